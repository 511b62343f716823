"""Allocation for a number of tokens: widths and depth under a cost, where merges depend on the attentions. Light.

Shorter sequences make every head and neuron cheaper, so a Plan that must meet both a fraction of tokens and a FLOPs
target is allocated with the costs of its own tokens. But tokens are merged where there is an attention: which of them
a Plan keeps decides its merges, and the merges decide what it costs to keep them. So

1. the dense model's merges give the costs of a first allocation; the merges of what it keeps give the next costs, until
   a Plan keeps exactly the attentions that its costs were made for. Mostly that is the first or the second.
2. Each round also solves the allocation with the attentions of its Plan held fixed: such a Plan always agrees with its
   merges. Where the rounds turn in a circle, the one with the least damage is taken.
3. Where none of them meets the target, attentions are removed one by one, the one that saves most first, as long as the
   others can merge enough; the first of these sets within the target is allocated. Its last is the smallest of all.

Every Plan that is returned is checked with its own tokens. Orders and damage curves stay those of all tokens: one
ranking serves every Plan, since all variants read prefixes of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan, Protection
from .costs import Costs, CostsByLast
from .depth import DepthAllocator
from .knapsack import Allocator
from .resolution import Resolution, grid_for, shown
from .tokens import DEFAULT, SCHEDULES, Schedule, check_tokens, merging_blocks

ROUNDS = 8  # of costs; two are enough unless the last attentions are about to go
Tables = Callable[[Plan], Costs | CostsByLast]  # the costs with the tokens of a Plan
Cost = Callable[[Plan], float]


@dataclass(frozen=True)
class TokenTarget:
    """The tokens that Plans are made for: the fraction of patch tokens left at the end, and the grid of patches.

    >>> TokenTarget(0.5).of(anatomy, plan).merged
    """

    fraction: float = 1.0
    grid: tuple[int, int] | None = None  # None: the model's own
    schedule: Schedule = SCHEDULES[DEFAULT]  # how the blocks share the merging

    def __post_init__(self) -> None:
        check_tokens(self.fraction)

    @property
    def merges(self) -> bool:
        return self.fraction < 1

    def of(self, anatomy: Anatomy, plan: Plan) -> Plan:
        """Return a Plan's heads and neurons with these tokens, or refuse a fraction that it cannot merge to."""
        sized = plan.with_tokens(grid=self.grid)
        return (
            sized.with_tokens(self.schedule.counts(anatomy, sized, self.fraction), self.grid) if self.merges else sized
        )

    def fits(self, anatomy: Anatomy, plan: Plan) -> Plan | None:
        """Return the same, or None where the Plan keeps too few attentions."""
        try:
            return self.of(anatomy, plan)
        except SnapvitError:
            return None

    def check(self, anatomy: Anatomy) -> None:
        """Refuse a model that cannot have these tokens, even if it keeps everything."""
        if any(anatomy.merges):
            raise SnapvitError("the model merges tokens already. Export the model that it was made from")
        dense = Plan.dense(anatomy).with_tokens(grid=self.grid)
        dense.check_fits(anatomy)
        if self.merges and (anatomy.patches_of(dense) < 2 or not merging_blocks(anatomy, dense)):
            why = "it has one patch" if anatomy.patches_of(dense) < 2 else "no attention follows that would read fewer"
            raise SnapvitError(f"the model's tokens cannot be merged: {why}. Leave --tokens out")
        self.of(anatomy, dense).check_fits(anatomy)

    def beside(self, anatomy: Anatomy) -> str:
        """Return the words that name these tokens beside a target: ` with tokens 0.5`."""
        size = "x".join(str(side * step) for side, step in zip(self.grid or (), anatomy.patch))
        found = [f"tokens {self.fraction:g}"] * self.merges + [f"{size} pixels"] * bool(size)
        return f" with {' and '.join(found)}" if found else ""


def token_targets(
    anatomy: Anatomy,
    fractions: Sequence[float],
    resolutions: Sequence[Resolution],
    schedule: Schedule = SCHEDULES[DEFAULT],
) -> dict[str, TokenTarget]:
    """Return all combinations of fractions of tokens and resolutions, by their part of a variant's name.

    >>> token_targets(anatomy, [0.5], [])
    """
    if not fractions and not resolutions:
        return {}
    merges = {f"tokens{100 * fraction:g}": fraction for fraction in fractions} or {"": 1.0}
    grids = {f"res{shown(size)}": grid_for(anatomy, size) for size in resolutions} or {"": None}
    return {
        "-".join(filter(None, (tokens, size))): TokenTarget(merges[tokens], grids[size], schedule)
        for size, tokens in product(grids, merges)  # one size after the other: images are read again for each
    }


