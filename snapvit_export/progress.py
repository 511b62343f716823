"""Progress of long work: the library reports to a `Progress`, and the command line decides what is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Intervals = Mapping[str, tuple[float, float, float]]  # by candidate: milliseconds, and the interval they lie in


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
