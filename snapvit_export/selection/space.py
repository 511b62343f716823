"""The space of candidates of one budget: precision, resolution and width span a lattice, merging fills the rest. Light.

A place of the lattice is a precision, a grid of patches and a width. Its Plan at a limit merges just as many tokens as
the limit asks for, so all places cost the same and only their fidelity differs. Where a place meets the limit without
any merge, a larger grid or width may do so too and is then never worse: such a place is left out. One more width,
`FILLED`, merges nothing and keeps the heads and neurons that the limit allows: what the published method does.

Costs are those of a latency model, or FLOPs. They only say what to look at next; what is reported is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from ..allocation.costs import Costs, CostsByLast, flops_costs
from ..allocation.levers import Lever
from ..allocation.planner import Planner
from ..allocation.token_target import TokenTarget
from ..allocation.tokens import Schedule, merging_blocks
from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..profiling.latency_model import LatencyModel
from ..target import Precision
from .point import Point

WIDTHS = (0.85, 0.7, 0.55, 0.4)  # of the cost of all heads and neurons, beside all of them
FILLED = -1  # the width that the limit allows, with all tokens
LEAST_SIDE = 0.5  # of an image: patches stand for less and less of what the model has learnt
MOST_GRIDS = 8
Grid = tuple[int, int] | None


class Cost(Protocol):
    """What a Plan costs, and tables of it for the allocation of heads and neurons."""

    def of(self, plan: Plan) -> float: ...

    def tables(self, plan: Plan) -> Costs | CostsByLast:
        """Return the costs of heads and neurons with the tokens of a Plan."""
        ...


@dataclass(frozen=True)
class ModelledLatency:
    """Milliseconds by a latency model."""

    model: LatencyModel
    anatomy: Anatomy

    def of(self, plan: Plan) -> float:
        return self.model.predict_ms(plan)

    def tables(self, plan: Plan) -> Costs | CostsByLast:
        return self.model.costs(self.anatomy, plan)


@dataclass(frozen=True)
class Flops:
    """FLOPs of the blocks."""

    anatomy: Anatomy

    def of(self, plan: Plan) -> float:
        return self.anatomy.block_flops(plan)

    def tables(self, plan: Plan) -> Costs | CostsByLast:
        return flops_costs(self.anatomy, plan)


class Place(NamedTuple):
    """A place of the lattice."""

    precision: Precision
    grid: int  # number of the grid: 0 is the model's own
    width: int  # number of the width: 0 is all; or FILLED


class Space:
    """All places of one model, and the Plan of each at any limit."""

    def __init__(
        self,
        planner: Planner,
        levers: Sequence[Lever],
        costs: Mapping[Precision, Cost],
        schedule: Schedule,
        grids: Sequence[Grid] = (None,),
        allows: Callable[[Point], bool] = lambda point: True,
        widths: Sequence[Plan] = (),
    ) -> None:
        """`costs`: of each precision that may be used, the family's own first. `allows`: other limits, such as size.

        `widths`: more of them, which meet other limits exactly.
        """
        self.anatomy, self.planner, self.levers, self.costs = planner.anatomy, planner, levers, dict(costs)
        self.schedule, self.allows, self._also = schedule, allows, widths
        self.own = next(iter(self.costs))
        self.grids = list(grids) if "tokens" in levers else [None]
        self._filled: dict[tuple[Place, int], Plan | None] = {}

    @property
    def cuts(self) -> bool:
        """True if heads, neurons or sub-layers may be cut."""
        return "width" in self.levers or "depth" in self.levers

    @cached_property
    def widths(self) -> list[Plan]:
        """Plans of all tokens, from all heads and neurons to few.

        Without merges only what meets a limit counts, and nothing meets one as closely as `FILLED` does.
        """
        dense = Plan.dense(self.anatomy)
        found = [dense]
        if self.cuts and "tokens" in self.levers:
            cost = self.costs[self.own]
            found += [plan for share in WIDTHS if (plan := self._within(self.planner, cost, share * cost.of(dense)))]
        found += self._also
        return sorted(dict.fromkeys(found), key=lambda plan: -plan.flops_ratio(self.anatomy))

    def places(self) -> list[Place]:
        """Return all places, those of the family's own precision first."""
        widths = [*range(len(self.widths)), *([FILLED] if self.cuts else [])]
        return [Place(p, grid, width) for p in self.costs for grid in range(len(self.grids)) for width in widths]

    def neighbours(self, place: Place) -> list[Place]:
        """Return the places one grid or one width away."""
        p, grid, width = place
        around = [Place(p, grid - 1, width), Place(p, grid + 1, width)]
        if width != FILLED:
            around += [Place(p, grid, other) for other in (width - 1, width + 1) if other >= 0]  # FILLED is no width
        known = set(self.places())
        return [each for each in around if each in known]

    def first(self, precision: Precision, limit: float) -> list[Place]:
        """Return some places of a precision that are apart from each other, to begin with."""
        whole = Plan.dense(self.anatomy)
        alone = [g for g, grid in enumerate(self.grids) if self.cost(precision, whole.with_tokens(grid=grid)) <= limit]
        last = alone[0] if alone else len(self.grids) - 1  # the largest images that need nothing else
        widths = [w for w, plan in enumerate(self.widths) if w in (0, 2) or plan in self._also]
        found = [Place(precision, grid, w) for w in widths for grid in dict.fromkeys((0, last // 2, last))]
        return [*found, Place(precision, 0, FILLED)] if self.cuts else found

    def cost(self, precision: Precision, plan: Plan) -> float:
        return self.costs[precision].of(plan)

    def point(self, place: Place, limit: float) -> Point | None:
        """Return the point of a place at a limit; None if it cannot meet it, or is never better than another place."""
        plan = self._filling(place, limit) if place.width == FILLED else self._merging(place, limit)
        if plan is None or (place.width != FILLED and self._is_idle(place, plan, limit)):
            return None
        point = Point(plan, place.precision)
        return point if self.allows(point) else None

    def larger(self, place: Place) -> tuple[Place, Point] | None:
        """Return the place of the next larger grid or width, the cheaper, and its point, which merges nothing."""
        p, grid, width = place
        if width == FILLED:
            return None
        places = [Place(p, grid - 1, width)] * (grid > 0) + [Place(p, grid, width - 1)] * (width > 0)
        found = [(each, Point(self._sized(each), p)) for each in places]
        return min(found, key=lambda each: self.cost(p, each[1].plan), default=None)

    def smallest(self, precision: Precision) -> Plan:
        """Return the cheapest Plan of a precision, whatever its fidelity."""
        dense, found = Plan.dense(self.anatomy), []
        for number, grid in enumerate(self.grids):
            sparsest = self._with_grid(number).sparsest if self.cuts else dense.with_tokens(grid=grid)
            narrow = [plan.with_tokens(grid=grid) for plan in self.widths]
            found += [sparsest, *narrow]
            if "tokens" in self.levers:
                found += [self.schedule.most(self.anatomy, plan) for plan in narrow]
        return min(found, key=lambda plan: self.cost(precision, plan))

    def _merging(self, place: Place, limit: float) -> Plan | None:
        sized = self._sized(place)
        if self.cost(place.precision, sized) <= limit:
            return sized
        if "tokens" not in self.levers or not merging_blocks(self.anatomy, sized):
            return None
        return self.schedule.least(self.anatomy, sized, lambda plan: self.cost(place.precision, plan) <= limit)

    def _is_idle(self, place: Place, plan: Plan, limit: float) -> bool:
        """Return True if a larger grid or width also meets the limit without a merge."""
        if any(plan.merged):
            return False
        p, grid, width = place
        larger = [Place(p, grid - 1, width)] * (grid > 0) + [Place(p, grid, width - 1)] * (width > 0)
        return any(self.cost(p, whole) <= limit and self.allows(Point(whole, p)) for whole in map(self._sized, larger))

    def _filling(self, place: Place, limit: float) -> Plan | None:
        made, cost = self._with_grid(place.grid), self.costs[place.precision]
        dense = cost.of(made.dense)
        steps = int(100 * limit / dense * (1 + 1e-9))  # whole ones: the same Plans whatever the noise of a limit
        if (place, steps) not in self._filled:
            self._filled[place, steps] = self._within(made, cost, min(dense * steps / 100, limit))
        return self._filled[place, steps]

    def step_name(self, plan: Plan) -> str | None:
        """Return the name of a Plan that only lacks heads, neurons or sub-layers: `t59` has 59 % of the dense cost.

        Where a ranking has one line of Plans for all costs, its steps have their own names.
        """
        if plan.changes_tokens:
            return None
        if not self.planner.allocates:
            return next((name for name, step in self.planner.steps().items() if step == plan), None)
        cost = self.costs[self.own]
        return f"t{math.ceil(100 * cost.of(plan) / cost.of(Plan.dense(self.anatomy)) - 1e-9)}"

    def _with_grid(self, number: int) -> Planner:
        grid = self.grids[number]
        return self.planner if grid is None else self.planner.for_tokens(TokenTarget(1.0, grid, self.schedule))

    def _sized(self, place: Place) -> Plan:
        return self.widths[place.width].with_tokens(grid=self.grids[place.grid])

    def _within(self, planner: Planner, cost: Cost, limit: float) -> Plan | None:
        """Return the densest Plan within a cost, or None."""
        if cost.of(planner.dense) <= limit:
            return planner.dense
        try:
            if planner.allocates:
                return planner.within(cost.tables, limit)
        except SnapvitError:  # out of reach
            return None
        return next((plan for plan in planner.steps().values() if cost.of(plan) <= limit), None)


def grids_for(anatomy: Anatomy) -> list[Grid]:
    """Return the grids of patches that candidates may have: the model's own, and some of smaller images.

    Both sides shrink alike, patch by patch, down to half of the image.
    """
    rows, columns = anatomy.grid
    longer = max(rows, columns)
    sides = range(longer, max(1, round(longer * LEAST_SIDE)) - 1, -1)
    found: dict[Grid, None] = {None: None}
    for side in sides:
        grid = max(1, round(rows * side / longer)), max(1, round(columns * side / longer))
        if grid != anatomy.grid:
            found[grid] = None
    every = -(-len(found) // MOST_GRIDS)
    return list(found)[::every]
