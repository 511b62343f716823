"""Turns: requests of many threads, one at a time, in the order in which they came. Light.

Python's own locks give no order. Here whoever is first in line runs, and sees who waits behind; it may answer some of
them together with its own request.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import SnapvitError


class Overloaded(SnapvitError):
    """Too many requests wait already."""


class Closed(SnapvitError):
    """The session was closed."""


@dataclass(eq=False)
class Request:
    """A request that waits or runs."""

    arrived_ms: float
    limit_ms: float | None  # from then on; None: whenever
    images: int
    inputs: Any
    answer: Any = None  # from whoever ran it together with its own
    _go: threading.Event = field(default_factory=threading.Event)

    @property
    def due_ms(self) -> float:
        return math.inf if self.limit_ms is None else self.arrived_ms + self.limit_ms


class Turns:
    """The line of requests, the first of which runs."""

    def __init__(self, most_waiting: int) -> None:
        self._most, self._lock = most_waiting, threading.Lock()
        self._line: deque[Request] = deque()
        self._idle = threading.Condition(self._lock)
        self._closed = False

    @contextmanager
    def turn(self, request: Request) -> Iterator[bool]:
        """Wait for the turn of a request; False if it was answered together with another."""
        with self._lock:
            if self._closed:
                raise Closed("the session is closed. Open another one")
            if len(self._line) > self._most:
                raise Overloaded(f"{self._most} requests wait already. Send fewer at a time, or later")
            self._line.append(request)
            if self._line[0] is request:
                request._go.set()
        try:
            request._go.wait()
            yield request.answer is None
        finally:
            self._leave([request])

    def waiting(self) -> list[Request]:
        """Return the line; the first runs now."""
        with self._lock:
            return list(self._line)

    def answered(self, requests: list[Request]) -> None:
        """Let requests go that have their answer."""
        self._leave(requests)
        for request in requests:
            request._go.set()

    def _leave(self, requests: list[Request]) -> None:
        with self._lock:
            for request in requests:
                if request in self._line:
                    self._line.remove(request)
            if self._line:
                self._line[0]._go.set()
            else:
                self._idle.notify_all()

    def close(self, seconds: float | None = None) -> bool:
        """Take no more requests, and wait until all that came before are answered; False if that took too long."""
        with self._lock:
            self._closed = True
            return self._idle.wait_for(lambda: not self._line, seconds)
