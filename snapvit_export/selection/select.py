"""Selects the most faithful variant that meets a budget, across all levers, and proves the choice. Light.

1. The dense model in every precision is timed beside its own (`precisions`); those of no use here are dropped.
2. A latency model of each precision that is left says what a point costs (`space`); a race on held-out images finds
   the places of the lattice that lose least at the budget (`race`). With one place there is nothing to race.
3. The best are built as they will be shipped, aimed a little below the budget by what their probes took; beside them
   the best of every single lever.
4. They are timed in new processes until the best that fits is told from the next better one that does not (`decide`).

Chosen is the best by fidelity of all that were measured to fit; where images cannot tell two apart, the denser. Steps
along a line are as wide as the noise of this machine, since finer ones could not be told apart. All numbers that decide
are those of the manifest: latencies pooled over all runs, fidelity on images that the race did not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..allocation.levers import Lever
from ..allocation.planner import Planner
from ..budget import Budget
from ..errors import BudgetNotMet, GateFailed, SnapvitError
from ..family.fidelity import NotFinite
from ..family.manifest import Choice, DroppedPrecision, Limits
from ..model.plan import Plan
from ..profiling.latency_model import LatencyModel
from ..target import Precision
from .candidates import DENSE, Candidates
from .choice import Chooser, no_variant
from .decide import FEWEST_RUNS, decide, time_enough
from .options import Options
from .point import Point
from .precisions import InPrecision, build_dense, of_no_use
from .race import Values, race
from .space import FILLED, Cost, Flops, ModelledLatency, Place, Space

CLEAR = 2.0  # margins of a latency that the next better one of a leader is aimed above the budget, to be told from it
MOST_CLEAR = 0.1  # of the budget: on a machine that is noisier, nothing would be told anyway
STEP = 0.04  # between neighbours of a line, of their latency: what some runs in new processes tell apart
MOST_STEPS = 4  # up a line, to another Plan
FINALISTS = 3
FEW_LOOKS, FEW_LEADERS = 10, 2  # of the race where other work takes half of the machine: then there is one finalist
FAR = 2.0  # times the divergence of the best in the race: the refit of what is cut does not make up for that
MOST_OFF = 1.12  # a latency model is not off by more: the run was disturbed
RUN_SECONDS = 0.5  # of every file in a run
SAFE = 0.97  # of a size: an estimate by parameters is not exact
LARGER_GRAPH = 1.3  # times the dense graph without its weights: merging adds nodes


@dataclass(frozen=True)
class Entrant:
    """A variant on its line: the place that it came from, and its cost in the units of the space."""

    place: Place
    point: Point
    cost: float


class Selection(Chooser):
    """One search for the variant that meets a budget; "dense" must have been built and timed."""

    def __init__(
        self, candidates: Candidates, planner: Planner, budget: Budget, limits: Limits, options: Options
    ) -> None:
        super().__init__(candidates, budget, limits, options)
        self.planner, self.own = planner, candidates.target.precision
        self.models: dict[Precision, LatencyModel] = {}
        self.dropped: list[DroppedPrecision] = []
        self.dense_in: dict[Precision, str] = {self.own: DENSE}  # the dense variant in each precision
        self.scales: dict[Place, float] = {}  # milliseconds of a unit of cost, where they were measured
        self.leaders: dict[Place, Values] = {}  # the best of the race, and their losses
        self.first_losses: dict[Place, float] = {}  # all that were in the race: mean losses on few images
        self.entrants: dict[str, Entrant] = {}  # by the name of the variant
        self.alternatives: dict[Lever, str] = {}
        self.is_hurried = False  # True: other work takes the cores, so less is tried

    @property
    def aim_ms(self) -> float:
        return self.budget_ms * (1 - STEP / 2)

    # -- the stages ---------------------------------------------------------------------------------------------------

    def run(self) -> Choice:
        """Search, decide, and return the choice with its proof."""
        if self.surely_fits(DENSE):
            time_enough(self, [DENSE])
        if self.surely_fits(DENSE):
            return self.choice(DENSE)
        self._compare_precisions()
        self._fit_models()
        entrants = self._enter_all()
        chosen = decide(self, entrants, list(self.alternatives.values())) or self._unsure() or self._smallest()
        model = self.models.get(self.candidates.built[chosen].precision)
        return self.choice(chosen, model, self.alternatives, self.dropped)

    def _compare_precisions(self) -> None:
        """Build and time the dense model in every precision, and drop those that are of no use here."""
        self.dense_in = build_dense(self.candidates, self.options.precisions)
        if len(self.dense_in) == 1:
            return
        self.candidates.progress.phase("timing the dense model in every precision")
        self.time(list(self.dense_in.values()))
        dense_ms = self.measured_ms(DENSE)
        close = [n for n in self.dense_in.values() if n != DENSE and abs(self.measured_ms(n) / dense_ms - 1) < 3 * STEP]
        time_enough(self, close)  # one process could not tell it from fp32
        dense_ms = self.measured_ms(DENSE)
        found = {
            p: InPrecision(self.measured_ms(name) / dense_ms, self._loss(name)) for p, name in self.dense_in.items()
        }
        too_large = self.candidates.built[DENSE].size_bytes > (self.limits.max_size_bytes or math.inf)
        self.dropped = [] if too_large else of_no_use(found, self.own, STEP)  # others may be of use for being smaller
        for each in self.dropped:
            del self.dense_in[each.precision]
            self.candidates.progress.note(f"{each.precision}: {each.reason}")

    def _loss(self, name: str) -> float:
        fidelity = self.candidates.built[name].fidelity
        return math.inf if fidelity is None else fidelity.divergence

    def _fit_models(self) -> None:
        """Fit a latency model of every precision; where there is none, FLOPs stand for latency."""
        levers = self.options.levers
        self.candidates.progress.step("latency model")
        for precision in self.dense_in:
            if precision != self.own and self.surely_fits(self.dense_in[precision]):
                continue  # nothing has to be cut in it
            model = self.candidates.latency_model(
                precision,
                removable="depth" in levers and not self.planner.protection.sublayers,
                budget_ms=self.budget_ms,
                tokens="tokens" in levers,
                least_heads=self.planner.least_heads,
            )
            if model is not None and model.is_sound:
                self.models[precision] = model

    @cached_property
    def space(self) -> Space:
        costs: dict[Precision, Cost] = {
            p: ModelledLatency(self.models[p], self.anatomy) if p in self.models else Flops(self.anatomy)
            for p in self.dense_in
        }
        options = self.options
        return Space(
            self.planner, options.levers, costs, options.schedule, options.grids, self._allows, self._limiting_widths()
        )

    def _allows(self, point: Point) -> bool:
        """Return True if a point should meet the limits beside the budget, as far as can be told before it is built."""
        is_cut = point.plan.with_tokens() != Plan.dense(self.anatomy)
        after = self.anatomy.with_output_biases() if is_cut and self.planner.corrected else self.anatomy
        params = after.params(point.plan)
        dense = self.candidates.built[self.dense_in[point.precision]]
        graph = dense.path.stat().st_size if dense.weights else 0  # which does not shrink with its weights
        size = (dense.size_bytes - graph) * params / self.anatomy.params() + LARGER_GRAPH * graph
        small = size <= SAFE * (self.limits.max_size_bytes or math.inf)
        return small and params <= (self.limits.max_params or math.inf)

    def _limiting_widths(self) -> list[Plan]:
        """Return the densest Plans that meet the limits beside the budget: one of them may be what is wanted."""
        shares = [self.limits.max_params / self.anatomy.params()] if self.limits.max_params else []
        for name in self.dense_in.values() if self.limits.max_size_bytes else ():
            shares.append(SAFE * (self.limits.max_size_bytes or 0) / self.candidates.built[name].size_bytes)
        found = []
        for share in shares:
            try:
                found += [self.planner.params(share)] if share < 1 else []
            except SnapvitError:  # out of reach
                continue
        return found

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _limit(self, place: Place, ms: float) -> float:
        """Return a latency in the units of the space, by what was measured nearest to the place."""
        return ms / self._scale(place)

    def _scale(self, place: Place) -> float:
        """Return the milliseconds of a unit of cost: by what was measured of the place, or of the dense model."""
        if place in self.scales:
            return self.scales[place]
        dense = Plan.dense(self.anatomy)
        return self.measured_ms(self.dense_in[place.precision]) / self.space.cost(place.precision, dense)

    def _point(self, place: Place, ms: float) -> Point | None:
        return self.space.point(place, self._limit(place, ms))

    def _enter(self, place: Place, point: Point, keep: bool) -> str | None:
        """Build a point and compare it with the dense model; None if it turns out too large for another limit."""
        is_step = place.width == FILLED and place.precision == self.own
        name = self.candidates.name_of(point, self.space.step_name(point.plan) if is_step else None)
        try:
            self.candidates.add(name, point, keep=keep)
        except (GateFailed, NotFinite) as error:
            if point.precision == self.own:
                raise
            self.candidates.progress.note(f"{name} is left out: {error}")  # its precision was our idea
            return None
        self.entrants[name] = Entrant(place, point, self.space.cost(point.precision, point.plan))
        return name if self.candidates.meets_limits(name, self.limits) else None

    def _enter_all(self) -> list[str]:
        """Build the finalists and the best of every single lever; return the names of all that may be chosen."""
        self.is_hurried = self.is_contended  # nothing will be decided, and it should not take long to say so
        ranked = self._race()
        self.candidates.progress.step("deciding")
        single = self._single()
        self._correct_scales([*ranked, *single.values()])
        found = [self._enter_at_aim(place, keep=True) for place in ranked]
        for lever, place in single.items():
            if (name := self._enter_at_aim(place, keep=place.width != FILLED)) is not None:  # no refit only to be shown
                self.alternatives[lever] = name
        fitting = [p for p, name in self.dense_in.items() if p != self.own and self.surely_fits(name)]
        if fitting and self._shows_alternatives:
            best = min(fitting, key=lambda p: self._loss(self.dense_in[p]))
            self.alternatives["precision"] = self._known(best)
        also = [name for name in self._made_well() if self._may_fit(name)]
        return list(dict.fromkeys(name for name in (*found, *also) if name is not None))

    def _made_well(self) -> list[str]:
        """Return the variants that are made as well as they can be, the dense one among them: nothing is cut there."""
        return [name for name, built in self.candidates.built.items() if built.kept or name == DENSE]

    def _may_fit(self, name: str) -> bool:
        """Return True if it is not told yet that a variant is too slow; what was asked for takes part in the choice."""
        return self.candidates.meets_limits(name, self.limits) and (
            name in self.entrants or (self.runs(name) > 0 and self.latency(name).low <= self.budget_ms)
        )

    def _enter_at_aim(self, place: Place, keep: bool) -> str | None:
        point = self._point(place, self.aim_ms)
        return None if point is None else self._enter(place, point, keep)

    def _known(self, precision: Precision) -> str:
        """Enter the dense model in a precision, which is built already."""
        name, place = self.dense_in[precision], Place(precision, 0, 0)
        point = self.candidates.built[name].point
        self.entrants[name] = Entrant(place, point, self.space.cost(precision, point.plan))
        return name

    def _race(self) -> list[Place]:
        """Return the places that lose least at the budget, best first: one of each kind that is not far behind.

        Of two kinds the race cannot tell the better one: a refit gives back a part of what width has lost.
        """
        first = [
            place for p in self.dense_in for place in self.space.first(p, self._limit(Place(p, 0, 0), self.aim_ms))
        ]
        points = {place: point for place in first if (point := self._point(place, self.aim_ms)) is not None}
        if len(points) <= 1 or self.candidates.meter is None:
            return list(points) or self._any_place()
        self.candidates.progress.step("race")
        self.candidates.progress.phase("comparing candidates on a few images")
        seen: dict[Point, Place] = {}

        def measure(places: Sequence[Place], on_all: bool) -> Mapping[Place, Values]:
            made = {place: point for place in places if (point := self._point(place, self.aim_ms)) is not None}
            if not on_all:  # some places have the same Plan at this budget
                made = {place: point for place, point in made.items() if seen.setdefault(point, place) == place}
            found = self.candidates.losses(made, few=not on_all)
            self.first_losses |= {} if on_all else {place: float(losses.mean()) for place, losses in found.items()}
            return found

        few = (FEW_LOOKS, FEW_LEADERS) if self.is_hurried else ()
        self.leaders = race(list(points), self.space.neighbours, measure, *few)
        if not self.leaders:
            raise SnapvitError("no candidate for this budget has finite outputs. Allow more, or name fewer --levers")
        least = min(float(losses.mean()) for losses in self.leaders.values())
        near = [place for place, losses in self.leaders.items() if losses.mean() <= FAR * least]
        kinds: dict[tuple[bool, bool], Place] = {}  # with all of the width or not, of own images or smaller ones
        for place in near:
            kinds.setdefault((place.width == 0, place.grid == 0), place)
        return list(kinds.values())[: 1 if self.is_hurried else FINALISTS]

    def _any_place(self) -> list[Place]:
        """Return a place that meets the budget, if there is one among all."""
        return [place for place in self.space.places() if self._point(place, self.aim_ms) is not None][:1]

    def _correct_scales(self, places: Sequence[Place]) -> None:
        """Time a first point of every line, all in turns, and correct what the space says of the line."""
        points = {place: point for place in places if (point := self._point(place, self.aim_ms)) is not None}
        new = {place: point for place, point in points.items() if not self._is_known(point)}
        if not new:
            return
        self.candidates.progress.phase(f"timing {len(new)} candidates")
        for place, ms in self.candidates.probe_ms(new, RUN_SECONDS, self.limits.at, self.budget_ms).items():
            guess = self.space.cost(place.precision, new[place].plan) * self._scale(place)
            self.scales[place] = self._scale(place) * min(max(ms / guess, 1 / MOST_OFF), MOST_OFF)

    def _is_known(self, point: Point) -> bool:
        return any(built.point == point and built.profile is not None for built in self.candidates.built.values())

    def _single(self) -> dict[Lever, Place]:
        """Return the best place of every lever alone that fills the budget: tokens, and width with depth."""
        if not self._shows_alternatives:
            return {}
        found: dict[Lever, Place] = {}
        if "tokens" in self.options.levers:
            best_first = [*self.leaders, *sorted(self.first_losses, key=self.first_losses.__getitem__)]
            alone = [place for place in best_first if place.precision == self.own and place.width == 0]
            found["tokens"] = alone[0] if alone else Place(self.own, 0, 0)
        if self.space.cuts:
            found["width"] = Place(self.own, 0, FILLED)
        return found

    @property
    def _shows_alternatives(self) -> bool:
        mixes = {"precision", "tokens"} & set(self.options.levers)
        return (
            not self.is_hurried and bool(mixes) and len(self.options.levers) > 1 and self.candidates.meter is not None
        )

    # -- the decision (`decide.Contest`) ------------------------------------------------------------------------------

    def time(self, names: Sequence[str]) -> None:
        """Time variants in turns with the dense one, in a new process."""
        self.candidates.time(list(dict.fromkeys(names)), RUN_SECONDS, self.limits.at, self.budget_ms, fresh=True)

    @property
    def is_contended(self) -> bool:
        """True if other work kept the last run from its cores."""
        profile = self.candidates.built[DENSE].profile
        return profile is not None and profile.is_contended

    def denser(self, name: str) -> str | None:
        """Build the next better point: up a variant's line as far as can be told, or the next larger place."""
        if name not in self.entrants or self.is_hurried:
            return None
        leader, at_ms = self.entrants[name], self.measured_ms(name)
        clear = min(max(STEP / 2, CLEAR * self._margin), MOST_CLEAR)
        above = max(self.budget_ms * (1 + clear), at_ms * (1 + STEP))
        for _ in range(MOST_STEPS):  # one is enough but for small models, whose steps are wide
            point = self.space.point(leader.place, above * leader.cost / at_ms)
            if point != leader.point:
                break
            above *= 1 + STEP
        if point is not None and point != leader.point:
            return self._enter(leader.place, point, keep=True)
        larger = self.space.larger(leader.place)
        if larger is None or not self._allows(larger[1]):
            return None
        return self._enter(*larger, keep=True)

    @property
    def _margin(self) -> float:
        """How far from a latency the end of its interval is after the fewest runs, as a share: by the dense model's."""
        found, runs = self.candidates.drift.latency(DENSE, self.limits.at), self.runs(DENSE)
        return (found.high / found.ms - 1) * math.sqrt(runs / FEWEST_RUNS)

    def lower(self, name: str) -> str | None:
        """Build the point of a variant's line that should fit after all, at least half a step below."""
        found = self.latency(name)
        if name not in self.entrants or not math.isfinite(found.ms):
            return None
        leader = self.entrants[name]
        self.scales[leader.place] = found.ms / leader.cost
        wanted = min(self.aim_ms, found.ms * (1 - STEP / 2), found.ms * self.aim_ms / found.high)
        point = self._point(leader.place, wanted)
        return None if point is None or point == leader.point else self._enter(leader.place, point, keep=True)

    def _unsure(self) -> str | None:
        """Return the best that may fit, of those that are made as well as they can be."""
        return self.best_unsure(self._made_well())

    def _smallest(self) -> str:
        """Build and time the smallest model of all; refuse the budget if not even that fits, and say what it takes."""
        precision = min(self.dense_in, key=lambda p: self.measured_ms(self.dense_in[p]))
        point = Point(self.space.smallest(precision), precision)
        name = self.candidates.name_of(point, "smallest")
        self.candidates.add(name, point, keep=True)
        self.candidates.progress.phase("timing the smallest")
        time_enough(self, [name])
        if self.surely_fits(name):  # lines end before it where a latency model takes some of what is kept for free
            return name
        raise BudgetNotMet(no_variant(self.candidates, name, self.latency(name), self.budget_ms, self.limits))


def select(
    candidates: Candidates, planner: Planner, budget: Budget, limits: Limits = Limits(), options: Options = Options()
) -> Choice:
    """Find the most faithful variant that meets a budget; "dense" must have been built and timed."""
    return Selection(candidates, planner, budget, limits, options).run()
