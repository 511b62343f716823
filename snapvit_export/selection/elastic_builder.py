"""Builds variants on a device from an Elastic folder: corrected, and compared in two flavours. Light: no torch.

They are made in a scratch folder; `adopt` moves those that are kept into the family, whose weight file is the same. So
is that of another precision, if the family has one already. Other weight files are named by their contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..checks.gates import SAME_WEIGHTS, flavour_tolerance, require_same_graph, require_same_in_runtime
from ..checks.merging import run_and_read
from ..correction.cholesky import WIDTHS_KEPT
from ..elastic.folder import Elastic, Weights
from ..errors import FileFormatError, SnapvitError
from ..family.manifest import Manifest
from ..graph.format import OTHER, Flavour, GraphFormat
from ..graph.precision import GraphPrecision
from ..graph.writer import Blueprint, GraphWriter, WrittenGraph, is_shared, shared_file
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..runtimes.ort import OrtSession
from ..storage.atomic import sha256
from ..target import Precision, SumBits, Target
from .candidates import BuiltVariant, Probe, SampleGraphs, write_samples
from .point import Point

WITHOUT_IMAGES: tuple[Precision, ...] = ("fp32", "int8-dynamic")  # the others need calibration


class ElasticBuilder:
    """Builds variants of a family from an Elastic folder of the same model and ranking."""

    def __init__(
        self,
        packed: Elastic,
        manifest: Manifest,
        target: Target,
        format: GraphFormat,
        inputs: Callable[[tuple[int, int]], npt.NDArray[Any]],
        scratch: Path,
        progress: Progress,
        are_real: bool = True,
    ) -> None:
        """`inputs`: some images of a height and width, as the graphs take them; `scratch`: for what is built.

        `are_real`: False for random pixels, on which forms of one graph are compared, but no runtime with another.

        `target`: in the family's own precision.
        """
        self.packed, self.target, self.format, self.progress = packed, target, format, progress
        self.inputs, self.scratch, self.manifest, self.are_real = inputs, scratch, manifest, are_real
        self._blueprint = Blueprint.of(packed)
        self._writers: dict[Precision, GraphWriter] = {}
        self._compared: dict[Precision, GraphWriter] = {}
        self._corrected = corrections_of(packed)

    def writer(self, precision: Precision) -> GraphWriter:
        """Return the writer of variants in a precision."""
        if precision not in WITHOUT_IMAGES:
            raise SnapvitError(f"variants in {precision} need calibration images. Export them where the images are")
        if precision not in self._writers:
            self._writers[precision] = self._make_writer(precision)
        return self._writers[precision]

    def _make_writer(self, precision: Precision) -> GraphWriter:
        """Return a new writer; the weight file that its graphs share must be the family's, if that has one."""
        name, sum_bits = shared_file(precision, self.target.precision), _sum_bits(self.manifest, precision)
        takes_bytes, flavour = self.format.takes_bytes, self.format.flavour
        made = GraphWriter(self._blueprint, self.scratch, takes_bytes, precision, sum_bits, name, flavour)
        known = next((file.sha256 for file in self.manifest.weights if file.file == name), None)
        if known not in (None, made.weights_sha256):
            raise FileFormatError(f"{self.packed.folder}: of other weights than {name} of the family. Pack its model")
        return made

    def _other_writer(self, precision: Precision) -> GraphWriter:
        """Return the writer of graphs in another flavour, to compare with: the same, or one of other weights."""
        if self.format.flavour != "tensorrt":
            return self.writer(precision)
        if precision not in self._compared:
            folder = self.scratch / f"compared-{precision}"
            folder.mkdir()
            self._compared[precision] = GraphWriter(self._blueprint, folder, self.format.takes_bytes, precision)
        return self._compared[precision]

    def require_same_model(self, folder: Path, dense: BuiltVariant) -> None:
        """Refuse an Elastic folder whose dense model is not the family's, before anything is timed."""
        precision = GraphPrecision(dense.precision)
        cut = self.writer(dense.precision).write(dense.name, dense.plan, format=self.format, precision=precision)
        ours, theirs = (self._outputs(path, dense.plan) for path in (dense.path, cut.graph))
        same = {sha256(path) for path in cut.weights} == {sha256(path) for path in dense.weights}
        if not same or not np.allclose(ours, theirs, atol=SAME_WEIGHTS, rtol=SAME_WEIGHTS):
            raise FileFormatError(f"{self.packed.folder}: of other weights than {folder}. Pack the model of the family")

    def build(self, name: str, point: Point, keep: bool, before: BuiltVariant | None = None) -> BuiltVariant:
        """Cut a variant, corrected if the folder has factors; it is always as good as this folder can make it.

        The factors are of the dense model's stream with all of its tokens, also for a Plan that has fewer.
        """
        self.progress.phase(f"cutting {name}")
        plan, writer, wanted = point.plan, self.writer(point.precision), self.format.flavour
        corrected = self._corrected_layers(plan)
        correction = "elastic" if corrected else None
        stream = {"snapvit.correction_tokens": "all"} if corrected and plan.changes_tokens else {}
        inputs, metadata = self._inputs_of(plan), {"snapvit.correction": correction or "none", **stream}

        def write(by: GraphWriter, flavour: Flavour) -> WrittenGraph:
            format, precision = replace(self.format, flavour=flavour), GraphPrecision(point.precision)
            return by.write(name, plan, corrected, format=format, precision=precision, metadata=metadata)

        reference = run_and_read(write(self._other_writer(point.precision), OTHER[wanted]).graph, inputs)
        written = write(writer, wanted)  # may take its place
        tolerance = flavour_tolerance(point.precision)
        require_same_graph(f"{name}: graphs of two flavours", *reference, written.graph, inputs, tolerance)
        target = msgspec.structs.replace(self.target, precision=point.precision)
        scores, compared = self.packed.anatomy.classes > 1, None
        if self.are_real:
            compared = require_same_in_runtime(name, written.graph, target, inputs, scores)
        return BuiltVariant(
            name=name,
            path=written.graph,
            weights=written.weights,
            plan=plan,
            precision=point.precision,
            sha256=sha256(written.graph),
            size_bytes=written.size_bytes,
            correction=correction,
            precision_cosine=None,
            kept=True,
            int8_sum_bits=writer.int8_sum_bits,
            compared=compared,
        )

    def write_samples(self, plans: Mapping[str, Plan], precision: Precision) -> SampleGraphs:
        """Write graphs of uncorrected weights for a latency model."""
        return write_samples(self.writer(precision), plans, self.format, GraphPrecision(precision))

    def write_probe(self, name: str, point: Point) -> Probe:
        """Write a graph to be compared with the dense model, in its own precision."""
        precision = GraphPrecision(point.precision)
        written = self.writer(point.precision).write(
            name, point.plan, self._corrected_layers(point.plan), format=self.format, precision=precision
        )
        return Probe(written.graph, written.weights, point.precision)

    def _corrected_layers(self, plan: Plan) -> Weights | None:
        return self._corrected(plan.heads, plan.neurons) if self.packed.corrects else None

    def _inputs_of(self, plan: Plan) -> npt.NDArray[Any]:
        """Return images of a Plan's size."""
        return self.inputs(self.packed.anatomy.image_of(plan))

    def _outputs(self, path: Path, plan: Plan) -> npt.NDArray[np.float32]:
        with OrtSession(path, usable_cores()) as session:
            return session.run(self._inputs_of(plan))


