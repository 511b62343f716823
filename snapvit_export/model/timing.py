"""How long each phase of a ranking took, and in how many processes: measured, so no part of what the ranking is. Light.

A Ranking keeps it in its provenance under `timing`. Two runs of the same command give files that are equal in all but
this. A run that was interrupted adds what each of its parts took; what is repeated since the last checkpoint counts
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec

from ..errors import FileFormatError
from ..progress import Stages
from ..storage.json import Count, NotNegative, Value, as_builtins

KEY = "timing"
DIGITS = 3  # of the seconds


class Timing(Value, frozen=True, kw_only=True):
    """The seconds that each phase took in so many processes, as the first of them measured."""

    processes: Count
    threads: Count  # of each process
    device: str
    seconds: dict[str, NotNegative]

    def is_like(self, other: Timing) -> bool:
        """Return True if the other was measured with the same processes, threads and device: they can be added."""
        return (self.processes, self.threads, self.device) == (other.processes, other.threads, other.device)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Timer(Protocol):
    """Counts the time until the end of a block for the phase of this name; a phase inside counts for itself alone."""

    def __call__(self, phase: str, /) -> AbstractContextManager[None]: ...


def untimed(phase: str) -> AbstractContextManager[None]:
    """Count nothing."""
    return nullcontext()


class PhaseClock:
    """Times the phases of one run, on top of what the earlier parts of an interrupted one took.

    >>> clock = PhaseClock()
    >>> with clock("scores"):
    ...     pass
    >>> list(clock.timings()[0].seconds)
    ['scores']
    """

    def __init__(self, processes: int = 1, threads: int = 1, device: str = "cpu") -> None:
        self._how = Timing(processes=processes, threads=threads, device=device, seconds={})
        self._stages = Stages()
        self.earlier: tuple[Timing, ...] = ()

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        return self._stages.stage(phase)

    def timings(self) -> tuple[Timing, ...]:
        """Return what was measured so far, one for each way in which parts of the run were made."""
        seconds = {name: round(value, DIGITS) for name, value in self._stages.measured().items()}
        now = msgspec.structs.replace(self._how, seconds=seconds)
        before = next((timing for timing in self.earlier if timing.is_like(now)), None)
        if before is None:
            return (*self.earlier, now)
        both = {name: before.seconds.get(name, 0.0) + seconds.get(name, 0.0) for name in {**before.seconds, **seconds}}
        now = msgspec.structs.replace(now, seconds={name: round(value, DIGITS) for name, value in both.items()})
        return tuple(now if timing is before else timing for timing in self.earlier)

    def in_plain_values(self) -> list[dict[str, Any]]:
        """Return the timings as a provenance and a checkpoint have them."""
        return as_builtins(self.timings())


def read_timings(record: Mapping[str, Any]) -> tuple[Timing, ...]:
    """Return the timings of a provenance or of a checkpoint; none if it is older."""
    try:
        return msgspec.convert(record.get(KEY, []), tuple[Timing, ...])
    except msgspec.ValidationError as error:
        raise FileFormatError(f"the ranking's {KEY} is damaged: {error}") from error


def untimed_part(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return a provenance without what differs between two runs of the same command."""
    return {name: value for name, value in provenance.items() if name != KEY}
