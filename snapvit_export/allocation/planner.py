"""The Planner: Plans of one ranking for a sparsity, FLOPs, parameters or cost, and which are feasible. Light.

Heads and neurons are two separate global rankings with two ratios. The published pairs (mlp, head) lie on a line that
starts at (0, 0); a sparsity, a FLOPs target and a parameter target each pick the densest point of that line that costs
no more than was asked. Points along the line are nested: a denser Plan keeps everything that a sparser one keeps.

A ranking with damage curves needs no line: a target picks, of all counts whatever, those with the least damage that
cost no more than was asked (`knapsack`). Such a Plan too is as dense as it can be: nothing can be added to it. Plans of
two targets need not be nested, since a head may be worth its cost at one and not at the other. `pair` stays the same.

A mixed ranking (`allocation.from_scores`) has no curves and needs no line either: heads and neurons are cut in one
order, and a target is as early a place in it as fits.

`with_tokens` gives a Planner for shorter sequences: its Plans carry the merges and the grid, and what they cost is
counted with these. Targets stay fractions of the dense model with all of its tokens.

`check_reach` refuses the impossible before any ranking is made. With sub-layers protected, the smallest Plan is the
protected part of every block. Where they are removable, one must stay, at its least: an attention where only the class
token is read, else an attention or an MLP; it is the one that costs least. A ranking may have too few measurements to
remove all others, or its line may end before: so what is refused here no ranking reaches, and what passes may still be
out of reach of the one that is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from ..errors import SnapvitError, UsageError
from ..model.anatomy import Anatomy
from ..model.plan import DeviceProtection, Part, Plan, Protection
from ..model.ranking import Ranking
from .costs import Costs, CostsByLast, flops_costs, params_costs, prunable_costs
from .cut_order import CutOrder
from .depth import DepthAllocator, Removal
from .knapsack import Allocator
from .token_target import Tables, TokenAllocator, TokenTarget, smallest_plans
from .tokens import DEFAULT, SCHEDULES, Schedule

# (mlp, head) ratios of the nominal sparsities 10..60 % in the paper.
PUBLISHED_PAIRS = ((0.15, 0.0), (0.25, 0.1), (0.35, 0.2), (0.45, 0.3), (0.55, 0.4), (0.65, 0.5))

# Where sub-layers are removable and there are no damage curves: (mlp ratio, share of the sub-layers that is removed)
# after each stage, width and sub-layers in turn. More sub-layers are removed only when no width is left to cut.
STAGES = ((0.0, 0.0), (0.2, 0.0), (0.2, 1 / 6), (1.0, 1 / 6), (1.0, 1.0))  # why these: docs/method.md, section 7


AnyAllocator = Allocator | DepthAllocator | TokenAllocator
CostsOf = Callable[[Anatomy, Plan | None], Costs]  # with the tokens of a Plan


class Planner:
    """All Plans of one ranking.

    >>> planner = Planner(ranking, anatomy)
    >>> planner.sparsity(0.3), planner.flops(0.72), planner.pair(0.35, 0.2)
    >>> planner.with_tokens(0.5).flops(0.4)     # half of the patch tokens left, and 0.4 of the dense FLOPs
    """

    def __init__(
        self,
        ranking: Ranking,
        anatomy: Anatomy,
        protection: Protection = Protection(),
        multiple: int = 1,
        corrected: bool = False,
        tokens: TokenTarget | None = None,
    ) -> None:
        """`multiple`: allocated MLPs keep a multiple of so many neurons, or all; it needs damage curves.

        `corrected`: the weights will be corrected, so the biases that this adds are counted as parameters.
        `tokens`: that all Plans have; None: those of the model.
        """
        ranking.check_fits(anatomy)
        if multiple < 1 or (multiple > 1 and ranking.damage is None):
            raise UsageError(f"widths in multiples of {multiple} need a ranking with damage curves and at least 1")
        if tokens is not None:
            tokens.check(anatomy)
        self.ranking, self.anatomy, self.protection, self.multiple = ranking, anatomy, protection, multiple
        self.corrected, self.tokens = corrected, tokens
        self._after = anatomy.with_output_biases() if corrected else anatomy
        self._damage = ranking.damage
        self._measured = None if protection.sublayers else ranking.sublayers
        self._removal = [] if ranking.damage is not None else _removal_order(ranking, anatomy, protection)
        kept = [*map(protection.kept_heads, ranking.heads)], [*map(protection.kept_neurons, ranking.neurons)]
        self._heads, self._neurons = map(CutOrder, (ranking.head_scores, ranking.neuron_scores), kept)
        self._mixed = (
            CutOrder(ranking.head_scores + ranking.neuron_scores, [*kept[0], *kept[1]]) if ranking.is_mixed else None
        )
        self._allocators: dict[CostsOf, AnyAllocator] = {}
        self._beside = ("" if tokens is None else tokens.beside(anatomy)) + protection.also

    def with_tokens(
        self,
        fraction: float = 1.0,
        grid: tuple[int, int] | None = None,
        schedule: Schedule = SCHEDULES[DEFAULT],
    ) -> Planner:
        """Return the Planner of Plans that leave this fraction of the patch tokens, of images with this grid."""
        return self.for_tokens(TokenTarget(fraction, grid, schedule))

    def for_tokens(self, target: TokenTarget) -> Planner:
        """Return the Planner of Plans with these tokens."""
        return Planner(self.ranking, self.anatomy, self.protection, self.multiple, self.corrected, target)

    @property
    def least_heads(self) -> int:
        """The heads that a block keeps at least on the device that is planned for, unless it keeps none."""
        return self.protection.least_heads if isinstance(self.protection, DeviceProtection) else 1

    @property
    def dense(self) -> Plan:
        """The Plan that keeps all heads and neurons."""
        return self._with_own_tokens(Plan.dense(self.anatomy))

    def _with_own_tokens(self, plan: Plan) -> Plan:
        return plan if self.tokens is None else self.tokens.of(self.anatomy, plan)

    def pair(self, mlp: float, head: float) -> Plan:
        """Cut int(total * ratio) of all neurons and of all heads, the smallest scores first."""
        plan = Plan(
            heads=self._heads.counts_at_ratio(head, "heads", self.protection.also),
            neurons=self._neurons.counts_at_ratio(mlp, "neurons"),
        )
        return self._with_own_tokens(plan)

    def without(self, structures: int) -> Plan:
        """Return the Plan that cuts so many heads and neurons, or all that may be: the first in a mixed order."""
        if self._mixed is None:
            raise UsageError("cutting a number of structures needs a ranking that has heads and neurons in one order")
        counts = self._mixed.counts(min(structures, self._mixed.removable))
        depth = len(self.anatomy.blocks)
        return Plan(heads=counts[:depth], neurons=counts[depth:])

    def sparsity(self, fraction: float) -> Plan:
        """Return the densest Plan with at least this fraction of the prunable parameters removed."""
        check_sparsity(fraction)
        dense = self.anatomy.prunable_params()
        return self._densest(
            self.anatomy.prunable_params,
            prunable_costs,
            lambda params: 1 - params / dense >= fraction,
            lambda least: _no_sparsity(fraction, 1 - least / dense, self._beside),
        )

    def flops(self, fraction: float) -> Plan:
        """Return the densest Plan whose blocks need at most this fraction of the dense blocks' FLOPs."""
        check_fraction("FLOPs", fraction)
        dense = self.anatomy.block_flops()
        return self._densest(
            self.anatomy.block_flops,
            flops_costs,
            lambda flops: flops / dense <= fraction,
            lambda least: _no_flops(fraction, least / dense, self._beside),
        )

    def params(self, fraction: float) -> Plan:
        """Return the densest Plan with at most this fraction of the dense model's parameters."""
        check_fraction("parameter", fraction)
        dense = self.anatomy.params()
        if fraction == 1:
            return self.dense  # nothing is cut, so nothing is corrected
        return self._densest(
            self._after.params,
            params_costs,
            lambda params: params <= fraction * dense,
            lambda least: _no_params(fraction, least / dense, self._beside),
        )

    def within(self, costs: Costs | CostsByLast | Tables, budget: float) -> Plan:
        """Return the Plan with the least damage under any cost, such as a latency model's; it needs damage curves.

        `costs` of the tokens that this Planner plans for, or a function that gives those of a Plan's tokens.
        """
        if self._damage is None:
            raise UsageError("an allocation under a cost needs a ranking with damage curves")
        return self._with_own_tokens(self._allocator_by(_tables(costs)).within(budget))

    @property
    def allocates(self) -> bool:
        """True if heads and neurons are traded against each other under a cost."""
        return self._damage is not None

    def steps_of(self, costs: Costs | CostsByLast | Tables) -> dict[str, Plan]:
        """Return Plans from all heads and neurons to the fewest, one per hundredth of the cost of all.

        `t63` has the least damage of all that cost at most 0.63; it needs damage curves. `costs` as in `within`, such
        as those of a latency model.
        """
        if self._damage is None:
            raise UsageError("an allocation under a cost needs a ranking with damage curves")
        tables, dense = _tables(costs), self.dense
        allocator = self._allocator_by(tables)

        def cost(plan: Plan) -> float:
            return tables(plan).of(plan)

        whole, smallest = cost(dense), cost(self._with_own_tokens(allocator.sparsest))
        plans, last = {"dense": dense}, whole
        for percent in range(99, 0, -1):
            if (budget := whole * percent / 100) >= smallest:
                plan = self._with_own_tokens(allocator.within(budget))
                if cost(plan) < last:
                    plans[f"t{percent}"], last = plan, cost(plan)
        # structures that cost nothing are kept
        sparsest = self._with_own_tokens(allocator.within(smallest * (1 + 1e-9)))
        return plans if cost(sparsest) >= last else {**plans, "sparsest": sparsest}

    def steps(self) -> dict[str, Plan]:
        """Return Plans from dense to the sparsest, one per hundredth, by name.

        With damage curves the hundredths are of FLOPs, which latency follows; `flops63` is `flops(0.63)`, left out
        where it would not need less than the step before. Without, they are of sparsity; `s37` is `sparsity(0.37)`.
        """
        plans = {"dense": self.dense}
        last = plans["dense"]
        for name, plan in self._hundredths():
            if plan.flops_ratio(self.anatomy) < last.flops_ratio(self.anatomy):
                plans[name] = last = plan
        if self.sparsest != last:
            plans["sparsest"] = self.sparsest
        return plans

    def _hundredths(self) -> Iterator[tuple[str, Plan]]:
        if self._damage is None:
            for percent in range(1, 100):
                if percent / 100 <= self.largest_sparsity:
                    yield f"s{percent}", self.sparsity(percent / 100)
        else:
            for percent in range(99, 0, -1):
                if self.sparsest.flops_ratio(self.anatomy) <= percent / 100:
                    yield f"flops{percent}", self.flops(percent / 100)

    @cached_property
    def sparsest(self) -> Plan:
        """The Plan that cuts everything that protection allows: the last point of the line."""
        if self._damage is None:
            return self._point(self._end)
        return self._with_own_tokens(self._allocator(flops_costs).sparsest)

    @property
    def largest_sparsity(self) -> float:
        return self.sparsest.sparsity(self.anatomy)

    @cached_property
    def _end(self) -> float:
        """The last position of the line: 1, or where just enough attentions are left to merge tokens in."""
        if self.tokens is None or self.tokens.fits(self.anatomy, self._at(1.0)) is not None:
            return 1.0
        low, high = 0.0, 1.0  # at `low` there are always enough, at `high` never
        for _ in range(50):
            middle = (low + high) / 2
            enough = self.tokens.fits(self.anatomy, self._at(middle)) is not None
            low, high = (middle, high) if enough else (low, middle)
        return low

    def _point(self, position: float) -> Plan:
        return self._with_own_tokens(self._at(position))

    def _at(self, position: float) -> Plan:
        """Return the point of the line at a position from 0 to 1: by the mlp ratio, or by STAGES with sub-layers.

        A width is a point of the published line, stopped where protection stops it; of a mixed ranking, a place in its
        one order.
        """
        if self._mixed is not None:
            return self.without(int(position * self._mixed.removable))
        mlp, removals = position, 0
        if self._removal:
            along = np.linspace(0, 1, len(STAGES))
            mlp, share = (float(np.interp(position, along, axis)) for axis in zip(*STAGES))
            there = sum(n > 0 for n in self.anatomy.heads + self.anatomy.neurons)
            removals = int(share * there + 1e-9)  # a sixth of 24 is 4
        knots = ((0.0, 0.0), *PUBLISHED_PAIRS, (1.0, 1.0))
        head = float(np.interp(mlp, [m for m, _ in knots], [h for _, h in knots]))
        counts = {
            "attention": list(self._heads.counts(self._heads.clipped(head))),
            "mlp": list(self._neurons.counts(self._neurons.clipped(mlp))),
        }
        for i, part in self._removal[:removals]:
            counts[part][i] = 0
        return Plan(heads=tuple(counts["attention"]), neurons=tuple(counts["mlp"]))

    def _densest(
        self,
        cost: Callable[[Plan], int],
        costs: CostsOf,
        fits: Callable[[int], bool],
        refusal: Callable[[int], str],
    ) -> Plan:
        """Return the densest Plan whose `cost` fits; `costs` is the same cost as tables, for the allocation."""
        dense = self.dense
        if fits(cost(dense)):
            return dense
        allocator = self._allocator(costs) if self._damage is not None else None
        least = cost(self._with_own_tokens(allocator.sparsest) if allocator else self.sparsest)
        if not fits(least):
            raise SnapvitError(refusal(least))
        if allocator:
            return self._with_own_tokens(allocator.within(_largest(fits, least, cost(dense))))
        low, high = 0.0, self._end  # `high` always fits, `low` never does
        for _ in range(50):  # halvings: finer than one neuron of a million
            middle = (low + high) / 2
            low, high = (low, middle) if fits(cost(self._point(middle))) else (middle, high)
        return self._point(high)

    def _allocator(self, costs: CostsOf) -> AnyAllocator:
        if costs not in self._allocators:
            self._allocators[costs] = self._allocator_by(lambda plan: costs(self._after, plan))
        return self._allocators[costs]

    def _allocator_by(self, tables: Tables) -> AnyAllocator:
        """Return the allocation under costs that may depend on tokens, and those on the attentions that are kept."""
        if self.tokens is None or not self.tokens.merges:
            return self._allocator_of(tables(self.dense))
        return TokenAllocator(self.anatomy, self.protection, self.tokens, tables, self._allocator_of, self.multiple)

    def _allocator_of(self, costs: Costs | CostsByLast) -> Allocator | DepthAllocator:
        assert self._damage is not None
        least = self.protection.least(self.anatomy)
        if not self.protection.sublayers:
            return DepthAllocator(Removal.of(self._damage, self._measured), costs, least, self.anatomy, self.multiple)
        last = Plan.dense(self.anatomy).last_attention  # protected, so it stays the last
        whole = costs.cases[last] if isinstance(costs, CostsByLast) else costs
        return Allocator(self._damage, whole, least, self.multiple)


