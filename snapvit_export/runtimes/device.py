"""The device: a card of the machine that a latency was measured on, and the cores that this process uses. Light.

`pin_to` keeps the process on some cores: one kind of a phone's cores, or one that other work leaves alone.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import SnapvitError, UsageError
from ..storage.json import Count, Finite, Value
from ..storage.memory import memory_bytes

LIMIT = " max"  # end of the names of clock limits, set by the power mode; the others are clocks of that moment


class Accelerator(Value, frozen=True, kw_only=True):
    """The GPU that did the work, and its software; "unknown" where the system does not say."""

    name: str
    software: dict[str, str]  # versions: jetpack, l4t, tensorrt, cuda, driver
    power_mode: str
    clocks_mhz: dict[str, Finite]  # "gpu", "cpu0": at that moment; "gpu max", "cpu0 max": in this power mode
    temperatures_c: dict[str, Finite]
    memory_bytes: Count  # a Jetson's is shared with the processor
    board: str | None = None  # that carries it: Orins of one name are not of one speed; None: not recorded
    sm_count: Count | None = None  # streaming multiprocessors; None: not recorded

    def at_rest(self, other: Accelerator | None) -> Accelerator:
        """Return it without what changes from one minute to the next, and without what `other` does not record."""
        limits = {name: mhz for name, mhz in self.clocks_mhz.items() if name.endswith(LIMIT)}
        board = None if other is None or other.board is None else self.board
        sm_count = None if other is None or other.sm_count is None else self.sm_count
        return msgspec.structs.replace(self, clocks_mhz=limits, temperatures_c={}, board=board, sm_count=sm_count)


class DeviceCard(Value, frozen=True, kw_only=True):
    """The machine that a latency was measured on; "unknown" where the system does not say."""

    cpu: str
    cores: Count  # that this process may use
    core_numbers: Annotated[
        tuple[Count, ...], msgspec.Meta(max_length=2**14)
    ] = ()  # which: a phone's are of several kinds
    governor: str
    memory_bytes: Count
    system: str
    runtime_version: str
    accelerator: Accelerator | None = None  # None: the processor did the work

    def same_machine(self, other: DeviceCard) -> bool:
        """Return True if latencies of one hold for the other: equal in all but temperatures and momentary clocks.

        Older files have neither board nor number of multiprocessors: what one of the two lacks is not compared.
        """
        return self._at_rest(other) == other._at_rest(self)

    def _at_rest(self, other: DeviceCard) -> DeviceCard:
        accelerator = self.accelerator and self.accelerator.at_rest(other.accelerator)
        return msgspec.structs.replace(self, accelerator=accelerator)


def this_device(runtime_version: str, accelerator: Accelerator | None = None) -> DeviceCard:
    """Describe the machine this runs on."""
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(usable_cores()))
    return DeviceCard(
        cpu=_cpu_model(),
        cores=usable_cores(),
        core_numbers=tuple(numbers),
        governor=_first_line(f"/sys/devices/system/cpu/cpu{numbers[0]}/cpufreq/scaling_governor"),
        memory_bytes=memory_bytes() or 0,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        runtime_version=runtime_version,
        accelerator=accelerator,
    )


def board() -> str | None:
    """Return the board that carries the GPU, as its device tree names it; None where there is none, as in a PC.

    A Jetson's GPU is called Orin on boards of 4 and of 16 multiprocessors.
    """
    found = _first_line("/proc/device-tree/model").replace("\0", "")
    return None if found in ("", "unknown") else found


def usable_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(count: int) -> None:
    """Refuse more threads than cores: they would wait for each other, and ten million of them for ever."""
    if count > (cores := usable_cores()):
        here = f"the {cores} cores that this process may use"
        raise UsageError(f"{count} threads are more than {here}. Give --threads {cores} or fewer")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().split("\n")[0].strip() or "unknown"
    except OSError:
        return "unknown"


def pin_to(cores: str | None) -> None:
    """Run only on these cores from now on, `0` or `0,2`; None: leave it as it is."""
    if cores is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SnapvitError("this system cannot keep a process on chosen cores. Leave --pin out")
    try:
        wanted = {int(part) for part in cores.split(",")}
    except ValueError:
        raise UsageError(f"--pin '{cores}' is not a list of cores. Write it like 0 or 0,2") from None
    allowed = os.sched_getaffinity(0)
    if not wanted <= allowed:
        known = ", ".join(map(str, sorted(allowed)))
        raise UsageError(f"--pin {cores}: this process may use the cores {known}. Choose among them")
    os.sched_setaffinity(0, wanted)
