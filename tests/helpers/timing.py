"""Timings that are over soon, where no latency matters, and simulated ones, where all latencies are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from snapvit_export.checks.inspect import inspect
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan
from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.profile import Profile, to_profile
from snapvit_export.profiling.sampling import Samples
from snapvit_export.profiling.timer import Timer
from snapvit_export.selection import decide
from snapvit_export.target import Precision

MOST_SECONDS = 0.1
DENSE_MS = 20.0
BURST, ROUNDS = 8, 15  # enough for every percentile


@contextmanager
def short_timings() -> Iterator[None]:
    """Every file is timed for a tenth of a second at most, but as often as its percentiles need; in this process.

    A choice is made by one run, and does not move along its line where that cannot tell.
    """
    plain = Timer.time

    def time(self: Timer, files: Any, seconds: float = 1.0, *rest: Any, **more: Any) -> Any:
        return plain(self, files, min(seconds, MOST_SECONDS), *rest, **{**more, "fresh": False})

    few = patch.multiple(decide, FEWEST_RUNS=1, MOST_RUNS=2, MOST_MOVES=3)
    with patch.object(Timer, "time", time), few:
        yield


def simulated_ms(anatomy: Anatomy, plan: Plan, precision: Precision, int8: float = 0.6) -> float:
    """A latency by the FLOPs that are really computed; `int8`: times less in such a precision."""
    share = 0.95 * _work(anatomy, plan) / _work(anatomy, Plan.dense(anatomy)) + 0.05
    return DENSE_MS * share * (int8 if precision.startswith("int8") else 1.0)


def _work(anatomy: Anatomy, plan: Plan) -> int:
    """FLOPs of the blocks before the last attention: where only the class token is read, the others are free."""
    last = plan.last_attention if anatomy.reads_token else len(anatomy.blocks)
    each = zip(anatomy.structure_flops(plan)[:last], plan.heads, plan.neurons)
    return sum(heads * head + neurons * neuron for (head, neuron), heads, neurons in each)


@contextmanager
def simulated_timings(anatomy: Anatomy, int8: float = 0.6, noise: float = 0.002) -> Iterator[None]:
    """Nothing is run: a file takes as long as `simulated_ms` says and a little noise, the same in every test."""
    rng = np.random.default_rng(0)

    def time(self: Timer, files: Any, *rest: Any, **more: Any) -> dict[str, Profile]:
        found = {}
        for name, file in files.items():
            precision = file.precision or self.target.precision
            ms = simulated_ms(anatomy, inspect(file.path).plan, precision, int8)
            wall = (ms * np.abs(rng.normal(1, noise, BURST * ROUNDS))).tolist()
            found[name] = to_profile(
                Samples(BURST, wall, wall),
                target=msgspec.structs.replace(self.target, precision=precision),
                sha256=file.sha256,
                device=self.device,
                conditions=Conditions(noise=0.0, drift=0.0, waited=0.0, others=None),
                pause_ms=self.pause_ms,
            )
        return found

    with patch.object(Timer, "time", time):
        yield
