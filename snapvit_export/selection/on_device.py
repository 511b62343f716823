"""Profiles a family on the device that will run it, and chooses or cuts a variant there. Light: no torch.

The family's files are timed as they are, with noise for images: latency does not depend on what is in an image. In
another runtime than ONNX Runtime their answers are compared first, on the family's reference images. If an Elastic
folder of the same ranking came along, variants that the family does not have are cut from it, corrected, and checked
against each other in two flavours; they are made beside the family and moved into it when they are whole. They use all
levers if something tells what a candidate loses: images that are given here, or the table of the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..allocation.asked import refuse_same
from ..allocation.levers import Lever
from ..allocation.resolution import Resolution, check_resolution
from ..allocation.token_target import token_targets
from ..allocation.tokens import DEFAULT, SCHEDULES, Schedule
from ..budget import Budget
from ..checks.inspect import inspect
from ..elastic.folder import Elastic
from ..errors import FileFormatError, SnapvitError, UsageError
from ..family.folder import read_family, unchanged, write_manifest
from ..family.layout import MANIFEST, RANKING
from ..family.manifest import Limits, Manifest, MeasuredOn, Prefer, Variant, WeightFile
from ..family.reference import as_inputs
from ..family.shipped import check_place, write_shipped
from ..graph.format import OPSETS, Flavour, GraphFormat
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..profiling.energy import ADVICE, meter_for
from ..profiling.profile import Percentile
from ..profiling.timer import File, Timer
from ..progress import Progress
from ..runtimes.device import check_threads
from ..runtimes.session import device_for
from ..storage.atomic import writing
from ..storage.temporary import alone_in, remove_leftovers, temporary_folder
from ..target import Runtime, Target, in_precision, parse_precision
from . import decide
from .candidates import BuiltVariant, Candidates, Meter, live_report
from .choice import select_among
from .device_options import options_for, planner_for, usable_levers
from .elastic_builder import WITHOUT_IMAGES, ElasticBuilder, adopt
from .image_meter import REFERENCE, meter_of_images
from .known_profiles import (
    Failed,
    FamilyProfile,
    known_candidates,
    not_to_choose,
    require_dense,
    require_runs,
    taken_by,
)
from .point import Point
from .reference_check import compare_here, differs, left_out, with_variants
from .select import RUN_SECONDS, select
from .table_meter import TableMeter

GATE_IMAGES = 4


@dataclass(frozen=True)
class TimingOptions:
    """Options for timing a family; None means as the family was made for."""

    runtime: Runtime | None = None
    threads: int | None = None
    batch: int | None = None
    pause_ms: float = 0.0  # before every run

    def target(self, manifest: Manifest) -> Target:
        """Return the target that these options mean for a family."""
        made, fixed = manifest.target, manifest.input.batch
        batch = self.batch or made.batch
        if fixed not in (None, batch):
            raise UsageError(f"the family takes exactly {fixed} images. Give --batch {fixed}")
        runtime = self.runtime or made.runtime
        is_openvino = any(variant.file.endswith(".xml") for variant in manifest.variants)
        if is_openvino and runtime != "openvino":
            raise UsageError(f"the family is made for OpenVINO, not for {runtime}. Export one for it")
        precision = parse_precision(made.precision, runtime)
        threads = self.threads or made.threads
        check_threads(threads)
        return Target(runtime=runtime, precision=precision, batch=batch, threads=threads)


def profile_family(
    folder: Path | str, options: TimingOptions, progress: Progress, seconds: float = 2.0
) -> FamilyProfile:
    """Time all variants of a family side by side on this machine, but for those that the runtime does not take."""
    folder = Path(folder)
    manifest = read_family(folder)
    target = options.target(manifest)
    device = device_for(target.runtime)
    variants = _taken(manifest, target, progress)
    compared = compare_here(folder, manifest, variants, target, progress)
    wrong = left_out(compared, manifest.dense, progress)
    sizes = {variant.name: variant.image_of(manifest.anatomy) for variant in variants if variant.name not in wrong}
    files = {v.name: File(folder / v.file, v.sha256, sizes[v.name], v.precision) for v in variants if v.name in sizes}
    progress.phase(f"timing {', '.join(files)}")
    timer = Timer(target, device, noise(manifest, target.batch), options.pause_ms)
    profiles = timer.time(files, seconds, live_report(progress, None), "p90", energy=True)
    return FamilyProfile(
        model=manifest.model,
        target=MeasuredOn.of(target, device),
        profiles={n: msgspec.structs.replace(found, compared=compared.get(n)) for n, found in profiles.items()},
        failed={name: Failed(sha256=manifest.variant(name).sha256, compared=compared[name]) for name in wrong},
    )


def choose_in_family(
    folder: Path | str,
    budget: Budget,
    limits: Limits,
    options: TimingOptions,
    progress: Progress,
    elastic: Path | None = None,
    known: FamilyProfile | None = None,
    tokens: Sequence[float] = (),
    resolution: Sequence[Resolution] = (),
    levers: Sequence[Lever] | None = None,
    data: str | None = None,
    prefer: Prefer = "fidelity",
    strict: bool = False,
) -> Manifest:
    """Choose the variant of a family that meets a budget on this machine, and record the choice in its manifest.

    `known`: latencies that were taken here before; they must be of these files, this device and this target. Those of a
    GPU, which the Jetson agent takes, decide alone: nothing is timed here. `tokens`, `resolution`: variants of all the
    heads and neurons are cut with these from the Elastic folder, timed, and kept. `levers`: that new variants may use;
    None: all that are possible here. `data`: images to compare on; None: by the table of the Elastic folder. `strict`:
    refuse what may fit but does not surely.
    """
    folder = Path(folder)
    manifest = read_family(folder)
    require_dense(manifest)
    _check_request(manifest, elastic, tokens, resolution, levers, data, prefer)
    check_place(folder, manifest)
    if known is not None and known.target.device.accelerator is not None:
        if elastic is not None or data is not None or options != TimingOptions():
            raise UsageError(
                "latencies of a GPU decide alone: give --profile without --elastic, --data, --runtime, --batch, ..."
            )
        return _choose_by_known(folder, manifest, budget, limits, known, strict, progress)
    _check_energy(budget, options.target(manifest), elastic, known)
    target = options.target(manifest)
    check_place(folder, manifest, target.runtime)
    device = device_for(target.runtime)
    packed = None if elastic is None else _same_ranking(Elastic.load(elastic), folder, manifest)
    used = None if packed is None else usable_levers(packed, target, levers, data is not None, progress)
    timer = Timer(target, device, noise(manifest, target.batch), options.pause_ms)
    with alone_in(folder):
        remove_leftovers(folder)
    with writing(folder), temporary_folder(folder, "cut") as scratch:
        candidates = _candidates(folder, manifest, timer, packed, scratch, progress, data, prefer)
        names = list(candidates.built)
        refused = {} if known is None else not_to_choose(manifest, known)
        taken = [each.name for each in _taken(manifest, target, progress) if each.name not in refused]
        runnable = [name for name in taken if name in candidates.built]
        if known is not None:
            _require_taken_here(known, [candidates.built[name] for name in runnable], timer, limits.at)
            candidates.record({name: known.profiles[name] for name in runnable})
        merging = SCHEDULES[DEFAULT] if packed is None else packed.merging
        asked = candidates.named(_with_tokens(manifest.anatomy, tokens, resolution, merging))
        for name, plan in asked.items():
            candidates.add(name, plan, keep=True)
        to_time = [*runnable, *(name for name in asked if name not in runnable)]
        _time(candidates, to_time, limits.at, energy=budget.energy_mj is not None)
        if packed is None or used is None:
            choice = select_among(candidates, budget, limits, prefer, strict)
        else:
            allowed = replace(options_for(packed, target, used, prefer, data is None), strict=strict)
            choice = select(candidates, planner_for(packed, used), budget, limits, allowed)
        wanted = dict.fromkeys([*asked, choice.variant, choice.next_denser])
        new = [name for name in wanted if name is not None and name not in names]
        with unchanged(folder, manifest):
            for name in new:
                candidates.update(adopt(folder, candidates.built[name]))
            reference = with_variants(folder, manifest, target, [candidates.built[name] for name in new])
        kept = (*names, *new)
        chosen = msgspec.structs.replace(
            manifest,
            target=MeasuredOn.of(target, device),
            variants=_all_variants(manifest, candidates.described(kept)),
            weights=_all_weights(manifest, candidates.weight_files(kept)),
            reference=reference,
            choice=choice,
            seconds=candidates.progress.rounded(),
        )
    return _written(folder, manifest, chosen)


def _all_variants(manifest: Manifest, described: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants, and those that could not be candidates here, which have no latency then; densest first."""
    names = {variant.name for variant in described}
    others = [msgspec.structs.replace(v, profile=None) for v in manifest.variants if v.name not in names]
    return tuple(sorted([*described, *others], key=lambda variant: (-variant.flops, variant.name)))


