"""Positions at another resolution: learnt ones resampled, rotary tables made for any grid of patches. Light: numpy.

A smaller image has a smaller grid of patches. Learnt positions are resampled as timm does it with torch: bicubic with
antialiasing, rows and columns one after the other. Along one axis that is a matrix: output o of m reads the n inputs
around (o + 1/2) n/m with the cubic kernel k(d) of a = -1/2, stretched by n/m where the grid becomes smaller, and its
weights are divided by their sum.

    k(d) = (a+2) d^3 - (a+3) d^2 + 1              d < 1
           a d^3 - 5a d^2 + 8a d - 4a         1 <= d < 2

Rotary tables are functions of coordinates, so they are made anew; timm has two kinds of them:

    cat       coordinate = (place + offset) * reference / size, angle = coordinate * temperature^(-j / (h/4))
    dinov3    coordinate = 2 (place + 1/2 + offset) / size - 1, angle = 2 pi coordinate * temperature^(-j / (h/4))

for j = 0 .. h/4 - 1 and both axes; h is the width of a head. All is computed in float64 and rounded once.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..storage.json import Size, Value

Grid = tuple[int, int]  # rows and columns of patches
Floats = npt.NDArray[np.float32]
CUBIC = -0.5  # a of the kernel that torch takes with antialiasing; without it would be -0.75


def resample(positions: npt.NDArray[np.floating], old: Grid, new: Grid) -> Floats:
    """Return the positions of a grid resampled for another one: (old patches, E) to (new patches, E).

    >>> resample(np.zeros((16, 48), np.float32), (4, 4), (3, 2)).shape[0]
    6
    """
    grid = positions.astype(np.float64).reshape(*old, -1)
    rows, columns = (resampling(*sizes) for sizes in zip(old, new))  # (new, old) each
    found = np.einsum("ai,bj,ije->abe", rows, columns, grid, optimize=True)
    return found.reshape(new[0] * new[1], -1).astype(np.float32)


def resampling(size: int, wanted: int) -> npt.NDArray[np.float64]:
    """Return the matrix that resamples one axis, (wanted, size); its rows sum to one."""
    if size == wanted:
        return np.eye(size)
    ratio = size / wanted
    stretch = max(ratio, 1.0)
    centres = (np.arange(wanted) + 0.5) * ratio
    weights = _cubic((np.arange(size) + 0.5 - centres[:, None]) / stretch)
    return weights / weights.sum(1, keepdims=True)


def _cubic(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    d, a = np.abs(distance), CUBIC
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d < 1, near, np.where(d < 2, far, 0.0))


class Rotary(Value, frozen=True, kw_only=True):
    """What rotary tables are made from, besides a grid and the width of a head."""

    kind: Literal["cat", "dinov3"]
    temperature: Annotated[float, msgspec.Meta(gt=0, le=1e30)]
    offset: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = 0.0  # in patches
    column_first: bool = False  # the first half of the angles is of the column; otherwise of the row
    reference: tuple[Size, Size] | None = None  # cat: the grid of the pretraining, whose range coordinates keep
    divisor: Literal["separate", "min", "max"] = "separate"  # dinov3: the side that coordinates are divided by

    def tables(self, grid: Grid, head_dim: int, half: bool) -> tuple[Floats, Floats]:
        """Return sin and cos for every patch, (patches, h) each; `half`: pairs lie half a head apart, not side by side.

        >>> sin, cos = Rotary(kind="dinov3", temperature=100.0).tables((12, 12), 64, half=True)
        """
        across = np.meshgrid(*self._coordinates(grid), indexing="ij")  # of the row, of the column: (rows, columns) each
        coordinates = np.stack(across[::-1] if self.column_first else across, axis=-1).reshape(-1, 2, 1)
        count = head_dim // 4
        frequencies = self.temperature ** -(np.arange(count) / count)
        angles = (coordinates * frequencies).reshape(len(coordinates), -1)  # (patches, h/2)
        angles = np.concatenate([angles, angles], axis=1) if half else np.repeat(angles, 2, axis=1)
        return np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)

    def _coordinates(self, grid: Grid) -> list[npt.NDArray[np.float64]]:
        """Return the coordinates of the rows and of the columns."""
        places = [np.arange(side) + self.offset for side in grid]
        if self.kind == "cat":
            wanted = grid if self.reference is None else self.reference
            return [place * to / side for place, side, to in zip(places, grid, wanted)]
        sides = {"separate": grid, "min": (min(grid),) * 2, "max": (max(grid),) * 2}[self.divisor]
        return [2 * np.pi * (2 * (place + 0.5) / side - 1) for place, side in zip(places, sides)]
