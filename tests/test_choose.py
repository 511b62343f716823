"""Budgets as people write them, and the choice they lead to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapvit_export.budget import Budget
from snapvit_export.choose import Bracket, choose
from snapvit_export.errors import BudgetNotMet, UsageError


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


@given(st.lists(st.floats(1, 100), min_size=1, max_size=60, unique=True), st.floats(0.5, 110))
def test_the_densest_that_fits_is_found_and_bracketed(latencies, budget):
    falling = sorted(latencies, reverse=True)
    timed: list[int] = []

    def time(numbers):
        timed.extend(numbers)
        return {n: falling[n] for n in numbers}

    if falling[-1] > budget:
        with pytest.raises(BudgetNotMet, match="smallest reaches"):
            choose(len(falling), budget, time)
        return
    bracket = choose(len(falling), budget, time)
    densest = next(n for n, ms in enumerate(falling) if ms <= budget)
    assert bracket == Bracket(densest, densest - 1 if densest else None)
    assert len(set(timed)) <= 2 + np.ceil(np.log2(len(falling) + 1))


def test_noise_that_contradicts_itself_is_said():
    rng = np.random.default_rng(0)
    budget = 10.0

    def time(numbers):  # candidates 4 to 6 cannot be told apart
        return {n: (20 - 2 * n if n < 4 else 8 - n / 10 if n > 6 else float(rng.uniform(8, 12))) for n in numbers}

    answers = [choose(12, budget, time) for _ in range(200)]
    assert any(not answer.decided for answer in answers)
    assert all(4 <= answer.chosen <= 7 for answer in answers)
    assert all(answer.next_denser == answer.chosen - 1 for answer in answers)


def test_of_two_contradicting_looks_the_sparser_is_taken():
    looks = iter([{5: True, 6: True}, {4: True, 5: True}, {3: False, 4: False}])

    def time(numbers):
        if len(numbers) == 1:  # first looks: 6 fits, 5 does not
            return {n: 9.0 if n >= 6 else 11.0 for n in numbers}
        return {n: 9.0 if fits else 11.0 for n, fits in next(looks).items()}

    assert choose(12, 10.0, time) == Bracket(5, 4, decided=False)


def test_the_named_smallest_latency_is_enough_when_typed_in():
    with pytest.raises(BudgetNotMet) as refused:
        choose(2, 1.0, lambda numbers: dict.fromkeys(numbers, 1.23449))
    allowed = str(refused.value).split("Allow at least ")[1].split(",")[0]
    assert Budget.parse(allowed).value == 1.24


def test_a_bracket_that_was_wrong_moves():
    first_look = {0: 20.0, 5: 9.0, 3: 9.5, 1: 15.0, 2: 9.9}  # 2 seemed to fit
    truth = [20, 15, 10.4, 10.1, 9.7, 9.0]
    seen: set[int] = set()

    def time(numbers):
        fresh = {n: first_look[n] if len(numbers) == 1 and n not in seen else truth[n] for n in numbers}
        seen.update(numbers)
        return fresh

    assert choose(6, 10.0, time) == Bracket(4, 3)
