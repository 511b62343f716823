"""Budgets as people write them, and the choice they lead to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapvit_export.budget import Budget
from snapvit_export.errors import UsageError
from snapvit_export.profiling.drift import Latency
from snapvit_export.selection.bracket import COMPARE_SECONDS, Bracket, OutOfReach, find_bracket
from snapvit_export.selection.select import rounded_up


@pytest.mark.parametrize(
    ("text", "ms"), [("10ms", 10), ("8.5 ms", 8.5), ("60%", 12), ("100fps", 40), (" .5MS ", 0.5), ("100 %", 20)]
)
def test_budgets_mean_milliseconds(text, ms):
    assert Budget.parse(text).to_ms(dense_ms=20, batch=4) == pytest.approx(ms)


@pytest.mark.parametrize(
    "text",
    ["10", "-3ms", "abc", "0ms", "", "ms", "10s", "1e999ms", "nanms", "10ms!", "0%", "0fps", "120%", "1_0ms", "٣ms"],
)
def test_other_budgets_are_refused_with_an_example(text):
    with pytest.raises(UsageError, match="10ms|100%"):
        Budget.parse(text)


def sharp(ms: float) -> Latency:
    return Latency(ms, ms, ms)


@given(
    st.lists(st.floats(1, 100), min_size=1, max_size=60, unique=True), st.floats(0.5, 110), st.floats(0.2, 5), st.data()
)
def test_the_densest_that_fits_is_found_and_bracketed_whatever_the_guesses(latencies, budget, scale, data):
    falling = sorted(latencies, reverse=True)
    bend = data.draw(st.floats(0.7, 1.3))
    guesses = [scale * ms**bend for ms in falling]

    def time(numbers, seconds):
        return {n: sharp(falling[n]) for n in numbers}

    if falling[-1] > budget:
        with pytest.raises(OutOfReach) as refused:
            find_bracket(guesses, budget, time, sharp(falling[0]))
        assert refused.value.latency.ms == falling[-1]
        return
    bracket = find_bracket(guesses, budget, time, sharp(falling[0]))
    densest = next(n for n, ms in enumerate(falling) if ms <= budget)
    assert (bracket.chosen, bracket.next_denser) == (densest, densest - 1 if densest else None)


@given(st.floats(0.05, 0.98), st.floats(0.3, 3), st.floats(-0.04, 0.04))
def test_a_model_that_is_a_few_per_cent_off_needs_five_candidates(share, scale, bend):
    falling = [100 * (1 - 0.0095 * n) for n in range(100)]
    guesses = [scale * ms * (1 + bend * n / 100) for n, ms in enumerate(falling)]
    timed: set[int] = set()

    def time(numbers, seconds):
        timed.update(numbers)
        return {n: sharp(falling[n]) for n in numbers}

    budget = 100 * (1 - 0.94 * (1 - share))
    bracket = find_bracket(guesses, budget, time, dense=sharp(100.0))
    assert falling[bracket.chosen] <= budget < falling[bracket.next_denser]
    assert len(timed) <= 5


def test_noise_that_contradicts_itself_is_said():
    rng = np.random.default_rng(0)
    budget = 10.0

    def time(numbers, seconds):  # candidates 4 to 6 cannot be told apart
        return {n: sharp(20 - 2 * n if n < 4 else 8 - n / 10 if n > 6 else float(rng.uniform(8, 12))) for n in numbers}

    guesses = [20 - 1.2 * n for n in range(12)]
    answers = [find_bracket(guesses, budget, time, sharp(20.0)) for _ in range(200)]
    assert any(not answer.decided for answer in answers)
    assert all(4 <= answer.chosen <= 7 for answer in answers if answer.decided)
    assert all(4 <= answer.chosen <= 9 for answer in answers)
    assert all(answer.next_denser == answer.chosen - 1 for answer in answers)


def test_a_budget_within_the_noise_of_a_neighbour_is_timed_for_longer_and_then_said():
    asked: list[float] = []
    truth = [20.0, 15.0, 9.9, 9.4, 5.0]

    def time(numbers, seconds):
        asked.append(seconds)
        width = 0.5 if seconds < COMPARE_SECONDS[-1] or not sharp_later else 0.0
        return {n: Latency(truth[n], truth[n] - width, truth[n] + width) for n in numbers}

    for sharp_later in (True, False):
        asked.clear()
        bracket = find_bracket(truth, 10.0, time, dense=sharp(20.0))
        assert asked[-1] == COMPARE_SECONDS[-1]
        assert bracket == (Bracket(2, 1) if sharp_later else Bracket(3, 2, decided=False))


def test_what_may_be_over_the_budget_is_not_chosen():
    truth = [20.0, 15.0, 10.3, 9.8, 9.0, 5.0]  # 9.8 +- 0.3 is not sure to keep 10

    def time(numbers, seconds):
        return {n: Latency(truth[n], truth[n] - 0.3, truth[n] + 0.3) for n in numbers}

    assert find_bracket(truth, 10.0, time, sharp(20.0)) == Bracket(4, 3, decided=False)


def test_that_nothing_fits_is_said_only_after_the_longest_look():
    asked: list[float] = []

    def time(numbers, seconds):
        asked.append(seconds)
        wide = {n: Latency(10.2, 9.0, 11.0) for n in numbers}
        return {n: Latency(10.2, 10.1, 10.3) for n in numbers} if seconds == COMPARE_SECONDS[-1] else wide

    with pytest.raises(OutOfReach):
        find_bracket([20.0, 15.0, 10.0], 10.0, time, sharp(20.0))
    assert asked[-1] == COMPARE_SECONDS[-1]


def test_a_dense_model_that_only_may_fit_is_compared_with_the_next():
    def time(numbers, seconds):
        return {n: Latency(9.99 - n, 9.0 - n, 10.5 - n) for n in numbers}

    assert find_bracket([10.0, 9.0, 8.0], 10.0, time, Latency(9.99, 8.0, 12.0)) == Bracket(1, 0, decided=False)


@pytest.mark.parametrize("known", [True, False])
def test_candidates_that_are_too_large_for_another_limit_are_passed_over_with_few_looks(known):
    truth = [float("inf")] * 60 + [6.0 - n / 100 for n in range(39)]
    guesses = truth if known else [10.0 - n / 20 for n in range(99)]  # parameters are known beforehand, sizes are not
    timed: set[int] = set()

    def time(numbers, seconds):
        timed.update(numbers)
        return {n: sharp(truth[n]) for n in numbers}

    assert find_bracket(guesses, 20.0, time, sharp(truth[0])) == Bracket(60, 59)
    assert len(timed) <= (2 if known else 9)


def test_limits_that_nothing_keeps_are_refused():
    with pytest.raises(OutOfReach):
        find_bracket(
            [10.0, 9.0, 8.0], 20.0, lambda numbers, s: {n: sharp(float("inf")) for n in numbers}, sharp(10.0 * 9)
        )


@given(st.floats(1e-3, 1e5))
def test_a_named_latency_is_enough_when_typed_in(ms):
    assert Budget.parse(f"{rounded_up(ms)}ms").value >= ms * (1 - 1e-9)


def test_a_bracket_that_was_wrong_moves():
    first_look = {0: 20.0, 5: 9.0, 3: 9.5, 1: 15.0, 2: 9.9}  # 2 seemed to fit
    truth = [20, 15, 10.4, 10.1, 9.7, 9.0]
    seen: set[int] = set()

    def time(numbers, seconds):
        fresh = {n: first_look.get(n, truth[n]) if len(numbers) == 1 and n not in seen else truth[n] for n in numbers}
        seen.update(numbers)
        return {n: sharp(ms) for n, ms in fresh.items()}

    assert find_bracket([20.0, 15.0, 9.9, 9.5, 9.2, 9.0], 10.0, time, sharp(20.0)) == Bracket(4, 3)
