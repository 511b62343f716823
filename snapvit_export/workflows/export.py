"""`snapvit export`: from a model and images to a family folder with the proof of its choice.

This module connects ranking, building, timing and selecting, which are done elsewhere. Importing it is light; torch is
loaded when an export begins, after everything that can be checked without it has been checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from .. import profiles
from ..allocation import recipe
from ..allocation.levers import LEVERS, PUBLISHED, Lever, in_order
from ..allocation.planner import Planner, check_fraction, check_ratio, check_reach, check_sparsity
from ..allocation.recipe import Settings, make_settings
from ..allocation.resolution import Resolution, check_resolution
from ..allocation.token_target import TokenTarget, token_targets
from ..allocation.tokens import DEFAULT as DEFAULT_SCHEDULE
from ..allocation.tokens import SCHEDULES, Schedule, check_tokens
from ..budget import Budget
from ..calibration.images import Images, calibration_and_held_out, in_two_parts, read_images
from ..calibration.source import Source
from ..correction.cholesky import Factors
from ..correction.moments import Damping
from ..errors import GateFailed, SnapvitError, UsageError, needs
from ..family.fidelity import LEAST_NEIGHBOURS
from ..family.folder import own_files, write_manifest
from ..family.layout import RANKING
from ..family.manifest import Choice, Input, Limits, Manifest, MeasuredOn, Prefer
from ..family.shipped import write_shipped
from ..graph.format import GraphFormat, flavour_for
from ..graph.writer import is_shared
from ..model.anatomy import Anatomy
from ..model.plan import Plan, Protection
from ..model.ranking import Ranking
from ..model.sublayer import KEY as SUBLAYERS
from ..profiling.timer import Timer
from ..progress import Progress, Stages
from ..runtimes.device import DeviceCard, this_device
from ..runtimes.session import device_for, version_of
from ..runtimes.tensorrt.session import BuildOnly
from ..selection.candidates import DENSE, Candidates
from ..selection.image_meter import BATCH as METER_BATCH
from ..selection.image_meter import (
    LEAST_IMAGES,
    MOST_RACED,
    MOST_REPORTED,
    REFERENCE,
    ImageMeter,
    columns_of,
    run_in_threads,
)
from ..selection.mixes import SPREAD, best_mix
from ..selection.options import Options
from ..selection.point import Point
from ..selection.precisions import build_dense
from ..selection.select import select
from ..selection.space import grids_for
from ..storage.atomic import refuse_foreign, staged_folder
from ..target import ON_CPU, Target, faster_than, in_precision, parse_precision
from .inputs import BUNDLED_MODEL, MOST_HELD_OUT, checkpoint_of, data_of, load_model_of, refuse_own_folder

# The steps of an export, and the share of its time that each took with a budget (docs/benchmarks.md, three models).
STEPS = {"reading": 3, "ranking": 24, "merging": 9, "building": 9, "latency model": 10, "race": 9, "deciding": 36}
NOT_HERE = "not run here"  # in the place of a runtime's version

if TYPE_CHECKING:
    from ..prune.build import VariantBuilder
    from ..prune.models.load import Model


@dataclass(frozen=True)
class Request:
    """A model to export to a budget, to explicit plans, or to both.

    Every sparsity, FLOPs, parameters and pair is a variant, with all tokens; or, if tokens or resolutions are given,
    one for each of their combinations, which then meets all of them.

    >>> manifest = export(Request("my-vit", data="path/to/images", budget="10ms"))
    >>> manifest = export(Request("my-vit", data="path/to/images", tokens=[0.5], flops=[0.4]))     # one variant
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
    tokens: Sequence[float] = ()  # fractions of the patch tokens that are left at the end
    resolution: Sequence[Resolution] = ()  # pixels of a square input, or height and width
    target: Target = field(default_factory=lambda: profiles.load("cpu").target)
    settings: Settings = field(default_factory=lambda: make_settings(recipe.DEFAULT))
    levers: Sequence[Lever] | None = None  # that a budget or a FLOPs target may use; None: `default_levers`
    mixes_precisions: bool = True  # False: all variants compute in the target's precision
    prefer: Prefer = "fidelity"  # of the variants that fit: the most faithful, or the most accurate
    strict: bool = False  # True: what may fit but does not surely is refused
    depth: bool | None = None  # True: sub-layers are removable; None: as the settings or the given ranking have it
    ranking: Path | None = None  # made before; None: ranked anew
    flavour: str | None = None  # of the graphs: ort or portable; None: what suits the target's runtime
    single_file: bool = False  # True: every graph holds its own weights
    static_batch: bool = False  # True: graphs take exactly the target's batch
    takes_bytes: bool = False  # True: graphs take (B, H, W, 3) bytes and normalise them
    limits: Limits = field(default_factory=Limits)  # beside the budget
    width_multiple: int = 1  # of the neurons that an MLP keeps
    clock: str | None = None  # advice on the clocks of the device before timing; only shown
    command: str | None = None  # that asks for this, kept in the manifest
    build_only: bool = False  # True: build engines for a GPU that is not here, and time nothing
    elsewhere: bool = False  # True: for a device that is not here, which times and chooses itself; nothing is timed
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    classes: Path | None = None  # names of the classes: line i names output i

    def __post_init__(self) -> None:
        depth = self.depth
        if depth is None and self.levers is not None:
            depth = "depth" in self.levers
        if depth is not None:  # one answer for ranking, checks and Plans
            object.__setattr__(self, "settings", replace(self.settings, depth=depth))

    @property
    def used_levers(self) -> tuple[Lever, ...]:
        """The levers that this export may use: those that were named, or the default ones.

        A budget may use all; but recipes other than the default one are published methods, which cut width (and depth)
        alone, and so do all other targets.
        """
        without = set() if self.mixes_precisions else {"precision"}
        if self.levers is not None:
            return in_order(list(set(self.levers) - without))
        may_be_all = (self.budget is not None or not self.is_timed) and self.settings.recipe == recipe.DEFAULT
        found = set(LEVERS if may_be_all else PUBLISHED)
        found -= set() if self.settings.depth else {"depth"}
        return in_order(list(found - without))

    @property
    def is_timed(self) -> bool:
        """False for a device that is not here."""
        return not (self.build_only or self.elsewhere)

    @property
    def runs_target(self) -> bool:
        """True if files can be run in the target's runtime, if only to compare their outputs."""
        return self.is_timed or (self.elsewhere and self.target.runtime in ON_CPU)

    @property
    def format(self) -> GraphFormat:
        """The format that graphs are written in."""
        return GraphFormat(
            flavour=flavour_for(self.target.runtime, self.flavour),
            batch=self.target.batch if self.static_batch else None,
            takes_bytes=self.takes_bytes,
            single_file=self.single_file,
        )


