"""Time files in turns in this process, in the runtime of their target, and record the conditions. Light."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy.typing as npt

from ..graph.format import cropped
from ..runtimes.device import DeviceCard
from ..runtimes.session import Session, open_session
from ..target import ON_CPU, Precision, Target
from .conditions import LoadMonitor, ThrottleMonitor
from .energy import measure_in_turns
from .profile import LEAST_RUNS, Method, Percentile, Profile, to_profile
from .sampling import Report, time_together

GPU_RUNS = 50  # whose median is the time of the GPU alone


@dataclass(frozen=True)
class File:
    """An exported file on disk, with its hash, the size of its images and the precision that it computes in."""

    path: Path
    sha256: str
    image: tuple[int, int] | None = None  # height and width that it takes; None: those of the timer's inputs
    precision: Precision | None = None  # None: the target's


@dataclass(frozen=True)
class Job:
    """One timing run: which files, where, how long and how often."""

    target: Target
    device: DeviceCard
    files: Mapping[str, File]
    seconds: float  # of each file, on average
    at: Percentile  # that there must be enough runs for
    pause_ms: float
    energy: bool
    least_runs: int | None = None  # of each file; None: as many as the percentile needs

    def target_of(self, file: File) -> Target:
        """Return the target in the precision of that file."""
        return self.target if file.precision is None else msgspec.structs.replace(self.target, precision=file.precision)


def time_in_process(
    job: Job, inputs: npt.NDArray[Any], report: Report, method: Method = "in-process"
) -> dict[str, Profile]:
    """Open all files of a job, time them in turns, and return their Profiles by name."""
    with ExitStack() as opened:
        sessions = {
            name: opened.enter_context(open_session(file.path, job.target_of(file))) for name, file in job.files.items()
        }
        calls: dict[str, Callable[[], object]] = {
            name: partial(session.run, _inputs_of(job.files[name], inputs)) for name, session in sessions.items()
        }
        monitor, throttling, on_cpu = LoadMonitor(), ThrottleMonitor(), job.target.runtime in ON_CPU
        samples = time_together(calls, job.seconds, job.pause_ms, report, job.least_runs or LEAST_RUNS[job.at])
        gpu = {name: _gpu_ms(session) for name, session in sessions.items()}
        taken = {name: getattr(session, "taken", None) for name, session in sessions.items()}
        throttled = throttling.share  # of this run, which all files have shared
        conditions = {name: monitor.conditions(taken, on_cpu, throttled) for name, taken in samples.items()}
        spent = measure_in_turns(calls, job.target.runtime) if job.energy else {}
    return {
        name: to_profile(
            samples[name],
            target=job.target_of(file),
            sha256=file.sha256,
            device=job.device,
            conditions=conditions[name],
            pause_ms=job.pause_ms,
            energy_rounds_mj=spent[name].rounds_mj if name in spent else (),
            energy_source=spent[name].source if name in spent else None,
            gpu_ms=gpu[name],
            method=method,
            taken=taken[name],
        )
        for name, file in job.files.items()
    }


def _inputs_of(file: File, inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return inputs if file.image is None else cropped(inputs, file.image)


def _gpu_ms(session: Session) -> float | None:
    """Return the median milliseconds of the GPU alone; None where there is no GPU, or it is not measured."""
    measure = getattr(session, "gpu_ms", None)
    return None if measure is None else median(measure() for _ in range(GPU_RUNS))