def _all_weights(manifest: Manifest, weights: Sequence[WeightFile]) -> tuple[WeightFile, ...]:
    files = {each.file for each in weights}
    return (*weights, *(each for each in manifest.weights if each.file not in files))


def _written(folder: Path, before: Manifest, manifest: Manifest) -> Manifest:
    """Write the choice down, and the chosen variant as one file; whatever interrupts this leaves a whole family."""
    with unchanged(folder, before):
        write_manifest(folder, msgspec.structs.replace(manifest, shipped=None))
        shipped = write_shipped(folder, manifest)
        write_manifest(folder, shipped)
    return shipped


def _check_request(
    manifest: Manifest,
    elastic: Path | None,
    tokens: Sequence[float],
    resolution: Sequence[Resolution],
    levers: Sequence[Lever] | None,
    data: str | None,
    prefer: Prefer,
) -> None:
    """Refuse what makes no sense before anything is read."""
    if (tokens or resolution) and elastic is None:
        raise UsageError("variants of other tokens or resolutions are cut from an Elastic folder. Give --elastic")
    if levers is not None and elastic is None:
        raise UsageError(
            "levers are what new variants may use, and these are cut from an Elastic folder. Give --elastic"
        )
    if prefer == "accuracy" and data is None:
        raise UsageError("--prefer accuracy needs images with labels of the model's classes. Give --data FOLDER")
    if data is not None and elastic is None and manifest.variant(manifest.dense).precision != "fp32":
        raise UsageError(
            "images are compared with the dense model in fp32, which this family does not have. Give --elastic"
        )
    _with_tokens(manifest.anatomy, tokens, resolution, SCHEDULES[DEFAULT])


