"""Run batches of any size through a graph that takes only one size. Light: numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def in_batches(run: Callable[[Array], Array], images: Array, size: int | None) -> Array:
    """Run a graph that takes `size` images at once as often as it must; None: it takes any number.

    The last run is filled up with images whose outputs are dropped.
    """
    if size is None or len(images) == size:
        return run(images)
    whole = np.resize(images, (-(-len(images) // size) * size, *images.shape[1:]))
    parts = [run(whole[start : start + size]) for start in range(0, len(whole), size)]
    return np.concatenate(parts)[: len(images)]
