"""The whole way: a model and images go in, a family folder with its proof comes out.

This file only strings the rooms together. Importing it is light; torch is loaded when an export begins, after all that
can be checked without it has been checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from .. import profiles
from ..allocation import recipe
from ..allocation.planner import Planner, check_fraction, check_ratio, check_reach, check_sparsity
from ..allocation.recipe import Rounds
from ..budget import Budget
from ..calibration.digits import BUNDLED as BUNDLED_IMAGES
from ..calibration.images import Images, calibration_and_held_out, read_images
from ..correction.cholesky import Factors
from ..correction.moments import Damping
from ..errors import Interrupted, SnapvitError, UsageError, needs
from ..family.manifest import RANKING, Input, Limits, Manifest, MeasuredOn, own_files, write_manifest
from ..graph.forward import Flavour, check_flavour
from ..model.plan import Plan, Protection
from ..model.ranking import Ranking
from ..model.sublayer import KEY as SUBLAYERS
from ..progress import Progress, Silent
from ..runtimes.device import this_device
from ..selection.candidates import Form
from ..selection.select import choose_on
from ..storage.atomic import refuse_foreign, staged_folder, writing
from ..target import Runtime, Target, parse_precision

BUNDLED_MODEL = "bundled"
BUNDLED_NAME = "digits-vit"  # what manifests call it
RUNTIME_LIKES: dict[Runtime, Flavour] = {"onnxruntime": "ort"}  # the others take standard operators
MOST_HELD_OUT = 500  # images that report accuracy


class AsksForImages(Protocol):
    """A request that names a model and perhaps images."""

    @property
    def model(self) -> str: ...

    @property
    def data(self) -> str | Sequence[str] | None: ...


@dataclass(frozen=True)
class Request:
    """What to export: a budget, explicit plans, or both.

    >>> manifest = export(Request("my-vit", data="path/to/images", budget="10ms"))
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
    recipe: str = recipe.DEFAULT
    correct: bool = True  # False: weights stay as they are
    correction: str | None = None  # None, here and below: as the recipe says
    damping: str | None = None
    images: int | None = None
    seed: int | None = None
    evaluations: int | None = None  # of the search
    depth: bool | None = None  # whether whole sub-layers may go; None: as the recipe or the given ranking says
    ranking: Path | None = None
    flavour: str | None = None  # of the graphs: ort or portable; None: as the target's runtime likes it
    single_file: bool = False  # True: every graph holds its own weights
    static_batch: bool = False  # True: graphs take exactly the target's batch
    takes_bytes: bool = False  # True: graphs take (B, H, W, 3) bytes and normalise them
    limits: Limits = field(default_factory=Limits)  # beside the budget
    width_multiple: int = 1  # of the neurons that an MLP keeps
    clock: str | None = None  # what to do with the clocks of the device before timing; only told
    build_only: bool = False  # True: build engines for a GPU that is not here, and time nothing


def export(request: Request, progress: Progress | None = None) -> Manifest:
    """Rank, cut, export, time and choose; write the family folder and return its manifest."""
    request = replace(request, out=Path(request.out))
    progress = progress or Silent()
    budget = Budget.parse(request.budget) if request.budget is not None else None
    settings = recipe.make_settings(
        request.recipe,
        correction=request.correction,
        damping=request.damping,
        images=request.images,
        seed=request.seed,
        evaluations=request.evaluations,
        depth=request.depth,
    )
    settings = settings if request.correct else replace(settings, correction=None)
    given = _check(request, budget)
    with needs("exporting", extra="all"):
        import torch  # noqa: F401
    from ..runtimes.session import device_for

    if request.build_only:
        from ..runtimes.tensorrt.session import BuildOnly

        device = this_device(BuildOnly.here().version)
    else:
        device = device_for(request.target.runtime)
    if request.clock is not None and budget is not None:
        progress.note(f"clocks: {request.clock}")
    progress.phase("finding images")
    split = calibration_and_held_out(data_of(request), settings.images, settings.seed, MOST_HELD_OUT)
    with staged_folder(request.out, replaceable=own_files(request.out)) as stage:
        manifest = _into(stage, request, settings, budget, given, split, device, progress)
        write_manifest(stage, manifest)
    if given is None:
        checkpoint_of(request.out).unlink(missing_ok=True)
    return manifest


