"""How a ranking goes in rounds: the sizes after each, and how far the answers may move. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from .planner import check_fraction

# How far the answers may have moved on images that no round was fitted on, by what is compared (`search.divergence`).
# The first two are a mean KL of k nats, and so the probability that is elsewhere is at most sqrt(k / 2) on average
# (Pinsker): at 0.5 at most half of it. On DeiT-Tiny the three limits are met at nearly the same cut (docs/method.md).
MOST_MOVED = {"predictions": 0.5, "neighbours": 0.5, "cosine": 0.3}


@dataclass(frozen=True)
class Rounds:
    """Falling FLOPs of the blocks, one for each round, and the divergence at which it ends.

    >>> Rounds((0.85, 0.7), most_moved=0.3)
    """

    flops: tuple[float, ...] = (0.85, 0.7, 0.55, 0.4)
    most_moved: float | None = None  # None: as the table above says; infinite: every round counts

    def __post_init__(self) -> None:
        for fraction in self.flops:
            check_fraction("FLOPs", fraction)
        if not self.flops or list(self.flops) != sorted(set(self.flops), reverse=True):
            raise UsageError("rounds need falling fractions of the FLOPs, such as 0.85,0.7,0.55")
        if self.most_moved is not None and not self.most_moved >= 0:
            raise UsageError(f"answers cannot move by {self.most_moved:g}. Give --most-moved 0 or more, such as 0.5")

    def limit(self, divergence: str) -> float:
        """The most that a round may move the answers."""
        return MOST_MOVED[divergence] if self.most_moved is None else self.most_moved