@dataclass(frozen=True, eq=False)
class _PreparedInputs:
    """Everything that variants are built from."""

    model: Model
    calibration: Images
    race: Images  # on which candidates are compared
    held_out: Images  # on which the best of them, and what was asked for, are reported
    ranking: Ranking
    factors: Factors | None  # None: made when first needed
    planner: Planner
    plans: Mapping[str, Plan]  # that were requested, by name
    merging: Schedule
    provenance: Mapping[str, object]


def export(request: Request, progress: Progress | None = None) -> Manifest:
    """Rank, cut, export, time and choose; write the family folder and return its manifest."""
    request = replace(request, out=Path(request.out))
    stages = progress = Stages(progress)
    budget = Budget.parse(request.budget) if request.budget is not None else None
    given = _check(request, budget)
    with stages.stage("starting"), needs("exporting", extra="all"):
        import torch  # noqa: F401

    device = _device(request)
    if request.clock is not None and budget is not None:
        progress.note(f"clocks: {request.clock}")
    stages.plan(_steps(request), estimates=budget is not None)  # shares of the time are known of a budget alone
    stages.step("reading")
    progress.phase("finding images")
    split = _split(request)
    with staged_folder(request.out, replaceable=own_files(request.out)) as stage:
        prepared = _prepare(request, given, split, progress)
        manifest = _fill(stage, request, budget, prepared, device, progress)
        if manifest.choice is not None:
            progress.phase("writing the chosen model as one file")
            manifest = write_shipped(stage, manifest)
        manifest = msgspec.structs.replace(manifest, seconds=stages.rounded())
        write_manifest(stage, manifest)
    if given is None:
        checkpoint_of(request.out).unlink(missing_ok=True)
    return manifest


