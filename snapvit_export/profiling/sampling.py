"""Timing samples: interleaved bursts of all candidates, and percentiles with bootstrap intervals. Light: numpy.

After a warm-up the candidates are timed in turns. A burst is a few runs in a row, so that a model is timed as it would
run in a loop, not with its weights just evicted by another; bursts of all candidates alternate, so that a slow minute
of the machine falls on all of them alike. With a pause, every run comes after a sleep instead: a camera's model finds
cold caches and a clock that has been lowered. Every sample is kept; in a long run every second burst, then every fourth
and so on, over the whole of it, so that a day takes no more memory than some minutes.

Two clocks. The wall clock is what a user waits for, and what a budget means. CPU time compares candidates on a
contended machine: it does not count what others did meanwhile.

Neighbours in time are alike: a busy second slows all runs in it. So intervals are found by resampling whole bursts (a
block bootstrap), not single runs, which would give intervals that are too narrow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bounds = tuple[float, float]
BURST = 8  # runs in a row
MIN_RUNS = 40  # samples of each candidate
STABLE = 0.05  # a candidate is warm when two bursts in a row differ by no more
COVERS = 0.95  # share of the intervals that contain the true value
DRAWS = 400  # of the bootstrap
AT_ONCE = 2**20  # numbers in memory while resampling
MOST_RUNS = 2**15  # kept of each candidate, two megabytes: more than 300 of them are beyond the 99th percentile
QUIET_PERCENTILE = 20  # of CPU times: that of an undisturbed run


@dataclass
class Samples:
    """Milliseconds of every run of one candidate, in the order they were taken."""

    burst: int  # runs in a row
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of all threads of this process

    def __len__(self) -> int:
        return len(self.wall_ms)

    def percentile(self, at: float) -> float:
        """Return the wall-clock milliseconds that this percentage of the runs did not exceed."""
        return float(np.percentile(self.wall_ms, at))

    def interval(self, at: float) -> Bounds:
        """Return the confidence interval of that percentile."""
        bursts, random = self._bursts(self.wall_ms), np.random.default_rng(0)
        step = max(1, AT_ONCE // bursts.size)
        parts = [min(step, DRAWS - n) for n in range(0, DRAWS, step)]  # the same draws as all at once
        drawn = (random.integers(0, len(bursts), (n, len(bursts))) for n in parts)
        found = np.concatenate([_percentiles(bursts, part, at) for part in drawn])
        low, high = np.percentile(found, [50 * (1 - COVERS), 50 * (1 + COVERS)])
        return float(low), float(high)

    @property
    def quiet_cpu_ms(self) -> float:
        """The CPU time of an undisturbed run: the clock that compares candidates on a contended machine."""
        return float(np.percentile(self.cpu_ms, QUIET_PERCENTILE))

    @property
    def noise(self) -> float:
        """The relative difference of a candidate from itself (A/A): bursts with even and with odd numbers."""
        bursts = self._bursts(self.wall_ms)
        if len(bursts) < 2:
            return 0.0
        even, odd = float(np.median(bursts[::2])), float(np.median(bursts[1::2]))
        return abs(even - odd) / max(min(even, odd), 1e-9)

    @property
    def drift(self) -> float:
        """The relative slowdown of the last third against the first; negative if it was faster."""
        third = max(1, len(self) // 3)
        first, last = np.median(self.wall_ms[:third]), np.median(self.wall_ms[-third:])
        return float(last / max(first, 1e-9) - 1)

    @property
    def waited(self) -> float:
        """The share of the wall-clock time in which the process did not compute; a second thread hides it."""
        return max(0.0, 1 - sum(self.cpu_ms) / max(sum(self.wall_ms), 1e-9))

    def thin(self) -> None:
        """Drop every second burst."""
        for values in (self.wall_ms, self.cpu_ms):
            bursts = range(0, len(values), 2 * self.burst)
            values[:] = [ms for start in bursts for ms in values[start : start + self.burst]]

    def spread(self, most: int) -> Samples:
        """Return at most so many bursts, evenly spread over the whole run; itself if there are no more."""
        bursts = len(self) // self.burst
        if bursts <= most:
            return self
        starts = [self.burst * (n * bursts // most) for n in range(most)]
        wall_ms, cpu_ms = (
            [ms for start in starts for ms in values[start : start + self.burst]]
            for values in (self.wall_ms, self.cpu_ms)
        )
        return Samples(self.burst, wall_ms, cpu_ms)

    def _bursts(self, values: Sequence[float]) -> npt.NDArray[np.float64]:
        whole = max(1, len(values) // self.burst)
        size = min(self.burst, len(values))
        return np.array(values[: whole * size], np.float64).reshape(whole, size)


def percentiles_of(bursts: npt.NDArray[np.float64], drawn: npt.NDArray[np.int64], at: float) -> npt.NDArray[np.float64]:
    """Return that percentile of every draw (draws, bursts); a few draws at a time, to save memory."""
    step = max(1, AT_ONCE // bursts.size)
    return np.concatenate([_percentiles(bursts, drawn[n : n + step], at) for n in range(0, len(drawn), step)])


def _percentiles(bursts: npt.NDArray[np.float64], drawn: npt.NDArray[np.int64], at: float) -> npt.NDArray[np.float64]:
    found = np.percentile(bursts[drawn].reshape(len(drawn), -1), at, axis=1)
    return found.astype(np.float64)


Report = Callable[[Mapping[str, Samples]], None]


def time_together(
    candidates: Mapping[str, Callable[[], object]],
    seconds: float = 1.0,
    pause_ms: float = 0.0,
    report: Report = lambda samples: None,
    least_runs: int = MIN_RUNS,
) -> dict[str, Samples]:
    """Time calls side by side, each as often, for `seconds` on average and at least `least_runs`; every run by name.

    `pause_ms`: sleep before every run, which is then a burst of its own; the seconds count the pauses too. `report` is
    called after each round.
    """
    for run in candidates.values():
        _warm_up(run)
    burst = 1 if pause_ms else BURST
    samples = {name: Samples(burst) for name in candidates}
    least_ms, most_runs = 1000 * seconds * len(samples), max(MOST_RUNS, 2 * least_runs)
    lasted_ms, rounds, kept_every = 0.0, 0, 1
    while _runs(samples) < least_runs or lasted_ms < least_ms:
        for name, run in candidates.items():
            if pause_ms:
                time.sleep(pause_ms / 1000)
            else:
                run()  # not timed: it finds the caches of another candidate
            taken = samples[name] if rounds % kept_every == 0 else Samples(burst)
            for _ in range(burst):
                lasted_ms += pause_ms + _timed(run, taken)
        rounds += 1
        if _runs(samples) > most_runs:
            kept_every *= 2
            for taken in samples.values():
                taken.thin()
        report(samples)
    return samples


def _runs(samples: Mapping[str, Samples]) -> int:
    return min(len(taken) for taken in samples.values())


def _timed(run: Callable[[], object], samples: Samples) -> float:
    """Add the milliseconds of one run to the samples, and return those of the wall clock."""
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    run()
    end = time.perf_counter_ns()
    samples.wall_ms.append((end - start) / 1e6)
    samples.cpu_ms.append((time.process_time_ns() - cpu) / 1e6)
    return samples.wall_ms[-1]


def _warm_up(run: Callable[[], object], limit_seconds: float = 2.0) -> None:
    """Run until a burst is as fast as the one before, or the limit is over."""
    end, before = time.monotonic() + limit_seconds, 0.0
    while time.monotonic() < end:
        taken = Samples(3)
        for _ in range(3):
            _timed(run, taken)
        now = float(np.median(taken.wall_ms))
        if abs(now - before) <= STABLE * before:
            return
        before = now