def _into(  # type: ignore[no-untyped-def]
    stage: Path, request: Request, settings: recipe.Settings, budget, given, split, device, progress: Progress
) -> Manifest:
    """Fill the folder with the variants and the ranking, and describe them."""
    from ..prune.build import Workshop
    from ..prune.correct.policy import Repair
    from ..prune.models.class_names import class_names
    from ..prune.models.load import load_model

    progress.phase(f"loading {request.model}")
    model = load_model(request.model, request.checkpoint)
    _refuse_early(request, settings, given, model)
    images, reporting = read_images(split, model.preprocessing, progress)
    ranking, factors = _ranking(request, settings, given, model, images, progress)
    planner = _planner(request, settings, ranking, model)
    wanted = _requested_plans(request, planner)
    damping = Damping.parse(settings.damping)
    repair = Repair(model, ranking, settings.correction, images, progress, factors, damping)
    form = Form(
        flavour=_flavour(request),
        single_file=request.single_file,
        batch=request.target.batch if request.static_batch else None,
        takes_bytes=request.takes_bytes,
    )
    done = _recipe(request, settings, given, ranking, images)
    with tempfile.TemporaryDirectory(dir=stage) as exact:
        workshop = Workshop(
            model,
            repair,
            request.target,
            device,
            images,
            reporting,
            stage,
            Path(exact),
            progress,
            form,
            done,
            times=not request.build_only,
        )
        workshop.add("dense", Plan.dense(model.anatomy))
        for name, plan in wanted.items():
            workshop.add(name, plan, keep=True)
        if request.build_only:
            workshop.build_engines()
        else:
            workshop.time(["dense", *wanted], at=request.limits.at)
        choice = choose_on(workshop, planner, budget, request.limits) if budget else None
    keep = {"dense", *wanted, *((choice.variant, choice.next_denser) if choice else ())}
    ranking.save(stage / RANKING)
    return Manifest(
        model=model.name,
        anatomy=model.anatomy,
        preprocessing=model.preprocessing,
        recipe=done,
        target=MeasuredOn.of(request.target, device),
        variants=workshop.finish(keep),
        weights=workshop.weight_files(keep),
        dense="dense",
        choice=choice,
        input=Input(
            type="uint8" if form.takes_bytes else "float32",
            layout="NHWC" if form.takes_bytes else "NCHW",
            batch=form.batch,
        ),
        labels=class_names(model),
    )


def _recipe(
    request: Request, settings: recipe.Settings, given: Ranking | None, ranking: Ranking, images: Images
) -> dict[str, object]:
    """What was done here; a ranking that was given keeps its own story apart."""
    done = {"correction": settings.correction, "damping": settings.damping}
    if given is None:
        return {"name": request.recipe, **done, **ranking.provenance}
    here = {"seed": settings.seed, "data": images.fingerprint}
    told = {key: value for key, value in ranking.provenance.items() if key != SUBLAYERS}
    measured = {SUBLAYERS: ranking.provenance[SUBLAYERS]} if SUBLAYERS in ranking.provenance else {}
    return {"name": "given", **done, **here, **measured, "ranking": told}


def _check(request: Request, budget: Budget | None) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    if budget is None and not (request.sparsity or request.flops or request.params or request.pairs):
        raise UsageError("nothing to export: give --budget 10ms, --sparsity 0.1,0.3, --flops 0.72 or --pair 0.35:0.2")
    if not request.correct and request.correction is not None:
        raise UsageError(f"--no-correct and --correction {request.correction} contradict each other. Give one")
    _flavour(request)
    parse_precision(request.target.precision, request.target.runtime)
    _check_runtime(request, budget)
    for fraction in request.sparsity:
        check_sparsity(fraction)
    for what, fractions in (("FLOPs", request.flops), ("parameter", request.params)):
        for fraction in fractions:
            check_fraction(what, fraction)
    for mlp, head in request.pairs:
        check_ratio("neurons", mlp)
        check_ratio("heads", head)
    if Path.cwd().is_relative_to(request.out.resolve()):
        raise SnapvitError(f"{request.out}: you are inside that folder. Choose another --out")
    refuse_foreign(request.out, own_files(request.out))
    return None if request.ranking is None else Ranking.load(request.ranking)


def _flavour(request: Request) -> Flavour:
    """What was asked for, or what the runtime of the target runs fastest."""
    if request.flavour is None:
        return RUNTIME_LIKES.get(request.target.runtime, "portable")
    return check_flavour(request.flavour)


def _check_runtime(request: Request, budget: Budget | None) -> None:
    """Refuse a runtime that cannot run here, and an engine that is neither run nor asked for."""
    from ..runtimes.session import version_of

    runtime = request.target.runtime
    if runtime == "openvino" and request.target.precision != "fp32" and (request.single_file or request.flavour):
        raise UsageError("int8 for OpenVINO is written in its own format: leave --single-file and --flavour out")
    if not request.build_only:
        version_of(runtime)
        return
    if runtime != "tensorrt":
        raise UsageError(f"--build-only builds TensorRT engines, not for {runtime}. Give --runtime tensorrt too")
    if budget is not None:
        raise UsageError("a budget is kept by timing, which --build-only does not do. Give --sparsity 0.1,0.3 instead")
    from ..runtimes.tensorrt.session import BuildOnly

    BuildOnly.here()


def checkpoint_of(out: Path) -> Path:
    """Where a long ranking keeps its state: beside what it will become."""
    return out.parent / f"{out.name}.checkpoint"


def data_of(request: AsksForImages) -> str | Sequence[str]:
    """Where the images of a request come from."""
    if request.data is not None:
        return request.data
    if request.model != BUNDLED_MODEL:
        raise UsageError(f"{request.model} needs images to calibrate on. Give --data FOLDER")
    return BUNDLED_IMAGES