def _check_energy(budget: Budget, target: Target, elastic: Path | None, known: FamilyProfile | None) -> None:
    """Refuse, before anything is timed, an energy budget that could not be decided here."""
    if budget.energy_mj is None:
        return
    if elastic is not None:
        raise UsageError(
            "new variants are cut to a latency, and energy is compared among variants that exist. Leave --elastic out, "
            "or give milliseconds"
        )
    if known is None and meter_for(target.runtime) is None:
        raise UsageError(f"nothing that can be read here measures the energy of {target.runtime}. {ADVICE}")


def _time(candidates: Candidates, names: Sequence[str], at: Percentile, energy: bool = False) -> None:
    """Time variants that were not yet, in as many new processes as a decision needs at least."""
    untimed = [name for name in names if candidates.built[name].profile is None]
    if not untimed:
        return
    candidates.progress.phase(f"timing {', '.join(untimed)}")
    for _ in range(decide.FEWEST_RUNS):
        candidates.time(untimed, RUN_SECONDS, at, fresh=True, energy=energy)


def _taken(manifest: Manifest, target: Target, progress: Progress) -> list[Variant]:
    """Return the variants that the runtime takes; the others are named in a note."""
    found = taken_by(manifest, target.runtime)
    if left_out := [variant.name for variant in manifest.variants if variant not in found]:
        progress.note(f"left out, since {target.runtime} does not compute in their precision: {', '.join(left_out)}")
    return found


def _with_tokens(
    anatomy: Anatomy, tokens: Sequence[float], resolution: Sequence[Resolution], merging: Schedule
) -> dict[str, Plan]:
    """Return the dense Plan with each combination of tokens and resolution, by name, or refuse what a model cannot."""
    for size in resolution:
        check_resolution(size)
    refuse_same("--tokens", tokens)
    refuse_same("--resolution", resolution)
    targets = token_targets(anatomy, tokens, resolution, merging)
    for target in targets.values():
        target.check(anatomy)
    return {name: target.of(anatomy, Plan.dense(anatomy)) for name, target in targets.items()}


def _candidates(
    folder: Path,
    manifest: Manifest,
    timer: Timer,
    packed: Elastic | None,
    scratch: Path,
    progress: Progress,
    data: str | None,
    prefer: Prefer,
) -> Candidates:
    """Return the variants of a family whose answers are right here, with a builder if an Elastic folder came along."""
    target, inputs = timer.target, partial(gate_inputs, folder, manifest)
    compared = compare_here(folder, manifest, taken_by(manifest, target.runtime), target, progress)
    wrong = left_out(compared, manifest.dense, progress)
    built = {
        each.name: replace(BuiltVariant.of(folder, each, manifest.anatomy), compared=compared.get(each.name))
        for each in manifest.variants
        if each.name not in wrong
    }
    dense, builder = built[manifest.dense], None
    if packed is not None:
        builder = ElasticBuilder(
            packed,
            manifest,
            target,
            format_of(folder, manifest),
            inputs,
            scratch,
            progress,
            manifest.reference is not None,
        )
        builder.require_same_model(folder, dense)
    runnable = [built[each.name] for each in taken_by(manifest, target.runtime) if each.name in built]

    def reference() -> Path:
        """Return the dense model in fp32: the family's, or one from the Elastic folder."""
        if dense.precision == "fp32":
            return dense.path
        assert builder is not None
        return builder.write_probe(REFERENCE, Point(dense.plan, "fp32")).path

    meter: Meter | None = None
    if data is not None:
        meter = meter_of_images(data, manifest, target, reference, prefer, progress)
    elif packed is not None and packed.fidelity is not None:
        meter = TableMeter(manifest.anatomy, packed.fidelity)
    for each in runnable:
        if meter is not None and (data is not None or each.fidelity is None):
            progress.phase(f"comparing {each.name} with the dense model")
            built[each.name] = meter.measured(each)
    sparser = "" if packed else "give --elastic to cut sparser ones, "
    advice = f"{sparser}export a family of a smaller model or in int8, or use more --threads"
    return Candidates(manifest.anatomy, target, progress, builder, timer, meter, built.values(), advice)


