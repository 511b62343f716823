"""A family on the device that will run it: time its variants there, choose one, cut new ones there. Light: no torch.

The family's files are timed as they are, with noise for images: latency does not depend on what is in a picture. If an
Elastic folder of the same ranking came along, variants that the family does not have are cut from it, corrected, and
checked against each other in both flavours; they are made beside the family and moved into it when they are whole.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ..budget import Budget
from ..checks.gates import require_same_in_runtime
from ..elastic.folder import Elastic
from ..errors import FileFormatError, SnapvitError, UsageError
from ..family.manifest import MANIFEST, RANKING, Choice, Limits, Manifest, MeasuredOn, read_family, write_manifest
from ..model.ranking import Ranking
from ..profiling.profile import Profile
from ..profiling.timer import File, Timer
from ..progress import Progress
from ..runtimes.session import device_for
from ..storage.atomic import writing
from ..storage.json import Value, read_json, write_json
from ..target import Runtime, Target, parse_precision
from .candidates import Stand, reported
from .elastic_builder import GATE_IMAGES, DeviceStand, KnownStand, noise, plan_of
from .select import choose_on, decide


@dataclass(frozen=True)
class Way:
    """How to time a family; what is None is as the family was made for."""

    runtime: Runtime | None = None
    threads: int | None = None
    batch: int | None = None
    pause_ms: float = 0.0  # before every run

    def target(self, manifest: Manifest) -> Target:
        """The target that this means for a family."""
        made, fixed = manifest.target, manifest.input.batch
        batch = self.batch or made.batch
        if fixed not in (None, batch):
            raise UsageError(f"the family takes exactly {fixed} images. Give --batch {fixed}")
        runtime = self.runtime or made.runtime
        is_openvino = any(variant.file.endswith(".xml") for variant in manifest.variants)
        if is_openvino and runtime != "openvino":
            raise UsageError(f"the family is made for OpenVINO, not for {runtime}. Export one for it")
        precision = parse_precision(made.precision, runtime)
        return Target(runtime=runtime, precision=precision, batch=batch, threads=self.threads or made.threads)


class FamilyProfile(Value, frozen=True, kw_only=True):
    """How long the variants of a family take on one device: what `snapvit profile` writes."""

    format_version: Literal[1] = 1
    model: str
    target: MeasuredOn
    profiles: dict[str, Profile]  # by variant

    def save(self, path: Path | str) -> None:
        """Write it as JSON."""
        write_json(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> FamilyProfile:
        """Read what `save` wrote."""
        return read_json(Path(path), FamilyProfile)


def profile_family(folder: Path | str, way: Way, progress: Progress, seconds: float = 2.0) -> FamilyProfile:
    """Time all variants of a family side by side on this machine."""
    folder = Path(folder)
    manifest = read_family(folder)
    target = way.target(manifest)
    device = device_for(target.runtime)
    files = {variant.name: File(folder / variant.file, variant.sha256) for variant in manifest.variants}
    if target.runtime != "onnxruntime":
        progress.phase(f"comparing with ONNX Runtime: {', '.join(files)}")
        images = noise(manifest, manifest.input.batch or GATE_IMAGES)
        for variant in manifest.variants:
            require_same_in_runtime(variant.name, folder / variant.file, target, images)
    progress.phase(f"timing {', '.join(files)}")
    timer = Timer(target, device, noise(manifest, target.batch), way.pause_ms)
    profiles = timer.time(files, seconds, reported(progress, None), "p90", energy=True)
    return FamilyProfile(model=manifest.model, target=MeasuredOn.of(target, device), profiles=profiles)


def choose_in_family(
    folder: Path | str,
    budget: Budget,
    limits: Limits,
    way: Way,
    progress: Progress,
    elastic: Path | None = None,
    known: FamilyProfile | None = None,
) -> Manifest:
    """Choose the variant of a family that keeps a budget on this machine; the manifest says so from now on.

    `known`: latencies that were taken here before; they must be of these files, this device and this target. Those of a
    GPU, which the Jetson agent takes, decide alone: nothing is timed here.
    """
    folder = Path(folder)
    manifest = read_family(folder)
    if known is not None and known.target.device.accelerator is not None:
        if elastic is not None or way != Way():
            raise UsageError(
                "latencies of a GPU decide alone: give --profile without --elastic, --runtime, --batch, ..."
            )
        return _choose_by_known(folder, manifest, budget, limits, known)
    target = way.target(manifest)
    device = device_for(target.runtime)
    packed = None if elastic is None else _same_ranking(Elastic.load(elastic), folder, manifest)
    with writing(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".cut-") as scratch:
        stand = DeviceStand(folder, manifest, target, device, progress, packed, Path(scratch), way.pause_ms)
        names = [variant.name for variant in manifest.variants]
        if known is None:
            stand.time(names, at=limits.at)
        else:
            stand.take(known, limits.at)
        choice = _choice(stand, manifest, budget, limits, packed)
        new = [name for name in (choice.variant, choice.next_denser) if name is not None and name not in names]
        for name in new:
            stand.moved(name)
        timed = {name: stand.built[name] for name in (*names, *new)}
    chosen = msgspec.structs.replace(
        manifest,
        target=MeasuredOn.of(target, device),
        variants=tuple(sorted(map(stand.described, timed.values()), key=lambda v: (-v.flops, v.name))),
        weights=stand.weight_files(timed),
        choice=choice,
    )
    write_manifest(folder, chosen)
    return chosen


def _choose_by_known(
    folder: Path, manifest: Manifest, budget: Budget, limits: Limits, known: FamilyProfile
) -> Manifest:
    """Choose by latencies that were taken on another device; the manifest then speaks of that one."""
    stand = KnownStand(folder, manifest, known, limits.at)
    choice = _choice(stand, manifest, budget, limits, None)
    chosen = msgspec.structs.replace(
        manifest, target=known.target, variants=tuple(map(stand.described, stand.built.values())), choice=choice
    )
    write_manifest(folder, chosen)
    return chosen


def _choice(stand: Stand, manifest: Manifest, budget: Budget, limits: Limits, packed: Elastic | None) -> Choice:
    if packed is not None:
        return choose_on(stand, packed.planner, budget, limits)
    densest_first = sorted(manifest.variants, key=lambda v: -v.flops)
    grid = {variant.name: plan_of(variant) for variant in densest_first}
    guesses = [stand.pace.latency(name, limits.at).ms for name in grid]
    return decide(stand, grid, guesses, budget, limits)


def _same_ranking(packed: Elastic, folder: Path, manifest: Manifest) -> Elastic:
    """The Elastic folder, if it belongs to the family."""
    ranking = Ranking.load(folder / RANKING)
    if ranking.order_sha256 != packed.ranking.order_sha256 or packed.anatomy != manifest.anatomy:
        raise FileFormatError(f"{packed.folder}: of another model or ranking than {folder}. Pack with its {RANKING}")
    if manifest.target.precision not in ("fp32", "int8-dynamic"):
        raise SnapvitError(
            f"{folder / MANIFEST}: new variants in {manifest.target.precision} need calibration images. "
            "Leave --elastic out, or export them where the images are"
        )
    return packed
