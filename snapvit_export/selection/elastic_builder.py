"""Builds variants on a device from an Elastic folder: corrected, and compared in both flavours. Light: no torch.

They are made in a scratch folder; `adopt` moves those that are kept into the family, whose weight file is the same.
Other weight files are named by their contents, so one that is there already is the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..checks.gates import SAME_WEIGHTS, flavour_tolerance, require_same_graph, require_same_in_runtime
from ..checks.merging import run_and_read
from ..elastic.folder import Elastic
from ..errors import FileFormatError
from ..family.manifest import Manifest
from ..graph.format import OPSETS, GraphFormat
from ..graph.precision import GraphPrecision
from ..graph.writer import WEIGHTS, Blueprint, GraphWriter
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..runtimes.ort import OrtSession
from ..storage.atomic import sha256
from ..target import SumBits, Target
from .candidates import BuiltVariant, SampleGraphs, write_samples


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
    ) -> None:
        """`inputs`: some images of a height and width, as the graphs take them; `scratch`: for what is built."""
        self.packed, self.target, self.format, self.progress = packed, target, format, progress
        self.inputs = inputs
        recorded = manifest.variant(manifest.dense).int8_sum_bits
        sum_bits: SumBits = 32 if recorded is UNSET else recorded  # older families do not record it
        self.writer = GraphWriter(Blueprint.of(packed), scratch, format.takes_bytes, target.precision, sum_bits)
        self.precision = GraphPrecision(target.precision)

    def require_same_model(self, folder: Path, dense: BuiltVariant) -> None:
        """Refuse an Elastic folder whose dense model is not the family's, before anything is timed."""
        cut = self.writer.write(dense.name, dense.plan, format=self.format, precision=self.precision)
        ours, theirs = (self._outputs(path, dense.plan) for path in (dense.path, cut.graph))
        same = {sha256(path) for path in cut.weights} == {sha256(path) for path in dense.weights}
        if not same or not np.allclose(ours, theirs, atol=SAME_WEIGHTS, rtol=SAME_WEIGHTS):
            raise FileFormatError(f"{self.packed.folder}: of other weights than {folder}. Pack the model of the family")

    def build(self, name: str, plan: Plan, keep: bool, before: BuiltVariant | None = None) -> BuiltVariant:
        """Cut a variant, corrected if the folder has factors; it is always as good as this folder can make it.

        The factors are of the dense model's stream with all of its tokens, also for a Plan that has fewer.
        """
        self.progress.phase(f"cutting {name}")
        corrected = self.packed.corrected_layers(plan) if self.packed.corrects else None
        correction = "elastic" if corrected else None
        stream = {"snapvit.correction_tokens": "all"} if corrected and plan.changes_tokens else {}
        inputs, reference = self._inputs_of(plan), None
        for flavour in sorted(OPSETS, key=lambda flavour: flavour == self.format.flavour):  # the wanted one last
            written = self.writer.write(
                name,
                plan,
                corrected,
                format=replace(self.format, flavour=flavour),
                precision=self.precision,
                metadata={"snapvit.correction": correction or "none", **stream},
            )
            if reference is None:
                reference = run_and_read(written.graph, inputs)  # the next one takes its place
        tolerance = flavour_tolerance(self.target.precision)
        assert reference is not None
        require_same_graph(f"{name}: graphs of both flavours", *reference, written.graph, inputs, tolerance)
        require_same_in_runtime(name, written.graph, self.target, inputs)
        return BuiltVariant(
            name=name,
            path=written.graph,
            weights=written.weights,
            plan=plan,
            sha256=sha256(written.graph),
            size_bytes=written.size_bytes,
            evaluation=None,
            correction=correction,
            precision_cosine=None,
            kept=True,
            int8_sum_bits=self.writer.int8_sum_bits,
        )

    def write_samples(self, plans: Mapping[str, Plan]) -> SampleGraphs:
        """Write graphs of uncorrected weights for a latency model."""
        return write_samples(self.writer, plans, self.format, self.precision)

    def _inputs_of(self, plan: Plan) -> npt.NDArray[Any]:
        """Return images of a Plan's size."""
        return self.inputs(self.writer.anatomy.image_of(plan))

    def _outputs(self, path: Path, plan: Plan) -> npt.NDArray[np.float32]:
        with OrtSession(path, usable_cores()) as session:
            return session.run(self._inputs_of(plan))


def adopt(folder: Path, built: BuiltVariant) -> BuiltVariant:
    """Move a new variant into a family folder; its graph points into the family's weight file, which is the same."""
    for path in {*built.files, *built.weights}:
        if path.name != WEIGHTS and path.is_file():
            path.replace(folder / path.name)
    weights = tuple(folder / path.name for path in built.weights)
    return replace(built, path=folder / built.path.name, weights=weights)
