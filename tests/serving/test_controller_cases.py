"""The table of cases says what the controller does, and shows every way that it can decide."""

import math

import msgspec
import pytest

from snapvit_export.serving.cases import CLOSE, read_cases

CASES = read_cases()


def numbers(value):
    """All numbers of a value in order, and the rest of it."""
    if isinstance(value, dict):
        value = [part for pair in sorted(value.items()) for part in pair]
    if isinstance(value, list | tuple):
        found = [numbers(part) for part in value]
        return [number for part, _ in found for number in part], [rest for _, rest in found]
    return ([float(value)], None) if isinstance(value, int | float) and not isinstance(value, bool) else ([], value)


def assert_same(found, wanted):
    (found_numbers, found_rest), (wanted_numbers, wanted_rest) = map(numbers, map(msgspec.to_builtins, (found, wanted)))
    assert found_rest == wanted_rest
    assert len(found_numbers) == len(wanted_numbers)
    for a, b in zip(found_numbers, wanted_numbers):
        assert math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE)


@pytest.mark.parametrize("case", CASES.choosing, ids=lambda case: case.what)
def test_a_state_gives_the_variant_of_the_table(case):
    assert_same(case.replayed(), case.decision)


@pytest.mark.parametrize("case", CASES.learning, ids=lambda case: case.what)
def test_a_run_gives_the_state_of_the_table(case):
    assert_same(case.replayed(), case.after)


def test_the_table_shows_every_kind_of_decision():
    decisions = [case.decision for case in CASES.choosing]
    assert {decision.variant for decision in decisions} == {each.name for each in CASES.choosing[0].runnable}
    assert {decision.fits for decision in decisions} == {True, False}
    assert {decision.refused for decision in decisions} == {True, False}
    assert any(case.images > case.together > 1 for case in CASES.choosing)
    assert any(decision.factor < decision.cautious for decision in decisions)  # bold
    assert any(case.state.tokens < 1 for case in CASES.choosing)
    assert any(decision.coming for decision in decisions)
    assert any(case.waiting for case in CASES.learning)
    assert any(case.late for case in CASES.learning)
    assert any(case.after.factor > case.state.factor for case in CASES.learning)
    assert any(case.after.factor < case.state.factor for case in CASES.learning)