def _steps(request: Request) -> dict[str, float]:
    """Return the steps that this export has, and their shares of the time."""
    left_out = set() if request.budget else {"latency model", "race", "deciding"}
    left_out |= {"ranking"} if request.ranking else set()
    merges = "tokens" in request.used_levers or any(fraction < 1 for fraction in request.tokens)
    left_out |= set() if merges else {"merging"}
    left_out |= set() if _races(request) else {"race"}
    return {name: share for name, share in STEPS.items() if name not in left_out}


def _split(request: Request) -> tuple[Source, ...]:
    """Return the images to calibrate on, those of the race and those of the report; the last two may be the same."""
    settings, races = request.settings, _races(request)
    least = LEAST_IMAGES if races else 0  # a published method calibrates on all images that it asks for
    calibration, held_out = calibration_and_held_out(
        data_of(request), settings.images, settings.seed, MOST_HELD_OUT, least
    )
    if races and not held_out.count:
        raise UsageError(
            f"{held_out.name}: has no image left to compare candidates on. Give more images, or --levers width,depth"
        )
    parts = in_two_parts(held_out, (MOST_RACED, MOST_REPORTED), LEAST_IMAGES) if races else (held_out, held_out)
    return calibration, *parts


def _races(request: Request) -> bool:
    """Return True if candidates of several levers are compared on images."""
    return bool({"precision", "tokens"} & set(request.used_levers))


def _check(request: Request, budget: Budget | None) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    if request.levers is not None and request.depth not in (None, "depth" in request.levers):
        raise UsageError("--levers and --depth or --no-depth contradict each other. Name depth in --levers, or not")
    if request.flops and budget is None and request.levers is not None and set(request.levers) == {"precision"}:
        raise UsageError("precision does not change FLOPs. Name other --levers too, or give --budget 10ms")
    if budget is None and request.is_timed and not _asks_for_plans(request):
        raise UsageError(
            "nothing to export: give --budget 10ms, --sparsity 0.1,0.3, --flops 0.72, --tokens 0.5 or --pair 0.35:0.2"
        )
    flavour_for(request.target.runtime, request.flavour)
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
    for fraction in request.tokens:
        check_tokens(fraction)
    for size in request.resolution:
        check_resolution(size)
    refuse_own_folder(request.out)
    refuse_foreign(request.out, own_files(request.out))
    return None if request.ranking is None else Ranking.load(request.ranking)


def _check_runtime(request: Request, budget: Budget | None) -> None:
    """Refuse a runtime that cannot run here, and an engine that is neither run nor asked for."""
    runtime = request.target.runtime
    if runtime == "openvino" and request.target.precision != "fp32" and (request.single_file or request.flavour):
        raise UsageError("int8 for OpenVINO is written in its own format: leave --single-file and --flavour out")
    if budget is not None and not request.is_timed:
        raise UsageError(
            "a budget is met by timing, which only the device can do. Leave --budget out: a spread of variants is "
            "built, and the device chooses among them"
        )
    if not request.build_only:
        if request.runs_target:
            version_of(runtime)
        return
    if runtime != "tensorrt":
        raise UsageError(f"--build-only builds TensorRT engines, not for {runtime}. Give --runtime tensorrt too")
    BuildOnly.here()


def _device(request: Request) -> DeviceCard:
    """Return the card of this machine for the target."""
    if request.build_only:
        return this_device(BuildOnly.here().version)
    return device_for(request.target.runtime) if request.runs_target else this_device(NOT_HERE)


