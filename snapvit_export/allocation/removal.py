"""What is lost when whole sub-layers go, in the units of the damage curves. Light: numpy.

A curve ends in the error of its layer's output when only the mean is left, which is the same kind of number as all
before it, and counts `WHOLE` times. Where the loss of one sub-layer was measured to move the answers more, for its
error, than that of most others, it counts for so much more again; never for less, since a late sub-layer matters less
at every width. What a search weights is weighted in both, so the end has the weight of its curve.

These add up over sub-layers, with one exception. Where only the class token is read, it learns nothing more of the
image once the last attentions are gone, and losing five of them is worse than five times one. So that is measured as
well, for all attentions from each block on; what it is worse than their sum belongs to the Plan as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..model.ranking import Damage
from ..model.sublayer import SubLayer

WHOLE = 1.0  # how much the end of a damage curve counts: others were worse (docs/benchmarks.md)


@dataclass(frozen=True, eq=False)
class Removal:
    """Damage curves that end in the loss of the sub-layer, and what comes on top of their sum.

    >>> Removal.of(ranking.damage, ranking.sublayers).curves
    """

    curves: Damage
    beyond: tuple[float, ...] | None  # by the last attention: what losing all later ones adds to their sum

    @staticmethod
    def of(damage: Damage, measured: Sequence[SubLayer] | None) -> Removal:
        """Of the curves of a ranking, and of what was measured of its sub-layers, if anything was."""
        ends = np.array([(heads[0], neurons[0]) for heads, neurons in damage])  # (blocks, 2)
        factors = np.full(ends.shape, WHOLE)
        typical = 0.0
        if measured is not None:
            moved = np.array([s.damage * s.weight for s in measured]).reshape(ends.shape) / np.maximum(ends, 1e-30)
            typical = float(np.median(moved))  # how far the answers move for a unit of damage
        if typical > 0:
            factors *= np.maximum(1.0, moved / typical)
        curves = tuple(
            (np.concatenate([[heads[0] * a], heads[1:]]), np.concatenate([[neurons[0] * m], neurons[1:]]))
            for (heads, neurons), (a, m) in zip(damage, factors)
        )
        return Removal(curves, _beyond(curves, measured, typical) if measured is not None and typical > 0 else None)


def _beyond(curves: Damage, measured: Sequence[SubLayer], typical: float) -> tuple[float, ...] | None:
    """For each last attention, what all later ones cost together, less the sum of what each costs."""
    attentions = measured[::2]
    found = []
    for last in range(len(attentions)):
        later = attentions[last + 1 :]
        lost = [float(heads[0]) for heads, _ in curves[last + 1 :]]
        alone = sum(end / max(s.weight, 1e-30) for end, s in zip(lost, later))  # as if no search had weighted them
        together = later[0].onward if later else 0.0
        if together is None:
            return None
        more = WHOLE * together / typical / alone - 1 if alone > 0 else 0.0
        found.append(max(more, 0.0) * sum(lost))
    return tuple(found)
