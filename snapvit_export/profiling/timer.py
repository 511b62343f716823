"""A Timer takes Profiles of files on one target, in this process or in a new one. Light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from ..runtimes.device import DeviceCard
from ..target import Target
from .in_process import File, Job, time_in_process
from .new_process import time_in_new_process
from .profile import Percentile, Profile
from .sampling import Report

__all__ = ["File", "Timer"]


@dataclass(frozen=True, eq=False)
class Timer:
    """Takes Profiles of files on one target.

    >>> timer.time({"dense": dense, "s30": s30})["s30"].p50_ms     # dense and s30 are Files
    """

    target: Target  # in the precision of all files that do not name their own
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
        fresh: bool = False,
        least_runs: int | None = None,
    ) -> dict[str, Profile]:
        """Time files in turns, each for `seconds` and often enough for the percentile `at`, or so often.

        `energy`: also run each alone for a while, in turns, to measure its energy (`profiling.energy`). `fresh`: in a
        new process. Where a process happens to put weights in memory makes a file faster or slower for as long as it
        lives, so only several processes tell what a user will find.
        """
        job = Job(self.target, self.device, files, seconds, at, self.pause_ms, energy, least_runs)
        return (time_in_new_process if fresh else time_in_process)(job, self.inputs, report)
