"""Rotary tables of a foreign graph, and the formula that they were made with, if it is a known one. Light: numpy.

The tables are enough to run the model. The formula makes them for another resolution: it is found by the step of the
angles from one patch to the next, which falls from feature to feature by a constant factor,

    step_k = a * temperature ** -(k / count)        k = 0 .. count - 1,  count = h / 4

and counts only if it gives the tables back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import UNSET, UnsetType

from ..model.positions import Grid, Rotary
from .nodes import Array, Misfit, Node
from .values import Index, Rotation

SAME = 1e-4  # of sines and cosines: angles of up to some tens, computed in float32
SAME_HALF = 5e-3  # the same, of tables that were stored in 16 bits


@dataclass(frozen=True, eq=False)
class Tables:
    """Sine and cosine of every patch, (patches, h); `half`: pairs lie half a head apart, not side by side."""

    sin: Array
    cos: Array
    half: bool
    order: Index | None = None  # of the features of a head, where pairs lie in neither of the two ways

    @staticmethod
    def of(node: Node, rotation: Rotation, prefix: int) -> Tables:
        """Return the tables of the patches; the prefix must not be rotated."""
        features = len(rotation.partner)
        if not np.array_equal(rotation.tokens, np.arange(len(rotation.tokens))):
            raise Misfit(node, "a rotary embedding of all keys was expected")
        if not (np.allclose(rotation.cos[:prefix], 1) and np.allclose(rotation.turned[:prefix], 0)):
            raise Misfit(node, "a rotary embedding of the patches alone was expected, not of the tokens before them")
        number = np.arange(features)
        sine = np.where(number < rotation.partner, -rotation.turned, rotation.turned)[prefix:]
        cosine = rotation.cos[prefix:]
        if np.array_equal(rotation.partner, number ^ 1):
            return Tables(sine, cosine, half=False)
        if np.array_equal(rotation.partner, (number + features // 2) % features):
            return Tables(sine, cosine, half=True)
        firsts = number[number < rotation.partner]
        order = np.concatenate([firsts, rotation.partner[firsts]])
        return Tables(sine[:, order], cosine[:, order], half=True, order=order)

    def same_as(self, other: Tables) -> bool:
        """Return True for the same tables."""
        alike = self.half == other.half and self.sin.shape == other.sin.shape
        order = (self.order is None) == (other.order is None)
        return (
            alike
            and order
            and np.allclose(self.sin, other.sin, atol=1e-5)
            and np.allclose(self.cos, other.cos, atol=1e-5)
        )


def fit(tables: Tables, grid: Grid) -> tuple[Literal["cat", "dinov3"], Rotary | UnsetType]:
    """Return the kind of a rotary embedding and its formula; tables of an unknown one count as `cat`."""
    patches, features = tables.sin.shape
    if features % 4 or patches != grid[0] * grid[1]:
        return "cat", UNSET
    for column_first in (False, True):
        for candidate in _candidates(tables, grid, column_first):
            sin, cos = candidate.tables(grid, features, tables.half)
            if max(np.abs(sin - tables.sin).max(), np.abs(cos - tables.cos).max()) < SAME:
                return candidate.kind, candidate
    return "cat", UNSET


def _candidates(tables: Tables, grid: Grid, column_first: bool) -> list[Rotary]:
    """Return formulas whose steps between neighbouring patches are those of the tables."""
    sin, cos = (_of_pairs(table, tables.half).reshape(*grid, -1) for table in (tables.sin, tables.cos))
    count = sin.shape[-1] // 2
    steps, starts = [], []
    for axis, side in enumerate(grid):
        if side < 2:
            return []
        mine = slice(count * (axis != column_first), count * (axis != column_first) + count)
        place: list[tuple[int, ...]] = [(0, 0), (1, 0) if axis == 0 else (0, 1)]
        first, second = (np.arctan2(sin[at][mine], cos[at][mine]) for at in place)
        steps.append(np.abs(np.angle(np.exp(1j * (second - first)))))
        starts.append(first)
    step = steps[0]
    if count < 2 or (step <= 0).any():
        return []
    temperature = _round((step[-2] / step[-1]) ** count)
    if not 1 < temperature < 1e9:
        return []
    slowest = temperature ** -((count - 1) / count)
    ratios = [float(s[-1] / slowest) for s in steps]  # radians from patch to patch, of the first feature
    found = [
        Rotary(kind="dinov3", temperature=temperature, column_first=column_first, divisor=divisor)
        for divisor in ("separate", "min", "max")
    ]
    offset = round(float(starts[0][-1] / steps[0][-1]), 3)
    reference = (round(ratios[0] * grid[0]), round(ratios[1] * grid[1]))
    if abs(offset) < 1e3 and all(side > 0 for side in reference):
        for given in (None, reference):
            for shift in (0.0, offset):
                found.append(
                    Rotary(
                        kind="cat", temperature=temperature, offset=shift, column_first=column_first, reference=given
                    )
                )
    return found


def _of_pairs(table: Array, half: bool) -> Array:
    """Return the columns of one feature of each pair."""
    return table[:, : table.shape[1] // 2] if half else table[:, ::2]


def _round(value: float) -> float:
    """Return a number to the two digits that temperatures have."""
    if not math.isfinite(value) or value <= 0:
        return 0.0
    digits = 1 - math.floor(math.log10(value))
    return float(round(value, digits))
