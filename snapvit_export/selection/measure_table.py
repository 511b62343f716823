"""Measures the fidelity of some Plans of an Elastic folder on images, as a table that devices choose by. Light.

The Plans are combinations of levels along three axes: resolution, width and merging. What a device may choose lies
within them, or a little beyond. Every graph is made as a device makes it, corrected from the folder's factors, in fp32.
Cutting tokens and cutting widths lose neither sums nor products of what each loses, so no combination is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from ..calibration.images import Images
from ..elastic.fidelity_table import FidelityTable, MeasuredFidelity
from ..elastic.folder import Elastic
from ..errors import SnapvitError
from ..family.fidelity import Comparison
from ..graph.format import GraphFormat
from ..graph.precision import GraphPrecision
from ..graph.writer import Blueprint, GraphWriter, shared_file
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.in_threads import run_in_threads
from ..storage.temporary import scratch_folder
from ..target import Precision
from .elastic_builder import corrections_of
from .image_meter import BATCH, Outputs
from .space import Grid, grids_for

PATCHES = (1.0, 0.7, 0.45)  # of the model's own, nearest of the smaller grids: the first step costs more than the next
FLOPS = (0.93, 0.85, 0.7, 0.55)  # of the dense model's with all tokens
LEFT = (0.5, 0.25)  # of the patch tokens
LEAST_IMAGES = 8  # fewer say nothing of a divergence


def measure_table(packed: Elastic, images: Images, progress: Progress) -> FidelityTable:
    """Return the table of a folder, measured on images that nothing was fitted on."""
    anatomy = packed.anatomy
    grids, widths = table_grids(packed), _widths(packed)
    levels = _levels(packed, grids, widths)
    plans = [
        _merging(packed, width.with_tokens(grid=grid), left) for grid in grids for width in widths for left in levels
    ]
    progress.phase("measuring fidelity for devices without images", len(plans) + 1)
    with scratch_folder(packed.folder) as scratch:
        measure = _Measure(packed, images, scratch)
        values = []
        for plan in plans:
            values.append(measure.of(plan, "fp32"))
            progress.advance()
        int8 = measure.of(Plan.dense(anatomy), "int8-dynamic")
        progress.advance()
    return FidelityTable(
        by=measure.by,
        images=len(images),
        source=images.source,
        grids=tuple(anatomy.grid if grid is None else grid for grid in grids),
        widths=tuple(plan.flops_ratio(anatomy) for plan in widths),
        tokens=levels,
        values=tuple(values),
        int8_dynamic=int8,
    )


def can_resize(packed: Elastic) -> bool:
    """Return True if a folder can give the weights of other resolutions."""
    return packed.anatomy.rope == "none" or packed.description.wiring.rotary is not UNSET


def table_grids(packed: Elastic) -> list[Grid]:
    """Return the grids of the table, the model's own first."""
    anatomy = packed.anatomy
    found: list[Grid] = [None]
    others = [grid for grid in grids_for(anatomy) if grid is not None] if can_resize(packed) else []
    for share in PATCHES if others else ():
        nearest = min(others, key=lambda grid: abs(_patches(anatomy, grid) - share * anatomy.patches))
        if _patches(anatomy, nearest) < _patches(anatomy, found[-1]):
            found.append(nearest)
    return found


def _patches(anatomy: Anatomy, grid: Grid) -> int:
    return anatomy.patches if grid is None else grid[0] * grid[1]


def _widths(packed: Elastic) -> list[Plan]:
    """Return Plans of all tokens, each with fewer FLOPs than the one before."""
    found = [Plan.dense(packed.anatomy)]
    for fraction in FLOPS:
        try:
            plan = packed.planner.flops(fraction)
        except SnapvitError:  # out of reach
            break
        if plan.flops_ratio(packed.anatomy) < found[-1].flops_ratio(packed.anatomy):
            found.append(plan)
    return found


def _levels(packed: Elastic, grids: Sequence[Grid], widths: Sequence[Plan]) -> tuple[float, ...]:
    """Return the fractions of the patch tokens that all of these Plans can leave."""
    found = [1.0]
    for left in LEFT:
        try:
            for grid in grids:
                for plan in widths:
                    _merging(packed, plan.with_tokens(grid=grid), left)
        except SnapvitError:  # out of reach: each block halves them at most
            break
        found.append(left)
    return tuple(found)


def _merging(packed: Elastic, plan: Plan, left: float) -> Plan:
    if left == 1:
        return plan
    return plan.with_tokens(packed.merging.counts(packed.anatomy, plan, left), plan.grid)


class _Measure:
    """Compares Plans of one folder with its dense model."""

    def __init__(self, packed: Elastic, images: Images, scratch: Path) -> None:
        self.packed, self.images, self.scratch = packed, images, scratch
        self.blueprint = Blueprint.of(packed)
        self.writers: dict[Precision, GraphWriter] = {}
        self._corrected = corrections_of(packed)
        self.dense = self._outputs(Plan.dense(packed.anatomy), "fp32")
        self.by = self._compared(self.dense).by

    def of(self, plan: Plan, precision: Precision) -> MeasuredFidelity:
        """Return what a Plan loses in a precision."""
        found = msgspec.structs.asdict(self._compared(self._outputs(plan, precision)).fidelity())
        return MeasuredFidelity(**{name: found[name] for name in MeasuredFidelity.__struct_fields__})

    def _compared(self, outputs: Outputs) -> Comparison:
        return Comparison.of(outputs, self.dense, classifies=self.packed.anatomy.classes > 1)

    def _outputs(self, plan: Plan, precision: Precision) -> Outputs:
        packed = self.packed
        corrected = self._corrected(plan.heads, plan.neurons) if packed.corrects else None
        writer = self._writer(precision)
        written = writer.write(
            "measured", plan, corrected, format=GraphFormat("ort"), precision=GraphPrecision(precision)
        )
        batch = 1 if precision == "int8-dynamic" else BATCH  # int8 has one scale for a whole batch
        try:
            return run_in_threads(written.graph, self.images.at(packed.anatomy.image_of(plan)).inputs(batch, False))
        finally:
            written.remove()

    def _writer(self, precision: Precision) -> GraphWriter:
        if precision not in self.writers:
            shared = shared_file(precision, "fp32")
            self.writers[precision] = GraphWriter(self.blueprint, self.scratch, precision=precision, shared=shared)
        return self.writers[precision]
