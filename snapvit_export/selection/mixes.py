"""The mix of levers with the best fidelity at given FLOPs: for targets that are not a latency, and for a spread. Light.

FLOPs are counted, not measured, so there is nothing to time: the race of candidates (`race`) decides alone, on the
images that are set aside for it. Precision does not change FLOPs, so it is no part of a mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..allocation.planner import Planner
from ..errors import SnapvitError
from .candidates import Candidates
from .options import Options
from .point import Point
from .race import Values, race
from .space import Flops, Place, Space

SPREAD = (0.85, 0.7, 0.55, 0.4, 0.3)  # of the dense FLOPs: variants for a device that chooses for itself


def best_mix(candidates: Candidates, planner: Planner, options: Options, flops: float) -> Point:
    """Return the point that loses least of all that need this fraction of the dense blocks' FLOPs."""
    anatomy, own = candidates.anatomy, candidates.target.precision
    space = Space(planner, options.levers, {own: Flops(anatomy)}, options.schedule, options.grids)
    limit = flops * anatomy.block_flops()

    def points(places: Sequence[Place]) -> dict[Place, Point]:
        return {place: point for place in places if (point := space.point(place, limit)) is not None}

    def measure(places: Sequence[Place], on_all: bool) -> Mapping[Place, Values]:
        return candidates.losses(points(places), few=not on_all)

    candidates.progress.phase(f"comparing mixes of {flops:g} of the FLOPs")
    first = [place for place in space.first(own, limit) if place in points([place])] or [*points(space.places())][:1]
    if not first:
        raise SnapvitError(f"FLOPs fraction {flops:g} is out of reach of {', '.join(options.levers)}")
    best = next(iter(race(first, space.neighbours, measure)))
    return points([best])[best]
