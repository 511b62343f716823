"""Depth allocation: Plans that may remove whole sub-layers, as the best of several knapsacks. Light: numpy.

Damage of a removal. A damage curve ends in the error of the layer's output when only its mean is left, a number of the
same kind as all before it; it counts `WHOLE` times. Where removing a sub-layer was measured to cause more output
divergence for its error than removing most others does, it counts by that factor more; never by less, since a late
sub-layer matters less at every width. A search weights both, so the end of a curve has the weight of the curve.

These damages add up over sub-layers, with one exception. Where only the class token is read, it receives nothing more
of the image once the last attentions are removed, and losing five of them is worse than five times one. So that is
measured as well, for all attentions from each block on; the excess over their sum belongs to the Plan as a whole.

Allocation. Some sub-layer must stay, so that there is a path from the image to the output. And where only the class
token is read, both cost and damage depend on which attention is the last one, since later blocks compute one token
only. So there is one `Allocator` for each case:

- If only the class token is read, one for each block whose attention may be the last. The attentions after it are
  removed, which is damage that no budget buys back, so earlier blocks are skipped once that alone exceeds the best so
  far. Where the joint loss of several attentions at the end was not measured, the last one stays.
- Else one without any condition; only if its Plan is empty, one for each sub-layer that might stay alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.ranking import Damage
from ..model.sublayer import SubLayer
from .costs import Costs, CostsByLast
from .knapsack import Allocator

WHOLE = 1.0  # factor of the end of a damage curve: other values were worse (docs/benchmarks.md)


@dataclass(frozen=True, eq=False)
class Removal:
    """Damage curves that end in the removal of the sub-layer, and the excess damage over their sum.

    >>> Removal.of(ranking.damage, ranking.sublayers).curves
    """

    curves: Damage
    beyond: tuple[float, ...] | None  # by the last attention: the excess of losing all later ones

    @staticmethod
    def of(damage: Damage, measured: Sequence[SubLayer] | None) -> Removal:
        """Make it from the curves of a ranking and the measurements of its sub-layers, if there are any."""
        ends = np.array([(heads[0], neurons[0]) for heads, neurons in damage])  # (blocks, 2)
        factors = np.full(ends.shape, WHOLE)
        typical = 0.0
        if measured is not None:
            moved = np.array([s.damage * s.weight for s in measured]).reshape(ends.shape) / np.maximum(ends, 1e-30)
            there = np.array([(len(heads) > 1, len(neurons) > 1) for heads, neurons in damage])  # not removed before
            typical = float(np.median(moved[there]))  # output divergence for a unit of damage
        if typical > 0:
            factors *= np.maximum(1.0, moved / typical)
        curves = tuple(
            (np.concatenate([[heads[0] * a], heads[1:]]), np.concatenate([[neurons[0] * m], neurons[1:]]))
            for (heads, neurons), (a, m) in zip(damage, factors)
        )
        return Removal(curves, _beyond(curves, measured, typical) if measured is not None and typical > 0 else None)


def _beyond(curves: Damage, measured: Sequence[SubLayer], typical: float) -> tuple[float, ...] | None:
    """Return for each last attention the joint damage of losing all later ones, less the sum of their damages."""
    attentions = measured[::2]
    found = []
    for last in range(len(attentions)):
        later = attentions[last + 1 :]
        lost = [float(heads[0]) for heads, _ in curves[last + 1 :]]
        alone = sum(end / max(s.weight, 1e-30) for end, s in zip(lost, later))  # as if no search had weighted them
        together = later[0].onward if later else 0.0
        if together is None:
            return None
        more = WHOLE * together / typical / alone - 1 if alone > 0 else 0.0
        found.append(max(more, 0.0) * sum(lost))
    return tuple(found)


class DepthAllocator:
    """All Plans of one set of damage curves under one kind of cost, also those that remove whole sub-layers.

    >>> DepthAllocator(Removal.of(ranking.damage, ranking.sublayers), flops_costs(anatomy), least, anatomy).within(1e6)
    """

    def __init__(
        self,
        removal: Removal,
        costs: Costs | CostsByLast,
        least: Plan,
        anatomy: Anatomy,
        multiple: int = 1,
        most: Plan | None = None,
    ) -> None:
        """`least`: what a sub-layer keeps unless it is removed; `multiple`: MLP widths are multiples of it, or full.

        `most`: a Plan of the same options; no Plan keeps more of anything.
        """
        self.curves, self.beyond = removal.curves, removal.beyond
        self.costs, self.least, self.multiple = costs, least, multiple
        self.reads_token = anatomy.reads_token
        self._most = most or Plan.dense(anatomy)
        self._made: dict[tuple[int, int], Allocator] = {}

    @cached_property
    def sparsest(self) -> Plan:
        """The Plan that costs least of all with one sub-layer left; of equals the one with less damage."""
        return min(
            (case.sparsest for case, _ in self._cases()), key=lambda plan: (self.costs.of(plan), self.damage(plan))
        )

    def damage(self, plan: Plan) -> float:
        """Return the sum of the damages of all sub-layers and the excess of losing the last attentions."""
        beyond = self.beyond[plan.last_attention] if self.reads_token and self.beyond else 0.0
        return beyond + sum(float(h[k]) + float(m[n]) for (h, m), k, n in zip(self.curves, plan.heads, plan.neurons))

    def within(self, budget: float) -> Plan:
        """Return the Plan with the least damage that costs at most `budget`, and to which nothing can be added."""
        if not self.reads_token and budget >= self._unconditional.costs.fixed:
            plan = self._unconditional.within(budget)
            if any(plan.heads + plan.neurons):
                return plan
        best: Plan | None = None
        for case, lost in self._cases():
            if best is not None and lost >= self.damage(best):
                continue
            if case.costs.of(case.sparsest) <= budget:
                plan = case.within(budget)
                if best is None or self.damage(plan) < self.damage(best):
                    best = plan
        if best is None:
            least = self.costs.of(self.sparsest)
            raise SnapvitError(f"a cost of {budget:g} is out of reach: the sparsest plan costs {least:g}")
        return best

    @cached_property
    def _unconditional(self) -> Allocator:
        assert isinstance(self.costs, Costs), "costs depend on the last attention only in models that read one token"
        return Allocator(
            self.curves, self.costs, self.least, self.multiple, [(True, True)] * len(self.curves), self._most
        )

    def _cases(self) -> Iterator[tuple[Allocator, float]]:
        """Yield an Allocator for each sub-layer that may be the one to stay, and the damage that this implies."""
        lost = 0.0
        for i in range(len(self.curves) - 1, -1, -1):
            if self._most.heads[i]:
                yield self._allocator(i, 0), lost + (self.beyond[i] if self.reads_token and self.beyond else 0.0)
                if self.reads_token and self.beyond is None:
                    return
            if self.reads_token:
                lost += float(self.curves[i][0][0])
            elif self._most.neurons[i]:
                yield self._allocator(i, 1), 0.0

    def _allocator(self, block: int, part: int) -> Allocator:
        """Return the Allocator of the case that this sub-layer stays: the last attention if a class token is read."""
        if (block, part) not in self._made:
            removable = [(True, True)] * len(self.curves)
            removable[block] = (part != 0, part != 1)
            costs = self.costs.cases[block] if isinstance(self.costs, CostsByLast) else self.costs
            most = _until(self._most, block) if self.reads_token else self._most
            self._made[block, part] = Allocator(self.curves, costs, self.least, self.multiple, removable, most)
        return self._made[block, part]


def _until(plan: Plan, last: int) -> Plan:
    """Return the plan without the attentions after block `last`."""
    return Plan(heads=(*plan.heads[: last + 1], *[0] * (len(plan.heads) - last - 1)), neurons=plan.neurons)
