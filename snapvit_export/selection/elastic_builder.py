"""The variants of a family as a stand on a device: timed as they are, or cut anew from an Elastic folder. Light.

`KnownStand` has latencies that were taken elsewhere, and neither builds nor times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..checks.gates import require_equal, require_same_in_runtime
from ..checks.inspect import inspect
from ..elastic.folder import Elastic
from ..errors import FileFormatError
from ..family.manifest import Manifest, Variant
from ..graph.forward import OPSETS, Flavour, Options
from ..graph.writer import WEIGHTS, Blueprint, Emitter
from ..model.plan import Plan
from ..profiling.profile import LEAST_RUNS, Percentile, Profile
from ..progress import Progress, Silent
from ..runtimes.device import DeviceCard, usable_cores
from ..runtimes.ort import OrtSession
from ..runtimes.tensorrt.engine_file import engine_files
from ..storage.atomic import sha256
from ..target import SumBits, Target
from .candidates import DENSE, Built, Form, Stand

if TYPE_CHECKING:
    from .on_device import FamilyProfile

GATE_IMAGES = 4


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
            said = manifest.variant(manifest.dense).int8_sum_bits
            bits: SumBits = 32 if said is UNSET else said  # families from before do not say it
            emitter = Emitter(Blueprint.of(packed), scratch, form.takes_bytes, target.precision, bits)
        images = noise(manifest, GATE_IMAGES)
        super().__init__(manifest.anatomy, emitter, target, device, images, form, progress, pause_ms)
        self.gate_inputs = noise(manifest, manifest.input.batch or GATE_IMAGES)
        for variant in manifest.variants:
            self.built[variant.name] = _as_built(folder, variant)
        if packed is not None:
            self._require_same_model(packed)
        for built in self.built.values():
            require_same_in_runtime(built.name, built.path, target, self.gate_inputs)

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
        if not same or not np.allclose(outputs[0], outputs[1], atol=1e-3, rtol=1e-3):
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
        require_same_in_runtime(name, path, self.target, self.gate_inputs)
        how = "elastic" if corrected else None
        self.built[name] = Built(
            name,
            path,
            written.weights,
            plan,
            sha256(path),
            written.size_bytes,
            None,
            how,
            None,
            True,
            int8_sum_bits=self.emitter.int8_sum_bits,
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
            require_runs(name, profile, at)
            self.built[name] = replace(built, profile=profile)
        self.pace.add({name: known.profiles[name] for name in self.built})

    def moved(self, name: str) -> Built:
        """A new variant as part of the family; its graph points into the family's weight file, which is the same."""
        built = self.built[name]
        engines = (path for path in engine_files(built.path) if path.is_file())
        for path in (built.path, *built.weights, *engines):
            if path.name != WEIGHTS:
                path.replace(self.folder / path.name)
        weights = tuple(self.folder / path.name for path in built.weights)
        self.built[name] = replace(built, path=self.folder / built.path.name, weights=weights)
        return self.built[name]


class KnownStand(Stand):
    """The variants of a family with latencies that were taken elsewhere: nothing can be built or timed."""

    advice = "export sparser variants and time them there"

    def __init__(self, folder: Path, manifest: Manifest, known: FamilyProfile, at: Percentile) -> None:
        on = known.target
        target = Target(runtime=on.runtime, precision=on.precision, batch=on.batch, threads=on.threads)
        form = Form("portable", False, manifest.input.batch, manifest.input.type == "uint8")
        super().__init__(manifest.anatomy, None, target, on.device, noise(manifest, 1), form, Silent())
        for variant in manifest.variants:
            profile = known.profiles.get(variant.name)
            if profile is None or profile.sha256 != variant.sha256:
                raise FileFormatError(
                    f"the given latencies of {variant.name} are missing or of another file. Time this family again"
                )
            require_runs(variant.name, profile, at)
            self.built[variant.name] = replace(_as_built(folder, variant), profile=profile)
        self.pace.add(known.profiles)

    def add(self, name: str, plan: Plan, keep: bool = False) -> None:
        """All are there."""

    def time(self, names: Sequence[str], seconds: float = 1.0, at: Percentile = "p50") -> None:
        """All are timed."""


def require_runs(name: str, profile: Profile, at: Percentile) -> None:
    """Refuse latencies of too few runs to tell a percentile."""
    if profile.runs < LEAST_RUNS[at]:
        raise FileFormatError(
            f"the given latencies of {name} are of {profile.runs} runs, and {at} needs {LEAST_RUNS[at]}. "
            "Profile for more --seconds, or leave --profile out"
        )


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


def plan_of(variant: Variant) -> Plan:
    """What a variant keeps."""
    return Plan(heads=variant.heads, neurons=variant.neurons)


def _as_built(folder: Path, variant: Variant) -> Built:
    return Built(
        variant.name,
        folder / variant.file,
        tuple(folder / name for name in variant.weights),
        plan_of(variant),
        variant.sha256,
        variant.size_bytes,
        variant.evaluation,
        variant.correction,
        variant.precision_cosine,
        True,
        parity=variant.parity,
        int8_sum_bits=None if variant.int8_sum_bits is UNSET else variant.int8_sum_bits,
    )
