"""A clock that moves only when it is told to, so that hours of timing are over in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from snapvit_export.profiling import energy, sampling


@dataclass
class FakeClock:
    """Stands for the module `time`; all of its clocks are one."""

    now_ns: int = 0

    def advance(self, ms: float) -> None:
        self.now_ns += round(1e6 * ms)

    def sleep(self, seconds: float) -> None:
        self.advance(1000 * seconds)

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def perf_counter_ns(self) -> int:
        return self.now_ns

    process_time_ns = perf_counter_ns


@contextmanager
def fake_clock() -> Iterator[FakeClock]:
    """What is timed in this process is timed by a clock of its own."""
    clock = FakeClock()
    with patch.object(sampling, "time", clock), patch.object(energy, "time", clock):
        yield clock
