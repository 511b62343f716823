"""Where variants are made during an export: cut, exported, checked, timed, evaluated; each file built once.

Uses torch to cut and to check; timing and accuracy go through the runtime, on the very file that is shipped. The gates,
each on real images:

    masked = sliced                        modules, before any repair
    repaired module = portable = ort       graphs in float32
    graph in fewer bits ~ in float32       if the target has another precision
    target's runtime = ONNX Runtime        if it is another one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ..calibration.images import Images
from ..checks.activations import streams
from ..checks.gates import NEAR, Streams, first_difference, require_close, require_equal, require_same_in_runtime
from ..checks.quantisation import calibrate
from ..evaluate.exported_model import top1
from ..family.evaluation import Evaluation
from ..graph.forward import OPSETS, Options
from ..graph.writer import Emitter, Written
from ..model.plan import Plan
from ..profiling.latency_model import LatencyModel
from ..progress import Progress
from ..runtimes.device import DeviceCard, usable_cores
from ..runtimes.ort import OrtSession
from ..runtimes.session import Session, open_session
from ..selection.candidates import Built, Form, Stand
from ..storage.atomic import sha256
from ..storage.json import to_json
from ..target import Target
from .blocks.timm_blocks import block_outputs
from .correct.policy import Repair
from .models.load import Model
from .models.masking import masked
from .models.slicing import shrink
from .pack import blueprint, corrected_layers

GATE_IMAGES = 8
RANGING_IMAGES = 32  # that tell how large values get, for fewer bits


class Workshop(Stand):
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
        times: bool = True,
    ) -> None:
        """`folder` gets the variants, `exact` their graphs in float32 where the target wants fewer bits.

        `times`: False if the target's runtime cannot run here, and nothing will be timed.
        """
        self.times = times
        self.gate_images = next(calibration.batches(GATE_IMAGES))  # (<=8, 3, H, W)
        self.gate_inputs = next(calibration.inputs(GATE_IMAGES, form.takes_bytes))
        drawn = blueprint(model, repair.ranking)
        self.folder = folder
        self.quantises = target.runtime == "openvino" and target.precision != "fp32"  # then graphs here are only fp32
        self.exact = Emitter(drawn, exact if target.precision != "fp32" else folder, form.takes_bytes)
        emitter = self.exact
        if target.precision != "fp32" and not self.quantises:
            emitter = Emitter(drawn, folder, form.takes_bytes, target.precision)
        super().__init__(model.anatomy, emitter, target, device, self.gate_inputs, form, progress)
        self.model, self.repair, self.provenance = model, repair, provenance
        self.held_out = held_out if _labels_suit(held_out, model) else None
        others = replace(calibration, pixels=calibration.pixels[GATE_IMAGES:], labels=None)  # than those of the gates
        self.ranging_images = (others if len(others) >= GATE_IMAGES else calibration).first(RANGING_IMAGES)

    @property
    def advice(self) -> str:
        """What would help if no variant fits a budget."""
        bits = "use --precision int8, " if self.target.precision in ("fp32", "fp16") else "use "
        return f"{bits}a smaller model or more --threads"

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
        written, parity = self._checked_graphs(name, module, wanted, write)
        cosine = None
        if self.quantises:
            path, weights, cosine = self._in_openvino_int8(name, written)
            size = sum(file.stat().st_size for file in (path, *weights))
        else:
            if self.exact is not self.emitter:
                write = partial(self.emitter.write, name, plan, made, metadata=told)
                written, cosine = self._in_fewer_bits(name, written, write)
            path, weights, size = written.graph, written.weights, written.size_bytes
        if self.times:
            require_same_in_runtime(name, path, self.target, self.gate_inputs)
        evaluation = self._evaluate(name, path)
        self.built[name] = Built(
            name,
            path,
            weights,
            plan,
            sha256(path),
            size,
            evaluation,
            correction,
            cosine,
            keep,
            parity=parity,
            int8_sum_bits=self.emitter.int8_sum_bits,  # None for OpenVINO, whose int8 NNCF makes
        )

    def build_engines(self) -> None:
        """Build TensorRT engines of all variants for a GPU that is not here, beside their graphs."""
        from ..runtimes.tensorrt.session import BuildOnly

        builder = BuildOnly.here()
        for name, built in self.built.items():
            self.progress.phase(f"building the engine of {name}")
            products = builder.build(built.path, self.target).counts
            told = ", ".join(f"{count} in {kind}" for kind, count in products.items())
            self.progress.note(f"{name}: matrix products {told}")

    def latency_model(self, lacking: bool = False) -> LatencyModel | None:
        """None where every net would have to be quantised with images first, which takes longer than a look or two."""
        return None if self.quantises else super().latency_model(lacking)

    def _in_openvino_int8(self, name: str, exact: Written) -> tuple[Path, tuple[Path, ...], float]:
        """Quantise with NNCF; also how close that is to the graph in float32."""
        from ..runtimes.openvino_nncf import quantise

        self.progress.phase(f"quantising {name}")
        images = list(self.ranging_images.inputs(1, self.form.takes_bytes))
        path, weights = quantise(exact.graph, self.folder / name, images, usable_cores())
        with open_session(path, self.target) as session:
            found = require_close(
                f"{name}: int8 in OpenVINO and fp32 in ONNX Runtime",
                self._outputs(exact.graph),
                session.run(self.gate_inputs),
                self.target.precision,
            )
        self.progress.note(f"{name}: cosine to fp32 {found.cosine:.6f}")
        exact.graph.unlink()
        exact.graph.with_suffix(".bin").unlink(missing_ok=True)
        return path, (weights,), found.cosine

    def _checked_graphs(
        self, name: str, module: torch.nn.Module, wanted: npt.NDArray[np.float32], write: Callable[..., Written]
    ) -> tuple[Written, float]:
        """Write the graphs of both flavours in float32, pass their gates; the one to go on with, and its difference."""
        last, form = self.form.flavour, self.form
        if self.target.precision != "fp32":  # only to compare and to calibrate with, which needs a portable graph
            last, form = "portable", Form(batch=self.form.batch if self.quantises else None)
        for flavour in sorted(OPSETS, key=lambda flavour: flavour == last):
            written = write(options=Options(flavour, form.batch), single_file=form.single_file)
            found = require_equal(
                f"{name}: module and {flavour} graph",
                wanted,
                self._outputs(written.graph),
                where=partial(self._where, module, written.graph),
            )
        return written, found.max_abs

    def _in_fewer_bits(self, name: str, exact: Written, write: Callable[..., Written]) -> tuple[Written, float]:
        """Write the graph in the target's precision; also how close it is to the one in float32."""
        precision = self.target.precision
        images = list(self.ranging_images.inputs(1, self.form.takes_bytes))
        symmetric = self.form.flavour == "portable"
        numerics = calibrate(precision, exact, images, symmetric, usable_cores())
        self.numerics = numerics if name == "dense" else self.numerics
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
        with self._open_to_evaluate(path) as session:
            return top1(session.run, self.held_out, self.form.takes_bytes)

    def _open_to_evaluate(self, path: Path) -> Session:
        """In the target's runtime, on all cores; in ONNX Runtime where the target's cannot run here."""
        if not self.times:
            return OrtSession(path, usable_cores())
        return open_session(path, msgspec.structs.replace(self.target, threads=usable_cores()))


def _labels_suit(images: Images, model: Model) -> bool:
    """Whether the labels of a source are the classes of the model: as many, and of the same names if both have any."""
    if images.labels is None or not len(images) or len(images.classes) != model.anatomy.classes:
        return False
    known = model.description.labels
    return not known or tuple(images.classes) == known
