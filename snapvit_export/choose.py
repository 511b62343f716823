"""From a budget to the densest candidate that fits, bracketed by the next denser one that does not. Light.

Candidates are points of a line from dense to sparse. Bisection finds the place; then the two neighbours are timed side
by side once more, and only that comparison decides. If it contradicts the first timing, the bracket moves; if it
would move back to where it was, the machine is too noisy to tell the neighbours apart, the sparser one that fitted is
taken, and the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .errors import BudgetNotMet

TimeTogether = Callable[[Sequence[int]], Mapping[int, float]]  # candidate numbers to latencies in ms, side by side


@dataclass(frozen=True)
class Bracket:
    """The densest candidate that fits, and the one before it (None if the first fits). `decided`: beyond noise."""

    chosen: int
    next_denser: int | None
    decided: bool = True


def choose(count: int, budget_ms: float, time: TimeTogether, dense_ms: float | None = None) -> Bracket:
    """Choose among candidates 0 (dense) to count-1 (sparsest) under `budget_ms`.

    >>> choose(3, 10.0, lambda numbers: {n: [20.0, 12.0, 8.0][n] for n in numbers})
    Bracket(chosen=2, next_denser=1, decided=True)
    """
    first_ms = time([0])[0] if dense_ms is None else dense_ms
    if first_ms <= budget_ms:
        return Bracket(0, None)
    last_ms = time([count - 1])[count - 1] if count > 1 else first_ms
    if last_ms > budget_ms:
        raise BudgetNotMet(
            f"no variant fits {budget_ms:.3g} ms: the smallest reaches {last_ms:.3g} ms, dense {first_ms:.3g} ms. "
            f"Allow at least {_rounded_up(last_ms)}ms, or use a smaller model or more threads"
        )
    too_slow, fits = 0, count - 1
    while fits - too_slow > 1:
        middle = (too_slow + fits) // 2
        too_slow, fits = (too_slow, middle) if time([middle])[middle] <= budget_ms else (middle, fits)
    return _confirm(fits, count, budget_ms, time)


def _rounded_up(ms: float) -> str:
    """Three digits that are enough when typed in as a budget."""
    step = 10.0 ** (math.floor(math.log10(ms)) - 2)
    return f"{math.ceil(ms / step) * step:.6g}"


def _confirm(fits: int, count: int, budget_ms: float, time: TimeTogether) -> Bracket:
    seen: set[int] = set()
    before = fits
    while fits not in seen:
        seen.add(fits)
        before = fits
        latency_ms = time([fits - 1, fits])
        if latency_ms[fits] > budget_ms:
            if fits == count - 1:
                raise BudgetNotMet(
                    f"no variant fits {budget_ms:.3g} ms: the smallest took {latency_ms[fits]:.3g} ms at second look. "
                    f"The machine is noisy: try again when it is idle, or allow a little more"
                )
            fits += 1
        elif latency_ms[fits - 1] <= budget_ms:
            if fits == 1:
                return Bracket(0, None)  # dense was too slow a moment ago and fits now: side by side decides
            fits -= 1
        else:
            return Bracket(fits, fits - 1)
    safe = max(before, fits)  # the two looks that contradict each other are neighbours
    return Bracket(safe, safe - 1, decided=False)
