"""The whole way: a model and images go in, a family folder with its proof comes out.

This file only strings the rooms together. Importing it is light; torch is loaded when an export begins, after all that
can be checked without it has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from . import profiles
from .budget import Budget
from .calibration.digits import BUNDLED as BUNDLED_IMAGES
from .calibration.images import calibration_and_held_out, prepare
from .errors import SnapvitError, UsageError, needs
from .family import RANKING, Choice, Manifest, MeasuredOn, own_files, write_manifest
from .files import refuse_foreign, staged_folder
from .plan import Plan, Planner
from .profiling.device import this_device
from .progress import Progress, Silent
from .ranking import Ranking
from .target import Target

BUNDLED_MODEL = "bundled"
MOST_HELD_OUT = 500  # images that report accuracy
SHOWN_UNREADABLE = 5  # names of pictures; the others are counted
GRID_STEP = 0.01  # of sparsity, between neighbours that a budget chooses from


@dataclass(frozen=True)
class Request:
    """What to export: a budget, explicit plans, or both.

    >>> export(Request(budget="10ms"))
    """

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    data: str | Sequence[str] | None = None  # None: the bundled digits, for the bundled model
    out: Path = Path("snapvit-family")
    budget: str | None = None
    sparsity: Sequence[float] = ()
    flops: Sequence[float] = ()
    params: Sequence[float] = ()
    pairs: Sequence[tuple[float, float]] = ()
    target: Target = field(default_factory=lambda: profiles.load("cpu").target)
    images: int = 256
    seed: int = 0
    ranking: Path | None = None


def export(request: Request, progress: Progress | None = None) -> Manifest:
    """Rank, cut, export, time and choose; write the family folder and return its manifest."""
    progress = progress or Silent()
    budget = Budget.parse(request.budget) if request.budget else None
    data = _checked(request, budget)
    with needs("exporting", extra="all"):
        import torch  # noqa: F401

        from .prune.load import load_model
    from .prune.workshop import Workshop
    from .runtimes import ort

    device = this_device(ort.version())
    progress.phase(f"loading {request.model}")
    model = load_model(request.model, request.checkpoint)
    progress.phase("finding images")
    calibration, held_out = calibration_and_held_out(data, request.images, request.seed, MOST_HELD_OUT)
    progress.phase("reading images", calibration.count + held_out.count)
    left_out = partial(_note_unreadable, progress)
    images = prepare(calibration, model.preprocessing, progress.advance, left_out)
    reporting = prepare(held_out, model.preprocessing, progress.advance, left_out)
    ranking = _ranking(request, model, images, progress)
    planner = Planner(ranking, model.anatomy)
    wanted = _requested_plans(request, planner)

    with staged_folder(request.out, replaceable=own_files(request.out)) as stage:
        workshop = Workshop(model, ranking, request.target, device, images, reporting, stage, progress)
        workshop.add("dense", Plan.dense(model.anatomy))
        for name, plan in wanted.items():
            workshop.add(name, plan)
        workshop.time(["dense", *wanted])
        choice = _choose(budget, request, planner, workshop) if budget else None
        keep = {"dense", *wanted, *((choice.variant, choice.next_denser) if choice else ())}
        manifest = Manifest(
            model=model.name,
            anatomy=model.anatomy,
            preprocessing=model.preprocessing,
            recipe={"name": "local-scores", "correction": None, **ranking.provenance},
            target=MeasuredOn.of(request.target, device),
            variants=workshop.finish(keep),
            dense="dense",
            choice=choice,
        )
        ranking.save(stage / RANKING)
        write_manifest(stage, manifest)
    return manifest


def _checked(request: Request, budget: Budget | None) -> str | Sequence[str]:
    """Refuse what can be refused before any work; return where the images come from."""
    if budget is None and not (request.sparsity or request.flops or request.params or request.pairs):
        raise UsageError("nothing to export: give --budget 10ms, --sparsity 0.1,0.3, --flops 0.72 or --pair 0.35:0.2")
    refuse_foreign(request.out, own_files(request.out))
    if request.data is not None:
        return request.data
    if request.model != BUNDLED_MODEL:
        raise UsageError(f"{request.model} needs images to calibrate on. Give --data FOLDER")
    return BUNDLED_IMAGES


def _note_unreadable(progress: Progress, names: Sequence[str]) -> None:
    shown = ", ".join(names[:SHOWN_UNREADABLE])
    more = f" and {len(names) - SHOWN_UNREADABLE} more" if len(names) > SHOWN_UNREADABLE else ""
    progress.note(f"unreadable pictures: {shown}{more}")


def _ranking(request: Request, model, images, progress: Progress) -> Ranking:  # type: ignore[no-untyped-def]
    if request.ranking is not None:
        ranking = Ranking.load(request.ranking)
        try:
            ranking.check_fits(model.anatomy)
        except SnapvitError as error:
            raise SnapvitError(f"{request.ranking}: {error}") from error
        return ranking
    from .prune.self_supervised import rank_by_gradients

    progress.phase("scoring heads and neurons", len(images))
    done = 0

    def advance(now: int) -> None:
        nonlocal done
        progress.advance(now - done)
        done = now

    return rank_by_gradients(model, images, seed=request.seed, on_batch=advance)


def _requested_plans(request: Request, planner: Planner) -> dict[str, Plan]:
    def percent(fraction: float) -> str:
        return f"{100 * fraction:g}"

    ways: list[tuple[str, Sequence[float], Callable[[float], Plan]]] = [
        ("s", request.sparsity, planner.sparsity),
        ("flops", request.flops, planner.flops),
        ("params", request.params, planner.params),
    ]
    plans = {f"{prefix}{percent(f)}": plan(f) for prefix, fractions, plan in ways for f in fractions}
    plans |= {f"pair{percent(mlp)}-{percent(head)}": planner.pair(mlp, head) for mlp, head in request.pairs}
    return plans


def _grid(planner: Planner) -> dict[str, Plan]:
    """All Plans a budget may choose from, dense first, one for each step of sparsity that differs from the last."""
    plans = {"dense": Plan.dense(planner.anatomy)}
    steps = int(planner.largest_sparsity / GRID_STEP)
    for step in range(1, steps + 1):
        plan = planner.sparsity(step * GRID_STEP)
        if plan != list(plans.values())[-1]:
            plans[f"s{step}"] = plan
    if planner.sparsest != list(plans.values())[-1]:
        plans["sparsest"] = planner.sparsest
    return plans


def _choose(budget: Budget, request: Request, planner: Planner, workshop) -> Choice:  # type: ignore[no-untyped-def]
    from .choose import choose

    grid = _grid(planner)
    names = list(grid)
    dense_ms = workshop.p50_ms("dense")
    budget_ms = budget.to_ms(dense_ms, request.target.batch)

    def time(numbers: Sequence[int]) -> dict[int, float]:
        chosen = [names[number] for number in numbers]
        for name in chosen:
            workshop.add(name, grid[name])
        workshop.time(chosen, seconds=1.0 if len(chosen) == 1 else 3.0)  # a look, or the comparison that decides
        return {number: workshop.p50_ms(names[number]) for number in numbers}

    bracket = choose(len(names), budget_ms, time, dense_ms=dense_ms)
    return Choice(
        variant=names[bracket.chosen],
        budget_ms=budget_ms,
        next_denser=None if bracket.next_denser is None else names[bracket.next_denser],
        decided=bracket.decided,
        measurements=workshop.measurements(budget_ms),
    )
