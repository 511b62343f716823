"""Bracket search for the densest candidate that meets a budget, next to a denser one that does not. Light.

Candidates are points of a line from dense to sparse, each with a guess of its latency. The guess only says which one to
build next: it is timed, all guesses are scaled by what it took, and the next one is proposed between what was too slow
and what fitted. When these are neighbours, they are timed side by side, for longer while that does not decide, and the
bracket moves if that contradicts the first timing run.

A candidate fits when the upper end of its interval meets the budget: then it will meet it tomorrow too. If the next
denser one lies within the budget but its interval does not, the machine is too noisy to decide between the two; the
sparser one is taken and marked as undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..profiling.drift import Latency

MOST_TIMED = 5  # candidates that a choice may build and time; more only where none of them fits
MARGIN = 0.01  # left by a first timing run: about the width of an interval once neighbours have been compared
FIRST_SECONDS, COMPARE_SECONDS = 1.0, (1.0, 3.0, 6.0)  # of every candidate; longer while the shorter run cannot decide

TimeTogether = Callable[[Sequence[int], float], Mapping[int, Latency]]  # candidates, side by side, for so many seconds


@dataclass(frozen=True)
class Bracket:
    """The densest candidate that fits, and the one before it (None if the first fits). `decided`: beyond noise."""

    chosen: int
    next_denser: int | None
    decided: bool = True


class OutOfReach(Exception):
    """Not even the last candidate fits."""

    def __init__(self, latency: Latency) -> None:
        super().__init__(f"the last candidate takes {latency.ms} ms")
        self.latency = latency


def find_bracket(
    guesses: Sequence[float], budget_ms: float, time: TimeTogether, dense: Latency, most_timed: int = MOST_TIMED
) -> Bracket:
    """Choose among candidates 0 (dense, whose latency is known) to the sparsest, whose latencies are guessed.

    A candidate that is refused for another reason, such as its size, has an infinite guess or an infinite latency.

    >>> find_bracket([19.0, 13.0, 8.5], 10.0, lambda numbers, seconds: {n: measured[n] for n in numbers}, measured[0])
    Bracket(chosen=2, next_denser=1, decided=True)
    """
    if dense.high <= budget_ms:
        return Bracket(0, None)
    line = _Line(guesses, budget_ms)
    line.learn(0, dense)
    if line.last == 0:
        raise OutOfReach(dense)
    too_slow, fits = 0, line.last + 1  # `fits` is known to, or lies beyond the last
    refused = math.isinf(dense.ms) and math.isfinite(guesses[0])
    while fits - too_slow > 1:
        number = line.propose(too_slow, fits, halve=refused)
        found = time([number], FIRST_SECONDS)[number]
        line.timed.add(number)
        line.learn(number, found)
        refused = math.isinf(found.ms)
        if found.ms * (1 + MARGIN) <= budget_ms:
            fits = number
        elif number < line.last:
            too_slow = number
        elif refused:
            raise OutOfReach(found)
        else:
            fits = number  # the last one: only a longer timing run shows that nothing fits
    return _confirm(fits, line, time, most_timed)


class _Line:
    """Candidates from dense to sparse, their guessed latencies, and the scale that corrects the guesses so far."""

    def __init__(self, guesses: Sequence[float], budget_ms: float) -> None:
        self.guesses, self.budget_ms, self.last = guesses, budget_ms, len(guesses) - 1
        self.scale = 1.0
        self.timed: set[int] = set()

    def learn(self, number: int, found: Latency) -> None:
        """Scale the guesses by a measured latency, on the safe side."""
        if math.isfinite(found.ms) and math.isfinite(self.guesses[number]):
            self.scale = found.ms * (1 + MARGIN) / self.guesses[number]

    def allows(self, fits: int, most_timed: int) -> bool:
        """Return True if a candidate and its neighbour may still be timed; dense is there anyway."""
        return len((self.timed | {fits - 1, fits}) - {0}) <= most_timed

    def propose(self, too_slow: int, fits: int, halve: bool = False) -> int:
        """Return the densest that should fit, between the two; `halve`: guesses in ms say nothing about a size."""
        allowed = self.budget_ms / self.scale
        wanted = next((n for n, guess in enumerate(self.guesses) if guess <= allowed), self.last)
        if halve:
            wanted = max(wanted, (too_slow + fits) // 2)
        return min(max(wanted, too_slow + 1), fits - 1)


def _confirm(fits: int, line: _Line, time: TimeTogether, most_timed: int) -> Bracket:
    """Time neighbours side by side until the denser is out of the budget and the sparser within."""
    seen: set[int] = set()
    while True:
        seen.add(fits)
        pair = _compare(fits, line.budget_ms, time)
        denser, chosen = pair[fits - 1], pair[fits]
        line.timed |= {fits - 1, fits}
        if chosen.high > line.budget_ms:
            is_over = chosen.ms > line.budget_ms
            if fits == line.last and is_over:
                raise OutOfReach(chosen)
            line.learn(fits, chosen)
            proposed = line.propose(min(fits, line.last - 1), line.last + 1)
            if fits == line.last or not (is_over or line.allows(proposed, most_timed)):
                return Bracket(fits, fits - 1, decided=False)  # within the budget, not surely
            fits = proposed
        elif denser.high <= line.budget_ms:
            if fits == 1:
                return Bracket(0, None)  # dense was too slow a moment ago and fits now: the run side by side decides
            line.learn(fits - 1, denser)
            proposed = line.propose(0, fits)
            if proposed in seen or not line.allows(proposed, most_timed):
                return Bracket(fits, fits - 1, decided=False)  # timing runs disagree: the sparser one is safe
            fits = proposed
        else:
            return Bracket(fits, fits - 1, decided=denser.ms > line.budget_ms)


def _compare(fits: int, budget_ms: float, time: TimeTogether) -> Mapping[int, Latency]:
    """Time a candidate and the next denser one side by side, for longer while the budget lies within an interval."""
    for seconds in COMPARE_SECONDS:
        pair = time([fits - 1, fits], seconds)
        if not any(latency.low < budget_ms < latency.high for latency in pair.values()):
            break
    return pair
