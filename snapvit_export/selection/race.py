"""A race of candidates for the least divergence: many on few images, the best of them on all. Light.

Fidelity is nearly smooth along every lever, so the best place of a lattice is found from a few that are apart: the
neighbours of the two best are looked at until neither has any left. How many images a look takes is for whoever
measures. Nothing here depends on what a candidate is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

MOST_LOOKED_AT = 28  # candidates on few images
AROUND = 2  # best ones whose neighbours are looked at
LEADERS = 5  # that are measured on all images

Key = TypeVar("Key", bound=Hashable)
Values = npt.NDArray[np.float64]  # one per image, less is better
Measure = Callable[[Sequence[Key], bool], Mapping[Key, Values]]  # few images, or all; candidates it cannot make: none


def race(
    first: Sequence[Key],
    neighbours: Callable[[Key], Sequence[Key]],
    measure: Measure[Key],
    most: int = MOST_LOOKED_AT,
    leaders: int = LEADERS,
) -> dict[Key, Values]:
    """Return the values of the best candidates on all images, best first.

    >>> list(race([0, 9], lambda n: [n - 1, n + 1], lambda keys, on_all: {n: np.array([(n - 6.0) ** 2]) for n in keys}))
    [6, 7, 5, 8, 9]
    """
    found: dict[Key, Values] = {}
    tried: set[Key] = set()

    def look(at: Sequence[Key]) -> None:
        fresh = [key for key in dict.fromkeys(at) if key not in tried][: most - len(tried)]
        tried.update(fresh)
        found.update(measure(fresh, False) if fresh else {})

    look(first)
    while len(tried) < most:
        around = [key for best in _best(found)[:AROUND] for key in neighbours(best) if key not in tried]
        if not around:
            break
        look(around)
    final = measure(_best(found)[:leaders], True)
    return {key: final[key] for key in _best(final)}


def _best(found: Mapping[Key, Values]) -> list[Key]:
    return sorted(found, key=lambda key: float(found[key].mean()))
