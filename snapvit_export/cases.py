"""Allocation where whole sub-layers may go: the best of several knapsacks. Light.

Something must stay, so that there is a way from the image to the output; and where only the class token is read, what
the rest costs depends on which attention is the last one, since from there on blocks work for one token. So one
`Allocator` is asked for each case:

- Costs that are a sum: one without any condition. Only if its answer cuts the way, one for each sub-layer that might be
  the one to stay; an attention, if only the class token is read, since nothing else brings patches to it.
- Costs by the last attention: one for each block whose attention may be the last. Those after it are gone, which is
  damage that no budget buys back, so earlier blocks are not looked at once that alone is more than the best so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from .allocate import Allocator
from .anatomy import Anatomy
from .costs import Costs, CostsByLast
from .errors import SnapvitError
from .plan import Plan
from .ranking import Damage


class Cases:
    """All Plans of one set of damage curves under one kind of cost, sub-layers that are gone among them.

    >>> Cases(with_removal(damage, measured), flops_costs(anatomy), least, anatomy).within(1e8)
    """

    def __init__(
        self, damage: Damage, costs: Costs | CostsByLast, least: Plan, anatomy: Anatomy, multiple: int = 1
    ) -> None:
        """`least`: what a sub-layer keeps that is not gone; `multiple`: of which MLP widths are one, or else full."""
        self.curves, self.costs, self.least, self.multiple = damage, costs, least, multiple
        self.reads_token = anatomy.pooling == "token"
        self._dense = Plan.dense(anatomy)
        self._made: dict[tuple[int, int], Allocator] = {}

    @cached_property
    def sparsest(self) -> Plan:
        """Of all that may stay alone, what costs least; of equals the one with less damage."""
        return min(
            (case.sparsest for case, _ in self._cases()), key=lambda plan: (self.costs.of(plan), self.damage(plan))
        )

    def damage(self, plan: Plan) -> float:
        """The sum of the damages of all sub-layers."""
        return sum(float(h[k]) + float(m[n]) for (h, m), k, n in zip(self.curves, plan.heads, plan.neurons))

    def within(self, budget: float) -> Plan:
        """The Plan with the least damage that costs at most `budget`, and to which nothing more can be added."""
        if isinstance(self.costs, Costs) and budget >= self.costs.fixed:
            plan = self._unconditional.within(budget)
            if any(plan.heads) if self.reads_token else any(plan.heads + plan.neurons):
                return plan
        best: Plan | None = None
        for case, lost in self._cases():
            if best is not None and lost >= self.damage(best):
                break
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
        assert isinstance(self.costs, Costs)
        return Allocator(self.curves, self.costs, self.least, self.multiple, [(True, True)] * len(self.curves))

    def _cases(self) -> Iterator[tuple[Allocator, float]]:
        """One Allocator for everything that may be the one to stay, and the damage that it cannot do without."""
        lost = 0.0
        for i in range(len(self.curves) - 1, -1, -1):
            yield self._allocator(i, 0), lost
            if isinstance(self.costs, CostsByLast):
                lost += float(self.curves[i][0][0])
            elif not self.reads_token:
                yield self._allocator(i, 1), lost

    def _allocator(self, block: int, part: int) -> Allocator:
        """Where this sub-layer stays; by the last attention, all later ones are gone."""
        if (block, part) not in self._made:
            may_go = [(True, True)] * len(self.curves)
            may_go[block] = (part != 0, part != 1)
            most, costs = self._dense, self.costs
            if isinstance(costs, CostsByLast):
                costs = costs.cases[block]
                most = _until(most, block)
            self._made[block, part] = Allocator(self.curves, costs, self.least, self.multiple, may_go, most)
        return self._made[block, part]


def _until(plan: Plan, last: int) -> Plan:
    """The same without the attentions after block `last`."""
    return Plan(heads=(*plan.heads[: last + 1], *[0] * (len(plan.heads) - last - 1)), neurons=plan.neurons)