def smallest_plans(
    anatomy: Anatomy, protection: Protection, target: TokenTarget, cost: Cost, keeps_last: bool = False
) -> Iterator[Plan]:
    """Yield Plans of the least widths with ever fewer attentions, the one whose removal saves most `cost` first.

    All of them reach the target's tokens. `keeps_last`: the last attention stays.
    """
    least = protection.least(anatomy)
    if protection.sublayers:
        yield target.of(anatomy, least)
        return
    heads = least.heads
    while True:
        made = target.fits(anatomy, Plan(heads=heads, neurons=(0,) * len(heads)))
        if made is not None:
            yield made
        removable = [i for i, kept in enumerate(heads) if kept]
        removable = removable[:-1] if keeps_last else removable
        fewer = [(*heads[:i], 0, *heads[i + 1 :]) for i in removable]
        plans = [target.fits(anatomy, Plan(heads=kept, neurons=(0,) * len(kept))) for kept in fewer if any(kept)]
        reached = [plan for plan in plans if plan is not None]
        if not reached:
            return
        heads = min(reached, key=cost).heads


class TokenAllocator:
    """All Plans of one set of damage curves that have the same share of tokens left, under one kind of cost."""

    def __init__(
        self,
        anatomy: Anatomy,
        protection: Protection,
        target: TokenTarget,
        tables: Tables,
        free: Callable[[Costs | CostsByLast], Allocator | DepthAllocator],
        multiple: int = 1,
    ) -> None:
        """`free`: makes the allocation of costs that do not depend on tokens; `multiple`: of MLP widths."""
        self.anatomy, self.protection, self.target, self.multiple = anatomy, protection, target, multiple
        self._tables, self._make = tables, free
        self._made: dict[tuple[int, ...], Allocator | DepthAllocator] = {}
        self._dense = target.of(anatomy, Plan.dense(anatomy))

    def cost(self, plan: Plan) -> float:
        """Return the cost of a Plan with its own tokens."""
        return self._tables(plan).of(plan)

    def damage(self, plan: Plan) -> float:
        """Return the damage of a Plan's heads and neurons."""
        return self._free(self._dense).damage(plan)

    @cached_property
    def sparsest(self) -> Plan:
        """The smallest Plan that keeps enough attentions to merge."""
        return min(self._smallest, key=self.cost)

    @cached_property
    def _smallest(self) -> list[Plan]:
        free = self._free(self._dense)
        keeps_last = isinstance(free, DepthAllocator) and free.reads_token and free.beyond is None
        return list(smallest_plans(self.anatomy, self.protection, self.target, self.cost, keeps_last))

    def within(self, budget: float) -> Plan:
        """Return the Plan with the least damage that was found to cost at most `budget` with its own tokens."""
        found: list[Plan] = []
        seen: set[tuple[int, ...]] = set()
        tokens = self._dense
        for _ in range(ROUNDS):
            free = self._free(tokens)
            if free.costs.of(free.sparsest) > budget:
                break
            plan = free.within(budget)
            own = self.target.fits(self.anatomy, plan)
            if own is not None and own.merged == tokens.merged:
                return own
            tokens = self._with_attentions(plan)
            if tokens.merged in seen:
                break
            seen.add(tokens.merged)
            found += self._fixed(tokens, budget)
        if not found:
            found = next((held for plan in self._smallest if (held := self._fixed(plan, budget))), [])
        if not found:
            least = self.cost(self.sparsest)
            raise SnapvitError(f"a cost of {budget:g} is out of reach: the sparsest plan costs {least:g}")
        return min(found, key=self.damage)

    def _free(self, tokens: Plan) -> Allocator | DepthAllocator:
        """Return the allocation in which any attention may go, by the costs of these tokens."""
        if tokens.merged not in self._made:
            self._made[tokens.merged] = self._make(self._tables(tokens))
        return self._made[tokens.merged]

    def _with_attentions(self, plan: Plan) -> Plan:
        """Return the dense model with a Plan's attentions, and the merges of these; more of them where it needs more.

        Attentions come back in the order of the damage that their removal does.
        """
        ends = [float(heads[0]) for heads, _ in self._free(self._dense).curves]
        removed = sorted((i for i, kept in enumerate(plan.heads) if not kept), key=lambda i: ends[i])
        while True:
            heads = tuple(0 if i in removed else have for i, have in enumerate(self.anatomy.heads))
            tokens = self.target.fits(self.anatomy, Plan(heads=heads, neurons=self.anatomy.neurons))
            if tokens is not None:
                return tokens
            removed.pop()

    def _fixed(self, tokens: Plan, budget: float) -> list[Plan]:
        """Return the Plan within the budget that keeps just the attentions of this one; none if there is none."""
        free, costs = self._free(self._dense), self._tables(tokens)
        one = costs.cases[max(tokens.last_attention, 0)] if isinstance(costs, CostsByLast) else costs
        least, loose = self.protection.least(self.anatomy), not self.protection.sublayers
        most = Plan(
            heads=tuple(have if kept else 0 for have, kept in zip(self.anatomy.heads, tokens.heads)),
            neurons=self.anatomy.neurons,
        )
        removable = [(loose and not kept, loose) for kept in tokens.heads]
        allocator = Allocator(free.curves, one, least, self.multiple, removable, most)
        if one.of(allocator.sparsest) > budget:
            return []
        own = self.target.fits(self.anatomy, allocator.within(budget))
        return [own] if own is not None and self.cost(own) <= budget else []
