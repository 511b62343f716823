"""Where the names of points go: beside them, never over each other or over a point.

Greedy, most important first; a name that finds no free place is left out, since hovering and the table have it.
Judged at the width of a phone: what is free there is free everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 270, 340  # pixels of the plot that is judged
LETTER, LINE = 7.2, 14  # of a label
PLACES = (("left", 9, -9), ("right", -9, -9), ("left", 9, 11), ("right", -9, 11), ("center", 0, -17), ("center", 0, 18))
DOT = 7
FAR = 20  # above a point whose label finds no free place and must be there


@dataclass(frozen=True)
class Placed:
    """A label and where it goes, relative to its point."""

    index: int
    align: str
    dx: int
    dy: int


def place(points: Sequence[tuple[float, float, str]], order: Sequence[int], sure: int = 0) -> list[Placed]:
    """Places for the labels of points (x, y from 0 to 1, the text), tried in that order; the first `sure` get one."""
    dots = [_around(x * WIDTH, (1 - y) * HEIGHT) for x, y, _ in points]
    taken: list[tuple[float, float, float, float]] = []
    found = []
    for rank, index in enumerate(order):
        x, y, text = points[index]
        others = [dot for i, dot in enumerate(dots) if i != index] + taken
        for align, dx, dy in PLACES:
            box = _box(x * WIDTH + dx, (1 - y) * HEIGHT + dy, align, len(text) * LETTER)
            if box[0] >= 0 and box[2] <= WIDTH and box[1] >= -4 and not any(_overlap(box, other) for other in others):
                taken.append(box)
                found.append(Placed(index, align, dx, dy))
                break
        else:
            if rank < sure:
                align = "left" if x < 0.3 else "right" if x > 0.7 else "center"
                taken.append(_box(x * WIDTH, (1 - y) * HEIGHT - FAR, align, len(text) * LETTER))
                found.append(Placed(index, align, 0, -FAR))
    return found


def _around(x: float, y: float) -> tuple[float, float, float, float]:
    return x - DOT, y - DOT, x + DOT, y + DOT


def _box(x: float, y: float, align: str, width: float) -> tuple[float, float, float, float]:
    left = x - {"left": 0.0, "center": width / 2, "right": width}[align]
    return left, y - LINE / 2, left + width, y + LINE / 2


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
