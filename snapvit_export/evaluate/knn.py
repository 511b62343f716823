"""k-nearest-neighbour accuracy of features, which needs no training. Light: numpy.

Features are scaled to length one; the k nearest training images vote, each with one vote, and among classes with
equally many votes the smallest number wins, as in scikit-learn. Every training image is compared (`neighbours`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .neighbours import nearest

NEIGHBOURS = 20
COUNTED = 1024  # images whose votes are counted at a time


def nearest_neighbours(
    train: npt.ArrayLike,
    train_labels: npt.ArrayLike,
    test: npt.ArrayLike,
    test_labels: npt.ArrayLike,
    k: int = NEIGHBOURS,
) -> float:
    """Return the share of test images whose neighbours vote for their label; features are (N, E)."""
    return float(neighbours_right(train, train_labels, test, test_labels, k).mean())


def neighbours_right(
    train: npt.ArrayLike,
    train_labels: npt.ArrayLike,
    test: npt.ArrayLike,
    test_labels: npt.ArrayLike,
    k: int = NEIGHBOURS,
    progress: Callable[[int], None] = lambda count: None,
) -> npt.NDArray[np.bool_]:
    """Return for each test image True if its neighbours vote for its label: (N,)."""
    rows, _ = nearest(train, test, k, progress)
    return np.asarray(majority(np.asarray(train_labels)[rows]) == np.asarray(test_labels))


def majority(votes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number that most votes of a row name, the smallest of several: (N,) from (N, k)."""
    classes, numbers = np.unique(votes, return_inverse=True)
    numbers = numbers.reshape(votes.shape)
    won = np.empty(len(votes), np.int64)
    for start in range(0, len(votes), COUNTED):
        part = numbers[start : start + COUNTED]
        own = part + len(classes) * np.arange(len(part))[:, None]  # a range of numbers for each row
        counts = np.bincount(own.reshape(-1), minlength=len(part) * len(classes))
        won[start : start + COUNTED] = counts.reshape(len(part), -1).argmax(1)
    return np.asarray(classes[won])
