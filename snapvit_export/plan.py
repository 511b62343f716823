"""Plans: how many heads and neurons each block keeps, and the ways to ask for one. Light: no torch.

Heads and neurons are two separate global rankings with two ratios. The published pairs (mlp, head) lie on a line that
starts at (0, 0); a sparsity, a FLOPs target and a parameter target each pick the densest point of that line that costs
no more than was asked. Points along the line are nested: a denser Plan keeps everything that a sparser one keeps.

A ranking with damage curves needs no line: a target picks, of all counts whatever, those with the least damage that
cost no more than was asked (`allocate`). Such a Plan too is as dense as it can be: nothing can be added to it. Plans of
two targets need not be nested, since a head may be worth its cost at one and not at the other. `pair` stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from .costs import Costs, CostsByLast, flops_costs, params_costs, prunable_costs
from .errors import SnapvitError, UsageError
from .values import Kept, Ratio, Value, read_json, write_json

if TYPE_CHECKING:
    from .allocate import Allocator
    from .anatomy import Anatomy
    from .cases import Cases
    from .ranking import Ranking

# (mlp, head) ratios of the nominal sparsities 10..60 % in the paper.
PUBLISHED_PAIRS = ((0.15, 0.0), (0.25, 0.1), (0.35, 0.2), (0.45, 0.3), (0.55, 0.4), (0.65, 0.5))

# Where sub-layers may go and there are no damage curves: (mlp ratio, share of the sub-layers that is gone) after each
# stage, width and sub-layers in turn. More sub-layers go only when protection leaves no width to cut.
STAGES = ((0.0, 0.0), (0.2, 0.0), (0.2, 1 / 6), (1.0, 1 / 6), (1.0, 1.0))  # why these: docs/method.md, section 7

Part = Literal["attention", "mlp"]  # of a block: a sub-layer


class Plan(Value, frozen=True, kw_only=True):
    """How many heads and neurons each block keeps: prefixes of the ranking's order.

    A block that keeps 0 heads has no attention, one that keeps 0 neurons no MLP; with neither, the block is gone.

    >>> Plan(heads=(6, 5), neurons=(768, 0))
    """

    format_version: Literal[1] = 1
    heads: tuple[Kept, ...]
    neurons: tuple[Kept, ...]

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
        """Refuse counts that the model does not have, and those that cut the path from the image to the output."""
        if len(self.heads) != len(anatomy.blocks):
            raise SnapvitError(f"the plan is for {len(self.heads)} blocks, the model has {len(anatomy.blocks)}")
        for kind in ("heads", "neurons"):
            for i, (keep, have) in enumerate(zip(getattr(self, kind), getattr(anatomy, kind))):
                if not 0 <= keep <= have:
                    raise SnapvitError(f"block {i}: the plan keeps {keep} {kind} of {have}. Keep 0 to {have}")
        if anatomy.reads_token and not any(self.heads):
            raise SnapvitError("the plan keeps no attention, so the class token would never see the image. Keep one")
        if not any(self.heads + self.neurons):
            raise SnapvitError("the plan keeps neither heads nor neurons: nothing of the blocks is left. Keep some")

    def keeps_all_of(self, other: Plan) -> bool:
        """Whether everything that `other` keeps is kept here too."""
        return all(a >= b for a, b in zip(self.heads + self.neurons, other.heads + other.neurons))

    @property
    def removed(self) -> tuple[tuple[int, Part], ...]:
        """The sub-layers that are gone, by block and part."""
        attention: list[tuple[int, Part]] = [(i, "attention") for i, n in enumerate(self.heads) if not n]
        return (*attention, *((i, "mlp") for i, n in enumerate(self.neurons) if not n))

    @property
    def last_attention(self) -> int:
        """The last block that has an attention, -1 if none has: after it no token learns anything of others."""
        return max((i for i, kept in enumerate(self.heads) if kept), default=-1)

    def sparsity(self, anatomy: Anatomy) -> float:
        """The fraction of the prunable parameters that is gone."""
        return 1 - anatomy.prunable_params(self) / anatomy.prunable_params()

    def flops_ratio(self, anatomy: Anatomy) -> float:
        """FLOPs of the blocks relative to the dense blocks."""
        return anatomy.block_flops(self) / anatomy.block_flops()


class Protection(Value, frozen=True, kw_only=True):
    """The best part of each block that is never cut, whatever the ratio; at least one head and one neuron.

    Where sub-layers are not protected, one may be removed whole; what of it remains otherwise is never less.
    """

    neurons: Ratio = 0.05
    heads: Ratio = 0.2
    sublayers: bool = True

    def kept_neurons(self, total: int) -> int:
        return max(1, int(total * self.neurons))

    def kept_heads(self, total: int) -> int:
        return max(1, int(total * self.heads))

    def may_go(self, anatomy: Anatomy, without: npt.ArrayLike) -> list[tuple[bool, bool]]:
        """Of each block, whether its attention and its MLP may be removed whole; `without`: the damage of that, (L, 2).

        One must stay, so that there is a way from the image to the output: the one with the most damage. If only the
        class token is read, it is an attention, since nothing else brings patches to that token.
        """
        ends = np.array(without, np.float64)
        if self.sublayers:
            return [(False, False)] * len(ends)
        if anatomy.reads_token:
            ends[:, 1] = -1
        stays = np.unravel_index(int(ends.argmax()), ends.shape)
        return [((i, 0) != stays, (i, 1) != stays) for i in range(len(ends))]

    def least(self, anatomy: Anatomy) -> Plan:
        """The Plan of what is protected and nothing else."""
        heads = tuple(self.kept_heads(n) for n in anatomy.heads)
        return Plan(heads=heads, neurons=tuple(self.kept_neurons(n) for n in anatomy.neurons))


class Planner:
    """All Plans of one ranking.

    >>> planner = Planner(ranking, anatomy)
    >>> planner.sparsity(0.3), planner.flops(0.72), planner.pair(0.35, 0.2)
    """

    def __init__(
        self,
        ranking: Ranking,
        anatomy: Anatomy,
        protection: Protection = Protection(),
        multiple: int = 1,
        corrected: bool = False,
    ) -> None:
        """`multiple`: allocated MLPs keep a multiple of so many neurons, or all; it needs damage curves.

        `corrected`: weights will be, so the biases that this adds are counted as parameters.
        """
        ranking.check_fits(anatomy)
        if multiple < 1 or (multiple > 1 and ranking.damage is None):
            raise UsageError(f"widths in multiples of {multiple} need a ranking with damage curves and at least 1")
        self.anatomy, self.protection, self.multiple = anatomy, protection, multiple
        self._after = anatomy.with_output_biases() if corrected else anatomy
        self._damage = ranking.damage
        self._measured = None if protection.sublayers else ranking.sublayers
        self._removal = [] if ranking.damage is not None else _removal_order(ranking, anatomy, protection)
        self._heads = _CutOrder(ranking.head_scores, protection.kept_heads)
        self._neurons = _CutOrder(ranking.neuron_scores, protection.kept_neurons)
        self._allocators: dict[Callable[[Anatomy], Costs], Allocator | Cases] = {}

    def pair(self, mlp: float, head: float) -> Plan:
        """Cut int(total * ratio) of all neurons and of all heads, the smallest scores first."""
        return Plan(
            heads=self._heads.counts_at_ratio(head, "heads"),
            neurons=self._neurons.counts_at_ratio(mlp, "neurons"),
        )

    def sparsity(self, fraction: float) -> Plan:
        """The densest Plan with at least this fraction of the prunable parameters gone."""
        check_sparsity(fraction)
        dense = self.anatomy.prunable_params()
        return self._densest(
            self.anatomy.prunable_params,
            prunable_costs,
            lambda params: 1 - params / dense >= fraction,
            lambda least: f"sparsity {fraction:g} is out of reach: protection leaves at most {1 - least / dense:.4f}",
        )

    def flops(self, fraction: float) -> Plan:
        """The densest Plan whose blocks need at most this fraction of the dense blocks' FLOPs."""
        check_fraction("FLOPs", fraction)
        dense = self.anatomy.block_flops()
        return self._densest(
            self.anatomy.block_flops,
            flops_costs,
            lambda flops: flops / dense <= fraction,
            lambda least: (
                f"FLOPs fraction {fraction:g} is out of reach: protection leaves at least {least / dense:.4f}"
            ),
        )

    def params(self, fraction: float) -> Plan:
        """The densest Plan with at most this fraction of the dense model's parameters."""
        check_fraction("parameter", fraction)
        dense = self.anatomy.params()
        if fraction == 1:
            return Plan.dense(self.anatomy)  # which nothing corrects
        return self._densest(
            self._after.params,
            params_costs,
            lambda params: params <= fraction * dense,
            lambda least: f"parameter fraction {fraction:g} is out of reach: the smallest plan has {least / dense:.4f}",
        )

    def within(self, costs: Costs | CostsByLast, budget: float) -> Plan:
        """The Plan with the least damage under any cost, such as a measured latency model; it needs damage curves."""
        if self._damage is None:
            raise UsageError("an allocation under a cost needs a ranking with damage curves")
        return self._allocator_of(costs).within(budget)

    @property
    def allocates(self) -> bool:
        """Whether heads and neurons are traded against each other under a cost."""
        return self._damage is not None

    def steps_of(self, costs: Costs | CostsByLast) -> dict[str, Plan]:
        """Plans from dense to the sparsest, one per hundredth of the dense cost, such as a latency model's.

        `t63` has the least damage of all that cost at most 0.63; it needs damage curves.
        """
        if self._damage is None:
            raise UsageError("an allocation under a cost needs a ranking with damage curves")
        dense, allocator = Plan.dense(self.anatomy), self._allocator_of(costs)
        whole, smallest = costs.of(dense), costs.of(allocator.sparsest)
        plans, last = {"dense": dense}, whole
        for percent in range(99, 0, -1):
            if (budget := whole * percent / 100) >= smallest:
                plan = allocator.within(budget)
                if costs.of(plan) < last:
                    plans[f"t{percent}"], last = plan, costs.of(plan)
        sparsest = allocator.within(smallest * (1 + 1e-9))  # what costs nothing is kept
        return plans if costs.of(sparsest) >= last else {**plans, "sparsest": sparsest}

    def steps(self) -> dict[str, Plan]:
        """Plans from dense to the sparsest, one per hundredth, by name.

        With damage curves the hundredths are of FLOPs, which latency follows; `flops63` is `flops(0.63)`, left out
        where it would not need less than the step before. Without, they are of sparsity; `s37` is `sparsity(0.37)`.
        """
        plans = {"dense": Plan.dense(self.anatomy)}
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
        """Everything cut that protection allows: the last point of the line."""
        return self._at(1.0) if self._damage is None else self._allocator(flops_costs).sparsest

    @property
    def largest_sparsity(self) -> float:
        return self.sparsest.sparsity(self.anatomy)

    def _at(self, position: float) -> Plan:
        """The point of the line that far along, from 0 to 1: by the mlp ratio, or by the stages if sub-layers may go.

        A width is a point of the published line, stopped where protection stops it.
        """
        mlp, gone = position, 0
        if self._removal:
            along = np.linspace(0, 1, len(STAGES))
            mlp, share = (float(np.interp(position, along, axis)) for axis in zip(*STAGES))
            gone = int(share * 2 * len(self.anatomy.blocks) + 1e-9)  # a sixth of 24 is 4
        knots = ((0.0, 0.0), *PUBLISHED_PAIRS, (1.0, 1.0))
        head = float(np.interp(mlp, [m for m, _ in knots], [h for _, h in knots]))
        counts = {
            "attention": list(self._heads.counts(self._heads.clipped(head))),
            "mlp": list(self._neurons.counts(self._neurons.clipped(mlp))),
        }
        for i, part in self._removal[:gone]:
            counts[part][i] = 0
        return Plan(heads=tuple(counts["attention"]), neurons=tuple(counts["mlp"]))

    def _densest(
        self,
        cost: Callable[[Plan], int],
        costs: Callable[[Anatomy], Costs],
        fits: Callable[[int], bool],
        refusal: Callable[[int], str],
    ) -> Plan:
        """The densest Plan whose `cost` fits; `costs` is the same cost as tables, for the allocation."""
        dense = Plan.dense(self.anatomy)
        if fits(cost(dense)):
            return dense
        allocator = self._allocator(costs) if self._damage is not None else None
        least = cost(allocator.sparsest if allocator else self.sparsest)
        if not fits(least):
            raise SnapvitError(refusal(least))
        if allocator:
            return allocator.within(_largest(fits, least, cost(dense)))
        low, high = 0.0, 1.0  # `high` always fits, `low` never does
        for _ in range(50):  # halvings: finer than one neuron of a million
            middle = (low + high) / 2
            low, high = (low, middle) if fits(cost(self._at(middle))) else (middle, high)
        return self._at(high)

    def _allocator(self, costs: Callable[[Anatomy], Costs]) -> Allocator | Cases:
        if costs not in self._allocators:
            self._allocators[costs] = self._allocator_of(costs(self._after))
        return self._allocators[costs]

    def _allocator_of(self, costs: Costs | CostsByLast) -> Allocator | Cases:
        from .allocate import Allocator  # which need Plan
        from .cases import Cases
        from .removal import Removal

        assert self._damage is not None
        least = self.protection.least(self.anatomy)
        if not self.protection.sublayers:
            return Cases(Removal.of(self._damage, self._measured), costs, least, self.anatomy, self.multiple)
        whole = costs.cases[-1] if isinstance(costs, CostsByLast) else costs  # every block has its attention
        return Allocator(self._damage, whole, least, self.multiple)


def _removal_order(ranking: Ranking, anatomy: Anatomy, protection: Protection) -> list[tuple[int, Part]]:
    """The sub-layers that may go, those whose loss moves the answers least first: without curves they go in turn."""
    if protection.sublayers:
        return []
    if ranking.sublayers is None:
        raise UsageError("whether a sub-layer may go is told by its damage, which the ranking lacks. Rank with --depth")
    without = np.array([s.damage for s in ranking.sublayers]).reshape(-1, 2)
    may_go = np.array(protection.may_go(anatomy, without))
    going = [s for s in ranking.sublayers if may_go[s.block, int(s.part == "mlp")]]
    return [(s.block, s.part) for s in sorted(going, key=lambda s: s.damage)]


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest whole cost that fits, by the comparison that will judge the Plan; `low` fits, `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
