"""Which precisions are dropped on a machine: those that save no step, and those that another one beats."""

import math

from snapvit_export.selection.precisions import InPrecision, of_no_use

STEP = 0.04
OWN = InPrecision(1.0, 0.0)


def dropped(**found: tuple[float, float]) -> dict[str, tuple[float, str]]:
    """What is dropped of ratios and divergences beside fp32, by name with `_` for `-`."""
    measured = {"fp32": OWN, **{name.replace("_", "-"): InPrecision(*each) for name, each in found.items()}}
    return {each.precision: (each.ratio, each.reason) for each in of_no_use(measured, "fp32", STEP)}


def test_the_familys_own_precision_is_never_dropped():
    assert dropped() == {}
    assert [each.precision for each in of_no_use({"int8-static": InPrecision(1.0, 9.0)}, "int8-static", STEP)] == []


def test_what_is_faster_by_a_step_stays():
    assert dropped(int8_dynamic=(0.96, 5.0)) == {}
    assert dropped(int8_dynamic=(0.5, 0.01), int8_static=(0.4, 0.02)) == {}  # each is better in one way


def test_what_is_not_faster_by_a_step_is_dropped_with_its_ratio():
    assert dropped(int8_dynamic=(0.97, 0.0)) == {"int8-dynamic": (0.97, "not faster here")}
    assert dropped(fp16=(1.3, 0.0), int8_static=(0.5, 0.1)) == {"fp16": (1.3, "not faster here")}


def test_what_is_as_fast_as_a_more_faithful_one_is_dropped_and_says_for_which():
    found = dropped(int8_dynamic=(0.6, 0.01), int8_static=(0.58, 0.5))  # faster, but by less than a step
    assert set(found) == {"int8-static"}
    ratio, reason = found["int8-static"]
    assert ratio == 0.58
    assert "int8-dynamic" in reason
    assert "0.60" in reason
    assert dropped(int8_dynamic=(0.6, 0.01), int8_static=(0.57, 0.5)) == {}  # by more than a step


def test_of_two_that_are_alike_one_stays():
    found = dropped(int8_dynamic=(0.6, 0.1), int8_static=(0.6, 0.1))
    assert len(found) == 1
    unknown = dropped(int8_dynamic=(0.6, math.inf), int8_static=(0.5, math.inf))  # nothing could be compared
    assert set(unknown) == {"int8-dynamic"}


def test_one_that_is_dropped_itself_drops_no_other():
    found = dropped(fp16=(0.99, 0.0), int8_dynamic=(0.95, 0.1), int8_static=(0.5, 0.2))
    assert set(found) == {"fp16"}
