"""Pareto dominance: variants for which another one is as fast and as good, and better in one of the two. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tradeoff(NamedTuple):
    """The latency and quality of a variant."""

    ms: float  # smaller is better
    quality: float  # larger is better

    def beats(self, other: Tradeoff) -> bool:
        """Return True if it is at least as good in both, and not the same."""
        return self != other and self.ms <= other.ms and self.quality >= other.quality


def dominated(points: Mapping[str, Tradeoff]) -> dict[str, str]:
    """Map each dominated variant to the best of those that dominate it, by measured values alone.

    >>> dominated({"dense": Tradeoff(16, 0.97), "s50": Tradeoff(8, 0.98)})
    {'dense': 's50'}
    """
    found = {}
    for name, point in points.items():
        better = [other for other in points if points[other].beats(point)]
        if better:
            found[name] = max(better, key=lambda other: (points[other].quality, -points[other].ms))
    return found