def _prepare(request: Request, given: Ranking | None, split: Sequence[Source], progress: Stages) -> _PreparedInputs:
    """Load the model, read the images, and rank unless a ranking was given."""
    from ..prune.rank.rank import rank_and_factor
    from ..prune.stats.schedules import choose_schedule

    with progress.stage("starting"):
        model = load_model_of(request, progress, request.classes)
    _refuse_early(request, given, model)
    distinct = split if split[1] is not split[2] else split[:2]
    with progress.stage("reading images"):
        calibration, race, *rest = read_images(
            distinct, model.preprocessing, progress, in_many_sizes="tokens" in request.used_levers
        )
    held_out = rest[0] if rest else race
    ranking, factors = given, None
    if ranking is None:
        checkpoint = checkpoint_of(request.out)
        progress.step("ranking")
        with progress.stage("ranking"):
            ranking, factors = rank_and_factor(
                model, calibration, request.settings, checkpoint=checkpoint, progress=progress
            )
    planner = _planner(request, ranking, model)
    provenance = _provenance(request, given, ranking, calibration)
    merging = SCHEDULES[DEFAULT_SCHEDULE]
    if any(fraction < 1 for fraction in request.tokens) or "tokens" in request.used_levers:
        progress.step("merging")
        with progress.stage("schedules of merging"):
            merging, provenance["token_schedule"] = choose_schedule(model, calibration, progress)
    plans = _requested_plans(request, planner, merging)
    return _PreparedInputs(model, calibration, race, held_out, ranking, factors, planner, plans, merging, provenance)


def _fill(
    stage: Path,
    request: Request,
    budget: Budget | None,
    prepared: _PreparedInputs,
    device: DeviceCard,
    progress: Stages,
) -> Manifest:
    """Fill the folder with the variants and the ranking, and describe them."""
    from ..prune.build import VariantBuilder
    from ..prune.correct.policy import Corrector
    from ..prune.models.class_names import class_names

    model, format, settings = prepared.model, request.format, request.settings
    damping = Damping.parse(settings.damping)
    corrector = Corrector(
        model, prepared.ranking, settings.correction, prepared.calibration, progress, prepared.factors, damping
    )
    with tempfile.TemporaryDirectory(dir=stage) as exact:
        builder = VariantBuilder(
            model,
            corrector,
            request.target,
            format,
            prepared.calibration,
            folder=stage,
            exact_folder=Path(exact),
            provenance=prepared.provenance,
            progress=progress,
            runs_target=request.runs_target,
        )
        batch = builder.gate_images().batch(request.target.batch)
        timer = Timer(request.target, device, batch) if request.is_timed else None
        meter = _meter(request, prepared, builder)
        candidates = Candidates(model.anatomy, request.target, progress, builder, timer, meter, advice=builder.advice)
        asked = _build_requested(request, prepared, candidates)
        choice = _time_and_choose(request, budget, prepared, candidates)
    candidates.keep_only([*asked, *filter(None, (choice.variant, choice.next_denser) if choice else ())])
    _remove_unread(stage, candidates)
    prepared.ranking.save(stage / RANKING)
    return Manifest(
        model=model.name,
        anatomy=model.anatomy,
        preprocessing=model.preprocessing,
        recipe=dict(prepared.provenance),
        target=MeasuredOn.of(request.target, device),
        variants=candidates.described(list(candidates.built)),
        weights=candidates.weight_files(list(candidates.built)),
        dense=DENSE,
        choice=choice,
        input=Input.of(format),
        labels=class_names(model),
        command=request.command,
    )


def _remove_unread(folder: Path, candidates: Candidates) -> None:
    """Remove shared weights that only probes have read, such as those of the dense model in fp32."""
    read = {path for built in candidates.built.values() for path in built.weights}
    for path in folder.iterdir():
        if is_shared(path) and path not in read:
            path.unlink()


def _meter(request: Request, prepared: _PreparedInputs, builder: VariantBuilder) -> ImageMeter | None:
    """Return what compares variants with the dense model; None without images that nothing was fitted on."""
    from ..prune.models.class_names import class_names

    anatomy = prepared.model.anatomy

    def dense(images: Images) -> npt.NDArray[np.float32]:
        probe = builder.write_probe(REFERENCE, Point(Plan.dense(anatomy), "fp32"))
        found = run_in_threads(probe.path, images.inputs(METER_BATCH, request.takes_bytes))
        probe.path.unlink()
        return found

    if len(prepared.held_out) < (1 if anatomy.classes > 1 else LEAST_NEIGHBOURS):
        return None
    columns = columns_of(prepared.held_out, anatomy, class_names(prepared.model), request.prefer, builder.progress)
    return ImageMeter(
        anatomy,
        request.target,
        prepared.race,
        prepared.held_out,
        dense,
        request.takes_bytes,
        columns,
        by_accuracy=request.prefer == "accuracy",
        runs_target=request.runs_target,
    )


