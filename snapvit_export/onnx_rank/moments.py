"""Mean and covariance of a stream of tokens that is never held whole, in numpy. Light.

The symbols and formulas are those of `prune.stats.moments`, which does the same with tensors, on a GPU too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..correction.moments import Moments
from ..errors import SnapvitError

Floats = npt.NDArray[np.float32]


class RunningMoments:
    """Sums over batches of one layer's input; errors call the layer `name`."""

    def __init__(self, name: str, width: int) -> None:
        self.name = name
        self._total = 0.0
        self._shift: Floats | None = None
        self._first, self._second = np.zeros(width), np.zeros((width, width))  # m, C

    def add(self, x: Floats, weights: Floats | None = None) -> None:
        """Add the tokens of some images, (B, T, d); `weights` (T,) are the same for every image."""
        if weights is not None:
            used = weights > 0
            weights = np.tile(weights[used], len(x))  # (B*used,)
            x = x[:, used]
        x = x.reshape(-1, x.shape[-1])  # (n, d)
        if self._shift is None:
            self._shift = x.mean(0, dtype=np.float64).astype(np.float32)  # a constant column gives zeros, not rounding
        y = x - self._shift
        self._total += float(len(y) if weights is None else weights.sum(dtype=np.float64))
        self._first += y.sum(0) if weights is None else weights @ y
        if weights is not None:
            y *= np.sqrt(weights)[:, None]
        self._second += y.T @ y
        if not (np.isfinite(self._first).all() and np.isfinite(self._second.diagonal()).all()):
            raise SnapvitError(
                f"{self.name}: its input holds values that are not finite numbers, or too large to square. "
                "Are the weights of this model whole?"
            )

    def result(self) -> Moments:
        """Return the moments of all that was added."""
        assert self._shift is not None
        offset = self._first / self._total  # (d,)
        covariance = self._second / self._total - np.outer(offset, offset)
        np.fill_diagonal(covariance, np.maximum(covariance.diagonal(), 0.0))  # rounding makes no variance negative
        return Moments(self._total, self._shift.astype(np.float64) + offset, (covariance + covariance.T) / 2)
