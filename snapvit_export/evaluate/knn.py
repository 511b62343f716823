"""k-nearest-neighbour accuracy of features, which needs no training. Light to import.

Features are scaled to length one; the k nearest training images vote, each with one vote, and among classes with
equally many votes the smallest number wins. By scikit-learn, comparing with every training image.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, needs

NEIGHBOURS = 20


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
) -> npt.NDArray[np.bool_]:
    """Return for each test image True if its neighbours vote for its label: (N,)."""
    with needs("k-nearest neighbours", extra="prune"):
        from sklearn.neighbors import KNeighborsClassifier
    bank = _unit(train)  # (M, E)
    if not 1 <= k <= len(bank):
        raise SnapvitError(f"{k} neighbours cannot be found among {len(bank)} training images. Give --data more")
    voters = KNeighborsClassifier(k, weights="uniform", algorithm="brute")
    with warnings.catch_warnings():  # scikit-learn suspects a regression where many classes have few images
        warnings.filterwarnings("ignore", message="The number of unique classes", category=UserWarning)
        voters.fit(bank, np.asarray(train_labels))
    return np.asarray(voters.predict(_unit(test)) == np.asarray(test_labels))


def _unit(features: npt.ArrayLike) -> npt.NDArray[Any]:
    x = np.asarray(features)
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
