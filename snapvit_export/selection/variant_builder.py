"""Builds the variants of an export: cut, correct, write, check; each file is built once. Light.

A `Cutter` gives the corrected weights of any Plan: from a module in torch (`prune.build`), or from tensors and factors
alone (`onnx_rank.cutter`). A variant of smaller images is checked on the same images, read again in its own size. The
gates, each on real images:

    the cut itself                               the Cutter's own: in torch, masked = sliced
    corrected model = graph = other flavour      graphs in float32, with the tokens that the Plan has
    graph in reduced precision ~ in float32      if the target has another precision
    target's runtime = ONNX Runtime              if it is another one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..checks.activations import streams
from ..checks.comparison import Compared
from ..checks.gates import (
    BLOCK_TOLERANCE,
    LEAST_COSINE,
    Streams,
    first_difference,
    require_close_elsewhere,
    require_close_graph,
    require_same_graph,
    require_same_in_runtime,
)
from ..checks.merging import Matches, run_and_read
from ..checks.quantisation import calibrate
from ..graph.format import OTHER, Flavour, GraphFormat
from ..graph.precision import GraphPrecision
from ..graph.writer import Blueprint, GraphWriter, WrittenGraph, shared_file
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..runtimes.session import open_session, with_cores_here
from ..storage.atomic import sha256
from ..storage.json import to_json
from ..target import Precision, Target, in_precision
from .candidates import BuiltVariant, Probe, SampleGraphs, write_samples
from .point import Point

GATE_IMAGES = 8
RANGING_IMAGES = 32  # on which the ranges of values are measured for reduced precision


Layers = Mapping[str, npt.NDArray[np.float32]]  # proj and fc2 that differ from the dense ones, by canonical name


class CutModel(Protocol):
    """The corrected weights of one Plan, and what they say of images."""

    @property
    def correction(self) -> str | None:
        """The name of the correction; None if nothing was corrected."""
        ...

    def layers(self) -> Layers:
        """Return the proj and fc2 that differ from the dense ones, in rank order."""
        ...

    def outputs(self, images: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], Mapping[int, Matches]] | None:
        """Return what it says of images, and the merges; None if only its graphs can be run."""
        ...

    def streams(self, images: npt.NDArray[np.float32]) -> Streams:
        """Return the output of each block."""
        ...


class Cutter(Protocol):
    """Cuts and corrects one model along its ranking."""

    @property
    def blueprint(self) -> Blueprint:
        """The dense model in rank order."""
        ...

    def cut(self, plan: Plan, keep: bool) -> CutModel:
        """Return the corrected model of a Plan; `keep`: as well as can be, not only to be timed."""
        ...

    def check(self, name: str, plan: Plan, images: npt.NDArray[np.float32]) -> None:
        """Refuse a cut that does not compute what it should, before any correction."""
        ...

    def probe_layers(self, plan: Plan) -> Layers | None:
        """Return the corrected layers of a probe for its graph; None: nothing to correct."""
        ...


@dataclass(frozen=True, eq=False)
class GateImages:
    """The images of a gate in one size, as modules and as graphs take them."""

    normalised: npt.NDArray[np.float32]  # (<=8, 3, H, W)
    inputs: npt.NDArray[Any]  # the same, or bytes (<=8, H, W, 3)

    def batch(self, count: int) -> npt.NDArray[Any]:
        """Return so many of them as graphs take them, over and over."""
        return np.resize(self.inputs, (count, *self.inputs.shape[1:]))


class VariantBuilder:
    """Builds variants of one model into one folder, in one precision or several."""

    def __init__(
        self,
        cutter: Cutter,
        target: Target,
        format: GraphFormat,
        calibration: Images,
        folder: Path,
        exact_folder: Path,
        provenance: Mapping[str, object],
        progress: Progress,
        runs_target: bool = True,
    ) -> None:
        """`folder` gets the variants, `exact_folder` float32 graphs that those in another precision are compared with.

        `runs_target`: False if the target's runtime cannot run here.
        """
        self.cutter, self.blueprint, self.provenance, self.progress = cutter, cutter.blueprint, provenance, progress
        self.anatomy = cutter.blueprint.anatomy
        self.target, self.format, self.folder, self.runs_target = target, format, folder, runs_target
        self.calibration = calibration
        self._gate_images: dict[tuple[int, int], GateImages] = {}
        self._exact_folder = exact_folder
        self._writers: dict[Precision, GraphWriter] = {}
        self._exact: dict[Path, GraphWriter] = {}
        self._calibrated: dict[Precision, GraphPrecision] = {}  # of the dense variant
        others = calibration.only(slice(GATE_IMAGES, None))  # not used by the gates
        self.ranging_images = (others if len(others) >= GATE_IMAGES else calibration).first(RANGING_IMAGES)

    @property
    def advice(self) -> str:
        """The end of the error message if no variant meets a budget: what would help."""
        smaller = "use --precision int8, " if self.target.precision in ("fp32", "fp16") else "use "
        return f"{smaller}a smaller model or more --threads"

    def quantises(self, precision: Precision) -> bool:
        """Return True if another program quantises graphs that are written here in fp32."""
        return self.target.runtime == "openvino" and precision != "fp32"

    def writer(self, precision: Precision) -> GraphWriter:
        """Return the writer of variants in a precision."""
        if precision not in self._writers:
            name = shared_file(precision, self.target.precision)
            self._writers[precision] = GraphWriter(
                self.blueprint,
                self.folder,
                self.format.takes_bytes,
                precision,
                shared=name,
                flavour=self.format.flavour,
            )
        return self._writers[precision]

    def exact(self, flavour: Flavour) -> GraphWriter:
        """Return the writer of float32 graphs that others are compared with; TensorRT's have a folder of their own."""
        folder = self._exact_folder / flavour if flavour == "tensorrt" else self._exact_folder
        if folder not in self._exact:
            folder.mkdir(exist_ok=True)
            self._exact[folder] = GraphWriter(self.blueprint, folder, self.format.takes_bytes, flavour=flavour)
        return self._exact[folder]

    def gate_images(self, image: tuple[int, int] | None = None) -> GateImages:
        """Return the images of the gates, in the model's own size or in another."""
        size = image or self.anatomy.image
        if size not in self._gate_images:
            few = self.calibration.at(size).first(GATE_IMAGES)
            inputs = next(few.inputs(GATE_IMAGES, self.format.takes_bytes))
            self._gate_images[size] = GateImages(next(few.batches(GATE_IMAGES)), inputs)
        return self._gate_images[size]

    def build(self, name: str, point: Point, keep: bool, before: BuiltVariant | None = None) -> BuiltVariant:
        """Cut, correct, write and check a variant; `keep`: by the chosen correction, not as a probe."""
        self.progress.phase(f"building {name}")
        plan, precision = point.plan, point.precision
        cut = self.cutter.cut(plan, keep)
        correction = cut.correction
        if before is not None and correction == before.correction and not plan.changes_tokens:
            return replace(before, kept=True)  # with other tokens, a probe is corrected by statistics of all of them
        image = self.anatomy.image_of(plan)
        gate = self.gate_images(image)
        self.cutter.check(name, plan, self.gate_images().normalised)
        corrected = cut.layers()
        metadata = {"snapvit.correction": correction or "none", "snapvit.recipe": to_json(self.provenance).decode()}

        def in_floats(format: GraphFormat) -> WrittenGraph:
            shares = format.flavour == self.format.flavour or self.format.flavour != "tensorrt"
            writer = self.writer("fp32") if precision == "fp32" and shares else self.exact(format.flavour)
            return writer.write(name, plan, corrected, format=format, metadata=metadata)

        written, parity = self._checked_graphs(name, precision, cut, gate, in_floats)
        cosine = None
        if self.quantises(precision):
            path, weights, cosine = self._in_openvino_int8(name, precision, written, image)
            size = sum(file.stat().st_size for file in (path, *weights))
        else:
            if precision != "fp32":
                write = partial(self.writer(precision).write, name, plan, corrected, metadata=metadata)
                is_dense = plan == Plan.dense(self.anatomy)
                written, cosine = self._in_reduced_precision(name, precision, written, image, write, is_dense)
            path, weights, size = written.graph, written.weights, written.size_bytes
        compared = None
        if self.quantises(precision) and cosine is not None:  # with fp32, when it was made
            nearest, least = min(cosine, 1.0), LEAST_COSINE[precision]
            count = len(gate.inputs)
            compared = Compared(
                cosine=nearest, least_cosine=nearest, asked=least, images=count, passed=True, beside="fp32"
            )
        elif self.runs_target:
            scores = self.anatomy.classes > 1
            compared = require_same_in_runtime(name, path, self._target(precision), gate.inputs, scores)
        return BuiltVariant(
            name=name,
            path=path,
            weights=weights,
            plan=plan,
            precision=precision,
            sha256=sha256(path),
            size_bytes=size,
            correction=correction,
            precision_cosine=cosine,
            kept=keep,
            parity=parity,
            # None for OpenVINO, whose int8 NNCF makes
            int8_sum_bits=None if self.quantises(precision) else self.writer(precision).int8_sum_bits,
            compared=compared,
        )

    def write_samples(self, plans: Mapping[str, Plan], precision: Precision) -> SampleGraphs | None:
        """Write graphs of uncorrected weights; None where each would have to be quantised with images first."""
        if self.quantises(precision):
            return None
        known = self._calibrated.get(precision, GraphPrecision(precision))
        return write_samples(self.writer(precision), plans, self.format, known)

    def write_probe(self, name: str, point: Point) -> Probe:
        """Write a graph to be compared on images, corrected from factors; in float32 if its own needs calibration."""
        plan, own = point.plan, point.precision in ("fp32", "int8-dynamic")
        precision: Precision = point.precision if own else "fp32"
        corrected = self.cutter.probe_layers(plan)
        writer = self.writer(precision) if own else self.exact(self.format.flavour)
        written = writer.write(name, plan, corrected, format=self.format, precision=GraphPrecision(precision))
        return Probe(written.graph, written.weights, precision)

    def _target(self, precision: Precision) -> Target:
        return in_precision(self.target, precision)

    def _in_openvino_int8(
        self, name: str, precision: Precision, exact: WrittenGraph, image: tuple[int, int]
    ) -> tuple[Path, tuple[Path, ...], float]:
        """Quantise with NNCF; return the graph, its weights and its cosine to the graph in float32."""
        from ..runtimes.openvino_nncf import quantise

        self.progress.phase(f"quantising {name}")
        images, gate = self._ranging_inputs(image), self.gate_images(image)
        path, weights = quantise(exact.graph, self.folder / name, images, usable_cores())
        with open_session(path, with_cores_here(self._target(precision))) as session:
            outputs = session.run(gate.inputs)
        what = f"{name}: int8 in OpenVINO and fp32 in ONNX Runtime"
        found = require_close_elsewhere(what, exact.graph, outputs, gate.inputs, precision)
        self.progress.note(f"{name}: cosine to fp32 {found.cosine:.6f}")
        exact.remove()
        return path, (weights,), found.cosine

    def _ranging_inputs(self, image: tuple[int, int]) -> list[npt.NDArray[Any]]:
        return list(self.ranging_images.at(image).inputs(1, self.format.takes_bytes))

    def _checked_graphs(
        self,
        name: str,
        precision: Precision,
        cut: CutModel,
        gate: GateImages,
        write: Callable[[GraphFormat], WrittenGraph],
    ) -> tuple[WrittenGraph, float | None]:
        """Write two flavours in float32 through their gates; return the wanted one and its largest difference.

        That is to the model outside a graph; None if there is none, and the flavours are compared with each other.
        """
        reference = cut.outputs(gate.normalised)
        is_outside, largest = reference is not None, None
        format = self.format
        if precision != "fp32":  # float32 is then only the reference, and graphs for ONNX Runtime hide values
            flavour: Flavour = "tensorrt" if format.flavour == "tensorrt" else "portable"
            format = GraphFormat(flavour, batch=format.batch if self.quantises(precision) else None)
        graphs = []
        for flavour in (OTHER[format.flavour], format.flavour):
            graphs.append(written := write(replace(format, flavour=flavour)))
            if reference is None:
                reference = run_and_read(written.graph, gate.inputs)  # the next one takes its place
                continue
            found = require_same_graph(
                f"{name}: module and {flavour} graph" if is_outside else f"{name}: graphs of two flavours",
                *reference,
                written.graph,
                gate.inputs,
                where=partial(self._where, cut if is_outside else None, written.graph, gate),
            )
            largest = found.max_abs if is_outside else None
        if graphs[0].graph != written.graph:  # in another folder
            graphs[0].remove()
        return written, largest

    def _in_reduced_precision(
        self,
        name: str,
        precision: Precision,
        exact: WrittenGraph,
        image: tuple[int, int],
        write: Callable[..., WrittenGraph],
        is_dense: bool,
    ) -> tuple[WrittenGraph, float]:
        """Write the graph in a reduced precision; return it and its cosine to the one in float32."""
        images, gate = self._ranging_inputs(image), self.gate_images(image)
        calibrated = calibrate(precision, exact, images, self.format.flavour, usable_cores())
        if is_dense:
            self._calibrated[precision] = calibrated
        if calibrated.wide:
            parts = ", ".join(sorted(calibrated.wide))
            self.progress.note(f"{name}: fp16 would overflow in {parts}, which stay in float32")
        written = write(format=self.format, precision=calibrated)
        found = require_close_graph(
            f"{name}: {precision} and fp32 graph",
            exact.graph,
            written.graph,
            gate.inputs,
            precision,
            where=lambda: first_difference(
                self._streams(exact.graph, gate), self._streams(written.graph, gate), BLOCK_TOLERANCE[precision]
            ),
        )
        self.progress.note(f"{name}: cosine to fp32 {found.cosine:.6f}")
        exact.remove()
        return written, found.cosine

    def _where(self, cut: CutModel | None, path: Path, gate: GateImages) -> str:
        """Describe where a graph first differs from its model; of graphs alone only the outputs are known."""
        if cut is None:
            return ""
        count = self.format.batch or GATE_IMAGES
        images = np.resize(gate.normalised, (count, *gate.normalised.shape[1:]))
        return first_difference(cut.streams(images), self._streams(path, gate))

    def _streams(self, path: Path, gate: GateImages) -> Streams:
        return streams(path, gate.batch(self.format.batch or GATE_IMAGES))
