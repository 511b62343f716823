"""Moments: mean and covariance of every proj and fc2 input of the dense model, and their damping. Light: numpy.

They are all that correction, orders and allocation need of the calibration images; `prune.stats.observe` takes them.
Damping is added to the diagonal of a covariance, so that it is not singular when there are few images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, UsageError
from ..model.anatomy import Anatomy
from ..storage.json import Value
from ..storage.memory import memory_bytes

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
        """Return the second moment about zero, as the released code corrects: no mean, so no bias compensation."""
        return Moments(self.samples, np.zeros_like(self.mean), self.covariance + np.outer(self.mean, self.mean))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Moments of the proj and the fc2 input of every block, and their provenance."""

    proj: tuple[Moments, ...]
    fc2: tuple[Moments, ...]
    images: int
    provenance: Mapping[str, Any] = field(default_factory=dict)  # model, weights_sha256, data


def covariance_bytes(anatomy: Anatomy) -> int:
    """Return the size of the covariances of all proj and fc2 inputs."""
    widths = [width for block in anatomy.blocks for width in (block.heads * block.head_dim, block.hidden)]
    return sum(np.dtype(np.float64).itemsize * width**2 for width in widths)


def check_memory(anatomy: Anatomy, name: str) -> None:
    """Refuse a model whose statistics and weights cannot be in this machine's memory together.

    Said before any work: a machine that runs out of memory ends the process without a word.
    """
    covariances, weights, most = covariance_bytes(anatomy), 4 * anatomy.params(), memory_bytes()
    if most is not None and covariances + weights > most:
        raise SnapvitError(
            f"{name}: the covariances of its {len(anatomy.blocks)} blocks take {covariances / 1e9:.1f} GB and its "
            f"weights {weights / 1e9:.1f} GB, and this machine has {most / 1e9:.1f} GB of memory. Do it on a larger one"
        )


class Damping(Value, frozen=True, kw_only=True):
    """A fraction of the mean, the largest or the 95th percentile of the diagonal.

    >>> Damping(kind="max", fraction=0.1)
    """

    kind: Literal["mean", "max", "percentile"] = "mean"
    fraction: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.01

    @staticmethod
    def parse(text: str) -> Damping:
        """Read "max:0.1"."""
        kind, _, fraction = text.partition(":")
        try:
            return msgspec.convert({"kind": kind, "fraction": float(fraction)}, Damping)
        except (ValueError, msgspec.MsgspecError):
            raise UsageError(
                f"damping '{text}' is not mean, max or percentile with a fraction from 0 to 10, such as mean:0.01"
            ) from None

    def amount(self, covariance: Array) -> float:
        """Return the number that is added to every entry of the diagonal."""
        diagonal = np.diag(covariance)
        typical = {"mean": diagonal.mean(), "max": diagonal.max(), "percentile": np.quantile(diagonal, 0.95)}[self.kind]
        return self.fraction * float(typical)

    def added_to(self, covariance: Array) -> Array:
        """Return a copy with the damped diagonal; an entry that would stay 0, of a column that never varies, is 1."""
        damped = covariance.copy()
        np.fill_diagonal(damped, np.diag(covariance) + self.amount(covariance))
        dead = np.diag(damped) <= 0
        damped[dead, dead] = 1.0
        return damped
