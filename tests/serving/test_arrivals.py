"""How many requests come together, and what is left to those that nobody sees yet."""

import random

import numpy as np
import pytest

from helpers.simulated_machine import RUNNABLE, every, hit_rate, mean_quality, noisy, simulate
from snapvit_export.serving.arrivals import LINES, Arrivals
from snapvit_export.serving.controller import LEAST_NOISE, Settings, State, decide

FASTEST = RUNNABLE[-1:]


def knowing(*lines):
    """A calm machine, and lines that were seen there."""
    return State(regime=(0.0,) * 31, tokens=2.0, factor=LEAST_NOISE, arrivals=Arrivals(lines=lines))


def line(count, late, **more):
    """What is known after a line of so many, whose last one was late or not."""
    found, known = Arrivals(), dict(expected=False, slowed=False) | more
    for n in range(count):
        last = n == count - 1
        found = found.after(1, count - 1 - n, late=last and late, **known)
    assert not found.answered
    return found.lines


def test_a_line_counts_if_somebody_in_it_was_late():
    assert line(4, late=True) == (4,)
    assert line(4, late=False) == (1,)
    assert line(4, late=False, expected=True) == (4,)  # nobody was late because of it


def test_who_is_late_without_having_waited_tells_nothing_of_others():
    assert line(1, late=True) == (1,)
    assert Arrivals().after(1, 1, late=True, expected=False, slowed=False).late is False


def test_a_run_that_was_slower_than_predicted_tells_nothing_of_how_requests_come():
    assert line(4, late=True, slowed=True) == (1,)


def test_one_long_line_in_a_hundred_is_forgiven_and_two_are_not():
    assert Arrivals(lines=(4,)).to_come(1, 0.99) == 0
    assert Arrivals(lines=(4, 1, 1, 3)).to_come(1, 0.99) == 2
    assert Arrivals(lines=(4,)).to_come(1, 0.999) == 3
    assert Arrivals(answered=1, lines=(4, 4)).to_come(2, 0.99) == 1
    assert Arrivals(answered=3, lines=(4, 4)).to_come(2, 0.99) == 0


def test_lines_are_forgotten():
    found = Arrivals(lines=(4, 4))
    for _ in range(LINES - 1):
        found = found.after(1, 0, late=False, expected=False, slowed=False)
    assert len(found.lines) == LINES
    assert found.to_come(1, 0.99) == 0


def test_who_comes_first_leaves_time_to_those_that_are_expected():
    def variant(state, left=(24.0,)):
        return decide(RUNNABLE, Settings(), state, left, 0.0).variant

    assert variant(knowing(1, 1)) == "dense"
    assert variant(knowing(2, 2)) == "s20"  # 16 ms, and 5 for the next
    assert variant(knowing(3, 3)) == "s40"  # 12.5, and twice 5
    assert variant(knowing(4, 4)) == "s80"  # the fourth too, if all are as fast as they can
    assert variant(knowing(4, 4), (24.9,)) == "s60"
    assert variant(knowing(9, 9), (24.9,)) == "s60"  # a fifth is lost anyway
    assert variant(knowing(4, 4), (24.9, 24.9, 24.9, 24.9)) == "s60"  # as when they are all there


def test_what_leaves_too_little_to_others_is_in_time_itself():
    decision = decide(RUNNABLE, Settings(), knowing(3, 3), [15.2], 0.0)
    assert (decision.variant, decision.fits, decision.coming) == ("s80", True, 2)
    assert decision.within_ms == 15.2


@pytest.mark.parametrize("most", [2, 3, 4])
def test_bursts_that_come_one_after_the_other_are_answered_nearly_as_well_as_by_the_fastest_alone(most):
    rng, arrivals, at = random.Random(most), [], 0.0
    while len(arrivals) < 3000:
        arrivals += [at + 0.5 * k for k in range(rng.randint(1, most))]
        at += rng.uniform(60.0, 200.0)
    served, alone = (
        simulate(noisy(lambda now: 1.0), arrivals, deadline_ms=24.0, runnable=some) for some in (RUNNABLE, FASTEST)
    )
    assert hit_rate(alone) >= 0.99
    assert hit_rate(served) >= 0.985
    assert mean_quality(served) > mean_quality(alone) + 0.05


def test_requests_at_random_times_are_in_time():
    arrivals = list(np.cumsum(np.random.default_rng(0).exponential(60.0, 3000)))
    served = simulate(noisy(lambda now: 1.0), arrivals, deadline_ms=24.0)
    assert hit_rate(served) >= 0.98
    assert mean_quality(served) >= 0.8


def test_frames_at_a_fixed_pace_that_are_all_in_time_cost_no_quality():
    served = simulate(noisy(lambda now: 1.0), every(22.0, 2000), deadline_ms=40.0)
    assert hit_rate(served) >= 0.99
    assert not any(each.decision.coming for each in served)


def test_what_is_refused_belongs_to_the_line():
    settings = Settings(late="refuse")
    served = simulate(lambda now, number: 1.0, [500.0 * n + k for n in range(4) for k in range(9)], 24.0, settings)
    assert any(each.decision.refused for each in served)
    assert served[-1].decision.coming == 0
    assert served[-9].state.arrivals.answered == 0
