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
    by: dict[str, str] = {}
    leader: str | None = None  # the best of all that are no slower
    for name in sorted(points, key=lambda name: (points[name].ms, -points[name].quality)):
        if leader is not None and points[leader].beats(points[name]):
            by[name] = leader
        if leader is None or points[name].quality > points[leader].quality:
            leader = name
    return {name: by[name] for name in points if name in by}
