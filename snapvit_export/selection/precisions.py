"""Which precisions are of use on this machine: the dense model in each, timed and compared beside its own. Light.

A precision that does not save a step is dropped, since it can only lose. So is one that another is as fast as and at
least as faithful. What is dropped is recorded with its ratio: on the next machine it may be otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import SnapvitError
from ..family.manifest import DroppedPrecision
from ..model.plan import Plan
from ..target import Precision
from .candidates import DENSE, Candidates
from .point import Point


@dataclass(frozen=True)
class InPrecision:
    """The dense model in a precision: its latency relative to the family's own, and its divergence."""

    ratio: float
    divergence: float


def build_dense(candidates: Candidates, precisions: Sequence[Precision]) -> dict[Precision, str]:
    """Build the dense model in each precision; return the names of those that can be, the family's own first."""
    found = {candidates.target.precision: DENSE}
    for precision in precisions:
        point = Point(Plan.dense(candidates.anatomy), precision)
        name = candidates.name_of(point)
        try:
            candidates.add(name, point, keep=True)
        except SnapvitError as error:  # such as a gate: this model cannot be had in it
            candidates.progress.note(f"{precision} is left out: {error}")
            continue
        found[precision] = name
    return found


def of_no_use(found: Mapping[Precision, InPrecision], own: Precision, step: float) -> list[DroppedPrecision]:
    """Return the precisions that are not worth a candidate; `step`: a difference in latency that can be told."""
    dropped = []
    left = dict(found)
    for precision in sorted(found, key=lambda p: -found[p].divergence):  # of two that are alike one stays
        if precision == own:
            continue
        mine = found[precision]
        others = [p for p in left if p not in (own, precision) and left[p].divergence <= mine.divergence]
        better = next((p for p in others if left[p].ratio <= mine.ratio * (1 + step)), None)
        if mine.ratio > 1 - step:
            reason = "not faster here"
        elif better is not None:
            reason = f"no better here than {better}, which takes {left[better].ratio:.2f} and loses no more"
        else:
            continue
        del left[precision]
        dropped.append(DroppedPrecision(precision=precision, ratio=mine.ratio, reason=reason))
    return dropped