def _require_taken_here(known: FamilyProfile, variants: Sequence[BuiltVariant], timer: Timer, at: Percentile) -> None:
    """Refuse latencies that are not of these files, this device and this target, or of too few runs."""
    for built in variants:
        profile, target = known.profiles.get(built.name), in_precision(timer.target, built.precision)
        if profile is None or not profile.belongs_to(built.sha256, target, timer.device, timer.pause_ms):
            raise FileFormatError(
                f"the given latencies of {built.name} are of another file or device, or were taken under other "
                "settings. Leave --profile out"
            )
        require_runs(built.name, profile, at)


def _choose_by_known(
    folder: Path,
    manifest: Manifest,
    budget: Budget,
    limits: Limits,
    known: FamilyProfile,
    strict: bool,
    progress: Progress,
) -> Manifest:
    """Choose by latencies that were taken on another device, which the manifest then names."""
    check_place(folder, manifest, known.target.runtime)
    for name, found in not_to_choose(manifest, known).items():
        progress.note(f"{differs(name, found)}. It is not chosen")
    for variant in filter(known.is_left_out, manifest.variants):
        progress.note(f"{variant.name} was not timed: {known.left_out[variant.name].reason}. It is not chosen")
    candidates = known_candidates(folder, manifest, known, limits.at)
    choice = select_among(candidates, budget, limits, strict=strict)
    variants = candidates.described(list(candidates.built))
    chosen = msgspec.structs.replace(manifest, target=known.target, variants=variants, choice=choice, seconds={})
    return _written(folder, manifest, chosen)


def _same_ranking(packed: Elastic, folder: Path, manifest: Manifest) -> Elastic:
    """Return the Elastic folder, if it belongs to the family."""
    ranking = Ranking.load(folder / RANKING)
    if ranking.order_sha256 != packed.ranking.order_sha256 or packed.anatomy != manifest.anatomy:
        raise FileFormatError(f"{packed.folder}: of another model or ranking than {folder}. Pack with its {RANKING}")
    if manifest.target.precision not in WITHOUT_IMAGES:
        raise SnapvitError(
            f"{folder / MANIFEST}: new variants in {manifest.target.precision} need calibration images. "
            "Leave --elastic out, or export them where the images are"
        )
    return packed


def gate_inputs(folder: Path, manifest: Manifest, image: tuple[int, int]) -> npt.NDArray[Any]:
    """Return the family's reference images as graphs of a height and width take them; noise where it has none.

    Two forms of one graph must agree on anything, so there noise will do; a runtime is not compared on it.
    """
    if manifest.reference is None:
        return noise(manifest, manifest.input.batch or GATE_IMAGES, image)
    pixels = manifest.reference.pixels_at(folder, image)[:GATE_IMAGES]
    return as_inputs(pixels, manifest.preprocessing, manifest.input.type == "uint8")


def noise(manifest: Manifest, count: int, image: tuple[int, int] | None = None) -> npt.NDArray[Any]:
    """Return images of noise as a family's graphs take them; `image`: height and width, if not the dense model's."""
    height, width = image or manifest.anatomy.image
    shape = (count, height, width, manifest.anatomy.channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return pixels if manifest.input.type == "uint8" else manifest.preprocessing.normalise(pixels)


def format_of(folder: Path, manifest: Manifest) -> GraphFormat:
    """Return the format that the graphs of a family were written in, read from their files."""
    dense = manifest.variant(manifest.dense)
    opset = inspect(folder / dense.file).opset if dense.file.endswith(".onnx") else OPSETS["portable"]
    flavour: Flavour = next((name for name, its in OPSETS.items() if its == opset), "portable")
    takes_bytes = manifest.input.type == "uint8"
    return GraphFormat(flavour, manifest.input.batch, takes_bytes, single_file=not dense.weights)
