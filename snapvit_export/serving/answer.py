"""The answer to a request, and the tally of all answers. Light."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..storage.json import Value

RECENT = 1024  # latencies that the percentiles of the tally are of


@dataclass(frozen=True, eq=False)
class Answer:
    """What a variant says of a batch, and how long it took."""

    output: npt.NDArray[np.float32]  # (B, classes), or the embedding of a model without classes
    variant: str
    latency_ms: float  # from arrival to answer
    fidelity: float | None  # share of images on which the variant gives the dense model's answer; None: not known
    deadline_ms: float | None
    met: bool  # the deadline; True where there is none
    fitted: bool  # it was predicted to meet it; False: nothing was, so the fastest ran
    waited_ms: float  # of it, before the run
    ran_ms: float  # of it, the run alone


class Stats(Value, frozen=True, kw_only=True):
    """What a session has done so far, and how it sees the machine."""

    calls: int  # answered
    met: int
    late: int
    refused: int  # since nothing could be in time, or too many waited
    failed: int  # with an error
    waiting: int
    by_variant: dict[str, int]
    hit_rate: float | None  # of all answered and refused
    fidelity: float | None  # mean of all answers
    p50_ms: float | None  # of the last latencies
    p99_ms: float | None
    slowness: float  # of the machine now, beside the time when the session was opened
    margin: float  # that predictions add to it now
    variants: dict[str, float]  # that may be run, and their latency on the machine at rest, ms
    opened: tuple[str, ...]
    retired: dict[str, str]  # why each was


@dataclass
class Tally:
    """Counts, kept by many threads."""

    _lock: Any = field(default_factory=threading.Lock)
    met: int = 0
    late: int = 0
    refused: int = 0
    failed: int = 0
    by_variant: Counter[str] = field(default_factory=Counter)
    fidelity: float = 0.0
    known: int = 0  # answers whose fidelity is
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, answer: Answer) -> None:
        with self._lock:
            self.by_variant[answer.variant] += 1
            self.recent_ms.append(answer.latency_ms)
            if answer.met:
                self.met += 1
            else:
                self.late += 1
            if answer.fidelity is not None:
                self.fidelity, self.known = self.fidelity + answer.fidelity, self.known + 1

    def refuse(self) -> None:
        with self._lock:
            self.refused += 1

    def fail(self) -> None:
        with self._lock:
            self.failed += 1

    def summary(self) -> dict[str, Any]:
        """Return the fields of Stats that are counted here."""
        with self._lock:
            calls, recent = self.met + self.late, list(self.recent_ms)
            asked = calls + self.refused
            return dict(
                calls=calls,
                met=self.met,
                late=self.late,
                refused=self.refused,
                failed=self.failed,
                by_variant=dict(self.by_variant),
                hit_rate=self.met / asked if asked else None,
                fidelity=self.fidelity / self.known if self.known else None,
                p50_ms=float(np.percentile(recent, 50)) if recent else None,
                p99_ms=float(np.percentile(recent, 99)) if recent else None,
            )
