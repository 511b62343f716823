"""A simulated machine for the controller: its speed over time, requests that arrive, and a queue in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from snapvit_export.serving.controller import Controller, Decision, Runnable, Settings, State

MOST_WAITING = 64
Slowness = Callable[[float, int], float]  # of a run that begins at so many ms and is the n-th: times its profile
RUNNABLE = tuple(
    Runnable(name=name, ms=ms, quality=quality)
    for name, ms, quality in (
        *(("dense", 20.0, 1.0), ("s20", 16.0, 0.97), ("s40", 12.5, 0.93)),
        *(("s60", 9.0, 0.85), ("s80", 5.0, 0.6)),
    )
)
QUALITY = {each.name: each.quality for each in RUNNABLE}


@dataclass(frozen=True)
class Served:
    """What became of one request."""

    decision: Decision
    state: State  # before it
    arrived_ms: float
    ran_ms: float  # 0: refused
    ended_ms: float
    met: bool

    @property
    def quality(self) -> float:
        return QUALITY[self.decision.variant]


def simulate(
    slowness: Slowness,
    arrivals: Sequence[float],
    deadline_ms: float = 24.0,
    settings: Settings = Settings(),
    state: State = State(),
    runnable: Sequence[Runnable] = RUNNABLE,
) -> list[Served]:
    """Answer requests in the order in which they arrive, one after the other, by a clock of its own."""
    controller, free_ms, served = Controller(runnable, settings, state), 0.0, []
    base = {each.name: each.ms for each in runnable}
    for number, arrived in enumerate(arrivals):
        now = max(free_ms, arrived)
        left = [at + deadline_ms - now for at in arrivals[number:] if at <= now]
        before, decision = controller.state, controller.decide(left, now)
        ran = 0.0 if decision.refused else base[decision.variant] * slowness(now, number)
        free_ms = now + ran
        met = not decision.refused and free_ms <= arrived + deadline_ms
        waiting = sum(at <= free_ms for at in arrivals[number + 1 : number + 1 + MOST_WAITING])
        if decision.refused:
            controller.refuse(waiting)
        else:
            controller.learn(decision, ran, free_ms, waiting=waiting, late=not met)
        served.append(Served(decision, before, arrived, ran, free_ms, met))
    return served


def every(ms: float, count: int) -> list[float]:
    """Arrivals of a camera."""
    return [ms * n for n in range(count)]


def noisy(
    level: Callable[[float], float], sigma: float = 0.01, spikes: float = 0.0, by: float = 3.0, seed: int = 0
) -> Slowness:
    """A machine of that slowness over time, with log-normal noise, and some runs that take `by` times as long."""
    rng = np.random.default_rng(seed)

    def slowness(now: float, _: int) -> float:
        spike = by if rng.random() < spikes else 1.0
        return level(now) * float(np.exp(sigma * rng.standard_normal())) * spike

    return slowness


def hit_rate(served: Sequence[Served]) -> float:
    return sum(each.met for each in served) / len(served)


def mean_quality(served: Sequence[Served]) -> float:
    return sum(each.quality for each in served) / len(served)
