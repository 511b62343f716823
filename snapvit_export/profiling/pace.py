"""The pace of a machine: how fast it was in every look, told by one reference that is in all of them. Light: numpy.

A shared machine is a few per cent faster or slower from one ten seconds to the next. What was timed in turns shares
that pace, so a candidate's ratio to the reference holds. Its milliseconds are that ratio times what the reference
usually takes, which is known only as well as the looks agree: so intervals are found by drawing rounds of turns and
whole looks again and again. An interval of one look alone would promise too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .profile import PERCENTILES, Percentile, Profile
from .samples import COVERS, DRAWS, drawn_percentiles, percentiles_of

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
    >>> pace.add(timer.time({"dense": dense, "t63": file}))
    >>> pace.latency("t63", "p50").high
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._looks: list[Mapping[str, Profile]] = []

    def add(self, look: Mapping[str, Profile]) -> None:
        """Remember one look, the reference among it."""
        assert self.reference in look, f"{self.reference} tells the pace of every look"
        self._looks.append(look)

    def usual_ms(self, at: Percentile) -> float:
        """What the reference takes."""
        return float(np.median([look[self.reference].at_ms(at) for look in self._looks]))

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
        drawn = rng.integers(0, len(of_name), (DRAWS, len(of_name)))  # the same rounds of both
        ratios = percentiles_of(of_name, drawn, q) / percentiles_of(of_reference, drawn, q)
        ratio = float(np.percentile(of_name, q) / np.percentile(of_reference, q))
        usual = self.usual_ms(at)
        found = ratios * (usual if to_usual else self._drawn_usual_ms(at, rng))
        low, high = np.percentile(found, [50 * (1 - COVERS), 50 * (1 + COVERS)])
        return Latency(ratio * usual, min(float(low), ratio * usual), max(float(high), ratio * usual))

    def _drawn_usual_ms(self, at: Percentile, rng: np.random.Generator) -> Floats:
        """What the reference would usually take if other looks, and other rounds of them, had been seen."""
        rounds = [_rounds(look[self.reference]) for look in self._looks]
        by_look = [drawn_percentiles(taken, PERCENTILES[at], rng) for taken in rounds]
        which = rng.integers(0, len(by_look), (DRAWS, len(by_look)))  # looks of each draw
        return np.array(np.median(np.stack(by_look)[which, np.arange(DRAWS)[:, None]], axis=1), np.float64)


def _rounds(profile: Profile) -> Floats:
    """The runs of a Profile by the turns that they were taken in."""
    return np.array(profile.samples_ms, np.float64).reshape(-1, profile.burst)
