"""The pace of a machine: how fast it was in every look, told by one reference that is in all of them. Light: numpy.

A shared machine is a few per cent faster or slower from one ten seconds to the next. What was timed in turns shares
that pace, so a candidate's ratio to the reference holds. Its milliseconds are that ratio times what the reference
takes in all looks together, which is known only as well as the looks agree: so intervals are found by drawing rounds of
turns and whole looks again and again. An interval of one look alone would promise too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .profile import PERCENTILES, Percentile, Profile
from .sampling import DRAWS, percentiles_of

BEYOND = 0.05  # share of the draws above the upper end of an interval, and below the lower one
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """A latency, and between what it lies."""

    ms: float
    low: float
    high: float

    def scaled(self, by: float) -> Latency:
        """The same on a machine that is so many times as slow."""
        return Latency(self.ms * by, self.low * by, self.high * by)


class Pace:
    """Looks at candidates and the reference, timed in turns.

    >>> pace = Pace("dense")
    >>> pace.add(timer.time({"dense": dense, "s30": s30}))
    >>> pace.latency("s30", "p50").high
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._looks: list[Mapping[str, Profile]] = []
        self._drawn: dict[tuple[Percentile, int], Floats] = {}  # by the number of looks

    def add(self, look: Mapping[str, Profile]) -> None:
        """Remember one look, the reference among it."""
        assert self.reference in look, f"{self.reference} tells the pace of every look"
        self._looks.append(look)

    def usual_ms(self, at: Percentile) -> float:
        """What the reference takes, over all looks."""
        return float(np.percentile(np.concatenate(self._reference_rounds()), PERCENTILES[at]))

    def latency(self, name: str, at: Percentile, to_usual: bool = False) -> Latency:
        """What a candidate takes at the usual pace, by all looks at its last file.

        `to_usual`: as part of what the reference takes, so that the pace itself adds no doubt.
        """
        q = PERCENTILES[at]
        looks = [look for look in self._looks if name in look]
        looks = [look for look in looks if look[name].sha256 == looks[-1][name].sha256]
        of_name = np.concatenate([_rounds(look[name]) for look in looks])  # (rounds, runs)
        of_reference = np.concatenate([_rounds(look[self.reference]) for look in looks])
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, len(of_name), (DRAWS, len(of_name)))
        beside = drawn  # the same rounds of both, which shared the machine's pace
        if len(of_reference) != len(of_name):  # timed one after the other, as trtexec does
            beside = rng.integers(0, len(of_reference), (DRAWS, len(of_reference)))
        ratios = percentiles_of(of_name, drawn, q) / percentiles_of(of_reference, beside, q)
        ratio = float(np.percentile(of_name, q) / np.percentile(of_reference, q))
        usual = self.usual_ms(at)
        found = ratios * (usual if to_usual else self._drawn_usual_ms(at))
        low, high = np.percentile(found, [100 * BEYOND, 100 * (1 - BEYOND)])
        return Latency(ratio * usual, min(float(low), ratio * usual), max(float(high), ratio * usual))

    def _drawn_usual_ms(self, at: Percentile) -> Floats:
        """What the reference would usually take if other looks, and other rounds of them, had been seen."""
        if (known := self._drawn.get((at, len(self._looks)))) is not None:
            return known
        rng = np.random.default_rng(1)
        rounds = self._reference_rounds()
        found = []
        for _ in range(DRAWS):
            looks = [rounds[n] for n in rng.integers(0, len(rounds), len(rounds))]
            drawn = [taken[rng.integers(0, len(taken), len(taken))] for taken in looks]
            found.append(np.percentile(np.concatenate(drawn), PERCENTILES[at]))
        self._drawn[at, len(self._looks)] = np.array(found, np.float64)
        return self._drawn[at, len(self._looks)]

    def _reference_rounds(self) -> list[Floats]:
        return [_rounds(look[self.reference]) for look in self._looks]


def _rounds(profile: Profile) -> Floats:
    """The runs of a Profile by the turns that they were taken in."""
    whole = profile.runs - profile.runs % profile.burst
    return np.array(profile.samples_ms[:whole], np.float64).reshape(-1, profile.burst)
