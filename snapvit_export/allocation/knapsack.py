"""Joint allocation of heads and neurons over all blocks: the least damage within a cost budget. Light: numpy.

A sub-layer is the attention or the MLP of a block. Its options are the widths it may have; each has a damage (from the
ranking's curves) and a cost. If it is removable, a width of 0 is an option too: its damage is the end of the curve, all
of the sub-layer's output but its mean, and it also saves the constant cost of the sub-layer. So depth is cut exactly
where that pays. Wanted is one option per sub-layer with the least sum of damages and a sum of costs within the budget:
a knapsack.

- `within(budget)` solves it by dynamic programming over costs in whole bins. Costs are rounded up, so the true cost
  never exceeds the budget; what rounding left over is then spent, best damage per cost first, until nothing more fits.
- The greedy line goes from the sparsest Plan to the dense one, by the structure that saves most damage per cost next,
  along the slopes of each curve's lower convex hull. Its Plans are nested. Where all sub-layers stand on corners of
  their hulls, no Plan of that cost or less has less damage: it is the minimum of damage + slope * cost.

What is exact: with at most OPTIONS widths per sub-layer and costs that are whole multiples of a bin, `within` is
optimal. Otherwise a first pass considers OPTIONS evenly spaced widths, and a second all widths near the first solution
with finer bins; the best of these and of the line, each filled up, is the result. The line alone is as good on
convex curves, but loses where a model has few heads and their curves are not convex; and it stops at the first
structure that does not fit, so it does not promise that nothing more fits. A Planner therefore asks `within`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..model.plan import Plan
from ..model.ranking import Damage
from .costs import Costs, Table

BINS = 4096  # of cost, from the sparsest Plan to the dense one
OPTIONS = 128  # widths of a sub-layer that the first pass considers

Widths = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _WidthOptions:
    """The widths that one sub-layer may have, from the least up, with their costs and damages."""

    widths: Widths  # (m,) rising
    costs: Table  # (m,) never falling
    damages: Table  # (m,) never rising

    def only(self, chosen: npt.NDArray[np.int64]) -> _WidthOptions:
        return _WidthOptions(self.widths[chosen], self.costs[chosen], self.damages[chosen])


class Allocator:
    """All Plans of one set of damage curves under one kind of cost.

    >>> Allocator(ranking.damage, flops_costs(anatomy), least).within(0.6 * anatomy.block_flops())
    """

    def __init__(
        self,
        damage: Damage,
        costs: Costs,
        least: Plan,
        multiple: int = 1,
        removable: Sequence[tuple[bool, bool]] = (),
        most: Plan | None = None,
    ) -> None:
        """`least`: what every block keeps at any cost. `multiple`: MLP widths are multiples of it, or full.

        `removable`: for every block if its attention and its MLP may be removed whole, below `least`; default: none.
        `most`: a Plan of the same options; no Plan keeps more of anything.
        """
        if not len(damage) == len(costs.heads) == len(least.heads) == len((most or least).heads):
            raise SnapvitError(
                f"damage of {len(damage)} blocks, costs of {len(costs.heads)}, a least plan of {len(least.heads)} "
                f"and at most one of {len((most or least).heads)} do not belong together"
            )
        self.curves, self.costs = damage, costs
        self._options: list[_WidthOptions] = []  # attention, MLP, attention, MLP, ...
        for i, curves in enumerate(damage):
            tables, floors = (costs.heads[i], costs.neurons[i]), (least.heads[i], least.neurons[i])
            droppable = removable[i] if removable else (False, False)
            tops = (len(curves[0]) - 1, len(curves[1]) - 1) if most is None else (most.heads[i], most.neurons[i])
            for curve, table, floor, step, drop, top in zip(curves, tables, floors, (1, multiple), droppable, tops):
                self._options.append(_upto(top, _options_of(curve, table, floor, step, drop, i), i))

    @property
    def sparsest(self) -> Plan:
        """The Plan with the least of everything."""
        return self._plan(np.zeros(len(self._options), np.int64))

    def damage(self, plan: Plan) -> float:
        """Return the sum of the damages of all sub-layers."""
        return sum(float(h[k]) + float(m[n]) for (h, m), k, n in zip(self.curves, plan.heads, plan.neurons))

    def within(self, budget: float) -> Plan:
        """Return the Plan with the least damage that costs at most `budget`, and to which nothing can be added."""
        self._check_reach(budget)
        coarse = self._coarse(budget)
        candidates = [coarse, self._fine(coarse, budget), self._line_picks(budget)]
        # In the passes too a sum of fractions may be above the budget by its last bit; the line never is.
        fitting = [picks for picks in candidates if self._cost(picks) <= budget]
        return min((self._plan(self._filled(picks, budget)) for picks in fitting), key=self.damage)

    def _check_reach(self, budget: float) -> None:
        least = self.costs.of(self.sparsest)
        if not least <= budget:
            raise SnapvitError(f"a cost of {budget:g} is out of reach: the sparsest plan costs {least:g}")

    @cached_property
    def _steps(self) -> npt.NDArray[np.int64]:
        """The sub-layer whose next option is added, from the sparsest Plan on: falling gain per cost."""
        gains = [_gain_per_cost(o) for o in self._options]
        owners = np.repeat(np.arange(len(gains)), [len(g) for g in gains])
        return np.asarray(owners[np.argsort(-np.concatenate(gains), kind="stable")])

    @cached_property
    def _step_costs(self) -> Table:
        """The cost of the line after each step, beyond that of the sparsest Plan."""
        costs = np.zeros(len(self._steps))
        for sublayer, o in enumerate(self._options):
            costs[self._steps == sublayer] = np.diff(o.costs)
        return np.cumsum(costs)

    def _line_picks(self, budget: float) -> Widths:
        """Return the last point of the line within the budget, as option numbers."""
        left = budget - self.costs.of(self.sparsest)
        fits = int(np.searchsorted(self._step_costs, left, side="right"))
        picks = np.bincount(self._steps[:fits], minlength=len(self._options))
        while fits and self._cost(picks) > budget:  # by the last bit of a sum of fractions
            fits -= 1
            picks[self._steps[fits]] -= 1
        return picks

    @cached_property
    def _thinned(self) -> list[npt.NDArray[np.int64]]:
        """The options of each sub-layer that the first pass considers: all, or evenly spaced ones with both ends."""
        counts = [len(o.widths) for o in self._options]
        return [np.unique(np.linspace(0, n - 1, min(n, OPTIONS)).round().astype(np.int64)) for n in counts]

    @cached_property
    def _bin(self) -> float:
        """The size of a bin: the common divisor of all costs where that makes few bins, else a fixed fraction."""
        extra = np.concatenate([o.costs - o.costs[0] for o in self._options])
        span = float(sum(o.costs[-1] - o.costs[0] for o in self._options))
        if (extra == extra.round()).all() and extra.max(initial=0) < 2**53:
            divisor = int(np.gcd.reduce(extra.astype(np.int64)))
            if divisor and span / divisor <= BINS:
                return float(divisor)
        return span / BINS or 1.0

    @cached_property
    def _table(self) -> _Knapsack:
        """The first pass: one table serves all budgets, and a larger budget never has more damage in it."""
        few = [o.only(chosen) for o, chosen in zip(self._options, self._thinned)]
        span = sum(o.costs[-1] - o.costs[0] for o in few)
        return _Knapsack(few, self._bin, int(span / self._bin) + len(few))

    def _coarse(self, budget: float) -> Widths:
        left = budget - self.costs.of(self.sparsest)
        picks = self._table.solve(left)
        return np.array([few[k] for few, k in zip(self._thinned, picks)])

    def _fine(self, coarse: Widths, budget: float) -> Widths:
        """Solve again with every width between the neighbours of the first solution; other sub-layers as they are."""
        windows = []
        for pick, few, o in zip(coarse, self._thinned, self._options):
            at = int(np.searchsorted(few, pick))
            low, high = (
                (few[max(at - 1, 0)], few[min(at + 1, len(few) - 1)]) if len(few) < len(o.widths) else (pick, pick)
            )
            windows.append(np.arange(low, high + 1))
        near = [o.only(window) for o, window in zip(self._options, windows)]
        left = budget - self.costs.fixed - sum(float(o.costs[0]) for o in near)
        span = sum(float(o.costs[-1] - o.costs[0]) for o in near)
        if left < 0 or span == 0:
            return coarse
        picks = _Knapsack(near, min(left, span) / BINS or 1.0, BINS).solve(left)
        return np.array([window[k] for window, k in zip(windows, picks)])

    def _filled(self, picks: Widths, budget: float) -> Widths:
        """Spend what is left: of all next options that fit, the one with the most damage saved per cost, again."""
        picks = picks.copy()
        gain = np.array([self._gain(i, k) for i, k in enumerate(picks)])
        while (gain >= 0).any():
            i = int(np.argmax(gain))
            picks[i] += 1
            if self._cost(picks) <= budget:
                gain[i] = self._gain(i, picks[i])
            else:  # no wider option of this sub-layer can fit either, and what is left only shrinks
                picks[i] -= 1
                gain[i] = -1.0
        return picks

    def _gain(self, sublayer: int, pick: int) -> float:
        """Return the damage saved per cost by the next option of a sub-layer; -1 if it has none."""
        o = self._options[sublayer]
        if pick + 1 == len(o.widths):
            return -1.0
        return _slope(o.costs[pick : pick + 2].tolist(), o.damages[pick : pick + 2].tolist(), 0, 1)

    def _cost(self, picks: Widths) -> float:
        """Return the cost of the Plan, added up as `Costs.of` does, to the last bit."""
        each = [float(o.costs[k]) for o, k in zip(self._options, picks.tolist())]
        return self.costs.fixed + sum(each[0::2]) + sum(each[1::2])

    def _plan(self, picks: npt.NDArray[np.int64]) -> Plan:
        widths = [int(o.widths[k]) for o, k in zip(self._options, picks)]
        return Plan(heads=tuple(widths[0::2]), neurons=tuple(widths[1::2]))


class _Knapsack:
    """The least damage for every cost in bins, sub-layer by sub-layer: best[i][b] uses the first i within b bins."""

    def __init__(self, options: Sequence[_WidthOptions], size: float, bins: int) -> None:
        self.size, self.bins = size, bins
        with np.errstate(over="ignore"):  # what is far beyond the last bin
            in_bins = [np.ceil((o.costs - o.costs[0]) / size) for o in options]
        self.costs = [np.minimum(costs, bins + 1).astype(np.int64) for costs in in_bins]
        self.damages = [o.damages for o in options]
        self.best = [np.zeros(bins + 1)]
        for costs, damages in zip(self.costs, self.damages):
            before, after = self.best[-1], np.full(bins + 1, np.inf)
            for c, v in zip(costs.tolist(), damages.tolist()):
                if c > bins:
                    break
                np.minimum(after[c:], before[: bins + 1 - c] + v, out=after[c:])
            self.best.append(after)

    def solve(self, left: float) -> list[int]:
        """Return the option of each sub-layer, when `left` may be spent beyond the first ones; of equals the widest."""
        bins_left = min(int(left / self.size), self.bins)
        picks = []
        for costs, damages, before in zip(self.costs[::-1], self.damages[::-1], self.best[-2::-1]):
            fits = int(np.searchsorted(costs, bins_left, side="right"))
            totals = before[bins_left - costs[:fits]] + damages[:fits]
            pick = fits - 1 - int(np.argmin(totals[::-1]))
            picks.append(pick)
            bins_left -= int(costs[pick])
        return picks[::-1]


def _options_of(curve: Table, table: Table, floor: int, step: int, removable: bool, block: int) -> _WidthOptions:
    full = len(curve) - 1
    if len(table) != len(curve) or not min(1, full) <= floor <= full:  # 0 only where the model lacks the sub-layer
        raise SnapvitError(
            f"block {block}: damage of {full} structures, costs of {len(table) - 1} and at least {floor} kept "
            "do not belong together"
        )
    widths = np.unique([*([0] if removable else []), *range(-(-floor // step) * step, full, step), full])
    return _WidthOptions(widths, table[widths], curve[widths])


def _upto(top: int, o: _WidthOptions, block: int) -> _WidthOptions:
    """Return the options of at most this width, which is one of them."""
    if top not in o.widths:
        raise SnapvitError(f"block {block}: at most {top} structures are to be kept, which is no width it may have")
    return o.only(np.flatnonzero(o.widths <= top))


def _gain_per_cost(o: _WidthOptions) -> Table:
    """Return for each step to the next option the slope of the lower convex hull: damage saved per cost."""
    costs, damages = o.costs.tolist(), o.damages.tolist()
    corners = [0]
    for k in range(1, len(costs)):
        while len(corners) > 1 and _slope(costs, damages, corners[-1], k) >= _slope(costs, damages, *corners[-2:]):
            corners.pop()  # it lies on or above the straight way to k
        corners.append(k)
    slopes = [_slope(costs, damages, a, b) for a, b in pairwise(corners)]
    return np.repeat(np.array(slopes, np.float64), np.diff(corners))


def _slope(costs: list[float], damages: list[float], a: int, b: int) -> float:
    return (damages[a] - damages[b]) / (costs[b] - costs[a]) if costs[b] > costs[a] else np.inf
