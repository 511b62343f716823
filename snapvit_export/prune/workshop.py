"""Where variants are made during an export: cut, exported, checked, timed, evaluated; each file built once.

Uses torch to cut and to check; timing and accuracy go through the runtime, on the very file that is shipped. The gates,
each on real images:

    masked = sliced                        modules, before any repair
    repaired module = portable = ort       graphs in float32
    graph in fewer bits ~ in float32       if the target has another precision
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..anatomy import Anatomy
from ..calibration.images import Images
from ..evaluate.accuracy import Evaluation, top1
from ..family import Measurement, Variant, WeightFile
from ..files import sha256
from ..graph.calibrate import calibrate
from ..graph.emit import OPSETS, Flavour, Options
from ..graph.emitter import Emitter, Written
from ..graph.gates import NEAR, Streams, first_difference, require_close, require_equal
from ..graph.probe import streams
from ..plan import Plan
from ..profiling.device import DeviceCard, usable_cores
from ..profiling.measure import Profile, time_together, to_profile
from ..progress import Progress
from ..recipe import ADDS_BIASES
from ..runtimes.ort import OrtSession
from ..target import Target
from ..values import to_json
from .load import Model
from .masking import masked
from .pack import blueprint, corrected_layers
from .parts import block_outputs
from .repair import Repair
from .slicing import shrink

GATE_IMAGES = 8
RANGING_IMAGES = 32  # that tell how large values get, for fewer bits


@dataclass(frozen=True)
class Form:
    """What the graphs look like from outside."""

    flavour: Flavour = "ort"
    single_file: bool = False  # every graph holds its own weights
    batch: int | None = None  # fixed; None: any
    takes_bytes: bool = False


@dataclass(frozen=True)
class Built:
    """A file on disk and all that is known of it so far."""

    name: str
    path: Path
    weights: tuple[Path, ...]
    plan: Plan
    sha256: str
    size_bytes: int
    evaluation: Evaluation | None
    correction: str | None
    precision_cosine: float | None
    kept: bool  # made as well as it can be, not only to be timed
    profile: Profile | None = None


class Workshop:
    """Builds variants of one model into one folder, and remembers them by name."""

    def __init__(
        self,
        model: Model,
        repair: Repair,
        target: Target,
        device: DeviceCard,
        calibration: Images,
        held_out: Images,
        folder: Path,
        exact: Path,
        progress: Progress,
        form: Form,
        provenance: Mapping[str, object],
    ) -> None:
        """`folder` gets the variants, `exact` their graphs in float32 where the target wants fewer bits."""
        self.model, self.repair, self.target, self.device = model, repair, target, device
        self.folder, self.progress = folder, progress
        self.held_out = held_out if _labels_suit(held_out, model) else None
        self.form, self.provenance = form, provenance
        self.gate_images = next(calibration.batches(GATE_IMAGES))  # (<=8, 3, H, W)
        self.gate_inputs = next(calibration.inputs(GATE_IMAGES, form.takes_bytes))
        others = replace(calibration, pixels=calibration.pixels[GATE_IMAGES:], labels=None)  # than those of the gates
        self.ranging_images = (others if len(others) >= GATE_IMAGES else calibration).first(RANGING_IMAGES)
        self.timed_batch = np.resize(self.gate_inputs, (target.batch, *self.gate_inputs.shape[1:]))
        self.built: dict[str, Built] = {}
        drawn, precision = blueprint(model, repair.ranking), target.precision
        self.emitter = Emitter(drawn, folder, form.takes_bytes, precision)
        self.exact = self.emitter if precision == "fp32" else Emitter(drawn, exact, form.takes_bytes)

    def add(self, name: str, plan: Plan, keep: bool = False) -> None:
        """Cut, repair, export and check a variant, unless it is there already; `keep`: as well as we can."""
        before = self.built.get(name)
        if before is not None and (before.kept or not keep):
            return
        self.progress.phase(f"building {name}")
        module, correction = self.repair.kept(plan) if keep else self.repair.probe(plan)
        if before is not None and correction == before.correction:
            self.built[name] = replace(before, kept=True)
            return
        wanted = self._checked_outputs(name, plan, module)
        made = corrected_layers(module, self.repair.ranking, plan, self.emitter.blueprint.dense)
        told = {"snapvit.correction": correction or "none", "snapvit.recipe": to_json(self.provenance).decode()}
        write = partial(self.exact.write, name, plan, made, metadata=told)
        written = self._checked_graphs(name, module, wanted, write)
        cosine = None
        if self.exact is not self.emitter:
            write = partial(self.emitter.write, name, plan, made, metadata=told)
            written, cosine = self._in_fewer_bits(name, written, write)
        path, size = written.graph, written.size_bytes
        self.built[name] = Built(
            name,
            path,
            written.weights,
            plan,
            sha256(path),
            size,
            self._evaluate(name, path),
            correction,
            cosine,
            keep,
        )

    def _checked_graphs(
        self, name: str, module: torch.nn.Module, wanted: npt.NDArray[np.float32], write: Callable[..., Written]
    ) -> Written:
        """Write the graphs of both flavours in float32, pass their gates, and return the one to go on with."""
        last, form = self.form.flavour, self.form
        if self.exact is not self.emitter:  # only to compare and to calibrate with, which needs a portable graph
            last, form = "portable", Form()
        for flavour in sorted(OPSETS, key=lambda flavour: flavour == last):
            written = write(options=Options(flavour, form.batch), single_file=form.single_file)
            require_equal(
                f"{name}: module and {flavour} graph",
                wanted,
                self._outputs(written.graph),
                where=partial(self._where, module, written.graph),
            )
        return written

    def _in_fewer_bits(self, name: str, exact: Written, write: Callable[..., Written]) -> tuple[Written, float]:
        """Write the graph in the target's precision; also how close it is to the one in float32."""
        precision = self.target.precision
        images = list(self.ranging_images.inputs(1, self.form.takes_bytes))
        symmetric = self.form.flavour == "portable"
        numerics = calibrate(precision, exact, images, symmetric, usable_cores())
        if numerics.wide:
            parts = ", ".join(sorted(numerics.wide))
            self.progress.note(f"{name}: fp16 would overflow in {parts}, which stay in float32")
        options = Options(self.form.flavour, self.form.batch, numerics=numerics)
        written = write(options=options, single_file=self.form.single_file)
        found = require_close(
            f"{name}: {precision} and fp32 graph",
            self._outputs(exact.graph),
            self._outputs(written.graph),
            precision,
            where=lambda: first_difference(self._streams(exact.graph), self._streams(written.graph), NEAR[precision]),
        )
        self.progress.note(f"{name}: cosine to fp32 {found.cosine:.6f}")
        exact.graph.unlink()
        exact.graph.with_suffix(".bin").unlink(missing_ok=True)
        return written, found.cosine

    def _outputs(self, path: Path) -> npt.NDArray[np.float32]:
        with OrtSession(path, usable_cores()) as session:
            return session.run(self.gate_inputs)

    def _where(self, module: torch.nn.Module, path: Path) -> str:
        """Where a graph parts from its module."""
        return first_difference(self._streams_of(module), self._streams(path))

    def _streams(self, path: Path) -> Streams:
        return streams(path, np.resize(self.gate_inputs, (self.form.batch or GATE_IMAGES, *self.gate_inputs.shape[1:])))

    def _streams_of(self, module: torch.nn.Module) -> Streams:
        count = self.form.batch or GATE_IMAGES
        images = np.resize(self.gate_images, (count, *self.gate_images.shape[1:]))
        return block_outputs(module, torch.from_numpy(images))

    def _anatomy(self, correction: str | None) -> Anatomy:
        """The dense anatomy; a correction gives a bias to layers that had none."""
        return self.model.anatomy.with_output_biases() if correction in ADDS_BIASES else self.model.anatomy

    def time(self, names: Sequence[str], seconds: float = 1.0) -> None:
        """Time variants side by side, each for `seconds`; a variant timed before gets the newer profile."""
        self.progress.phase(f"timing {', '.join(names)}")
        sessions = {name: OrtSession(self.built[name].path, self.target.threads) for name in names}
        calls = {name: partial(session.run, self.timed_batch) for name, session in sessions.items()}
        samples = time_together(calls, seconds)
        for name, session in sessions.items():
            session.close()
            built = self.built[name]
            profile = to_profile(
                samples[name],
                batch=self.target.batch,
                threads=self.target.threads,
                sha256=built.sha256,
                device=self.device,
            )
            self.built[name] = replace(built, profile=profile)
            self.progress.note(f"{name}: p50 {profile.p50_ms:.2f} ms, p90 {profile.p90_ms:.2f} ms")

    def p50_ms(self, name: str) -> float:
        """The latency that a budget means: the median of the last timing."""
        return self._profile(name).p50_ms

    def measurements(self, budget_ms: float) -> tuple[Measurement, ...]:
        """Everything that was built and timed, densest first."""
        anatomy = self.model.anatomy
        found = [
            Measurement(
                variant=built.name,
                sparsity=built.plan.sparsity(anatomy),
                correction=built.correction,
                params=self._anatomy(built.correction).params(built.plan),
                flops=anatomy.flops(built.plan),
                size_bytes=built.size_bytes,
                profile=self._profile(built.name),
                evaluation=built.evaluation,
                fits=self.p50_ms(built.name) <= budget_ms,
            )
            for built in self.built.values()
        ]
        return tuple(sorted(found, key=lambda m: (-m.flops, m.variant)))

    def finish(self, keep: Collection[str | None]) -> tuple[Variant, ...]:
        """Remove the files of probes that are not kept, and describe the rest, densest first."""
        for built in self.built.values():
            if built.name not in keep:
                built.path.unlink()
                (self.folder / f"{built.name}.bin").unlink(missing_ok=True)
        variants = [self._variant(built) for built in self.built.values() if built.name in keep]
        return tuple(sorted(variants, key=lambda v: (-v.flops, v.name)))

    def weight_files(self, keep: Collection[str | None]) -> tuple[WeightFile, ...]:
        """All files that the graphs of these variants point into, the shared one first."""
        paths = dict.fromkeys(path for built in self.built.values() if built.name in keep for path in built.weights)
        return tuple(WeightFile(file=path.name, size_bytes=path.stat().st_size, sha256=sha256(path)) for path in paths)

    def _variant(self, built: Built) -> Variant:
        anatomy, plan = self.model.anatomy, built.plan
        return Variant(
            name=built.name,
            file=built.path.name,
            weights=tuple(path.name for path in built.weights),
            sparsity=plan.sparsity(anatomy),
            heads=plan.heads,
            neurons=plan.neurons,
            params=self._anatomy(built.correction).params(plan),
            flops=anatomy.flops(plan),
            flops_ratio=plan.flops_ratio(anatomy),
            size_bytes=built.size_bytes,
            sha256=built.sha256,
            precision=self.target.precision,
            precision_cosine=built.precision_cosine,
            corrected=built.correction is not None,
            correction=built.correction,
            profile=built.profile,
            evaluation=built.evaluation,
        )

    def _checked_outputs(self, name: str, plan: Plan, module: torch.nn.Module) -> npt.NDArray[np.float32]:
        """What the repaired module gives for the gate's images, after the first gate: masked = sliced."""
        images, ranking = torch.from_numpy(self.gate_images), self.repair.ranking
        sliced = shrink(self.model.module, ranking, plan)
        with torch.no_grad(), masked(self.model.module, ranking, plan) as dense:
            require_equal(
                f"{name}: masked and sliced",
                dense(images).numpy(),
                sliced(images).numpy(),
                where=lambda: first_difference(block_outputs(dense, images), block_outputs(sliced, images)),
            )
        with torch.no_grad():
            return module(images).numpy()

    def _evaluate(self, name: str, path: Path) -> Evaluation | None:
        if self.held_out is None:
            return None
        self.progress.phase(f"evaluating {name}")
        with OrtSession(path, usable_cores()) as session:
            return top1(session.run, self.held_out, self.form.takes_bytes)

    def _profile(self, name: str) -> Profile:
        profile = self.built[name].profile
        assert profile is not None, f"{name} was not timed"
        return profile


def _labels_suit(images: Images, model: Model) -> bool:
    """Whether the labels of a source are the classes of the model: as many, and of the same names if both have any."""
    if images.labels is None or not len(images) or len(images.classes) != model.anatomy.classes:
        return False
    known = model.description.labels
    return not known or tuple(images.classes) == known