def _has_one_size(model: Model) -> bool:
    """Return True for a model whose rotary tables are its own, made for one size of images."""
    from ..prune.pack import read_wiring

    return model.anatomy.rope != "none" and read_wiring(model.module, model.anatomy).rotary is UNSET


def _options(request: Request, prepared: _PreparedInputs) -> Options:
    """Return what the choice may do with each lever."""
    anatomy, levers, own = prepared.model.anatomy, request.used_levers, request.target.precision
    fixed = _has_one_size(prepared.model) or prepared.calibration.again is None
    # OpenVINO's int8 has a format of its own.
    fixed_format = request.target.runtime == "openvino" and bool(request.single_file or request.flavour)
    return Options(
        levers=levers,
        precisions=() if "precision" not in levers or fixed_format else faster_than(own, request.target.runtime),
        grids=(None,) if fixed else grids_for(anatomy),
        schedule=prepared.merging,
        prefer=request.prefer,
        strict=request.strict,
    )


def _build_requested(request: Request, prepared: _PreparedInputs, candidates: Candidates) -> list[str]:
    """Build the dense model and what was asked for beside a budget; return their names."""
    candidates.progress.step("building")
    candidates.add(DENSE, Plan.dense(candidates.anatomy))
    for name, plan in prepared.plans.items():
        candidates.add(name, plan, keep=True)
    _add_mixes(request, prepared, candidates)
    return list(candidates.built)


def _time_and_choose(
    request: Request, budget: Budget | None, prepared: _PreparedInputs, candidates: Candidates
) -> Choice | None:
    """Time what was built, then choose what the budget needs; engines for another device are only built."""
    if request.build_only:
        _build_engines(candidates)
    if not request.is_timed:
        return None
    candidates.progress.phase(f"timing {', '.join(candidates.built)}")
    candidates.time(list(candidates.built), at=request.limits.at, fresh=budget is not None)
    if budget is None:
        return None
    return select(candidates, prepared.planner, budget, request.limits, _options(request, prepared))


def _add_mixes(request: Request, prepared: _PreparedInputs, candidates: Candidates) -> None:
    """Build the mix of levers with the best fidelity for each FLOPs target, or a spread of them for a device."""
    options = _options(request, prepared)
    if _mixed_flops(request) and candidates.meter is None:
        raise SnapvitError(f"{prepared.held_out.source}: too few images to compare mixes on. Give more, or no --levers")
    if _wants_spread(request):
        build_dense(candidates, options.precisions)
    for fraction in _mixed_flops(request):
        point = best_mix(candidates, prepared.planner, options, fraction)
        for precision in (request.target.precision, *(() if request.is_timed else options.precisions)):
            name = f"flops{_percent(fraction)}" + ("" if precision == point.precision else f"-{precision}")
            try:
                candidates.add(name, Point(point.plan, precision), keep=True)
            except GateFailed as error:
                if precision == point.precision:
                    raise
                candidates.progress.note(f"{name} is left out: {error}")


def _mixed_flops(request: Request) -> Sequence[float]:
    """Return the FLOPs targets that a mix of levers meets; the others are met by width and depth alone."""
    if "tokens" not in request.used_levers or request.tokens or request.resolution:
        return ()
    if _wants_spread(request):
        return SPREAD
    return request.flops if request.levers is not None else ()


def _wants_spread(request: Request) -> bool:
    """Return True if a device that is not here is to choose among sizes that nobody has named."""
    return not request.is_timed and not _asks_for_plans(request)


def _unmixed_flops(request: Request) -> Sequence[float]:
    """Return the FLOPs targets that width and depth meet alone."""
    if _mixed_flops(request):
        return ()
    return SPREAD if _wants_spread(request) else request.flops


def _asks_for_plans(request: Request) -> bool:
    widths = request.sparsity or request.flops or request.params or request.pairs
    return bool(widths or request.tokens or request.resolution)


def _build_engines(candidates: Candidates) -> None:
    """Build TensorRT engines of all variants for a GPU that is not here, beside their graphs."""
    builder, progress = BuildOnly.here(), candidates.progress
    for name, built in candidates.built.items():
        progress.phase(f"building the engine of {name}")
        target = in_precision(candidates.target, built.precision)
        products = builder.build(built.path, target).counts
        by_kind = ", ".join(f"{count} in {kind}" for kind, count in products.items())
        progress.note(f"{name}: matrix products {by_kind}")


