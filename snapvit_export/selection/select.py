"""Selects the densest variant that meets a budget: Plans are proposed, built, timed and compared. Light.

`bracket` walks along the line of candidates; here its numbers become variants, and its result becomes the
proof: the chosen variant, the next denser one, every measurement with all timing runs pooled, and what is in doubt.
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
from ..profiling.latency_model import LatencyModel
from ..profiling.sample_plans import SHARES
from .bracket import OutOfReach, find_bracket
from .candidates import DENSE, BuiltVariant, Candidates

MOST_BUILT = 12  # candidates, and sample configurations that lack no sub-layer, that a choice builds and times


def select(candidates: Candidates, planner: Planner, budget: Budget, limits: Limits = Limits()) -> Choice:
    """Find the densest variant that meets a budget; "dense" must have been built and timed."""
    anatomy = candidates.anatomy
    budget_ms = budget.to_ms(candidates.drift.reference_ms(limits.at), candidates.target.batch)
    if candidates.latency(DENSE, limits, budget.is_relative).high <= budget_ms:
        return select_among(candidates, {DENSE: Plan.dense(anatomy)}, [budget_ms], budget, limits)
    model = candidates.latency_model(removable=not planner.protection.sublayers, budget_ms=budget_ms)
    sound = model if model is not None and model.is_sound else None
    steps = planner.steps_of(sound.costs(anatomy)) if sound and planner.allocates else planner.steps()
    grid = candidates.named(steps)
    if limits.max_params or limits.max_size_bytes:
        grid = _falling(grid, anatomy)
    guesses = [sound.predict_ms(plan) if sound else plan.flops_ratio(anatomy) for plan in grid.values()]
    return select_among(candidates, grid, guesses, budget, limits, model)


def _falling(grid: Mapping[str, Plan], anatomy: Anatomy) -> dict[str, Plan]:
    """Leave out candidates that are faster than an earlier one but larger, so that smaller means later.

    Behind the last attention MLPs are all but free, so an early last attention may make a model fast and yet large.
    """
    found: dict[str, Plan] = {}
    least = math.inf
    for name, plan in grid.items():
        if (params := anatomy.params(plan)) <= least:
            found[name], least = plan, params
    return found


def select_among(
    candidates: Candidates,
    grid: Mapping[str, Plan],
    guesses: Sequence[float],
    budget: Budget,
    limits: Limits,
    model: LatencyModel | None = None,
) -> Choice:
    """Choose among named Plans from dense, the first, to sparse, building and timing what is needed."""
    names, relative, anatomy = list(grid), budget.is_relative, candidates.anatomy
    first_dense_ms = candidates.drift.reference_ms(limits.at)
    first_budget_ms = budget.to_ms(first_dense_ms, candidates.target.batch)

    def timed(numbers: Sequence[int], seconds: float) -> dict[int, Latency]:
        chosen = [names[number] for number in numbers]
        for name in chosen:  # two timed together decide, so they must be the files that are kept
            candidates.add(name, grid[name], keep=len(chosen) > 1)
        candidates.time(chosen, seconds, limits.at, first_budget_ms)
        # A budget in percent moves with the machine, so its latencies are brought back to the first dense one.
        slower = candidates.drift.reference_ms(limits.at) / first_dense_ms if relative else 1.0
        return {number: candidates.latency(names[number], limits, relative).scaled(1 / slower) for number in numbers}

    allowed = limits.max_params or math.inf
    guesses = [ms if anatomy.params(plan) <= allowed else math.inf for ms, plan in zip(guesses, grid.values())]
    most_timed = MOST_BUILT - 1 - (min(model.nets, len(SHARES)) if model else 0)
    try:
        dense = candidates.latency(names[0], limits, relative)
        bracket = find_bracket(guesses, first_budget_ms, timed, dense, most_timed)
    except OutOfReach as refused:
        raise BudgetNotMet(_out_of_reach(candidates, names[-1], first_budget_ms, limits, refused.latency)) from refused
    budget_ms = budget.to_ms(candidates.drift.reference_ms(limits.at), candidates.target.batch)
    measurements = candidates.measurements(budget_ms, limits, relative)
    found = {m.variant: m for m in measurements}
    number = _with_all_runs(bracket.chosen, [candidates.built.get(name) for name in names], found)
    chosen, denser = names[number], names[number - 1] if number else None
    beside = found[denser] if denser is not None and candidates.meets_limits(denser, limits) else None
    doubt = _doubt(found[chosen], beside, budget_ms)
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


def _with_all_runs(chosen: int, built: Sequence[BuiltVariant | None], found: Mapping[str, Measurement]) -> int:
    """Return the choice by all runs pooled: a denser candidate that fits after all, if it was built to be kept."""

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
    """Return the reason why a choice is not beyond doubt, and advice; None if it is."""
    if any(measurement.profile.is_contended for measurement in (chosen, denser) if measurement is not None):
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


def _out_of_reach(candidates: Candidates, last: str, budget_ms: float, limits: Limits, smallest: Latency) -> str:
    dense_ms = candidates.drift.reference_ms(limits.at)
    if math.isfinite(smallest.ms):
        return (
            f"no variant fits {budget_ms:.3g} ms: the smallest reaches {smallest.ms:.3g} ms, dense {dense_ms:.3g} ms. "
            f"Allow at least {rounded_up(smallest.high)}ms, or {candidates.advice}"
        )
    built = candidates.built[last]
    params = candidates.anatomy.params(built.plan)
    asked = [f"{size / 1e6:.3g} MB" for size in [limits.max_size_bytes] if size]
    asked += [f"{params / 1e6:.3g} M parameters" for params in [limits.max_params] if params]
    return (
        f"no variant is as small as {' and '.join(asked)}: the smallest has {built.size_bytes / 1e6:.3g} MB and "
        f"{params / 1e6:.3g} M parameters. Allow that, or {candidates.advice}"
    )


def rounded_up(ms: float) -> str:
    """Format a latency in three digits, rounded up so that it is enough as a budget."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return f"{math.ceil(ms / step) * step:.6g}"
