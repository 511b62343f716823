"""Elastic correction: one Cholesky factor of a layer's input covariance corrects it at every width. Light: numpy.

| symbol | meaning                                            | shape    |
|--------|----------------------------------------------------|----------|
| W, b   | weight and bias of fc2 or proj, columns in rank order | (E, d) |
| mu     | mean of the layer's input, in rank order           | (d,)     |
| S      | its covariance, damped, in rank order; S = L L^T   | (d, d)   |
| k      | columns kept: the first k in rank order            |          |

The affine map of the first k columns that is nearest to W x + b over the images is

    W'(k) = (W L)[:, :k] (L[:k, :k])^-1,    b'(k) = b + W mu - W'(k) mu[:k],

since the leading block of L is the factor of the leading block of S. The error that remains with k columns is the
tail e(k) = sum over j >= k of |(W L)[:, j]|^2: the damage curve of the layer, for every width at once. Neither needs
the images, W or S again: the Factors of all layers are everything that a correction of any Plan needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..model.plan import Plan
from ..model.ranking import Ranking
from .moments import Array, Damping, Moments

Array32 = npt.NDArray[np.float32]
WIDTHS_KEPT = 8  # whose corrected layers stay in memory: candidates of one width differ in their tokens

BLOCK = 96  # columns solved at once, the fastest size on one and on two threads: larger solves wait for each other


@dataclass(frozen=True, eq=False)
class Factor:
    """The correction of one layer at any width: a structure is `unit` columns, best first.

    >>> weight, shift = factor.corrected(keep=100)
    """

    unit: int
    mean: Array  # (d,) in rank order
    lower: Array  # (d, d) L
    projected: Array  # (E, d) W L
    constant: Array  # (E,) W mu: output of the dense layer for the mean input
    layer_scale: Array  # (E,) LayerScale after the layer; ones without

    @property
    def structures(self) -> int:
        return len(self.mean) // self.unit

    def corrected(self, keep: int) -> tuple[Array, Array]:
        """Return the weight of the kept columns, (E, keep*unit) in rank order, and the change of the bias, (E,)."""
        if not 0 <= keep <= self.structures:
            raise ValueError(f"a layer of {self.structures} structures cannot keep {keep}")
        k = keep * self.unit
        weight = solve_lower(self.projected[:, :k], self.lower[:k, :k])
        return weight, self.constant - weight @ self.mean[:k]

    def errors(self) -> Array:
        """Return e(k) for k = 0 to all structures kept: the remaining squared error per token, after LayerScale."""
        lost = (
            np.square(self.projected * self.layer_scale[:, None]).sum(0).reshape(-1, self.unit).sum(1)
        )  # (structures,)
        return np.concatenate([np.cumsum(lost[::-1])[::-1], [0.0]])


def make_factor(
    weight: npt.ArrayLike,
    moments: Moments,
    order: npt.ArrayLike,
    unit: int,
    damping: Damping = Damping(),
    layer_scale: npt.ArrayLike | None = None,
) -> Factor:
    """Factor a layer: `weight` (E, d) with columns as in the model, `order` the structures best first."""
    w = np.asarray(weight, np.float64)
    columns = columns_of(order, unit)
    if w.shape[1] != moments.width or sorted(columns) != list(range(moments.width)):
        raise SnapvitError(
            f"the order has {len(columns)} columns, the statistics {moments.width}, the weight {w.shape[1]}. "
            "They belong to different models"
        )
    s = damping.added_to(moments.covariance[np.ix_(columns, columns)])
    w_ranked = w[:, columns]
    alive = np.where(np.diag(moments.covariance)[columns] > 0, w_ranked, 0.0)  # the bias takes what never varies
    lower = cholesky(s)
    scale = np.ones(len(w)) if layer_scale is None else np.asarray(layer_scale, np.float64)
    return Factor(unit, moments.mean[columns], lower, alive @ lower, w @ moments.mean, scale)


def no_factor(unit: int, outputs: int) -> Factor:
    """Return the Factor of a layer that the model lacks: nothing to keep, no damage, nothing added."""
    return Factor(
        unit, np.zeros(0), np.zeros((0, 0)), np.zeros((outputs, 0)), np.zeros(outputs), layer_scale=np.ones(outputs)
    )


def columns_of(order: npt.ArrayLike, unit: int) -> npt.NDArray[np.int64]:
    """Return the columns of structures: `unit` consecutive ones each."""
    return (np.asarray(order, np.int64)[:, None] * unit + np.arange(unit)).ravel()


def from_rank_order(order: npt.NDArray[np.int64], keep: int, unit: int) -> npt.NDArray[np.int64]:
    """Return the places of the kept columns in rank order, listed in the order that the model has them."""
    return columns_of(np.argsort(order[:keep]), unit)


def solve_lower(right: Array, lower: Array) -> Array:
    """Return X with X L = right for a lower triangular L, by blocks from the last column: mostly matrix products."""
    x = np.array(right)  # (E, k)
    k = x.shape[1]
    for start in reversed(range(0, k, BLOCK)):
        stop = min(start + BLOCK, k)
        x[:, start:stop] = np.linalg.solve(lower[start:stop, start:stop].T, x[:, start:stop].T).T
        x[:, :start] -= x[:, start:stop] @ lower[start:stop, :start]
    return x


def cholesky(s: Array) -> Array:
    """Return L of S = L L^T; where rounding left S not quite positive definite, more is added to its diagonal."""
    more = 0.0
    scale = float(np.diag(s).mean())
    for _ in range(12):
        try:
            lower = np.linalg.cholesky(s if more == 0.0 else s + more * scale * np.eye(len(s)))
            return lower.astype(np.float64, copy=False)
        except np.linalg.LinAlgError:
            more = max(10 * more, 1e-12)
    raise SnapvitError("the covariance of a layer's input cannot be factored: it is not a covariance")


@dataclass(frozen=True, eq=False)
class Factors:
    """The Factor of proj and of fc2 of every block, for one order of the structures."""

    proj: tuple[Factor, ...]
    fc2: tuple[Factor, ...]
    order_sha256: str  # of the ranking's order, `Ranking.order_sha256`
    damping: Damping
    images: int  # that the statistics were taken from

    def corrected_layers(self, plan: Plan, dense: Mapping[str, Array32]) -> dict[str, Array32]:
        """Return the corrected weight and bias of every proj and fc2 that a Plan cuts, in rank order.

        `dense`: the model's own tensors under their canonical names (`model.tensor_names`).
        """
        found: dict[str, Array32] = {}
        for layer, factors, kept in (("proj", self.proj, plan.heads), ("fc2", self.fc2, plan.neurons)):
            for i, (factor, keep) in enumerate(zip(factors, kept)):
                if keep < factor.structures:
                    name = f"blocks.{i}.{layer}"
                    weight, shift = factor.corrected(keep)  # (E, kept), (E,)
                    bias = shift + dense.get(f"{name}.bias", np.float32(0))
                    found[f"{name}.weight"] = np.ascontiguousarray(weight.T, np.float32)
                    found[f"{name}.bias"] = bias.astype(np.float32)
        return found

    def check_made_for(self, ranking: Ranking) -> None:
        """Refuse a ranking of another order: its kept columns would get the weights of other columns."""
        if ranking.order_sha256 != self.order_sha256:
            raise SnapvitError(
                "the factors were made for another order of heads and neurons than this ranking has. "
                "Make them again for this ranking"
            )
