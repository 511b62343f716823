"""Graphs that take a fixed number of images, run for any number. Light: numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Run = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]


def in_batches(run: Run, images: npt.NDArray[Any], batch: int | None) -> npt.NDArray[np.float32]:
    """Run images (N, ...) as often as a batch of that size must; None: a graph that takes any number.

    The last run is filled up with images that are not told of.
    """
    if batch is None or len(images) == batch:
        return run(images)
    whole = np.resize(images, (-(-len(images) // batch) * batch, *images.shape[1:]))
    parts = [run(whole[start : start + batch]) for start in range(0, len(whole), batch)]
    return np.concatenate(parts)[: len(images)]
