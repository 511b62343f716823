"""k-nearest-neighbour accuracy of features: how well they tell classes apart without any training. Light: numpy.

Features are scaled to length one; the k most similar training images vote, and among classes with equally many votes
the smallest number wins.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError

NEIGHBOURS = 20


def nearest_neighbours(
    train: npt.ArrayLike,
    train_labels: npt.ArrayLike,
    test: npt.ArrayLike,
    test_labels: npt.ArrayLike,
    k: int = NEIGHBOURS,
) -> float:
    """The share of test images whose neighbours vote for their label; features are (N, E)."""
    labels, wanted = np.asarray(train_labels), np.asarray(test_labels)
    bank, queries = _unit(train), _unit(test)
    if not 1 <= k <= len(bank):
        raise SnapvitError(f"{k} neighbours cannot be found among {len(bank)} images")
    right = 0
    for start in range(0, len(queries), 1024):  # bounded memory
        similar = queries[start : start + 1024] @ bank.T  # (<=1024, N)
        nearest = labels[np.argpartition(-similar, k - 1, axis=1)[:, :k]]  # (<=1024, k)
        votes = np.array([np.bincount(row).argmax() for row in nearest])
        right += int((votes == wanted[start : start + 1024]).sum())
    return right / len(queries)


def _unit(features: npt.ArrayLike) -> npt.NDArray[np.float64]:
    x = np.asarray(features, np.float64)
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
