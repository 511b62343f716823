"""From a budget to the densest candidate that fits, bracketed by the next denser one that does not. Light.

Candidates are points of a line from dense to sparse, each with a guess of its latency. The guess only says which one to
build next: it is timed, all guesses are scaled by what it took, and the next one is proposed between what was too slow
and what fitted. When these are neighbours, they are timed side by side, and only that comparison decides: longer while
it cannot tell, and the bracket moves if it contradicts the first look. If the budget stays within the noise of either,
or the comparisons contradict each other, the sparser one is taken and the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .errors import BudgetNotMet

MOST_MOVES = 2  # of the bracket towards denser candidates, each of which builds another one
NEAR = 0.005  # of the budget: what differs by less counts as either; candidates are a hundredth apart
LOOK_SECONDS, COMPARE_SECONDS = 1.0, (1.0, 3.0, 6.0)  # of every candidate; longer while the shorter cannot tell


@dataclass(frozen=True)
class Latency:
    """A measured latency, and between what it lies."""

    ms: float
    low: float
    high: float

    def scaled(self, by: float) -> Latency:
        """The same on a machine that is so many times as slow."""
        return Latency(self.ms * by, self.low * by, self.high * by)


TimeTogether = Callable[[Sequence[int], float], Mapping[int, Latency]]  # candidates, side by side, for so many seconds


@dataclass(frozen=True)
class Bracket:
    """The densest candidate that fits, and the one before it (None if the first fits). `decided`: beyond noise."""

    chosen: int
    next_denser: int | None
    decided: bool = True


def choose(guesses: Sequence[float], budget_ms: float, time: TimeTogether, dense: Latency | None = None) -> Bracket:
    """Choose among candidates 0 (dense) to the sparsest, whose latencies are guessed, under `budget_ms`.

    A candidate that is refused for another reason, such as its size, has an infinite latency.

    >>> choose([19.0, 13.0, 8.5], 10.0, lambda numbers, seconds: {n: measured[n] for n in numbers})
    Bracket(chosen=2, next_denser=1, decided=True)
    """
    first = time([0], LOOK_SECONDS)[0] if dense is None else dense
    if first.ms <= budget_ms:
        return Bracket(0, None)
    last = len(guesses) - 1
    too_slow, fits, scale = 0, last + 1, 1.0  # `fits` is known to, or lies beyond the last
    scale = first.ms / guesses[0] if math.isfinite(first.ms) else scale
    while fits - too_slow > 1:
        number = _propose(guesses, budget_ms / scale, too_slow, fits)
        found = time([number], LOOK_SECONDS)[number].ms
        scale = found / guesses[number] if math.isfinite(found) else scale
        if found <= budget_ms:
            fits = number
        elif number == last:
            raise BudgetNotMet(_out_of_reach(budget_ms, found, first.ms))
        else:
            too_slow = number
    if fits > last:
        raise BudgetNotMet(_out_of_reach(budget_ms, first.ms, first.ms))
    return _confirm(fits, last, budget_ms, time)


def _propose(guesses: Sequence[float], budget_ms: float, too_slow: int, fits: int) -> int:
    """The densest that should fit, between the two; guesses fall from one candidate to the next."""
    wanted = next((n for n, guess in enumerate(guesses) if guess <= budget_ms), len(guesses) - 1)
    return min(max(wanted, too_slow + 1), fits - 1)


def _out_of_reach(budget_ms: float, smallest_ms: float, dense_ms: float) -> str:
    return (
        f"no variant fits {budget_ms:.3g} ms: the smallest reaches {smallest_ms:.3g} ms, dense {dense_ms:.3g} ms. "
        f"Allow at least {_rounded_up(smallest_ms)}ms, or use --precision int8, a smaller model or more threads"
    )


def _rounded_up(ms: float) -> str:
    """Three digits that are enough when typed in as a budget."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return f"{math.ceil(ms / step) * step:.6g}"


def _confirm(fits: int, last: int, budget_ms: float, time: TimeTogether) -> Bracket:
    seen: set[int] = set()
    before = fits
    while fits not in seen:
        seen.add(fits)
        before = fits
        pair, sure = _compare(fits, budget_ms, time)
        if pair[fits].ms > budget_ms:
            if fits == last:
                raise BudgetNotMet(
                    f"no variant fits {budget_ms:.3g} ms: the smallest took {pair[fits].ms:.3g} ms at second look. "
                    f"The machine is noisy: try again when it is idle, or allow a little more"
                )
            fits += 1
        elif pair[fits - 1].ms <= budget_ms:
            if fits == 1:
                return Bracket(0, None, sure)  # dense was too slow a moment ago and fits now: side by side decides
            if len(seen) > MOST_MOVES:
                return Bracket(fits, fits - 1, decided=False)  # each look finds the machine faster: enough
            fits -= 1
        else:
            return Bracket(fits, fits - 1, sure)
    safe = max(before, fits)  # the two looks that contradict each other are neighbours
    return Bracket(safe, safe - 1, decided=False)


def _compare(fits: int, budget_ms: float, time: TimeTogether) -> tuple[Mapping[int, Latency], bool]:
    """Time a candidate and the next denser one side by side; whether the budget is clear of both."""
    for seconds in COMPARE_SECONDS:
        pair = time([fits - 1, fits], seconds)
        sure = all(_clear(latency, budget_ms) for latency in pair.values())
        if sure:
            break
    return pair, sure


def _clear(latency: Latency, budget_ms: float) -> bool:
    """Whether a latency lies on one side of the budget, or so near that it does not matter."""
    return latency.high <= budget_ms * (1 + NEAR) or latency.low >= budget_ms * (1 - NEAR)
