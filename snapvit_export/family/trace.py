"""The contents of `deadlines.json`: requests over time, who answered each, how long it took, and the load. Light."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..storage.json import Name, NotNegative, Positive, Value, read_json, write_json
from .layout import TRACE

MOST = 100_000  # requests in a file


class Traced(Value, frozen=True, kw_only=True):
    """One request."""

    at_s: NotNegative  # its arrival, from the beginning
    variant: Name | None  # None: none answered
    latency_ms: NotNegative | None
    met: bool
    slowness: Positive | None = None  # of the machine, as the session saw it


class Load(Value, frozen=True, kw_only=True):
    """Other work on the machine, for some time."""

    from_s: NotNegative
    to_s: NotNegative
    what: Annotated[str, msgspec.Meta(max_length=100)]


class Trace(Value, frozen=True, kw_only=True):
    """Requests in the order in which they came."""

    format_version: Literal[1] = 1
    title: Annotated[str, msgspec.Meta(max_length=200)]
    deadline_ms: Positive
    variants: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1000)]  # that could answer, the most faithful first
    requests: Annotated[tuple[Traced, ...], msgspec.Meta(max_length=MOST)]
    loads: Annotated[tuple[Load, ...], msgspec.Meta(max_length=MOST)] = ()

    @property
    def hit_rate(self) -> float:
        """The share of requests that were answered in time."""
        return sum(each.met for each in self.requests) / max(len(self.requests), 1)

    def save(self, folder: Path) -> None:
        """Write it into a family folder."""
        write_json(folder / TRACE, self)

    @staticmethod
    def load(folder: Path) -> Trace | None:
        """Read it from a family folder; None if nothing was recorded there."""
        path = folder / TRACE
        return read_json(path, Trace) if path.is_file() else None
