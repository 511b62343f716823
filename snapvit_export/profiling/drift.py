"""Latencies of candidates from several timing runs, with intervals that hold although runs differ. Light: numpy.

A machine is a few per cent faster or slower from one ten seconds to the next, and every process puts weights elsewhere
in memory, which makes each file faster or slower for as long as the process lives. What was timed in turns shares the
first (drift), so ratios to one reference that is in every run hold; nothing shares the second but a run with itself.
So a run is one observation, however many samples it has. In logarithms, where factors are sums:

    y_r          the percentile of the candidate in run r, one of the n runs that it was in
    d_r          the percentile of the reference, which was in all R runs
    l_r          y_r - d_r, the ratio to the reference

    latency      exp(mean l + mean d), its ratio at the speed that the machine has on average
    variance     s_l^2 (1/n - 1/R) + s_y^2 / R

The variance is exact: that of mean l + mean d with what they share, as d_r is in l_r too. A candidate that was in all
runs has s_y^2 / n, the variance of its own mean; the others pay for runs that they missed, but only with the noise of
their ratio. The interval is latency times exp(+- t sqrt(variance)), with the quantile of Student's t that is exceeded
with probability BEYOND. For a relative interval the reference is the unit: s_l^2 / n.

Three runs say little of a variance, so s_l^2 and s_y^2 are pooled: squared deviations from the mean of every file that
was in two runs or more, divided by f = the sum of (n - 1). So processes are taken to disturb all files alike. Files of
one run share something, so the pool has fewer than f degrees of freedom: for k files that correlate by c it has
f / (1 + (k - 1) c^2). Ratios share the reference, half of their variance, so c = 1/2. Latencies share the drift, the
part of s_y^2 that is not in s_l^2, half of which is the reference's: c = 1 - s_l^2 / (2 s_y^2). The degrees of freedom
of the sum of both variances are Welch's and Satterthwaite's. Neither is taken to be less than what the samples within
the runs tell, drawn again by rounds: runs that agree better than that do so by chance.

A candidate of one run has no second observation: rounds of that run are drawn again, and runs of the reference with
rounds in them. That interval is too narrow where processes differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .profile import PERCENTILES, RESOLUTION_MS, Percentile, Profile
from .sampling import DRAWS, percentiles_of
from .student_t import t_quantile

BEYOND = 0.05  # probability above the upper end of an interval, and below the lower one
SHARED_BY_RATIOS = 0.5  # correlation of two ratios to one reference
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


@dataclass(frozen=True)
class Spread:
    """A variance, and the degrees of freedom that it is known with."""

    variance: float
    freedom: float

    def times(self, factor: float) -> Spread:
        return Spread(factor * self.variance, self.freedom)

    def plus(self, other: Spread) -> Spread:
        """Return that of the sum, by Welch and Satterthwaite."""
        variance = self.variance + other.variance
        parts = [each for each in (self, other) if each.variance]
        unsure = sum(each.variance**2 / each.freedom for each in parts)
        return Spread(variance, max(1.0, variance**2 / unsure)) if unsure else other  # 1.0: but for rounding

    def at_least(self, variance: float) -> Spread:
        return Spread(max(self.variance, variance), self.freedom)

    @property
    def margin(self) -> float:
        """How far from the value the ends of its interval are."""
        return t_quantile(1 - BEYOND, self.freedom) * math.sqrt(self.variance)


class DriftCorrection:
    """Timing runs of candidates and the reference, taken in turns.

    >>> drift = DriftCorrection("dense")
    >>> drift.add(timer.time({"dense": dense, "s30": s30}))
    >>> drift.latency("s30", "p50").high
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._runs: list[Mapping[str, Profile]] = []
        self._percentiles: dict[tuple[int, str, Percentile], float] = {}
        self._drawn: dict[tuple[int, str, Percentile], tuple[Floats, Floats]] = {}
        self._drawn_speeds: dict[tuple[int, Percentile], Floats] = {}

    def add(self, run: Mapping[str, Profile]) -> None:
        """Add one timing run, which includes the reference."""
        assert self.reference in run, f"{self.reference} measures the speed of the machine in every run"
        self._runs.append(run)

    def runs(self, name: str) -> int:
        """Return how many timing runs of its last file there are."""
        return len(self._runs_of(name))

    def is_contended(self, name: str) -> bool:
        """Return True if other work kept most runs of a candidate's last file from their cores."""
        contended = [self._runs[run][name].is_contended for run in self._runs_of(name)]
        return 2 * sum(contended) > len(contended)

    def reference_ms(self, at: Percentile) -> float:
        """Return the latency of the reference: the geometric mean of all runs."""
        found = [self._percentile(run, self.reference, at) for run in range(len(self._runs))]
        return float(_geometric_mean(np.array(found)))

    def latency(self, name: str, at: Percentile, relative: bool = False) -> Latency:
        """Return the latency of a candidate at the average speed of the reference, from all runs of its last file.

        `relative`: the interval is that of the ratio to the reference, so that drift does not widen it.
        """
        runs, reference_ms = self._runs_of(name), self.reference_ms(at)
        ms = float(_geometric_mean(np.array([self._ratio(run, name, at) for run in runs]))) * reference_ms
        if len(runs) > 1:
            margin = self._spread(name, runs, at, relative).margin
            return Latency(ms, ms * math.exp(-margin), ms * math.exp(margin))
        _, ratios = self._drawn_rounds(runs[0], name, at)
        found = ratios * (reference_ms if relative else self._drawn_reference_ms(at))
        low, high = np.percentile(found, [100 * BEYOND, 100 * (1 - BEYOND)])
        return Latency(ms, min(float(low), ms), max(float(high), ms))

    def _spread(self, name: str, runs: list[int], at: Percentile, relative: bool) -> Spread:
        """Return the variance of the logarithm of a latency that was found in several runs."""
        of_ratio, of_own = self._between_runs(at)
        drawn = [self._drawn_rounds(run, name, at) for run in runs]
        of_own = of_own.at_least(float(np.mean([np.var(np.log(own), ddof=1) for own, _ in drawn])))
        of_ratio = of_ratio.at_least(float(np.mean([np.var(np.log(ratios), ddof=1) for _, ratios in drawn])))
        if name == self.reference:
            of_ratio = Spread(0.0, 1.0)
        if relative:
            return of_ratio.times(1 / len(runs))
        return of_ratio.times(1 / len(runs) - 1 / len(self._runs)).plus(of_own.times(1 / len(self._runs)))

    def _between_runs(self, at: Percentile) -> tuple[Spread, Spread]:
        """Return how ratios to the reference vary from run to run, and how latencies do: s_l^2 and s_y^2."""
        files: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, run in enumerate(self._runs):
            for name, profile in run.items():
                files[name, profile.sha256].append(number)
        again = [(name, runs) for (name, _), runs in files.items() if len(runs) > 1]
        ratios = [[self._ratio(run, name, at) for run in runs] for name, runs in again if name != self.reference]
        own = [[self._percentile(run, name, at) for run in runs] for name, runs in again]
        of_ratio, variance = _pooled(ratios, SHARED_BY_RATIOS), _pooled(own, 0.0).variance
        drift = 1 - of_ratio.variance / (2 * variance) if variance else 0.0
        return of_ratio, _pooled(own, min(max(drift, 0.0), 1.0))

    def _runs_of(self, name: str) -> list[int]:
        """Return the numbers of the runs of its last file."""
        runs = [number for number, run in enumerate(self._runs) if name in run]
        return [number for number in runs if self._runs[number][name].sha256 == self._runs[runs[-1]][name].sha256]

    def _percentile(self, run: int, name: str, at: Percentile) -> float:
        if (run, name, at) not in self._percentiles:
            self._percentiles[run, name, at] = float(np.percentile(self._rounds(run, name), PERCENTILES[at]))
        return self._percentiles[run, name, at]

    def _ratio(self, run: int, name: str, at: Percentile) -> float:
        return self._percentile(run, name, at) / self._percentile(run, self.reference, at)

    def _drawn_rounds(self, run: int, name: str, at: Percentile) -> tuple[Floats, Floats]:
        """Return a candidate's latency and its ratio to the reference, every time that rounds are drawn again."""
        if (known := self._drawn.get((run, name, at))) is not None:
            return known
        of_name, of_reference = self._rounds(run, name), self._rounds(run, self.reference)
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, len(of_name), (DRAWS, len(of_name)))
        beside = drawn  # the same rounds of both, which shared the machine's speed
        if len(of_reference) != len(of_name):  # timed one after the other, as trtexec does
            beside = rng.integers(0, len(of_reference), (DRAWS, len(of_reference)))
        own = percentiles_of(of_name, drawn, PERCENTILES[at])
        ratios = own / percentiles_of(of_reference, beside, PERCENTILES[at])
        self._drawn[run, name, at] = own, ratios
        return own, ratios

    def _drawn_reference_ms(self, at: Percentile) -> Floats:
        """Return the latency of the reference, every time that runs, and rounds within them, are drawn again."""
        total = len(self._runs)
        for run in range(total):
            if (run, at) not in self._drawn_speeds:
                rounds = self._rounds(run, self.reference)
                drawn = np.random.default_rng((1, run)).integers(0, len(rounds), (DRAWS, len(rounds)))
                self._drawn_speeds[run, at] = percentiles_of(rounds, drawn, PERCENTILES[at])
        speeds = np.stack([self._drawn_speeds[run, at] for run in range(total)])  # (runs, draws)
        rng = np.random.default_rng(1)
        runs, draws = rng.integers(0, total, (DRAWS, total)), rng.integers(0, DRAWS, (DRAWS, total))
        return _geometric_mean(speeds[runs, draws])

    def _rounds(self, run: int, name: str) -> Floats:
        """Return the samples of a Profile by the rounds that they were taken in."""
        profile = self._runs[run][name]
        whole = profile.runs - profile.runs % profile.burst
        samples = np.maximum(profile.samples_ms[:whole], RESOLUTION_MS)  # their logarithms are finite
        return samples.astype(np.float64).reshape(-1, profile.burst)


def _geometric_mean(values: Floats) -> Floats:
    """Return that of each row; of a single value it is that very value."""
    first = values[..., :1]
    return np.asarray(first[..., 0] * np.exp(np.mean(np.log(values / first), axis=-1)), np.float64)


def _pooled(groups: list[list[float]], correlation: float) -> Spread:
    """Return the variance of logarithms about the mean of their group; in one run groups correlate by so much."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return Spread(0.0, 1.0)
    squares = sum(float(np.var(np.log(group))) * len(group) for group in groups)
    return Spread(squares / freedom, freedom / (1 + (len(groups) - 1) * correlation**2))
