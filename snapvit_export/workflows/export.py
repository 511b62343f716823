"""`snapvit export`: from a model and images to a family folder with the proof of its choice.

This module connects ranking, building, timing and selecting, which are done elsewhere. Importing it is light; torch is
loaded when an export of a model that needs it begins, after everything that can be checked without it has been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..allocation.asked import percent
from ..budget import Budget
from ..calibration.images import Images
from ..errors import GateFailed, SnapvitError, needs
from ..family.fidelity import LEAST_NEIGHBOURS
from ..family.folder import own_files, write_manifest
from ..family.layout import RANKING
from ..family.manifest import Choice, Input, Manifest, MeasuredOn
from ..family.reference import Reference
from ..family.shipped import write_shipped
from ..graph.writer import is_shared
from ..model.plan import Plan
from ..profiling.timer import Timer
from ..progress import Progress, Stages
from ..runtimes.device import DeviceCard, this_device
from ..runtimes.in_threads import run_in_threads
from ..runtimes.session import device_for
from ..runtimes.tensorrt.session import BuildOnly
from ..selection.candidates import DENSE, Candidates
from ..selection.image_meter import BATCH as METER_BATCH
from ..selection.image_meter import REFERENCE, ImageMeter, columns_of
from ..selection.mixes import best_mix
from ..selection.options import Options
from ..selection.point import Point
from ..selection.precisions import build_dense
from ..selection.reference_check import write_reference
from ..selection.select import select
from ..selection.space import grids_for
from ..selection.variant_builder import VariantBuilder
from ..storage.atomic import staged_folder
from ..storage.temporary import scratch_folder
from ..target import faster_than, in_precision
from .export_request import Request as Request
from .export_request import check
from .inputs import checkpoint_of, is_onnx
from .prepared import PreparedModel, split_images
from .requested_plans import mixed_flops, note_least_heads, note_same

# The steps of an export, and the share of its time that each took with a budget (docs/benchmarks.md, three models).
STEPS = {"reading": 3, "ranking": 24, "merging": 9, "building": 9, "latency model": 10, "race": 9, "deciding": 36}
NOT_HERE = "not run here"  # in the place of a runtime's version


def export(request: Request, progress: Progress | None = None) -> Manifest:
    """Rank, cut, export, time and choose; write the family folder and return its manifest."""
    request = replace(request, out=Path(request.out))
    stages = progress = Stages(progress)
    budget = Budget.parse(request.budget) if request.budget is not None else None
    given = check(request, budget)
    prepare = _preparer(request, stages)
    device = _device(request)
    if request.clock is not None and budget is not None:
        progress.note(f"clocks: {request.clock}")
    stages.plan(_steps(request), estimates=budget is not None)  # shares of the time are known of a budget alone
    stages.step("reading")
    progress.phase("finding images")
    split = split_images(request)
    with staged_folder(request.out, replaceable=own_files(request.out)) as stage:
        prepared = prepare(request, given, split, progress)
        note_same(prepared.plans, prepared.planner, progress)
        note_least_heads(request, prepared, progress)
        manifest = _fill(stage, request, budget, prepared, device, progress)
        if manifest.choice is not None:
            progress.phase("writing the chosen model as one file")
            manifest = write_shipped(stage, manifest)
        manifest = msgspec.structs.replace(manifest, seconds=stages.rounded())
        write_manifest(stage, manifest)
    if given is None and not is_onnx(request.model):
        checkpoint_of(request.out).unlink(missing_ok=True)
    return manifest


def _preparer(request: Request, progress: Stages) -> Callable[..., PreparedModel]:
    """Return what prepares the model: in torch, or an ONNX file without it."""
    if is_onnx(request.model):
        from .prepare_onnx import prepare as prepare_onnx

        return prepare_onnx
    with progress.stage("starting"), needs("exporting", extra="all"):
        import torch  # noqa: F401
    from .prepare_torch import prepare

    return prepare


def _steps(request: Request) -> dict[str, float]:
    """Return the steps that this export has, and their shares of the time."""
    left_out = set() if request.budget else {"latency model", "race", "deciding"}
    left_out |= {"ranking"} if request.ranking else set()
    left_out |= set() if request.merges else {"merging"}
    left_out |= set() if request.races else {"race"}
    return {name: share for name, share in STEPS.items() if name not in left_out}


def _device(request: Request) -> DeviceCard:
    """Return the card of this machine for the target."""
    if request.build_only:
        return this_device(BuildOnly.here().version)
    return device_for(request.target.runtime) if request.runs_target else this_device(NOT_HERE)


def _fill(
    stage: Path,
    request: Request,
    budget: Budget | None,
    prepared: PreparedModel,
    device: DeviceCard,
    progress: Stages,
) -> Manifest:
    """Fill the folder with the variants and the ranking, and describe them."""
    format, anatomy = request.format, prepared.anatomy
    with scratch_folder(stage) as exact:
        builder = VariantBuilder(
            prepared.cutter,
            request.target,
            format,
            prepared.images.calibration,
            folder=stage,
            exact_folder=exact,
            provenance=prepared.provenance,
            progress=progress,
            runs_target=request.runs_target,
        )
        batch = builder.gate_images().batch(request.target.batch)
        timer = Timer(request.target, device, batch) if request.is_timed else None
        meter = _meter(request, prepared, builder)
        candidates = Candidates(anatomy, request.target, progress, builder, timer, meter, advice=builder.advice)
        asked = _build_requested(request, prepared, candidates)
        choice = _time_and_choose(request, budget, prepared, candidates)
    candidates.keep_only([*asked, *filter(None, (choice.variant, choice.next_denser) if choice else ())])
    reference = _reference(stage, request, prepared, candidates, builder) if request.writes_reference else None
    _remove_unread(stage, candidates)
    if request.save_torch:
        from .save_torch import save_torch

        names = list(candidates.built) if choice is None else [choice.variant]
        save_torch(stage, prepared, {name: candidates.built[name] for name in names}, progress)
    prepared.ranking.save(stage / RANKING)
    return Manifest(
        model=prepared.name,
        anatomy=anatomy,
        preprocessing=prepared.preprocessing,
        recipe=dict(prepared.provenance),
        target=MeasuredOn.of(request.target, device),
        variants=candidates.described(list(candidates.built)),
        weights=candidates.weight_files(list(candidates.built)),
        dense=DENSE,
        choice=choice,
        input=Input.of(format),
        labels=prepared.labels,
        reference=reference,
        command=request.command,
    )


def _reference(
    stage: Path, request: Request, prepared: PreparedModel, candidates: Candidates, builder: VariantBuilder
) -> Reference:
    """Write what other runtimes are compared with: some of the images, and the answers of all variants to them."""
    builder.progress.phase("writing reference answers")
    dense = Point(Plan.dense(prepared.anatomy), "fp32")
    return write_reference(
        stage,
        prepared.anatomy,
        request.target,
        prepared.images.calibration,
        request.takes_bytes,
        candidates.built,
        lambda: builder.write_probe(REFERENCE, dense).path,
    )


def _remove_unread(folder: Path, candidates: Candidates) -> None:
    """Remove shared weights that only probes have read, such as those of the dense model in fp32."""
    read = {path for built in candidates.built.values() for path in built.weights}
    for path in folder.iterdir():
        if is_shared(path) and path not in read:
            path.unlink()


def _meter(request: Request, prepared: PreparedModel, builder: VariantBuilder) -> ImageMeter | None:
    """Return what compares variants with the dense model; None without images that nothing was fitted on."""
    anatomy, images = prepared.anatomy, prepared.images

    def dense(of: Images) -> npt.NDArray[np.float32]:
        probe = builder.write_probe(REFERENCE, Point(Plan.dense(anatomy), "fp32"))
        found = run_in_threads(probe.path, of.inputs(METER_BATCH, request.takes_bytes))
        probe.path.unlink()
        return found

    if len(images.held_out) < (1 if anatomy.classes > 1 else LEAST_NEIGHBOURS):
        return None
    columns = columns_of(images.held_out, anatomy, prepared.labels, request.prefer, builder.progress)
    return ImageMeter(
        anatomy,
        request.target,
        images.race,
        images.held_out,
        dense,
        request.takes_bytes,
        columns,
        by_accuracy=request.prefer == "accuracy",
        runs_target=request.runs_target,
    )


def _options(request: Request, prepared: PreparedModel) -> Options:
    """Return what the choice may do with each lever."""
    anatomy, levers, own = prepared.anatomy, request.used_levers, request.target.precision
    fixed = prepared.has_one_size or prepared.images.calibration.again is None
    # OpenVINO's int8 has a format of its own.
    fixed_format = request.target.runtime == "openvino" and bool(request.single_file or request.flavour)
    others = faster_than(own, request.target.runtime, request.card_precisions)
    others = tuple(p for p in others if p != "fp8" or request.format.flavour == "tensorrt")  # has no other form
    return Options(
        levers=levers,
        precisions=() if "precision" not in levers or fixed_format else others,
        grids=(None,) if fixed else grids_for(anatomy),
        schedule=prepared.merging,
        prefer=request.prefer,
        strict=request.strict,
    )


def _build_requested(request: Request, prepared: PreparedModel, candidates: Candidates) -> list[str]:
    """Build the dense model and what was asked for beside a budget; return their names."""
    candidates.progress.step("building")
    candidates.add(DENSE, Plan.dense(candidates.anatomy))
    for name, plan in prepared.plans.items():
        candidates.add(name, plan, keep=True)
    _add_mixes(request, prepared, candidates)
    return list(candidates.built)


def _time_and_choose(
    request: Request, budget: Budget | None, prepared: PreparedModel, candidates: Candidates
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


def _add_mixes(request: Request, prepared: PreparedModel, candidates: Candidates) -> None:
    """Build the mix of levers with the best fidelity for each FLOPs target, or a spread of them for a device."""
    options = _options(request, prepared)
    if mixed_flops(request) and candidates.meter is None:
        raise SnapvitError(
            f"{prepared.images.held_out.source}: too few images to compare mixes on. Give more, or no --levers"
        )
    if request.wants_spread:
        build_dense(candidates, options.precisions)
    for fraction in mixed_flops(request):
        point = best_mix(candidates, prepared.planner, options, fraction)
        for precision in (request.target.precision, *(() if request.is_timed else options.precisions)):
            name = f"flops{percent(fraction)}" + ("" if precision == point.precision else f"-{precision}")
            try:
                candidates.add(name, Point(point.plan, precision), keep=True)
            except GateFailed as error:
                if precision == point.precision:
                    raise
                candidates.progress.note(f"{name} is left out: {error}")


def _build_engines(candidates: Candidates) -> None:
    """Build TensorRT engines of all variants for a GPU that is not here, beside their graphs."""
    builder, progress = BuildOnly.here(), candidates.progress
    for name, built in candidates.built.items():
        progress.phase(f"building the engine of {name}")
        target = in_precision(candidates.target, built.precision)
        products = builder.build(built.path, target).counts
        by_kind = ", ".join(f"{count} in {kind}" for kind, count in products.items())
        progress.note(f"{name}: matrix products {by_kind}")
