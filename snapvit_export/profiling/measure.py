"""Timing: warm up until stable, then interleave the candidates in short bursts and keep every sample. Light.

A burst is a few runs in a row, so that a model is timed as it would run in a loop, not with its weights just evicted
by another; bursts of all candidates alternate, so that a slow minute of the machine falls on all of them alike. With a
pause, every run comes after a sleep instead: a camera's model finds cold caches and a clock that has been lowered.

Two clocks. The wall clock is what a user waits for, and what a budget means. CPU time compares candidates on a machine
that has other work: it does not count what others did meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from .sampling import Samples

BURST = 8  # runs in a row
MIN_RUNS = 40  # samples of each candidate
STABLE = 0.05  # two bursts in a row that differ by no more are warm
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
    least_ms = 1000 * seconds * len(samples)
    while _runs(samples) < least_runs or sum(taken.lasted_ms(pause_ms) for taken in samples.values()) < least_ms:
        for name, run in candidates.items():
            if pause_ms:
                time.sleep(pause_ms / 1000)
            else:
                run()  # the first of a burst finds the caches of the one before
            for _ in range(burst):
                _timed(run, samples[name])
        report(samples)
    return samples


def _runs(samples: Mapping[str, Samples]) -> int:
    return min(len(taken) for taken in samples.values())


def _timed(run: Callable[[], object], samples: Samples) -> None:
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    run()
    end = time.perf_counter_ns()
    samples.wall_ms.append((end - start) / 1e6)
    samples.cpu_ms.append((time.process_time_ns() - cpu) / 1e6)


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
