"""A Profile: the measured latencies of one file on one device, with intervals and conditions. Light."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..errors import UsageError
from ..runtimes.device import DeviceCard
from ..storage.json import Count, Size, Value
from ..target import ON_CPU, Precision, Target
from .conditions import BUSY, Conditions
from .sampling import Samples

Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
Percentile = Literal["p50", "p90", "p99"]
Method = Annotated[str, msgspec.Meta(max_length=64)]  # such as "in-process" (our timer around a session), "trtexec"
PERCENTILES: dict[Percentile, float] = {"p50": 50, "p90": 90, "p99": 99}
# Runs that a percentile needs: at least ten beyond it.
LEAST_RUNS: dict[Percentile, int] = {"p50": 40, "p90": 100, "p99": 1000}


class Profile(Value, frozen=True, kw_only=True):
    """A distribution of wall-clock latencies, and the way it was measured."""

    p50_ms: Milliseconds
    p90_ms: Milliseconds
    p99_ms: Milliseconds
    spread_ms: Milliseconds  # between the quartiles
    intervals_ms: dict[Percentile, tuple[Milliseconds, Milliseconds]]  # 95 % of these hold the percentile
    cpu_ms: Milliseconds | None  # CPU time of an undisturbed run, all threads: to compare files; None: a GPU worked
    gpu_ms: float | None = None  # median that the GPU alone computed, without copying to and from it
    energy_mj: float | None = None  # of one run, with all that the processor did meanwhile; None: unknown, or a GPU ran
    method: Method | None = None  # None: unknown, in an older file
    samples_ms: tuple[Milliseconds, ...]  # every run, in order
    runs: Count
    burst: Size = 1  # runs in a row, between those of others
    pause_ms: Milliseconds = 0.0  # slept before every run
    conditions: Conditions
    precision: Precision
    batch: Count
    threads: Count
    sha256: str  # of the file that was timed
    device: DeviceCard

    def at_ms(self, percentile: Percentile) -> float:
        """Return the latency that a budget at this percentile is compared with."""
        return float(getattr(self, f"{percentile}_ms"))

    @property
    def is_contended(self) -> bool:
        """True if other work took cores that it needed: then its latency is not the device's."""
        others = self.conditions.others or 0.0
        return self.conditions.waited > BUSY or others + self.threads > self.device.cores + BUSY

    def belongs_to(self, sha256: str, target: Target, device: DeviceCard, pause_ms: float = 0.0) -> bool:
        """Return True if it is of this file, device and kind of timing; only then it may be used again."""
        wanted = (target.precision, target.batch, target.threads, pause_ms)
        same_kind = (self.precision, self.batch, self.threads, self.pause_ms) == wanted
        return self.sha256 == sha256 and same_kind and self.device.same_machine(device)


def to_profile(
    samples: Samples,
    *,
    target: Target,
    sha256: str,
    device: DeviceCard,
    conditions: Conditions,
    pause_ms: float = 0.0,
    energy_mj: float | None = None,
    gpu_ms: float | None = None,
    method: Method | None = None,
) -> Profile:
    """Summarise the samples of one candidate."""
    return Profile(
        p50_ms=samples.percentile(50),
        p90_ms=samples.percentile(90),
        p99_ms=samples.percentile(99),
        spread_ms=samples.percentile(75) - samples.percentile(25),
        intervals_ms={name: samples.interval(at) for name, at in PERCENTILES.items()},
        cpu_ms=samples.quiet_cpu_ms if target.runtime in ON_CPU else None,
        energy_mj=energy_mj,
        gpu_ms=gpu_ms,
        method=method,
        samples_ms=tuple(round(ms, 4) for ms in samples.wall_ms),
        runs=len(samples),
        burst=samples.burst,
        pause_ms=pause_ms,
        conditions=conditions,
        precision=target.precision,
        batch=target.batch,
        threads=target.threads,
        sha256=sha256,
        device=device,
    )


def check_percentile(name: str) -> Percentile:
    """Return the percentile of that name."""
    if name not in PERCENTILES:
        raise UsageError(f"no percentile is called '{name}'. Known: {', '.join(PERCENTILES)}")
    return name
