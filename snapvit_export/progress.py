"""Progress of long work: the library reports to a `Progress`, and the command line decides what is shown.

`Stages` stands between the two: it measures where the time goes, numbers the steps of the work, and estimates from
those that are done how long the rest will take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

Intervals = Mapping[str, tuple[float, float, float]]  # by candidate: milliseconds, and the interval they lie in
OTHER = "other"  # time that belongs to no stage
SHORT = 5.0  # seconds: less is not worth an estimate
ENOUGH = 0.1  # of the whole must be done before it tells how long the rest takes


def clock(seconds: float) -> str:
    """Write a duration: 0:41, or 1:02:11 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress(Protocol):
    """Receives phases, steps within them, notes, and latencies while they are measured."""

    def phase(self, what: str, total: int | None = None) -> None: ...

    def advance(self, steps: int = 1) -> None: ...

    def describe(self, what: str) -> None: ...  # renames the phase; its count goes on

    def note(self, text: str) -> None: ...

    def latencies(self, found: Intervals, budget_ms: float | None) -> None: ...  # as measured so far


class Silent:
    """Shows nothing: the default of the library, and `--quiet`."""

    def phase(self, what: str, total: int | None = None) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass

    def describe(self, what: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def latencies(self, found: Intervals, budget_ms: float | None) -> None:
        pass


class Stages:
    """A Progress that passes everything on, and measures the seconds of each stage of the work.

    >>> stages = Stages(progress)
    >>> with stages.stage("ranking"):
    ...     stages.phase("observing the dense model")
    >>> list(stages.rounded())
    ['ranking']
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}  # by stage, in the order in which they began
        self._progress: Progress = progress or Silent()
        self._running: list[str] = []  # the innermost last
        self._began = self._since = time.monotonic()
        self._shares: dict[str, float] = {}  # of each step, of the whole time
        self._estimates = True
        self._step, self._step_began = "", self._began

    def plan(self, shares: Mapping[str, float], estimates: bool = True) -> None:
        """Declare the steps of the work, and the share of the whole time that each usually takes, if that is known."""
        self._shares, self._estimates = dict(shares), estimates

    def step(self, name: str) -> None:
        """Begin a step; those that were not planned have no number."""
        self._step, self._step_began = name if name in self._shares else "", time.monotonic()

    @property
    def where(self) -> str:
        """Where in the whole work this is, to put before a phase: "[2/7, about 0:40 left] "."""
        if not self._step:
            return ""
        names = list(self._shares)
        number = names.index(self._step)
        done, left = (sum(self._shares[name] for name in part) for part in (names[:number], names[number:]))
        taken, since = self._step_began - self._began, time.monotonic() - self._step_began
        seconds = taken * left / done - since if done >= ENOUGH * (done + left) else 0.0
        about = f", about {clock(10 * math.ceil(seconds / 10))} left" if self._estimates and seconds >= SHORT else ""
        return f"[{number + 1}/{len(names)}{about}] "

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time until the end of the block; a stage inside it counts for itself alone."""
        self._count()
        self.seconds.setdefault(name, 0.0)
        self._running.append(name)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def _count(self) -> None:
        """Add the time since the last change to the innermost stage."""
        now = time.monotonic()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def measured(self) -> dict[str, float]:
        """Return the seconds of each stage so far."""
        self._count()
        return dict(self.seconds)

    def rounded(self) -> dict[str, float]:
        """Return the seconds so far to a tenth, and what belongs to no stage as "other": together the wall clock's."""
        self._count()
        outside = self._since - self._began - sum(self.seconds.values())
        found = {**self.seconds, OTHER: self.seconds.get(OTHER, 0.0) + outside}
        return {name: round(seconds, 1) for name, seconds in found.items() if name != OTHER or round(seconds, 1) > 0}

    def phase(self, what: str, total: int | None = None) -> None:
        self._progress.phase(f"{self.where}{what}", total)

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(steps)

    def describe(self, what: str) -> None:
        self._progress.describe(what)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def latencies(self, found: Intervals, budget_ms: float | None) -> None:
        self._progress.latencies(found, budget_ms)
