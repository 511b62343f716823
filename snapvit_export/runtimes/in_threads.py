"""Runs batches in ONNX Runtime on all cores, one thread for each batch: faster than all cores for one after another."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .device import usable_cores
from .ort import OrtSession

AHEAD = 4  # batches for each core that are prepared at once


def run_in_threads(path: Path, batches: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """Return the outputs of a graph for all batches; only as many of them are in memory as keep the cores busy."""
    cores, outputs, left = usable_cores(), [], iter(batches)
    with OrtSession(path, 1) as session, ThreadPoolExecutor(cores) as pool:
        while some := list(islice(left, AHEAD * cores)):
            outputs += list(pool.map(session.run, some))
    return np.concatenate(outputs)
