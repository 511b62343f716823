"""Fidelity of a model to the dense one, image by image: cosine and agreement. Needs no labels. Light: numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..family.evaluation import MeasuredValues, mean, share


def fidelity(outputs: npt.ArrayLike, dense: npt.ArrayLike, classifies: bool = True) -> MeasuredValues:
    """Measure cosine to the dense outputs and, for logits, agreement of predictions, with standard errors.

    >>> fidelity(small_logits, dense_logits)["agreement"]
    """
    found: MeasuredValues = {"cosine": mean(cosines(outputs, dense))}
    if classifies:
        found["agreement"] = share(agreeing(outputs, dense))
    return found


def cosines(outputs: npt.ArrayLike, dense: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the cosine of each image's output to the dense model's: (N,). An output of zeros has 0."""
    a, b = _checked(outputs, dense)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray(np.clip((a * b).sum(1) / np.maximum(lengths, 1e-30), -1, 1))


def agreeing(outputs: npt.ArrayLike, dense: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return for each image True if the dense model predicts the same class: (N,)."""
    a, b = _checked(outputs, dense)
    return np.asarray(a.argmax(1) == b.argmax(1))


def _checked(outputs: npt.ArrayLike, dense: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    a, b = np.asarray(outputs, np.float64), np.asarray(dense, np.float64)
    if a.shape != b.shape or a.ndim != 2 or not a.size:
        raise SnapvitError(f"outputs of shape {a.shape} cannot be compared with the dense model's {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise SnapvitError("outputs that are not finite numbers cannot be compared. Check the model's precision")
    return a, b