def _tables(costs: Costs | CostsByLast | Tables) -> Tables:
    """Return a function of costs by tokens, which is the same for all if costs are given."""
    return (lambda plan: costs) if isinstance(costs, Costs | CostsByLast) else costs


def _removal_order(ranking: Ranking, anatomy: Anatomy, protection: Protection) -> list[tuple[int, Part]]:
    """Return the removable sub-layers, least output divergence first: their order where there are no curves."""
    if protection.sublayers:
        return []
    if ranking.is_mixed:
        raise UsageError("a ranking that has heads and neurons in one order has no sub-layers in it. Give --no-depth")
    if ranking.sublayers is None:
        raise UsageError("removing sub-layers needs their measured damage, which the ranking lacks. Rank with --depth")
    without = np.array([s.damage for s in ranking.sublayers]).reshape(-1, 2)
    removable = np.array(protection.removable(anatomy, without))
    there = np.array([anatomy.heads, anatomy.neurons]).T > 0
    found = [s for s in ranking.sublayers if (removable & there)[s.block, int(s.part == "mlp")]]
    return [(s.block, s.part) for s in sorted(found, key=lambda s: s.damage)]


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest whole cost that fits, by the comparison used for the Plan; `low` fits, `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_reach(
    anatomy: Anatomy,
    protection: Protection,
    *,
    sparsity: Sequence[float] = (),
    flops: Sequence[float] = (),
    params: Sequence[float] = (),
    corrected: bool = False,
    tokens: TokenTarget | None = None,
) -> None:
    """Refuse fractions that no ranking of such a model reaches; `corrected`: the biases that this adds count.

    `tokens`: that the Plans have. Which attentions then stay at the least is found as `TokenAllocator` finds it.
    """
    if tokens is not None:
        tokens.check(anatomy)
    beside = ("" if tokens is None else tokens.beside(anatomy)) + protection.also

    def least(cost: Callable[[Plan], int]) -> int:
        return min(cost(plan) for plan in _smallest(anatomy, protection, tokens, cost))

    most_sparse = 1 - least(anatomy.prunable_params) / anatomy.prunable_params()
    for fraction in sparsity:
        check_sparsity(fraction)
        if fraction > most_sparse:
            raise SnapvitError(_no_sparsity(fraction, most_sparse, beside))
    least_flops = least(anatomy.block_flops) / anatomy.block_flops()
    for fraction in flops:
        check_fraction("FLOPs", fraction)
        if fraction < least_flops:
            raise SnapvitError(_no_flops(fraction, least_flops, beside))
    after = anatomy.with_output_biases() if corrected else anatomy
    least_params, dense = least(after.params), anatomy.params()
    for fraction in params:
        check_fraction("parameter", fraction)
        if fraction < 1 and least_params > fraction * dense:  # the dense Plan is not corrected
            raise SnapvitError(_no_params(fraction, least_params / dense, beside))


def _no_sparsity(fraction: float, most: float, beside: str) -> str:
    return f"sparsity {fraction:g}{beside} is out of reach: protection leaves at most {most:.4f}"


def _no_flops(fraction: float, least: float, beside: str) -> str:
    return f"FLOPs fraction {fraction:g}{beside} is out of reach: protection leaves at least {least:.4f}"


def _no_params(fraction: float, least: float, beside: str) -> str:
    return f"parameter fraction {fraction:g}{beside} is out of reach: the smallest plan has {least:.4f}"


def _smallest(
    anatomy: Anatomy, protection: Protection, tokens: TokenTarget | None, cost: Callable[[Plan], int]
) -> Iterator[Plan]:
    """Yield the smallest Plans: every feasible Plan keeps all that at least one of them keeps.

    With merged tokens: those along which attentions are removed, since enough of them must stay.
    """
    if tokens is not None and tokens.merges:
        yield from smallest_plans(anatomy, protection, tokens, cost)
        return
    for plan in _smallest_widths(anatomy, protection):
        yield plan if tokens is None else tokens.of(anatomy, plan)


def _smallest_widths(anatomy: Anatomy, protection: Protection) -> Iterator[Plan]:
    least = protection.least(anatomy)
    if protection.sublayers:
        yield least
        return
    nothing = (0,) * len(anatomy.blocks)
    for i, (heads, neurons) in enumerate(zip(least.heads, least.neurons)):
        if heads:
            yield Plan(heads=(*nothing[:i], heads, *nothing[i + 1 :]), neurons=nothing)
        if neurons and not anatomy.reads_token:
            yield Plan(heads=nothing, neurons=(*nothing[:i], neurons, *nothing[i + 1 :]))


def check_sparsity(fraction: float) -> None:
    """Refuse a sparsity that is not a fraction to cut."""
    if not 0 <= fraction < 1:
        raise UsageError(f"sparsity {fraction:g} is not a fraction from 0 to below 1, such as 0.3")


def check_fraction(what: str, fraction: float) -> None:
    """Refuse a number that is not a fraction to keep."""
    if not 0 < fraction <= 1:
        raise UsageError(f"{what} fraction {fraction:g} is not above 0 and at most 1, such as 0.72")
