"""How long work tells where it is. The library speaks to a `Progress`; the command line decides what is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Intervals = Mapping[str, tuple[float, float, float]]  # by candidate: milliseconds, and between which they lie


class Progress(Protocol):
    """Hears of phases, steps within them, and remarks."""

    def phase(self, what: str, total: int | None = None) -> None: ...

    def advance(self, steps: int = 1) -> None: ...

    def describe(self, what: str) -> None: ...  # another word for the phase, its count goes on

    def note(self, text: str) -> None: ...

    def latencies(self, found: Intervals, budget_ms: float | None) -> None: ...  # while they are being measured


class Silent:
    """Says nothing: the default of the library, and `--quiet`."""

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