@dataclass(frozen=True)
class RankRequest:
    """What to rank, on which images, and where the ranking goes."""

    model: str = BUNDLED_MODEL
    data: str | Sequence[str] | None = None
    out: Path = Path("ranking.safetensors")
    checkpoint: Path | None = None
    settings: recipe.Settings = field(default_factory=recipe.Settings)
    device: str = "cpu"
    engine: str | None = None
    autocast: str | None = None
    rounds: Sequence[float] = ()  # FLOPs after each: cut a little, refit, order what is kept anew
    most_moved: float | None = None  # a round that moves the answers further ends it; None: as `rounds` says


def rank_model(request: RankRequest, progress: Progress) -> Ranking | None:
    """Rank a model and write the file; None in a process that only helps another."""
    from ..prune.models.checks import check_device
    from ..prune.models.load import load_model
    from ..prune.rank.distributed import join
    from ..prune.rank.iterative import rank_in_rounds
    from ..prune.rank.rank import needs_images, rank
    from ..prune.rank.search.engine import check_autocast, check_engine

    settings, rounds = request.settings, _rounds(request)
    check_device(request.device)
    engine, autocast = check_engine(request.engine), check_autocast(request.autocast)
    with join(request.device) as processes:
        if rounds is not None and not processes.is_first:
            return None  # each round needs the one before: one process does them all
        speaking = progress if processes.is_first else Silent()
        speaking.phase("finding images")
        source = None
        if rounds is not None or needs_images(settings):
            source, _ = calibration_and_held_out(data_of(request), settings.images, settings.seed, most_held_out=0)
        speaking.phase(f"loading {request.model}")
        model = load_model(request.model, request.checkpoint)
        nothing = Images(np.zeros((0, *model.anatomy.image, 3), np.uint8), None, model.preprocessing, "none")
        images = nothing if source is None else read_images((source,), model.preprocessing, speaking)[0]
        checkpoint = checkpoint_of(request.out)
        with writing(request.out):
            request.out.parent.mkdir(parents=True, exist_ok=True)
        options = dict(engine=engine, autocast=autocast, processes=processes)
        with _goes_on(checkpoint):
            if rounds is not None:
                ranking = rank_in_rounds(model, images, rounds, settings, checkpoint=checkpoint, progress=speaking)
            else:
                ranking = rank(model, images, settings, checkpoint=checkpoint, progress=speaking, **options)
        if not processes.is_first:
            return None
        ranking.save(request.out)
        checkpoint.unlink(missing_ok=True)
        return ranking


@contextmanager
def _goes_on(checkpoint: Path) -> Iterator[None]:
    """Tell whoever interrupts a ranking that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if not checkpoint.exists():
            raise
        raise Interrupted(f"interrupted. {checkpoint} is whole: run the same command again to continue") from None


def _rounds(request: RankRequest) -> Rounds | None:
    """What was asked for in rounds, if it was; refuse what has no part there, or only there."""
    settings = request.settings
    if not request.rounds:
        if request.most_moved is not None:
            raise UsageError("--most-moved ends a ranking in rounds. Give --rounds 0.85,0.7,0.55 too, or leave it out")
        return None
    if settings.evaluations:
        raise UsageError("rounds go without a search. Give --rounds with --evaluations 0, or leave --rounds out")
    if request.device != "cpu" or request.engine or request.autocast:
        raise UsageError("rounds run on the CPU. Leave --device, --engine and --autocast out")
    return Rounds(tuple(request.rounds), request.most_moved)


def _ranking(  # type: ignore[no-untyped-def]
    request: Request, settings: recipe.Settings, given: Ranking | None, model, images: Images, progress: Progress
) -> tuple[Ranking, Factors | None]:
    from ..prune.rank.rank import rank_and_factor

    if given is not None:
        return given, None
    return rank_and_factor(model, images, settings, checkpoint=checkpoint_of(request.out), progress=progress)


def _refuse_early(  # type: ignore[no-untyped-def]
    request: Request, settings: recipe.Settings, given: Ranking | None, model
) -> None:
    """Refuse a ranking of another model, and plans that protection forbids, before any long work."""
    from ..prune.models.checks import check_same_weights

    if given is not None:
        check_same_weights(given, model, f"{request.ranking}: ")
        _requested_plans(request, _planner(request, settings, given, model))
        return
    flat = Planner(Ranking.flat(model.anatomy), model.anatomy)
    for mlp, head in request.pairs:
        flat.pair(mlp, head)
    check_reach(
        model.anatomy,
        Protection(sublayers=not settings.depth),
        sparsity=request.sparsity,
        flops=request.flops,
        params=request.params,
        corrected=settings.correction in recipe.ADDS_BIASES,
    )


def _planner(request: Request, settings: recipe.Settings, ranking: Ranking, model) -> Planner:  # type: ignore[no-untyped-def]
    return Planner(
        ranking,
        model.anatomy,
        _protection(request, ranking),
        corrected=settings.correction in recipe.ADDS_BIASES,
        multiple=request.width_multiple,
    )


def _protection(request: Request, ranking: Ranking) -> Protection:
    """What the ranking says is never cut; whether whole sub-layers may go is for the request to say first."""
    if request.depth is None:
        return ranking.protection
    return msgspec.structs.replace(ranking.protection, sublayers=not request.depth)


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
