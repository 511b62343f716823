"""The device card: on what a latency was measured. Light: standard library."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ..values import Count, Value


class DeviceCard(Value, frozen=True, kw_only=True):
    """The machine, as far as it tells; "unknown" where it does not."""

    cpu: str
    cores: Count  # that this process may use
    core_numbers: tuple[Count, ...] = ()  # which: a phone's are of several kinds
    governor: str
    memory_bytes: Count
    system: str
    runtime_version: str


def this_device(runtime_version: str) -> DeviceCard:
    """Describe the machine this runs on."""
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    return DeviceCard(
        cpu=_cpu_model(),
        cores=usable_cores(),
        core_numbers=tuple(numbers),
        governor=_first_line(f"/sys/devices/system/cpu/cpu{numbers[0]}/cpufreq/scaling_governor"),
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        runtime_version=runtime_version,
    )


def usable_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().split("\n")[0].strip() or "unknown"
    except OSError:
        return "unknown"
