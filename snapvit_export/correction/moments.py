"""Statistics: mean and covariance of every fc2 and proj input of the dense model. Light: numpy.

They are all that correction, orders and allocation need of the calibration images. `prune.observe` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of one layer's input over `samples` tokens, in float64, neither damped nor reordered."""

    samples: float  # tokens; with weights, the sum of them
    mean: Array  # (d,)
    covariance: Array  # (d, d)

    @property
    def width(self) -> int:
        return len(self.mean)

    def uncentred(self) -> Moments:
        """The second moment about zero, as the released code corrects: no mean, so no bias compensation."""
        return Moments(self.samples, np.zeros_like(self.mean), self.covariance + np.outer(self.mean, self.mean))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Moments of the proj and the fc2 input of every block, and what they were taken from."""

    proj: tuple[Moments, ...]
    fc2: tuple[Moments, ...]
    images: int
    provenance: Mapping[str, Any] = field(default_factory=dict)  # model, weights_sha256, data
