"""From a stand and a budget to the Choice: candidates are proposed, built, timed in turns and compared. Light.

`choose` walks along the line of candidates; here its numbers become variants of a stand, and its answer becomes the
proof: what was chosen, the next denser one, every measurement by all looks together, and what remains in doubt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..allocation.planner import Planner
from ..budget import Budget
from ..errors import BudgetNotMet
from ..family.manifest import Choice, Limits, Measurement
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..profiling.drift import Latency
from ..profiling.latency_model import DESIGN, LatencyModel
from .bracket import OutOfReach, choose
from .candidates import DENSE, Built, Stand

MOST_ARTEFACTS = 12  # that a choice builds and times, with the nets of its latency model that lack no sub-layer


def choose_on(stand: Stand, planner: Planner, budget: Budget, limits: Limits) -> Choice:
    """Find the densest variant that keeps a budget; "dense" must have been built and timed."""
    budget_ms = budget.to_ms(stand.pace.usual_ms(limits.at), stand.target.batch)
    if stand.latency(DENSE, limits, budget.is_relative).high <= budget_ms:
        return decide(stand, {DENSE: Plan.dense(stand.anatomy)}, [budget_ms], budget, limits)
    model = stand.latency_model(lacking=not planner.protection.sublayers)
    sound = model if model is not None and model.is_sound else None
    grid = stand.named(planner.steps_of(sound.costs(stand.anatomy)) if sound and planner.allocates else planner.steps())
    if limits.max_params or limits.max_size_bytes:
        grid = _falling(grid, stand.anatomy)
    guesses = [sound.predict_ms(plan) if sound else plan.flops_ratio(stand.anatomy) for plan in grid.values()]
    return decide(stand, grid, guesses, budget, limits, model)


def _falling(grid: dict[str, Plan], anatomy: Anatomy) -> dict[str, Plan]:
    """The candidates without those that are faster than an earlier one but larger, so that smaller means later.

    Behind the last attention MLPs are all but free, so an early last attention may make a model fast and yet large.
    """
    found: dict[str, Plan] = {}
    least = math.inf
    for name, plan in grid.items():
        if (params := anatomy.params(plan)) <= least:
            found[name], least = plan, params
    return found


def decide(
    stand: Stand,
    grid: dict[str, Plan],
    guesses: Sequence[float],
    budget: Budget,
    limits: Limits,
    model: LatencyModel | None = None,
) -> Choice:
    """Choose among named Plans from dense, the first, to sparse, building and timing what is needed."""
    names, relative = list(grid), budget.is_relative
    usual_ms = stand.pace.usual_ms(limits.at)
    stand.budget_ms = budget_ms = budget.to_ms(usual_ms, stand.target.batch)

    def timed(numbers: Sequence[int], seconds: float) -> dict[int, Latency]:
        chosen = [names[number] for number in numbers]
        for name in chosen:  # two are timed together when they decide: then it must be the files that are kept
            stand.add(name, grid[name], keep=len(chosen) > 1)
        stand.time(chosen, seconds, limits.at)
        slower = stand.pace.usual_ms(limits.at) / usual_ms if relative else 1.0  # a relative budget goes with the pace
        return {number: stand.latency(names[number], limits, relative).scaled(1 / slower) for number in numbers}

    allowed = limits.max_params or math.inf
    guesses = [ms if stand.anatomy.params(plan) <= allowed else math.inf for ms, plan in zip(guesses, grid.values())]
    try:
        most = MOST_ARTEFACTS - 1 - (min(model.nets, len(DESIGN)) if model else 0)
        bracket = choose(guesses, budget_ms, timed, stand.latency(names[0], limits, relative), most)
    except OutOfReach as refused:
        raise BudgetNotMet(_out_of_reach(stand, names[-1], budget_ms, limits, refused.latency)) from refused
    budget_ms = budget.to_ms(stand.pace.usual_ms(limits.at), stand.target.batch)
    measurements = stand.measurements(budget_ms, limits, relative)
    found = {m.variant: m for m in measurements}
    number = _by_all_looks(bracket.chosen, [stand.built.get(name) for name in names], found)
    chosen, denser = names[number], names[number - 1] if number else None
    if denser is not None and not stand.is_small(denser, limits):
        doubt = _doubt(found[chosen], None, budget_ms)
    else:
        doubt = _doubt(found[chosen], found[denser] if denser else None, budget_ms)
    return Choice(
        variant=chosen,
        budget_ms=budget_ms,
        next_denser=denser,
        decided=doubt is None,
        doubt=doubt,
        limits=limits,
        model=model,
        measurements=measurements,
    )


def _by_all_looks(chosen: int, built: Sequence[Built | None], found: Mapping[str, Measurement]) -> int:
    """The choice by all that was seen at the end: a denser candidate that fits after all, if it was made to be kept."""

    def is_kept(number: int) -> bool:
        candidate = built[number]
        return candidate is not None and candidate.kept

    def fits(number: int) -> bool:
        candidate = built[number]
        return candidate is not None and candidate.name in found and found[candidate.name].fits

    while chosen > 0 and is_kept(chosen - 1) and fits(chosen - 1) and (chosen == 1 or is_kept(chosen - 2)):
        chosen -= 1
    return chosen


def _doubt(chosen: Measurement, denser: Measurement | None, budget_ms: float) -> str | None:
    """Why a choice is not beyond doubt, and what to do; None if it is."""
    if any(measurement.profile.is_crowded for measurement in (chosen, denser) if measurement is not None):
        return "other work kept the model from its cores. Stop it and choose again"
    unsure = chosen if chosen.between_ms[1] > budget_ms else denser
    if unsure is None or unsure.latency_ms > budget_ms:
        return None
    low, high = unsure.between_ms
    if high <= budget_ms:
        return f"{unsure.variant} was too slow at first and fits at the end. Choose again when the machine is idle"
    return (
        f"{unsure.variant} takes {low:.2f} to {high:.2f} ms and may fit or not. Choose again when the machine is idle, "
        f"or allow {rounded_up(high)}ms"
    )


def _out_of_reach(stand: Stand, last: str, budget_ms: float, limits: Limits, smallest: Latency) -> str:
    dense_ms = stand.pace.usual_ms(limits.at)
    if math.isfinite(smallest.ms):
        return (
            f"no variant fits {budget_ms:.3g} ms: the smallest reaches {smallest.ms:.3g} ms, dense {dense_ms:.3g} ms. "
            f"Allow at least {rounded_up(smallest.high)}ms, or {stand.advice}"
        )
    built = stand.built[last]
    params = stand.anatomy.params(built.plan)
    asked = [f"{size / 1e6:.3g} MB" for size in [limits.max_size_bytes] if size]
    asked += [f"{params / 1e6:.3g} M parameters" for params in [limits.max_params] if params]
    return (
        f"no variant is as small as {' and '.join(asked)}: the smallest has {built.size_bytes / 1e6:.3g} MB and "
        f"{params / 1e6:.3g} M parameters. Allow that, or {stand.advice}"
    )


def rounded_up(ms: float) -> str:
    """Three digits that are enough when typed in as a budget."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return f"{math.ceil(ms / step) * step:.6g}"