def _provenance(request: Request, given: Ranking | None, ranking: Ranking, calibration: Images) -> dict[str, object]:
    """Return the provenance of this export; a given ranking keeps its own apart."""
    done = {"correction": request.settings.correction, "damping": request.settings.damping}
    if given is None:
        return {"name": request.settings.recipe, **done, **ranking.provenance}
    here = {"seed": request.settings.seed, "data": calibration.fingerprint}
    before = {key: value for key, value in ranking.provenance.items() if key != SUBLAYERS}
    measured = {SUBLAYERS: ranking.provenance[SUBLAYERS]} if SUBLAYERS in ranking.provenance else {}
    return {"name": "given", **done, **here, **measured, "ranking": before}


def _refuse_early(request: Request, given: Ranking | None, model: Model) -> None:
    """Refuse a ranking of another model, and plans that protection forbids, before any long work."""
    from ..prune.models.load import check_same_weights

    settings = request.settings
    grids = [tokens.grid for tokens in _requested_tokens(request, model.anatomy).values() if tokens is not None]
    if any(grids) and _has_one_size(model):
        raise SnapvitError(f"{model.name}: its rotary tables are its own, made for one size. Leave --resolution out")
    if given is not None:
        check_same_weights(given, model, f"{request.ranking}: ")
        _requested_plans(request, _planner(request, given, model), SCHEDULES[DEFAULT_SCHEDULE])
        return
    flat = Planner(Ranking.flat(model.anatomy), model.anatomy)
    for mlp, head in request.pairs:
        flat.pair(mlp, head)
    for tokens in _requested_tokens(request, model.anatomy).values():
        check_reach(
            model.anatomy,
            Protection(sublayers=not settings.depth),
            sparsity=request.sparsity,
            flops=request.flops,
            params=request.params,
            corrected=settings.correction in recipe.ADDS_BIASES,
            tokens=tokens,
        )


def _planner(request: Request, ranking: Ranking, model: Model) -> Planner:
    """Return the Planner of a ranking; the request decides first if sub-layers are removable."""
    protection = ranking.protection
    if request.depth is not None or request.levers is not None:
        protection = msgspec.structs.replace(protection, sublayers=not request.settings.depth)
    if "width" not in request.used_levers:  # what is not removed whole stays whole
        protection = protection.of_whole_parts
    return Planner(
        ranking,
        model.anatomy,
        protection,
        corrected=request.settings.correction in recipe.ADDS_BIASES,
        multiple=request.width_multiple,
    )


def _requested_plans(request: Request, planner: Planner, merging: Schedule) -> dict[str, Plan]:
    """Return the Plans requested by sparsity, FLOPs, parameters, pairs, tokens or resolution, by their names."""
    plans: dict[str, Plan] = {}
    for with_tokens, tokens in _requested_tokens(request, planner.anatomy, merging).items():
        made = planner if tokens is None else planner.for_tokens(tokens)
        widths = _requested_widths(request, made)
        if not widths and tokens is not None:
            plans[with_tokens] = made.dense
        plans |= {"-".join(filter(None, (name, with_tokens))): plan for name, plan in widths.items()}
    return plans


def _requested_widths(request: Request, planner: Planner) -> dict[str, Plan]:
    by_fraction: list[tuple[str, Sequence[float], Callable[[float], Plan]]] = [
        ("s", request.sparsity, planner.sparsity),
        ("flops", _unmixed_flops(request), planner.flops),
        ("params", request.params, planner.params),
    ]
    plans = {f"{prefix}{_percent(f)}": plan(f) for prefix, fractions, plan in by_fraction for f in fractions}
    plans |= {f"pair{_percent(mlp)}-{_percent(head)}": planner.pair(mlp, head) for mlp, head in request.pairs}
    return plans


def _requested_tokens(
    request: Request, anatomy: Anatomy, merging: Schedule = SCHEDULES[DEFAULT_SCHEDULE]
) -> dict[str, TokenTarget | None]:
    """Return all combinations of the requested tokens and resolutions, by their part of a name; or none of either."""
    return {**token_targets(anatomy, request.tokens, request.resolution, merging)} or {"": None}


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g}"