def corrections_of(packed: Elastic) -> Callable[[tuple[int, ...], tuple[int, ...]], Weights]:
    """Return what corrects the layers of a width, by its heads and neurons; the last few stay in memory.

    It holds the folder and nothing that holds it: in a circle the mapped files would stay open after their last use.
    """

    def corrected(heads: tuple[int, ...], neurons: tuple[int, ...]) -> Weights:
        return packed.corrected_layers(Plan(heads=heads, neurons=neurons))

    return lru_cache(WIDTHS_KEPT)(corrected)


def _sum_bits(manifest: Manifest, precision: Precision) -> SumBits:
    """Return the kind of int8 that a family has already, since its variants share a weight file; or the newer one."""
    found = [variant.int8_sum_bits for variant in manifest.variants if variant.precision == precision]
    if not found:
        return 16
    return 32 if found[0] is UNSET else found[0]  # older families do not record it


def adopt(folder: Path, built: BuiltVariant) -> BuiltVariant:
    """Move a new variant into a family folder; a weight file that others share is moved if the family has none yet."""
    for path in (*built.weights, *built.files):
        kept = folder / path.name
        if path == kept or not path.is_file():
            continue  # of the family already, or moved with another variant
        if not (is_shared(path) and kept.is_file()):  # the same, as the builder made sure
            path.replace(kept)
    weights = tuple(folder / path.name for path in built.weights)
    return replace(built, path=folder / built.path.name, weights=weights)
