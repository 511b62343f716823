"""Time files side by side in the target's runtime, and record the conditions. Light."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy.typing as npt

from ..graph.format import cropped
from ..runtimes.device import DeviceCard
from ..runtimes.session import Session, open_session
from ..target import ON_CPU, Target
from .conditions import EnergyCounter, LoadMonitor
from .profile import LEAST_RUNS, Percentile, Profile, to_profile
from .sampling import Report, time_together

ENERGY_SECONDS = 1.0  # of runs between two readings of the counter
GPU_RUNS = 50  # whose median is the time of the GPU alone


@dataclass(frozen=True)
class File:
    """An exported file on disk, with its hash and the size of its images."""

    path: Path
    sha256: str
    image: tuple[int, int] | None = None  # height and width that it takes; None: those of the timer's inputs


@dataclass(frozen=True, eq=False)
class Timer:
    """Takes Profiles of files on one target.

    >>> timer.time({"dense": dense, "s30": s30})["s30"].p50_ms     # dense and s30 are Files
    """

    target: Target
    device: DeviceCard
    inputs: npt.NDArray[Any]  # one batch, as the files take it; of the largest images if theirs differ
    pause_ms: float = 0.0

    def time(
        self,
        files: Mapping[str, File],
        seconds: float = 1.0,
        report: Report = lambda s: None,
        at: Percentile = "p50",
        energy: bool = False,
    ) -> dict[str, Profile]:
        """Time files in turns, each for `seconds` and often enough for the percentile `at`.

        `energy`: also run each alone for a while, to read the processor's counter; it does not include a GPU, so it is
        not read where one works.
        """
        with ExitStack() as opened:
            sessions = {
                name: opened.enter_context(open_session(file.path, self.target)) for name, file in files.items()
            }
            calls: dict[str, Callable[[], object]] = {
                name: partial(session.run, self._inputs_of(files[name])) for name, session in sessions.items()
            }
            monitor, on_cpu = LoadMonitor(), self.target.runtime in ON_CPU
            samples = time_together(calls, seconds, self.pause_ms, report, LEAST_RUNS[at])
            gpu = {name: _gpu_ms(session) for name, session in sessions.items()}
            conditions = {name: monitor.conditions(taken, on_cpu) for name, taken in samples.items()}
            spent = {name: _energy_mj(call) if energy and on_cpu else None for name, call in calls.items()}
        return {
            name: to_profile(
                samples[name],
                target=self.target,
                sha256=file.sha256,
                device=self.device,
                conditions=conditions[name],
                pause_ms=self.pause_ms,
                energy_mj=spent[name],
                gpu_ms=gpu[name],
                method="in-process",
            )
            for name, file in files.items()
        }

    def _inputs_of(self, file: File) -> npt.NDArray[Any]:
        return self.inputs if file.image is None else cropped(self.inputs, file.image)


def _gpu_ms(session: Session) -> float | None:
    """Return the median milliseconds of the GPU alone; None where there is no GPU, or it is not measured."""
    measure = getattr(session, "gpu_ms", None)
    return None if measure is None else median(measure() for _ in range(GPU_RUNS))


def _energy_mj(call: Callable[[], object]) -> float | None:
    """Return the millijoules of one run; None where no counter can be read."""
    counter = EnergyCounter()
    if not counter.known:
        return None
    before, end, runs = counter.read(), time.monotonic() + ENERGY_SECONDS, 0
    while time.monotonic() < end:
        call()
        runs += 1
    spent = counter.since(before)
    return None if spent is None else spent / runs
