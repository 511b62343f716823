"""A family on the device that will run it: time its variants there, choose one, cut new ones there. Light: no torch.

The family's files are timed as they are, with noise for images: latency does not depend on what is in a picture. If an
Elastic folder of the same ranking came along, variants that the family does not have are cut from it, corrected, and
checked against each other in both flavours; they are made beside the family and moved into it when they are whole.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from .budget import Budget
from .decide import choose_on, decide
from .elastic.folder import Elastic
from .errors import FileFormatError, SnapvitError, UsageError
from .family import MANIFEST, RANKING, Choice, Limits, Manifest, MeasuredOn, Variant, read_family, write_manifest
from .files import sha256, writing
from .graph.emit import OPSETS, Flavour, Options
from .graph.emitter import WEIGHTS, Blueprint, Emitter
from .graph.gates import require_equal
from .graph.inspect import inspect
from .plan import Plan
from .profiling.device import DeviceCard, this_device, usable_cores
from .profiling.profile import LEAST_RUNS, Percentile, Profile
from .profiling.timer import File, Timer
from .progress import Progress
from .ranking import Ranking
from .runtimes.opening import version_of
from .runtimes.ort import OrtSession
from .stand import DENSE, Built, Form, Stand, reported
from .target import Runtime, Target, parse_precision
from .values import Value, read_json, write_json

GATE_IMAGES = 4


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
    device = this_device(version_of(target.runtime))
    files = {variant.name: File(folder / variant.file, variant.sha256) for variant in manifest.variants}
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

    `known`: latencies that were taken here before; they must be of these files, this device and this target.
    """
    folder = Path(folder)
    manifest = read_family(folder)
    target = way.target(manifest)
    device = this_device(version_of(target.runtime))
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


def _choice(stand: DeviceStand, manifest: Manifest, budget: Budget, limits: Limits, packed: Elastic | None) -> Choice:
    if packed is not None:
        return choose_on(stand, packed.planner, budget, limits)
    densest_first = sorted(manifest.variants, key=lambda v: -v.flops)
    grid = {variant.name: _plan(variant) for variant in densest_first}
    guesses = [stand.pace.latency(name, limits.at).ms for name in grid]
    return decide(stand, grid, guesses, budget, limits)


