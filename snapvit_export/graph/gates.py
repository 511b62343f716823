"""The gate between two forms of one model: they must give the same answer on real images, or nothing goes on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import GateFailed
from ..values import Value

Outputs = npt.NDArray[np.float32]


class Agreement(Value, frozen=True, kw_only=True):
    """How close two outputs are. `max_abs` is in units of the reference's largest value."""

    max_abs: float
    cosine: float


def agreement(reference: Outputs, other: Outputs) -> Agreement:
    """Compare two outputs of shape (images, features)."""
    scale = max(float(np.abs(reference).max()), 1e-12)
    a, b = reference.astype(np.float64), other.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = (a * b).sum(1) / np.maximum(norms, 1e-300)
    return Agreement(max_abs=float(np.abs(a - b).max()) / scale, cosine=float(cosine.min()))


def require_equal(what: str, reference: Outputs, other: Outputs, tolerance: float = 1e-4) -> Agreement:
    """Pass if both outputs agree to `tolerance` of the largest value; `what` names the two forms."""
    if reference.shape != other.shape:
        raise GateFailed(f"{what}: outputs have shapes {reference.shape} and {other.shape}")
    if not (np.isfinite(reference).all() and np.isfinite(other).all()):
        raise GateFailed(f"{what}: outputs hold values that are not finite numbers")
    found = agreement(reference, other)
    if not found.max_abs <= tolerance:
        raise GateFailed(f"{what}: outputs differ by {found.max_abs:.2e} of the largest value (allowed {tolerance:g})")
    return found
