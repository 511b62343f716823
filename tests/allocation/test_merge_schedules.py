"""Schedules of token merging leave what they promise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import anatomy_of
from snapvit_export.allocation.tokens import SCHEDULES, merging_blocks
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.plan import Plan


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_schedule_leaves_the_fraction_that_it_promises(data):
    merge_schedule = data.draw(st.sampled_from(list(SCHEDULES.values()))).counts
    depth = data.draw(st.integers(1, 6))
    anatomy = anatomy_of([4] * depth, [10] * depth)
    heads = tuple(data.draw(st.lists(st.integers(0, 4), min_size=depth, max_size=depth)))
    grid = data.draw(st.sampled_from([None, (3, 4), (2, 2)]))
    plan = Plan(heads=heads, neurons=(10,) * depth, grid=grid)
    fraction = data.draw(st.floats(0.01, 1))
    patches = anatomy.patches_of(plan)
    wanted = max(1, round(fraction * patches))
    can = merging_blocks(anatomy, plan)
    least = patches
    for _ in can:
        least -= least // 2
    if wanted < least:
        with pytest.raises(SnapvitError, match=f"token fraction {fraction:g} is out of reach") as refused:
            merge_schedule(anatomy, plan, fraction)
        named = float(str(refused.value).rsplit(" ", 1)[1])
        assert patches - sum(merge_schedule(anatomy, plan, named)) == least  # what it names works when typed in
        return
    merged = merge_schedule(anatomy, plan, fraction)
    assert patches - sum(merged) == wanted
    assert all(not count or i in can for i, count in enumerate(merged))
    if any(heads):
        plan.with_tokens(merged, grid).check_fits(anatomy)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan")])
def test_fractions_that_make_no_sense_are_usage_errors(fraction):
    anatomy = anatomy_of([4, 4], [10, 10])
    with pytest.raises(UsageError, match="not above 0 and at most 1"):
        SCHEDULES["constant"].counts(anatomy, Plan.dense(anatomy), fraction)
