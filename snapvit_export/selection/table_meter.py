"""Estimates the fidelity of candidates from the table of an Elastic folder, where there are no images. Light.

What a Plan loses is read between the measured ones around it, along three axes:

    resolution   the logarithm of the number of patches
    width        the FLOPs of its heads and neurons with all tokens, as a fraction of the dense model's
    merging      the fraction of its patch tokens that is left at the end

linearly in the square root of the divergence: a small change of a model by x changes its predictions by x and their KL
by x squared, so the root is nearly straight from the dense model on, where its logarithm has no value. Beyond the last
level the line of the last two goes on, unless it would say that less is better. In int8-dynamic what the dense model
loses in it is added: two small changes that know nothing of each other add in squares. No other precision is made on a
device; a variant in one that came with the family is taken to lose as much.

It is an estimate. It takes it that what counts is how many FLOPs a Plan keeps, not which heads, neurons and sub-layers
(a device chooses them by its own latencies), nor in which blocks tokens merge; and the images are those of whoever
packed the model. The standard error is that of the images alone. So an estimate is never given as a measurement:
`Fidelity.estimated` says what it is, and images on the device are better (`image_meter`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..elastic.fidelity_table import FidelityTable
from ..family.fidelity import Fidelity
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from .candidates import BuiltVariant, Probe
from .point import Point

Floats = npt.NDArray[np.float64]


class TableMeter:
    """Estimates the fidelity of any Plan from those that were measured when the model was packed."""

    needs_probes = False

    def __init__(self, anatomy: Anatomy, table: FidelityTable) -> None:
        self.anatomy, self.table = anatomy, table
        self._axes = (
            [-math.log(rows * columns) for rows, columns in table.grids],
            [-width for width in table.widths],
            [-left for left in table.tokens],
        )  # all rise: the more, the more is cut
        self._divergence = self._values("divergence")
        self._relative_error = self._values("standard_error") / np.maximum(self._divergence, 1e-12)
        self._agreement = self._values("agreement")
        self._agreement_error = self._values("agreement_error")

    def losses(self, probe: Probe | None, point: Point, few: bool) -> Floats:
        """Return the estimated divergence of a candidate, as if of one image."""
        return np.array([self.estimate(point).divergence])

    def measured(self, built: BuiltVariant) -> BuiltVariant:
        """Return a variant with its estimated fidelity."""
        return replace(built, fidelity=self.estimate(built.point))

    def estimate(self, point: Point) -> Fidelity:
        """Return the estimated fidelity of a point."""
        place = self._place(point.plan)
        root = np.sqrt(self._divergence)
        divergence = max(_between(self._axes, root, place), _between(self._axes, root, place, beyond=True)) ** 2
        error = divergence * _between(self._axes, self._relative_error, place)
        agreement = max(_between(self._axes, self._agreement, place, beyond=True), 0.0)
        agreement = min(agreement, _between(self._axes, self._agreement, place))
        agreement_error = _between(self._axes, self._agreement_error, place)
        if point.precision != "fp32":
            int8 = self.table.int8_dynamic
            divergence, error = divergence + int8.divergence, math.hypot(error, int8.standard_error)
            agreement *= int8.agreement
            agreement_error = math.hypot(agreement_error, int8.agreement_error)
        return Fidelity(
            by=self.table.by,
            divergence=divergence,
            standard_error=error,
            agreement=agreement,
            agreement_error=agreement_error,
            images=self.table.images,
            estimated=True,
        )

    def _place(self, plan: Plan) -> tuple[float, float, float]:
        """Return where a Plan lies along the axes."""
        patches = self.anatomy.patches_of(plan)
        width = plan.with_tokens().flops_ratio(self.anatomy)
        return -math.log(patches), -width, -(1 - sum(plan.merged) / patches)

    def _values(self, name: str) -> Floats:
        return np.array([getattr(value, name) for value in self.table.values]).reshape(self.table.shape)


def _between(axes: Sequence[Sequence[float]], values: Floats, place: Sequence[float], beyond: bool = False) -> float:
    """Return a value between those of a lattice, linearly along each axis; `beyond`: the last line goes on."""
    for axis, at in zip(axes, place):  # each step does away with the first axis that is left
        if len(axis) == 1:
            values = values[0]
            continue
        n = min(max(int(np.searchsorted(axis, at)), 1), len(axis) - 1)
        share = max((at - axis[n - 1]) / (axis[n] - axis[n - 1]), 0.0)
        share = share if beyond else min(share, 1.0)
        values = values[n - 1] + share * (values[n] - values[n - 1])
    return float(values)
