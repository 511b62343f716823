"""Compare pruning methods: all rank on the same images, are cut to the same sizes and evaluated on the same set.

A method is a recipe or a criterion by name, may be combined with a correction that is not its own, and may have
settings of its own (`allocation/method.py`): `snapvit`, `magnitude+elastic`, `paper:search-over=mlp`. Every result is
saved at once, so a run that was stopped can be resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from ..allocation.method import Method
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
from .rank.provenance import criterion_of, needs_images
from .rank.rank import rank_and_factor

Evaluate = Callable[[nn.Module], Evaluation]


def method(named: Method | str) -> Settings:
    """Return the settings of a method."""
    asked = Method.parse(named) if isinstance(named, str) else named
    base, correction = asked.base, asked.correction
    if correction is not None and correction not in CORRECTIONS:
        raise UsageError(f"{asked}: no correction is called '{correction}'. Known: {', '.join(CORRECTIONS)}")
    if base not in (*RECIPES, *ALIASES, *CRITERIA):
        known = ", ".join([*RECIPES, *CRITERIA])
        raise UsageError(
            f"no recipe or criterion is called '{base}'. Known: {known}; with + and a correction if wanted"
        )
    try:
        settings = _settings(base, asked.changes)
        criterion_of(settings)  # refuses a criterion, views or a reduction that do not exist
    except UsageError as error:
        raise UsageError(f"{asked}: {error}" if asked.options else str(error)) from error
    if settings.allocation != "joint" and settings.correction in (None, "mean") and "damping" in asked.options:
        raise UsageError(f"{asked}: damping is of a correction. Add one, such as {base}+elastic, or leave it out")
    if asked.data and not (needs_images(settings) or settings.correction is not None):
        raise UsageError(f"{asked}: reads no images. Leave data out")
    return settings


def _settings(base: str, changes: Mapping[str, Any]) -> Settings:
    if base in (*RECIPES, *ALIASES):
        return make_settings(base, **changes)
    if "criterion" in changes:
        raise UsageError(f"{base} is a criterion itself. Leave criterion out")
    return make_settings("local", criterion=base, **changes)


def compare(
    model: Model,
    images: Mapping[str, Images],
    methods: Mapping[str, Settings],
    sizes: Sequence[float],
    evaluate: Evaluate,
    comparison: Comparison,
    folder: Path,
    progress: Progress,
    processes: Processes = Processes(),
) -> Comparison:
    """Fill a comparison with every method at every size; it is saved in `folder` after each of them.

    `images` by method: those that it ranks and corrects on.
    """
    for name, settings in methods.items():
        missing = [size for size in sizes if comparison.found(name, size) is None]
        if not missing:
            progress.note(f"{name}: known from before")
            continue
        checkpoint = folder / checkpoint_name(name)
        ranking, factors = rank_and_factor(
            model, images[name], settings, checkpoint=checkpoint, processes=processes, progress=progress
        )
        planner = Planner(ranking, model.anatomy, ranking.protection, corrected=settings.correction in ADDS_BIASES)
        damping = Damping.parse(settings.damping)
        device = str(processes.device)
        corrector = Corrector(model, ranking, settings.correction, images[name], progress, factors, damping, device)
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


def checkpoint_name(method: str) -> str:
    """Return the file name of a method's checkpoint; options may have what a file name cannot."""
    base, colon, _ = method.partition(":")
    return f"{base}-{hashlib.sha256(method.encode()).hexdigest()[:12]}.checkpoint" if colon else f"{base}.checkpoint"


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


def same_images(settings: Settings, asked: Method, images: int, seed: int) -> Settings:
    """Return the settings with the number of images that all methods share, and their seed unless it has its own."""
    if settings.cka_images is not None and settings.cka_images > images:
        raise UsageError(f"{asked}: more images than the {images} that all share. Give --images {settings.cka_images}")
    return replace(settings, images=images, seed=asked.options.get("seed", seed))
