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
SAME_HALF = 2e-2  # the same, of tables that were computed in 16 bits


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


def fit(tables: Tables, grid: Grid, is_half: bool) -> tuple[Literal["cat", "dinov3"], Rotary | UnsetType]:
    """Return the kind of a rotary embedding and its formula; tables of an unknown one count as `cat`."""
    patches, features = tables.sin.shape
    if features % 4 or features < 8 or patches != grid[0] * grid[1] or min(grid) < 2:
        return "cat", UNSET
    allowed = SAME_HALF if is_half else SAME
    for column_first in (False, True):
        for candidate in _candidates(tables, grid, column_first):
            sin, cos = candidate.tables(grid, features, tables.half)
            if max(np.abs(sin - tables.sin).max(), np.abs(cos - tables.cos).max()) < allowed:
                return candidate.kind, candidate
    return "cat", UNSET


def _candidates(tables: Tables, grid: Grid, column_first: bool) -> list[Rotary]:
    """Return formulas whose angles at the first patches are those of the tables."""
    sin, cos = (_of_pairs(table, tables.half).reshape(*grid, 2, -1) for table in (tables.sin, tables.cos))
    angles = np.arctan2(sin, cos)  # (rows, columns, 2, count)
    own = (1, 0) if column_first else (0, 1)  # which half of the angles is of the row, and which of the column
    starts = [angles[0, 0, half] for half in own]
    steps = [_turn(angles[1, 0, own[0]] - starts[0]), _turn(angles[0, 1, own[1]] - starts[1])]
    slow, count = [float(step[-1]) for step in steps], len(steps[0])  # of the slowest feature: never more than a turn
    fast = min(1, count - 2)  # one before the slowest that is slow enough as well
    found: list[Rotary] = []
    if min(slow) <= 0 or steps[0][fast] <= 0:
        return found
    measured = float(steps[0][fast] / slow[0]) ** (count / (count - 1 - fast))
    offset = round(float(starts[0][-1]) / slow[0], 3)  # in patches
    for digits in (2, 1):
        temperature = _rounded(measured, digits)
        if 1 < temperature < 1e9:
            first = temperature ** ((count - 1) / count)  # how much faster the first feature is
            reference = (round(slow[0] * first * grid[0]), round(slow[1] * first * grid[1]))
            found += _of_temperature(temperature, column_first, offset, reference)
    return found


def _of_temperature(temperature: float, column_first: bool, offset: float, reference: Grid) -> list[Rotary]:
    """Return all formulas of a temperature."""
    divisors: tuple[Literal["separate", "min", "max"], ...] = ("separate", "min", "max")
    found = [
        Rotary(kind="dinov3", temperature=temperature, column_first=column_first, divisor=divisor)
        for divisor in divisors
    ]
    for size in (reference, None):  # coordinates of the model's own grid tell no reference from none; timm's have one
        if size is None or min(size) > 0:
            found += [
                Rotary(kind="cat", temperature=temperature, offset=shift, column_first=column_first, reference=size)
                for shift in (0.0, offset)
            ]
    return found


def _turn(angle: Array) -> Array:
    """Return angles between minus and plus half a turn."""
    return np.angle(np.exp(1j * angle))


def _of_pairs(table: Array, half: bool) -> Array:
    """Return the columns of one feature of each pair."""
    return table[:, : table.shape[1] // 2] if half else table[:, ::2]


def _rounded(value: float, digits: int) -> float:
    """Return a number to so many digits: temperatures are 100 or 10000."""
    if not math.isfinite(value) or value <= 0:
        return 0.0
    return float(round(value, digits - 1 - math.floor(math.log10(value))))
