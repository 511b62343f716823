"""Timings that are over soon, where no latency matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from snapvit_export.profiling.timer import Timer
from snapvit_export.selection import bracket

MOST_SECONDS = 0.1


@contextmanager
def short_timings() -> Iterator[None]:
    """Every file is timed for a tenth of a second at most, but as often as its percentiles need."""
    plain = Timer.time

    def time(self: Timer, files: Any, seconds: float = 1.0, *rest: Any, **more: Any) -> Any:
        return plain(self, files, min(seconds, MOST_SECONDS), *rest, **more)

    once = (MOST_SECONDS,)  # no longer runs where the first cannot tell
    with patch.object(Timer, "time", time), patch.object(bracket, "COMPARE_SECONDS", once):
        yield
