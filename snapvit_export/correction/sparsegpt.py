"""SparseGPT's correction, cutting columns from left to right: kept for comparison, as in the released code.

| symbol | meaning                                                    | shape  |
|--------|------------------------------------------------------------|--------|
| W      | weight of fc2 or proj, columns as in the model             | (E, d) |
| H      | damped second moment of the layer's input, about zero      | (d, d) |
| U      | upper triangular, U^T U = H^-1                             | (d, d) |

A cut column j is spread over the columns after it, W_:,j.. -= W_:j U_j,j.. / U_jj, the best that those alone can do.
The kept columns before it are not used, so this is worse than `Factor`, which solves for all kept columns at once; and
without a mean there is no bias to correct. Light: numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .cholesky import cholesky
from .moments import Array, Damping, Moments


def left_to_right(weight: npt.ArrayLike, moments: Moments, keep: npt.ArrayLike, damping: Damping = Damping()) -> Array:
    """Return the weight, (E, d), after cutting all columns but those that `keep` (d,) marks: the cut ones are zero."""
    w = np.array(weight, np.float64)
    kept = np.asarray(keep, bool)
    if kept.shape != (moments.width,) or w.shape[1] != moments.width:
        raise ValueError(f"{w.shape[1]} columns, a mask of {kept.shape} and statistics of {moments.width}")
    w[:, np.diag(moments.uncentred().covariance) == 0] = 0.0  # an input that is always zero contributes nothing
    upper = upper_of_inverse(moments, damping)  # U
    for j in np.flatnonzero(~kept):
        w[:, j:] -= np.outer(w[:, j] / upper[j, j], upper[j, j:])
        w[:, j] = 0.0
    return w


def upper_of_inverse(moments: Moments, damping: Damping = Damping()) -> Array:
    """Return U: (d, d)."""
    second = moments.uncentred().covariance
    inverse = np.asarray(np.linalg.inv(_invertible(damping.added_to(second))), np.float64)
    return cholesky(inverse).T


def _invertible(s: Array) -> Array:
    """Return S with a little more on its diagonal where few images left it singular."""
    lower = cholesky(s)
    return lower @ lower.T
