"""A Profile: the measured latencies of one file on one device, with intervals and conditions. Light."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import msgspec
import numpy as np

from ..checks.comparison import Compared
from ..errors import UsageError
from ..runtimes.device import DeviceCard
from ..runtimes.taken import Taken
from ..storage.json import Finite, NotNegative, Size, Some, Value
from ..target import ON_CPU, Precision, Target
from .conditions import BUSY, Conditions
from .sampling import Samples

MOST_MS = 1e9  # eleven days: no run takes longer
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
Duration = Annotated[float, msgspec.Meta(gt=0, le=MOST_MS)]  # of something that happened
Percentile = Literal["p50", "p90", "p99"]
Method = Annotated[str, msgspec.Meta(max_length=64)]  # such as "in-process" (our timer around a session), "trtexec"
Source = Annotated[str, msgspec.Meta(max_length=200)]
PERCENTILES: dict[Percentile, float] = {"p50": 50, "p90": 90, "p99": 99}
# Runs that a percentile needs: at least ten beyond it.
LEAST_RUNS: dict[Percentile, int] = {"p50": 40, "p90": 100, "p99": 1000}
RESOLUTION_MS = 1e-4  # that samples are rounded to; their percentiles are not, so the two differ by so much


class Profile(Value, frozen=True, kw_only=True):
    """A distribution of wall-clock latencies, and the way it was measured."""

    p50_ms: Duration
    p90_ms: Duration
    p99_ms: Duration
    spread_ms: Milliseconds  # between the quartiles
    intervals_ms: dict[Percentile, tuple[Duration, Duration]]  # 95 % of these hold the percentile
    cpu_ms: Milliseconds | None  # CPU time of an undisturbed run, all threads: to compare files; None: a GPU worked
    gpu_ms: Milliseconds | None = None  # median that the GPU alone computed, without copying to and from it
    # Of one run, in a row of many, by `energy_source`: never the processor alone where a GPU ran. None: unknown.
    energy_mj: Finite | None = None
    energy_rounds_mj: tuple[NotNegative, ...] = ()  # of every round, of which `energy_mj` is the mean
    energy_source: Source | None = None  # such as "VDD_IN by INA3221", "GPU by NVML"; None in older files: RAPL
    energy_above_idle_mj: Finite | None = None  # without what the board draws anyway
    power_w: NotNegative | None = None  # on average while it ran
    steady_ms: Duration | None = None  # median after minutes without a pause, when it is hot; None: not tried
    method: Method | None = None  # None: unknown, in an older file
    taken: Taken | None = None  # how, on a GPU; None: on a processor, or unknown
    # The answers of the file in this runtime beside those of its graph in ONNX Runtime; None: not compared, or it is
    # ONNX Runtime on the CPU.
    compared: Compared | None = None
    samples_ms: tuple[Duration, ...]  # every run, in order
    runs: Some
    burst: Size = 1  # runs in a row, between those of others
    pause_ms: Milliseconds = 0.0  # slept before every run
    conditions: Conditions
    precision: Precision
    batch: Size
    threads: Size
    sha256: str  # of the file that was timed
    device: DeviceCard

    def __post_init__(self) -> None:
        if not self.burst <= self.runs == len(self.samples_ms):
            raise ValueError(f"{len(self.samples_ms)} samples are not {self.runs} runs in bursts of {self.burst}")
        samples = np.asarray(self.samples_ms, np.float64)
        if not ((samples > 0) & (samples <= MOST_MS)).all():
            raise ValueError("a sample is not a duration")
        if rounds := self.energy_rounds_mj:
            mean = sum(rounds) / len(rounds)
            if self.energy_mj is None or abs(self.energy_mj - mean) > 1e-6 * mean:
                raise ValueError("its energy is not the mean of its rounds")
        if not self.p50_ms <= self.p90_ms <= self.p99_ms:
            raise ValueError("its percentiles do not rise")
        for name, found in zip(PERCENTILES, np.percentile(samples, list(PERCENTILES.values()))):
            if not abs(self.at_ms(name) - found) <= RESOLUTION_MS + 1e-6 * found:
                raise ValueError(f"{name} is {self.at_ms(name):g} ms, and {found:g} ms by its samples")
            if name not in self.intervals_ms:
                raise ValueError(f"{name} has no interval")
            if not self.intervals_ms[name][0] <= self.intervals_ms[name][1]:
                raise ValueError(f"the interval of {name} ends before it begins")

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
    energy_rounds_mj: tuple[float, ...] = (),
    energy_source: Source | None = None,
    gpu_ms: float | None = None,
    method: Method | None = None,
    taken: Taken | None = None,
) -> Profile:
    """Summarise the samples of one candidate."""
    samples = replace(samples, wall_ms=[max(ms, RESOLUTION_MS) for ms in samples.wall_ms])  # a coarse clock tells 0
    return Profile(
        p50_ms=samples.percentile(50),
        p90_ms=samples.percentile(90),
        p99_ms=samples.percentile(99),
        spread_ms=samples.percentile(75) - samples.percentile(25),
        intervals_ms={name: samples.interval(at) for name, at in PERCENTILES.items()},
        cpu_ms=samples.quiet_cpu_ms if target.runtime in ON_CPU else None,
        energy_mj=sum(energy_rounds_mj) / len(energy_rounds_mj) if energy_rounds_mj else None,
        energy_rounds_mj=energy_rounds_mj,
        energy_source=energy_source,
        gpu_ms=gpu_ms,
        method=method,
        taken=taken,
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
