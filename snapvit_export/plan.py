"""Plans: how many heads and neurons each block keeps, and the ways to ask for one. Light: no torch.

Heads and neurons are two separate global rankings with two ratios. The published pairs (mlp, head) lie on a line that
starts at (0, 0); a sparsity, a FLOPs target and a parameter target each pick the densest point of that line that costs
no more than was asked. Points along the line are nested: a denser Plan keeps everything that a sparser one keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from .errors import SnapvitError, UsageError
from .values import Ratio, Size, Value, read_json, write_json

if TYPE_CHECKING:
    from .anatomy import Anatomy
    from .ranking import Ranking

# (mlp, head) ratios of the nominal sparsities 10..60 % in the paper.
PUBLISHED_PAIRS = ((0.15, 0.0), (0.25, 0.1), (0.35, 0.2), (0.45, 0.3), (0.55, 0.4), (0.65, 0.5))


class Plan(Value, frozen=True, kw_only=True):
    """How many heads and neurons each block keeps: prefixes of the ranking's order.

    >>> Plan(heads=(6, 5), neurons=(768, 512))
    """

    format_version: Literal[1] = 1
    heads: tuple[Size, ...]
    neurons: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not self.heads or len(self.heads) != len(self.neurons):
            raise ValueError("a plan needs head and neuron counts for the same number of blocks, at least one")

    @staticmethod
    def dense(anatomy: Anatomy) -> Plan:
        """The Plan that cuts nothing."""
        return Plan(heads=anatomy.heads, neurons=anatomy.neurons)

    def save(self, path: Path | str) -> None:
        """Write the counts as JSON."""
        write_json(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> Plan:
        """Read counts that `save` wrote, or that somebody wrote by hand."""
        return read_json(Path(path), Plan)

    def check_fits(self, anatomy: Anatomy) -> None:
        """Refuse counts that the model does not have."""
        if len(self.heads) != len(anatomy.blocks):
            raise SnapvitError(f"the plan is for {len(self.heads)} blocks, the model has {len(anatomy.blocks)}")
        for kind in ("heads", "neurons"):
            for i, (keep, have) in enumerate(zip(getattr(self, kind), getattr(anatomy, kind))):
                if not 1 <= keep <= have:
                    raise SnapvitError(f"block {i}: the plan keeps {keep} {kind} of {have}. Keep 1 to {have}")

    def keeps_all_of(self, other: Plan) -> bool:
        """Whether everything that `other` keeps is kept here too."""
        return all(a >= b for a, b in zip(self.heads + self.neurons, other.heads + other.neurons))

    def sparsity(self, anatomy: Anatomy) -> float:
        """The fraction of the prunable parameters that is gone."""
        return 1 - anatomy.prunable_params(self) / anatomy.prunable_params()

    def flops_ratio(self, anatomy: Anatomy) -> float:
        """FLOPs of the blocks relative to the dense blocks."""
        return anatomy.block_flops(self) / anatomy.block_flops()


class Protection(Value, frozen=True, kw_only=True):
    """The best part of each block that is never cut, whatever the ratio; at least one head and one neuron."""

    neurons: Ratio = 0.05
    heads: Ratio = 0.2

    def kept_neurons(self, total: int) -> int:
        return max(1, int(total * self.neurons))

    def kept_heads(self, total: int) -> int:
        return max(1, int(total * self.heads))


class Planner:
    """All Plans of one ranking.

    >>> planner = Planner(ranking, anatomy)
    >>> planner.sparsity(0.3), planner.flops(0.72), planner.pair(0.35, 0.2)
    """

    def __init__(self, ranking: Ranking, anatomy: Anatomy, protection: Protection = Protection()) -> None:
        ranking.check_fits(anatomy)
        self.anatomy, self.protection = anatomy, protection
        self._heads = _CutOrder(ranking.head_scores, protection.kept_heads)
        self._neurons = _CutOrder(ranking.neuron_scores, protection.kept_neurons)

    def pair(self, mlp: float, head: float) -> Plan:
        """Cut int(total * ratio) of all neurons and of all heads, the smallest scores first."""
        return Plan(
            heads=self._heads.counts_at_ratio(head, "heads"),
            neurons=self._neurons.counts_at_ratio(mlp, "neurons"),
        )

    def sparsity(self, fraction: float) -> Plan:
        """The densest Plan with at least this fraction of the prunable parameters gone."""
        check_sparsity(fraction)
        return self._densest(
            lambda plan: plan.sparsity(self.anatomy) >= fraction,
            lambda best: f"sparsity {fraction:g} is out of reach: protection leaves at most {best:.4f}",
            lambda plan: plan.sparsity(self.anatomy),
        )

    def flops(self, fraction: float) -> Plan:
        """The densest Plan whose blocks need at most this fraction of the dense blocks' FLOPs."""
        check_fraction("FLOPs", fraction)
        return self._densest(
            lambda plan: plan.flops_ratio(self.anatomy) <= fraction,
            lambda best: f"FLOPs fraction {fraction:g} is out of reach: protection leaves at least {best:.4f}",
            lambda plan: plan.flops_ratio(self.anatomy),
        )

    def params(self, fraction: float) -> Plan:
        """The densest Plan with at most this fraction of the dense model's parameters."""
        check_fraction("parameter", fraction)
        dense = self.anatomy.params()
        return self._densest(
            lambda plan: self.anatomy.params(plan) <= fraction * dense,
            lambda best: f"parameter fraction {fraction:g} is out of reach: the smallest plan has {best:.4f}",
            lambda plan: self.anatomy.params(plan) / dense,
        )

    @cached_property
    def sparsest(self) -> Plan:
        """The last point of the line: everything cut that protection allows."""
        return self._at(1.0)

    @property
    def largest_sparsity(self) -> float:
        return self.sparsest.sparsity(self.anatomy)

    def _at(self, mlp: float) -> Plan:
        """The point of the published line at this mlp ratio, stopped where protection stops it."""
        knots = ((0.0, 0.0), *PUBLISHED_PAIRS, (1.0, 1.0))
        head = float(np.interp(mlp, [m for m, _ in knots], [h for _, h in knots]))
        return Plan(
            heads=self._heads.counts(self._heads.clipped(head)),
            neurons=self._neurons.counts(self._neurons.clipped(mlp)),
        )

    def _densest(
        self, fits: Callable[[Plan], bool], refusal: Callable[[float], str], measure: Callable[[Plan], float]
    ) -> Plan:
        low, high = 0.0, 1.0  # `high` always fits, `low` never does
        if fits(self._at(low)):
            return self._at(low)
        if not fits(self.sparsest):
            raise SnapvitError(refusal(measure(self.sparsest)))
        for _ in range(50):  # halvings: finer than one neuron of a million
            middle = (low + high) / 2
            low, high = (low, middle) if fits(self._at(middle)) else (middle, high)
        return self._at(high)


