"""Decides which of some variants is the best that fits, by timing as little as the noise of the machine allows. Light.

The leader is the best variant that has not failed. A first run tells what it takes, and by that the next better point
of its line is built. Both are timed in turns, with all others that have not been timed often enough, one run after the
other, each in a new process: the latency of one file differs between processes by more than within one, so runs are
what must be repeated. After every run the intervals are looked at (a sequential test): it ends when neither the
leader's nor its neighbour's holds the budget, when those that do would hold it after `MOST_RUNS` too, so near to it is
their latency, or after that many.

A leader whose interval does not end below the budget has failed; the next point down its line enters. Where the next
better point fits, it enters and becomes the leader. After `MOST_MOVES` the best of what fits is taken; while nothing
does, it goes on down, `UNTIL_ONE_FITS` times as far. On a machine whose cores others use too, more of either would
not tell more: there are `RUNS_BESIDE_OTHERS` and `MOVES_BESIDE_OTHERS`, and no next better point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ..profiling.drift import Latency

FEWEST_RUNS, MOST_RUNS, RUNS_BESIDE_OTHERS = 3, 8, 2  # in new processes
MOST_MOVES, MOVES_BESIDE_OTHERS = 6, 3
UNTIL_ONE_FITS = 2  # times as many, while none does
HOPE = 0.5  # of the margin after all runs: nearer to the budget, they would hardly tell


class Contest(Protocol):
    """What a decision needs to know and to have done."""

    @property
    def budget_ms(self) -> float: ...

    @property
    def is_contended(self) -> bool:
        """True if other work kept the last run from its cores."""
        ...

    def latency(self, name: str) -> Latency: ...

    def runs(self, name: str) -> int:
        """Return how often a variant was timed."""
        ...

    def time(self, names: Sequence[str]) -> None:
        """Time variants in turns, in a new process."""
        ...

    def best(self, names: Sequence[str]) -> str:
        """Return the best of some variants, by fidelity."""
        ...

    def denser(self, name: str) -> str | None:
        """Build the next better point, up a variant's line as far as can be told; None if there is none."""
        ...

    def lower(self, name: str) -> str | None:
        """Build the point of a variant's line that should fit; None if there is none."""
        ...


def decide(contest: Contest, entrants: Sequence[str], beside: Sequence[str] = ()) -> str | None:
    """Return the best variant that fits; None if none does. `beside`: others that are timed, only to be shown."""
    pool, failed = list(entrants), set[str]()
    for move in range(UNTIL_ONE_FITS * MOST_MOVES):
        if contest.is_contended and move >= MOVES_BESIDE_OTHERS:
            break
        if move >= MOST_MOVES and any(fits(contest, name) for name in pool):
            break
        alive = [name for name in pool if name not in failed]
        if not alive:
            break
        leader = contest.best(alive)
        if not contest.runs(leader):
            contest.time([name for name in dict.fromkeys((leader, *alive, *beside)) if not contest.runs(name)])
        is_slow = contest.latency(leader).low > contest.budget_ms
        denser = None if is_slow or contest.is_contended else contest.denser(leader)
        _time_until_decided(contest, leader, denser, [*alive, *beside])
        if not fits(contest, leader):
            failed.add(leader)
            lower = contest.lower(leader)
            pool += [lower] if lower is not None and lower not in pool else []
        elif denser is not None and denser not in pool and fits(contest, denser):
            pool.append(denser)
        elif not is_slow or contest.is_contended:  # one that seemed too slow at first has no next better point yet
            break
    fitting = [name for name in pool if fits(contest, name)]
    return contest.best(fitting) if fitting else None


def time_enough(contest: Contest, names: Sequence[str]) -> None:
    """Time variants until each has as many runs as a decision needs."""
    while missing := [name for name in names if contest.runs(name) < _fewest(contest)]:
        contest.time(missing)


def fits(contest: Contest, name: str) -> bool:
    """Return True if a variant was timed often enough and its whole interval meets the budget."""
    return contest.runs(name) >= _fewest(contest) and contest.latency(name).high <= contest.budget_ms


def _time_until_decided(contest: Contest, leader: str, denser: str | None, others: Sequence[str]) -> None:
    pair = [leader] if denser is None else [leader, denser]
    for _ in range(MOST_RUNS):
        waiting = [name for name in others if name not in pair and contest.runs(name) < _fewest(contest)]
        more = any(_may_be_told(contest, name) for name in pair if contest.runs(name))
        is_told = all(contest.runs(name) >= _fewest(contest) for name in pair) and (contest.is_contended or not more)
        if is_told and not waiting:
            return
        contest.time(waiting if is_told else [*pair, *waiting])


def _fewest(contest: Contest) -> int:
    """Return the runs that each variant gets at least."""
    return min(RUNS_BESIDE_OTHERS, FEWEST_RUNS) if contest.is_contended else FEWEST_RUNS


def _may_be_told(contest: Contest, name: str) -> bool:
    """Return True if it is not told yet whether a variant fits, and more runs may tell it."""
    latency, runs = contest.latency(name), contest.runs(name)
    if not latency.low <= contest.budget_ms < latency.high:
        return False
    margin = (latency.high - latency.low) / 2 * math.sqrt(runs / MOST_RUNS)  # that would be left after all runs
    return abs(latency.ms - contest.budget_ms) > HOPE * margin
