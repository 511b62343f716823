"""Compare pruning methods: all rank on the same images, are cut to the same sizes and evaluated on the same set.

A method is a recipe or a criterion by name, and may be combined with a correction that is not its own: `snapvit`,
`magnitude`, `snapvit+elastic`. Every result is saved at once, so a run that was stopped can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from torch import nn

from ..allocation.planner import Planner
from ..allocation.recipe import ADDS_BIASES, ALIASES, CORRECTIONS, RECIPES, Settings, make_settings
from ..calibration.images import Images
from ..correction.moments import Damping
from ..errors import UsageError
from ..evaluate.comparison import Axis, Comparison, MethodResult, sizes_of
from ..family.evaluation import TITLES, Evaluation
from ..model.plan import Plan
from ..progress import Progress
from .correct.policy import Corrector
from .models.load import Model
from .rank.criteria import CRITERIA
from .rank.distributed import Processes
from .rank.rank import rank_and_factor

Evaluate = Callable[[nn.Module], Evaluation]


def method(name: str, **changes: object) -> Settings:
    """Return the settings of a method: RECIPE or CRITERION, or one of these + CORRECTION."""
    base, plus, correction = name.partition("+")
    if plus and correction not in CORRECTIONS:
        raise UsageError(f"{name}: no correction is called '{correction}'. Known: {', '.join(CORRECTIONS)}")
    given = {**changes, **({"correction": correction} if plus else {})}
    if base in (*RECIPES, *ALIASES):
        return make_settings(base, **given)
    if base in CRITERIA:
        return make_settings("local", criterion=base, **given)
    known = ", ".join([*RECIPES, *CRITERIA])
    raise UsageError(f"no recipe or criterion is called '{base}'. Known: {known}; with + and a correction if wanted")


def compare(
    model: Model,
    images: Images,
    methods: Mapping[str, Settings],
    sizes: Sequence[float],
    evaluate: Evaluate,
    comparison: Comparison,
    folder: Path,
    progress: Progress,
    processes: Processes = Processes(),
) -> Comparison:
    """Fill a comparison with every method at every size; it is saved in `folder` after each of them."""
    for name, settings in methods.items():
        missing = [size for size in sizes if comparison.found(name, size) is None]
        if not missing:
            progress.note(f"{name}: known from before")
            continue
        checkpoint = folder / f"{name}.checkpoint"
        ranking, factors = rank_and_factor(
            model, images, settings, checkpoint=checkpoint, processes=processes, progress=progress
        )
        planner = Planner(ranking, model.anatomy, ranking.protection, corrected=settings.correction in ADDS_BIASES)
        damping = Damping.parse(settings.damping)
        device = str(processes.device)
        corrector = Corrector(model, ranking, settings.correction, images, progress, factors, damping, device)
        for size in missing:
            plan = _plan(planner, comparison.axis, size)
            module, correction = corrector.kept(plan)
            progress.phase(f"evaluating {name} at {size:g}")
            found = _contestant(model, name, size, plan, correction, evaluate(module))
            comparison = msgspec.structs.replace(comparison, contestants=(*comparison.contestants, found))
            comparison.save(folder)
            measure = comparison.measure
            progress.note(f"{name} at {size:g}: {TITLES[measure]} {found.evaluation.value(measure):.3f}")
        checkpoint.unlink(missing_ok=True)
    return comparison


def _plan(planner: Planner, axis: Axis, size: float) -> Plan:
    return planner.sparsity(size) if axis == "sparsity" else planner.flops(size)


def _contestant(
    model: Model, recipe: str, asked: float, plan: Plan, correction: str | None, evaluation: Evaluation
) -> MethodResult:
    sizes = sizes_of(plan, model.anatomy, correction)
    return MethodResult(recipe=recipe, asked=asked, evaluation=evaluation, **sizes)


def ordered(comparison: Comparison, methods: Sequence[str], sizes: Sequence[float]) -> Comparison:
    """Return a comparison of only these methods and sizes, in this order."""
    found = [comparison.found(name, size) for name in methods for size in sizes]
    return msgspec.structs.replace(comparison, contestants=tuple(c for c in found if c is not None))


def same_images(settings: Settings, images: int, seed: int) -> Settings:
    """Return the settings with the number and seed of the images that all methods share."""
    return replace(settings, images=images, seed=seed)
