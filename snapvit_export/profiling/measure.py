"""Timing: warm up until stable, then interleave the candidates in short bursts and keep every sample. Light.

A burst is a few runs in a row, so that a model is timed as it would run in a loop, not with its weights just evicted
by another; bursts of all candidates alternate, so that a slow minute of the machine falls on all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import numpy as np

from ..values import Count, Value
from .device import DeviceCard

Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
BURST = 8  # runs in a row
MIN_RUNS = 40  # samples of each candidate


class Profile(Value, frozen=True, kw_only=True):
    """A measured latency of one file on one device: a distribution, and how it was taken."""

    p50_ms: Milliseconds
    p90_ms: Milliseconds
    p99_ms: Milliseconds
    spread_ms: Milliseconds  # between the quartiles
    runs: Count
    batch: Count
    threads: Count
    sha256: str  # of the file that was timed
    device: DeviceCard


def time_together(candidates: Mapping[str, Callable[[], object]], seconds: float = 1.0) -> dict[str, list[float]]:
    """Time calls side by side, each for at least `seconds`; wall-clock milliseconds of every run, by name."""
    for run in candidates.values():
        _warm_up(run)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    while any(len(taken) < MIN_RUNS or sum(taken) < 1000 * seconds for taken in samples.values()):
        for name, run in candidates.items():
            _timed(run)  # the first of a burst finds the caches of the one before
            samples[name] += [_timed(run) for _ in range(BURST)]
    return samples


def to_profile(samples: list[float], *, batch: int, threads: int, sha256: str, device: DeviceCard) -> Profile:
    """Summarise the samples of one candidate."""
    p25, p50, p75, p90, p99 = np.percentile(samples, [25, 50, 75, 90, 99])
    return Profile(
        p50_ms=float(p50),
        p90_ms=float(p90),
        p99_ms=float(p99),
        spread_ms=float(p75 - p25),
        runs=len(samples),
        batch=batch,
        threads=threads,
        sha256=sha256,
        device=device,
    )


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e6


def _warm_up(run: Callable[[], object], limit_seconds: float = 2.0) -> None:
    """Run until two bursts in a row agree within 5 %, or the limit is over."""
    end, before = time.monotonic() + limit_seconds, float("inf")
    while time.monotonic() < end:
        now = float(np.median([_timed(run) for _ in range(3)]))
        if abs(now - before) <= 0.05 * before:
            return
        before = now