class DeviceStand(Stand):
    """The variants of a family, and those that an Elastic folder gives."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        target: Target,
        device: DeviceCard,
        progress: Progress,
        packed: Elastic | None,
        scratch: Path,
        pause_ms: float = 0.0,
    ) -> None:
        form = _form(folder, manifest)
        self.folder, self.packed = folder, packed
        emitter = None
        if packed is not None:
            emitter = Emitter(Blueprint.of(packed), scratch, form.takes_bytes, target.precision)
        images = noise(manifest, GATE_IMAGES)
        super().__init__(manifest.anatomy, emitter, target, device, images, form, progress, pause_ms)
        self.gate_inputs = noise(manifest, manifest.input.batch or GATE_IMAGES)
        for variant in manifest.variants:
            self.built[variant.name] = _as_built(folder, variant)
        if packed is not None:
            self._require_same_model(packed)
        own = self.built[DENSE]
        if own.path.suffix == ".onnx":
            self.require_same_in_runtime(DENSE, own.path, self.gate_inputs)

    def _require_same_model(self, packed: Elastic) -> None:
        """Refuse an Elastic folder whose dense model is not the family's, before anything is timed."""
        own = self.built[DENSE]
        options = Options(self.form.flavour, self.form.batch, numerics=self.numerics)
        cut = self.emitter.write(DENSE, own.plan, options=options, single_file=self.form.single_file)
        outputs = []
        for path in (own.path, cut.graph):
            with OrtSession(path, usable_cores()) as session:
                outputs.append(session.run(self.gate_inputs))
        same = all(sha256(path) == sha256(self.folder / path.name) for path in cut.weights)
        if not same or not np.allclose(*outputs, atol=1e-3, rtol=1e-3):
            raise FileFormatError(f"{packed.folder}: of other weights than {self.folder}. Pack the model of the family")

    @property
    def advice(self) -> str:
        """What would help if no variant fits a budget."""
        sparser = "" if self.packed else "give --elastic to cut sparser ones, "
        return f"{sparser}export a family of a smaller model or in int8, or use more --threads"

    def named(self, grid: dict[str, Plan]) -> dict[str, Plan]:
        """A Plan that the family has keeps its name; a name that means another Plan there gets a number."""
        known = {built.plan: name for name, built in self.built.items()}
        taken = set(self.built)
        found = {}
        for name, plan in grid.items():
            numbered = (f"{name}-{n}" for n in count(2))
            new = known.get(plan) or (name if name not in taken else next(n for n in numbered if n not in taken))
            found[new] = plan
            taken.add(new)
        return found

    def add(self, name: str, plan: Plan, keep: bool = False) -> None:
        """Cut a variant from the Elastic folder, unless it is there."""
        if name in self.built:
            return
        assert self.packed is not None, "only a packed model gives new variants"
        self.progress.phase(f"cutting {name}")
        corrected = self.packed.corrected_layers(plan) if self.packed.corrects else None
        told = {"snapvit.correction": "elastic" if corrected else "none"}
        outputs = []
        for flavour in sorted(OPSETS, key=lambda flavour: flavour == self.form.flavour):  # the wanted one last
            written = self.emitter.write(
                name,
                plan,
                corrected,
                options=Options(flavour, self.form.batch, numerics=self.numerics),
                single_file=self.form.single_file,
                metadata=told,
            )
            with OrtSession(written.graph, usable_cores()) as session:
                outputs.append(session.run(self.gate_inputs))
        tolerance = 1e-4 if self.target.precision == "fp32" else 0.05  # int8 sums differ by the order of operators
        require_equal(f"{name}: graphs of both flavours", outputs[0], outputs[1], tolerance)
        path = written.graph
        how = "elastic" if corrected else None
        self.built[name] = Built(
            name, path, written.weights, plan, sha256(path), written.size_bytes, None, how, None, True
        )

    def take(self, known: FamilyProfile, at: Percentile) -> None:
        """Use latencies that were taken before, if they were taken here and tell the percentile."""
        timer = self.timer
        for name, built in self.built.items():
            profile = known.profiles.get(name)
            if profile is None or not profile.belongs_to(built.sha256, timer.target, timer.device, timer.pause_ms):
                raise FileFormatError(
                    f"the given latencies of {name} are of another file or device, or were taken in another way. "
                    "Leave --profile out"
                )
            if profile.runs < LEAST_RUNS[at]:
                raise FileFormatError(
                    f"the given latencies of {name} are of {profile.runs} runs, and {at} needs {LEAST_RUNS[at]}. "
                    "Profile for more --seconds, or leave --profile out"
                )
            self.built[name] = replace(built, profile=profile)
        self.pace.add({name: known.profiles[name] for name in self.built})

    def moved(self, name: str) -> Built:
        """A new variant as part of the family; its graph points into the family's weight file, which is the same."""
        built = self.built[name]
        for path in (built.path, *built.weights):
            if path.name != WEIGHTS:
                path.replace(self.folder / path.name)
        weights = tuple(self.folder / path.name for path in built.weights)
        self.built[name] = replace(built, path=self.folder / built.path.name, weights=weights)
        return self.built[name]


def noise(manifest: Manifest, count: int) -> npt.NDArray[Any]:
    """Images of noise in the form that a family's graphs take."""
    height, width = manifest.anatomy.image
    shape = (count, height, width, manifest.anatomy.channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return pixels if manifest.input.type == "uint8" else manifest.preprocessing.normalise(pixels)


def _form(folder: Path, manifest: Manifest) -> Form:
    """How the graphs of a family were written, as their files tell."""
    dense = manifest.variant(manifest.dense)
    if not dense.file.endswith(".onnx"):
        return Form("portable", False, manifest.input.batch, manifest.input.type == "uint8")
    opset = inspect(folder / dense.file).opset
    flavour: Flavour = "ort" if opset == OPSETS["ort"] else "portable"
    return Form(flavour, not dense.weights, manifest.input.batch, manifest.input.type == "uint8")


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


def _plan(variant: Variant) -> Plan:
    return Plan(heads=variant.heads, neurons=variant.neurons)


def _as_built(folder: Path, variant: Variant) -> Built:
    return Built(
        variant.name,
        folder / variant.file,
        tuple(folder / name for name in variant.weights),
        _plan(variant),
        variant.sha256,
        variant.size_bytes,
        variant.evaluation,
        variant.correction,
        variant.precision_cosine,
        True,
    )
