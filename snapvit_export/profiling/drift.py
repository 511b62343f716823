"""Correct latencies for a machine whose speed drifts, by one reference that is in every timing run. Light: numpy.

A shared machine is a few per cent faster or slower from one ten seconds to the next. What was timed in turns shares
that drift, so a candidate's ratio to the reference holds. Its milliseconds are that ratio times the reference speed:
what the reference takes with all runs pooled, which is known only as well as the runs agree. So intervals are found by
drawing rounds of turns and whole runs again and again. An interval of one run alone would promise too much.
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
    """A latency, and the interval it lies in."""

    ms: float
    low: float
    high: float

    def scaled(self, by: float) -> Latency:
        """Return the latency on a machine that is `by` times as slow."""
        return Latency(self.ms * by, self.low * by, self.high * by)


class DriftCorrection:
    """Timing runs of candidates and the reference, taken in turns.

    >>> drift = DriftCorrection("dense")
    >>> drift.add(timer.time({"dense": dense, "s30": s30}))
    >>> drift.latency("s30", "p50").high
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._runs: list[Mapping[str, Profile]] = []
        self._drawn: dict[tuple[Percentile, int], Floats] = {}  # by the number of runs

    def add(self, run: Mapping[str, Profile]) -> None:
        """Add one timing run, which includes the reference."""
        assert self.reference in run, f"{self.reference} measures the speed of the machine in every run"
        self._runs.append(run)

    def reference_ms(self, at: Percentile) -> float:
        """Return the latency of the reference, all runs pooled."""
        return float(np.percentile(np.concatenate(self._reference_rounds()), PERCENTILES[at]))

    def latency(self, name: str, at: Percentile, relative: bool = False) -> Latency:
        """Return the latency of a candidate at the reference speed, all runs of its last file pooled.

        `relative`: the interval is that of the ratio to the reference, so that drift does not widen it.
        """
        q = PERCENTILES[at]
        runs = [run for run in self._runs if name in run]
        runs = [run for run in runs if run[name].sha256 == runs[-1][name].sha256]
        of_name = np.concatenate([_rounds(run[name]) for run in runs])  # (rounds, runs)
        of_reference = np.concatenate([_rounds(run[self.reference]) for run in runs])
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, len(of_name), (DRAWS, len(of_name)))
        beside = drawn  # the same rounds of both, which shared the machine's speed
        if len(of_reference) != len(of_name):  # timed one after the other, as trtexec does
            beside = rng.integers(0, len(of_reference), (DRAWS, len(of_reference)))
        ratios = percentiles_of(of_name, drawn, q) / percentiles_of(of_reference, beside, q)
        ratio = float(np.percentile(of_name, q) / np.percentile(of_reference, q))
        reference_ms = self.reference_ms(at)
        found = ratios * (reference_ms if relative else self._drawn_reference_ms(at))
        low, high = np.percentile(found, [100 * BEYOND, 100 * (1 - BEYOND)])
        ms = ratio * reference_ms
        return Latency(ms, min(float(low), ms), max(float(high), ms))

    def _drawn_reference_ms(self, at: Percentile) -> Floats:
        """Return the latency of the reference in every bootstrap draw of runs and of rounds within them."""
        if (known := self._drawn.get((at, len(self._runs)))) is not None:
            return known
        rng = np.random.default_rng(1)
        rounds = self._reference_rounds()
        found = []
        for _ in range(DRAWS):
            runs = [rounds[n] for n in rng.integers(0, len(rounds), len(rounds))]
            drawn = [taken[rng.integers(0, len(taken), len(taken))] for taken in runs]
            found.append(np.percentile(np.concatenate(drawn), PERCENTILES[at]))
        self._drawn[at, len(self._runs)] = np.array(found, np.float64)
        return self._drawn[at, len(self._runs)]

    def _reference_rounds(self) -> list[Floats]:
        return [_rounds(run[self.reference]) for run in self._runs]


def _rounds(profile: Profile) -> Floats:
    """Return the samples of a Profile by the rounds that they were taken in."""
    whole = profile.runs - profile.runs % profile.burst
    return np.array(profile.samples_ms[:whole], np.float64).reshape(-1, profile.burst)
