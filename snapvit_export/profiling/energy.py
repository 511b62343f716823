"""Energy of one run: by the sensors of a board, the counter of a GPU or that of a processor, in several rounds. Light.

What measures depends on what works. A run on a GPU is measured by the rails of its board (a Jetson) or by the counter
of the GPU itself (NVML), never by the processor's, which knows nothing of it. A run on the processor is measured by the
counter of its packages (RAPL), or by the rails of its board. Where none can be read the energy is None, never a guess.

Files take turns, as in timing: energies of several rounds give an interval.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import SnapvitError
from ..runtimes import jetson_agent as board
from ..runtimes.cuda import require_gpu
from ..target import ON_CPU, Runtime
from .conditions import EnergyCounter
from .drift import BEYOND
from .profile import Profile
from .student_t import t_quantile

ROUNDS = 5
LEAST_ROUNDS = 3  # that an interval needs
RAPL_SECONDS = 0.25  # of a round; the counter is a thousand times finer
NVML_SECONDS = 1.0  # the counter moves some ten times a second
LIBRARY = "libnvidia-ml.so.1"
ADVICE = (
    "Give milliseconds, or choose by Profiles of a machine that measures energy: snapvit profile (as root), a Jetson"
)


@dataclass(frozen=True)
class Energy:
    """The energy of one run, and the interval that it lies in."""

    mj: float
    low: float
    high: float


def energy_of(profiles: Sequence[Profile]) -> Energy | None:
    """Return the energy by all Profiles of one file, one for each timing run; None if it was measured too rarely.

    Of several runs each is one observation, of a single one each of its rounds; what does not say by what it was
    measured, as older files, tells nothing. The interval is Student's, as sure as those of latencies.
    """
    known = [p for p in profiles if p.energy_rounds_mj and p.energy_source is not None]
    values = [statistics.mean(profile.energy_rounds_mj) for profile in known]
    if len(known) < LEAST_ROUNDS:
        values = list(known[-1].energy_rounds_mj) if known else []
    if len(values) < LEAST_ROUNDS:
        return None
    mean = statistics.mean(values)
    margin = t_quantile(1 - BEYOND, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Energy(mean, max(mean - margin, 0.0), mean + margin)


@dataclass(frozen=True)
class Measured:
    """The energy of one run of a file, by round, and what measured it."""

    rounds_mj: tuple[float, ...]
    source: str

    @property
    def mj(self) -> float:
        return statistics.mean(self.rounds_mj)


class Meter(Protocol):
    """Measures the energy of calls."""

    @property
    def source(self) -> str:
        """What it measures, in words."""
        ...

    def measure(self, call: Callable[[], object]) -> float | None:
        """Return the millijoules of one call, of those of a while; None if they could not be told."""
        ...


class ProcessorMeter:
    """The processor's packages, by RAPL."""

    source = "processor packages by RAPL"

    def __init__(self, counter: EnergyCounter) -> None:
        self._counter = counter

    def measure(self, call: Callable[[], object]) -> float | None:
        before = self._counter.read()
        runs, _, _ = _repeat(call, RAPL_SECONDS)
        spent = self._counter.since(before)
        return None if not spent else spent / runs


class BoardMeter:
    """The board of a Jetson, by the sensors of its rails, as the agent reads them."""

    def __init__(self, power: board.Power, root: Path) -> None:
        self._power, self._root = power, root

    @property
    def source(self) -> str:
        return self._power.source

    def measure(self, call: Callable[[], object]) -> float | None:
        seconds = max(NVML_SECONDS, 2 * board.LEAST_REFRESHES * self._power.refresh)
        with board.Watch(self._power, self._root) as watch:
            _repeat(call, self._power.refresh)  # until the sensor has forgotten what was before
            runs, start, end = _repeat(call, seconds)
        return watch.spent((start, end, runs)).energy_mj


class GpuMeter:
    """A GPU with a counter of its own, by NVML."""

    source = "GPU by NVML"

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read

    def measure(self, call: Callable[[], object]) -> float | None:
        before = self._read()
        runs, _, _ = _repeat(call, NVML_SECONDS)
        after = self._read()
        return None if before is None or after is None or after <= before else (after - before) / runs


def _repeat(call: Callable[[], object], seconds: float) -> tuple[int, float, float]:
    """Call for so long; return how often, and the moments of beginning and end."""
    start, runs = time.monotonic(), 0
    while not runs or time.monotonic() < start + seconds:
        call()
        runs += 1
    return runs, start, time.monotonic()


def meter_for(runtime: Runtime, root: Path = board.ROOT) -> Meter | None:
    """Return what measures the energy of a runtime here; None if nothing does that may."""
    if runtime in ON_CPU and (counter := EnergyCounter()).known:
        return ProcessorMeter(counter)
    power, _ = board.power_of(root)
    if power is not None:
        return BoardMeter(power, root)
    read = None if runtime in ON_CPU else nvml_counter()
    return None if read is None or read() is None else GpuMeter(read)


def nvml_counter() -> Callable[[], int | None] | None:
    """Return what reads the millijoules of the first CUDA GPU since its driver was loaded; None without NVML."""
    try:
        library, address = ctypes.CDLL(LIBRARY), require_gpu().pci_address
    except (OSError, SnapvitError):
        return None
    device = ctypes.c_void_p()
    by_address = (address.encode(), ctypes.byref(device))
    try:
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(*by_address):
            return None
        consumed = library.nvmlDeviceGetTotalEnergyConsumption
    except AttributeError:  # an older driver
        return None

    def read() -> int | None:
        found = ctypes.c_ulonglong()
        return None if consumed(device, ctypes.byref(found)) else found.value  # refused before Volta, and on Jetsons

    return read


def measure_in_turns(
    calls: Mapping[str, Callable[[], object]], runtime: Runtime, rounds: int = ROUNDS
) -> dict[str, Measured]:
    """Measure the energy of calls in turns; those whose energy could not be told in enough rounds are left out."""
    meter = meter_for(runtime)
    if meter is None:
        return {}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if (spent := meter.measure(call)) is not None:
                found[name].append(spent)
    told = {name: tuple(values) for name, values in found.items() if len(values) >= LEAST_ROUNDS}
    return {name: Measured(values, meter.source) for name, values in told.items()}