class _CutOrder:
    """The order in which all structures of one kind go, over all blocks; protected ones are not in it."""

    def __init__(self, scores: tuple[npt.NDArray[np.float32], ...], kept: Callable[[int], int]) -> None:
        self.sizes = np.array([len(block) for block in scores])
        self.total = int(self.sizes.sum())
        best_first = [np.argsort(-block, kind="stable")[kept(len(block)) :] for block in scores]
        blocks = np.repeat(np.arange(len(scores)), [len(rows) for rows in best_first])
        rows = np.concatenate(best_first)
        values = np.concatenate([block[chosen] for block, chosen in zip(scores, best_first)])
        # Falling score, then rising (block, index), read backwards: equal scores go from the last block, last index.
        self.blocks = blocks[np.lexsort((rows, blocks, -values))][::-1]

    def clipped(self, ratio: float) -> int:
        return min(int(self.total * ratio), len(self.blocks))

    def counts(self, cut: int) -> tuple[int, ...]:
        gone = np.bincount(self.blocks[:cut], minlength=len(self.sizes))
        return tuple(int(n) for n in self.sizes - gone)

    def counts_at_ratio(self, ratio: float, kind: str) -> tuple[int, ...]:
        check_ratio(kind, ratio)
        cut = int(self.total * ratio)
        if cut > len(self.blocks):
            raise SnapvitError(
                f"cutting {ratio:g} of the {kind} leaves less than the protected part of each block. "
                f"The largest ratio possible is {self._largest_ratio():.4f}"
            )
        return self.counts(cut)

    def _largest_ratio(self) -> float:
        return int(len(self.blocks) / self.total * 1e4) / 1e4  # rounded down, so that it works when typed in


def check_sparsity(fraction: float) -> None:
    """Refuse what is no fraction to cut."""
    if not 0 <= fraction < 1:
        raise UsageError(f"sparsity {fraction:g} is not a fraction from 0 to below 1, such as 0.3")


def check_ratio(kind: str, ratio: float) -> None:
    """Refuse what is no ratio of structures to cut."""
    if not 0 <= ratio < 1:
        raise UsageError(f"a ratio of {ratio:g} of the {kind} is not a fraction from 0 to below 1")


def check_fraction(what: str, fraction: float) -> None:
    """Refuse what is no fraction to keep."""
    if not 0 < fraction <= 1:
        raise UsageError(f"{what} fraction {fraction:g} is not above 0 and at most 1, such as 0.72")
