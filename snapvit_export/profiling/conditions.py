"""Conditions of a timing run: other load on the machine, slowdown, noise, energy. Light: standard library.

Everything is read from Linux's own files; where they are missing the value is None, never a guess.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from ..runtimes import jetson_agent as board
from ..storage.json import Finite, NotNegative, Ratio, Value
from .sampling import Samples

RAPL = Path("/sys/class/powercap")
SLOWED = 0.05  # by so much while timing: heat, or a clock that was lowered
WORKING = (1, 2, 3, 6, 7, 8)  # columns of /proc/stat: user, nice, system, two of interrupts, other virtual machines
BUSY = 0.2  # share of a core that others used
NOISY = 0.02  # difference of a candidate from itself


class Conditions(Value, frozen=True, kw_only=True):
    """The disturbances of a timing run, which limit how far it can be trusted."""

    noise: NotNegative  # relative difference of a candidate from itself (A/A)
    drift: Finite  # relative slowdown from the beginning to the end
    waited: Ratio  # share of the time in which the process did not run
    others: NotNegative | None  # cores that other processes and machines kept busy; None: unknown
    throttled: Ratio | None = None  # share of the rounds in which heat or current throttled the chip; None: unknown

    def warnings(self) -> list[tuple[str, float, str]]:
        """Return warnings: the kind of disturbance, its size, and a clause that says what to do."""
        found = []
        if self.others is not None and self.others > BUSY:
            text = f"other programs or virtual machines kept {self.others:.1f} cores busy; stop them and time again"
            found.append(("load", self.others, text))
        if self.drift > SLOWED:
            text = f"it slowed down by {100 * self.drift:.0f} % while it was timed; let it cool or fix its clock"
            found.append(("heat", self.drift, text))
        if self.noise > NOISY:
            text = f"the same model differed by {100 * self.noise:.1f} % from itself; time it for longer"
            found.append(("noise", self.noise, text))
        if self.throttled:
            text = (
                f"heat or current throttled it in {100 * self.throttled:.0f} % of its rounds; cool it or power it well"
            )
            found.append(("throttling", self.throttled, text))
        return found


class LoadMonitor:
    """Measures the load of other processes, from its creation until `conditions` is called."""

    def __init__(self) -> None:
        self._started, self._own, self._all = time.monotonic(), time.process_time(), _busy_seconds()

    def conditions(self, samples: Samples, on_cpu: bool = True, throttled: float | None = None) -> Conditions:
        """Return the load, and the disturbances in the samples; where a GPU works, waiting for it is none."""
        waited = samples.waited if on_cpu else 0.0
        return Conditions(
            noise=samples.noise, drift=samples.drift, waited=waited, others=self.others, throttled=throttled
        )

    @property
    def others(self) -> float | None:
        """The number of cores that other processes kept busy so far, on average; None: not known, or too early."""
        now, elapsed = _busy_seconds(), time.monotonic() - self._started
        if now is None or self._all is None or elapsed < 0.2:  # the kernel counts in hundredths
            return None
        return max(0.0, (now - self._all - (time.process_time() - self._own)) / elapsed)


class ThrottleMonitor:
    """Tells if heat or current has throttled a board since its creation, by its own counters and alerts.

    They are read twice, and never while something is timed: what has come and gone again without a counter is missed.
    """

    def __init__(self, root: Path = board.ROOT) -> None:
        self._root, self._alerts, self._before = root, board.alert_files(root), board.over_currents(root)

    @property
    def share(self) -> float | None:
        """Return 1 if something did, 0 if nothing did; None where nothing tells."""
        if not self._alerts and not self._before:
            return None
        after = board.over_currents(self._root)
        counted = any(after.get(name, count) != count for name, count in self._before.items())
        return float(counted or any((board.number_of(state) or 0) > 0 for state in self._alerts.values()))


def _busy_seconds() -> float | None:
    """Return the seconds that the cores of this process have been busy since the machine started."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        tick = os.sysconf("SC_CLK_TCK")
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    except (OSError, AttributeError, ValueError):
        return None
    rows = [line.split() for line in lines if line.split(" ", 1)[0] in mine]
    return sum(int(row[column]) for row in rows for column in WORKING if column < len(row)) / tick


class EnergyCounter:
    """The energy counter of the processor's packages (RAPL); without one, or without permission, no energy."""

    def __init__(self, folder: Path = RAPL) -> None:
        zones = [zone for zone in sorted(folder.glob("*-rapl:*")) if _name(zone).startswith("package")]
        self._zones = [zone for zone in zones if _number(zone / "energy_uj") is not None]

    @property
    def known(self) -> bool:
        return bool(self._zones)

    def read(self) -> list[int]:
        """Return the microjoules of every package; the counters wrap."""
        return [_number(zone / "energy_uj") or 0 for zone in self._zones]

    def since(self, before: list[int]) -> float | None:
        """Return the millijoules since an earlier reading; None without a counter."""
        if not self._zones:
            return None
        total = 0
        for zone, first, last in zip(self._zones, before, self.read()):
            wrap = (_number(zone / "max_energy_range_uj") or 0) if last < first else 0
            total += last - first + wrap
        return total / 1000


def _name(zone: Path) -> str:
    """Return the name of a zone; "psys", for one, includes the packages."""
    try:
        return (zone / "name").read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def worst_warnings(taken: Iterable[Conditions]) -> list[str]:
    """Return the warnings of several timing runs, each kind once, at its worst."""
    worst: dict[str, tuple[float, str]] = {}
    for conditions in taken:
        for kind, size, text in conditions.warnings():
            if size > worst.get(kind, (0.0, ""))[0]:
                worst[kind] = (size, text)
    return [text for _, text in worst.values()]
