"""Plans: exact counts, nesting, protection, and the four ways to ask for one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import anatomy_of
from snapvit_export.allocation.planner import PUBLISHED_PAIRS, Planner
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking


@st.composite
def planners(draw) -> Planner:
    depth = draw(st.integers(1, 5))
    heads = draw(st.lists(st.integers(1, 9), min_size=depth, max_size=depth))
    hidden = draw(st.lists(st.integers(1, 70), min_size=depth, max_size=depth))
    # Few distinct values, zero and a denormal among them: ties are the rule, not the exception.
    values = st.sampled_from([0.0, 1e-42, 1e-3, 0.5, 0.5, 2.0])
    scores = lambda sizes: tuple(  # noqa: E731
        np.array(draw(st.lists(values, min_size=n, max_size=n)), np.float32) for n in sizes
    )
    return Planner(Ranking(scores(heads), scores(hidden)), anatomy_of(heads, hidden))


@given(planners(), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_pair_cuts_exactly_int_total_times_ratio(planner, mlp, head):
    anatomy, protection = planner.anatomy, planner.protection
    cut_neurons, cut_heads = int(sum(anatomy.neurons) * mlp), int(sum(anatomy.heads) * head)
    most_neurons = sum(n - protection.kept_neurons(n) for n in anatomy.neurons)
    most_heads = sum(n - protection.kept_heads(n) for n in anatomy.heads)
    if cut_neurons > most_neurons or cut_heads > most_heads:
        with pytest.raises(SnapvitError, match="largest ratio possible is"):
            planner.pair(mlp, head)
        return
    plan = planner.pair(mlp, head)
    plan.check_fits(anatomy)
    assert sum(anatomy.neurons) - sum(plan.neurons) == cut_neurons
    assert sum(anatomy.heads) - sum(plan.heads) == cut_heads
    assert all(keep >= protection.kept_neurons(n) for keep, n in zip(plan.neurons, anatomy.neurons))
    assert all(keep >= protection.kept_heads(n) for keep, n in zip(plan.heads, anatomy.heads))


@given(planners(), st.floats(0, 1), st.floats(0, 1))
def test_sparser_plans_are_nested_in_denser_ones(planner, a, b):
    largest = planner.largest_sparsity
    low, high = sorted((a * largest, b * largest))
    assert planner.sparsity(low).keeps_all_of(planner.sparsity(high))


@given(planners(), st.floats(0.0, 1.0))
def test_a_sparsity_is_reached_by_the_densest_plan_of_the_line(planner, share):
    wanted = share * planner.largest_sparsity
    plan = planner.sparsity(wanted)
    assert plan.sparsity(planner.anatomy) >= wanted
    for step in np.linspace(0, 1, 200):
        point = planner._at(float(step))
        if point.sparsity(planner.anatomy) >= wanted:
            assert plan.keeps_all_of(point)


@given(planners(), st.floats(0.01, 1.0))
def test_flops_and_parameter_targets_are_kept(planner, fraction):
    anatomy = planner.anatomy
    for plan_for, cost in (
        (planner.flops, lambda plan: plan.flops_ratio(anatomy)),
        (planner.params, lambda plan: anatomy.params(plan) / anatomy.params()),
    ):
        if cost(planner.sparsest) > fraction:
            with pytest.raises(SnapvitError, match="out of reach"):
                plan_for(fraction)
        else:
            assert cost(plan_for(fraction)) <= fraction


@given(planners())
def test_the_line_passes_through_the_published_pairs(planner):
    for mlp, head in PUBLISHED_PAIRS:
        try:
            plan = planner.pair(mlp, head)
        except SnapvitError:
            continue  # protection does not allow this pair on so small a model
        assert planner._at(mlp) == plan


@given(planners())
def test_nothing_asked_is_nothing_cut(planner):
    dense = Plan.dense(planner.anatomy)
    assert planner.sparsity(0) == planner.flops(1) == planner.params(1) == planner.pair(0, 0) == dense


def test_the_smallest_scores_go_first_whatever_the_block():
    ranking = Ranking(
        (np.ones(2, np.float32), np.ones(2, np.float32)),
        (np.array([5, 1, 7, 3], np.float32), np.array([2, 8, 4, 6], np.float32)),
    )
    planner = Planner(ranking, anatomy_of([2, 2], [4, 4]))
    assert planner.pair(1 / 8, 0).neurons == (3, 4)  # the 1 goes
    assert planner.pair(2 / 8, 0).neurons == (3, 3)  # then the 2
    assert planner.pair(3 / 8, 0).neurons == (2, 3)  # then the 3


def test_ties_go_from_the_last_block_backwards():
    zeros = (np.zeros(4, np.float32), np.zeros(4, np.float32))
    planner = Planner(Ranking(zeros, zeros), anatomy_of([4, 4], [4, 4]))
    assert planner.pair(0.25, 0.125) == Plan(heads=(4, 3), neurons=(4, 2))


def test_the_named_largest_ratio_works_when_typed_in():
    scores = (np.arange(100, dtype=np.float32), np.arange(100, dtype=np.float32))
    planner = Planner(Ranking((scores[0][:6], scores[0][:6]), scores), anatomy_of([6, 6], [100, 100]))
    with pytest.raises(SnapvitError, match=r"largest ratio possible is 0\.9500") as refused:
        planner.pair(0.97, 0)
    largest = float(str(refused.value).rsplit(" ", 1)[1])
    assert sum(planner.pair(largest, 0).neurons) == 10
    with pytest.raises(SnapvitError, match=r"of the heads .* 0\.8333"):
        planner.pair(0, 0.95)


@pytest.mark.parametrize(("ask", "value"), [("sparsity", 1.5), ("sparsity", -0.1), ("flops", 0), ("params", 1.1)])
def test_fractions_that_make_no_sense_are_usage_errors(ask, value):
    scores = (np.arange(4, dtype=np.float32),)
    planner = Planner(Ranking(scores, scores), anatomy_of([4], [4]))
    with pytest.raises(UsageError, match=f"{value:g}"):
        getattr(planner, ask)(value)


def test_protection_keeps_at_least_one():
    assert (Protection().kept_heads(3), Protection().kept_neurons(7)) == (1, 1)
    assert (Protection().kept_heads(12), Protection().kept_neurons(3072)) == (2, 153)


def test_plans_and_anatomies_are_files(tmp_path):
    anatomy = anatomy_of([4, 4], [10, 10])
    plan = Plan(heads=(1, 4), neurons=(3, 10))
    plan.save(tmp_path / "plan.json")
    anatomy.save(tmp_path / "anatomy.json")
    assert (Plan.load(tmp_path / "plan.json"), Anatomy.load(tmp_path / "anatomy.json")) == (plan, anatomy)
    (tmp_path / "plan.json").write_text('{"format_version": 2, "heads": [1], "neurons": [1]}')
    with pytest.raises(SnapvitError, match=r"plan.json.*format_version"):
        Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text('{"heads": [-1], "neurons": [1]}')
    with pytest.raises(SnapvitError, match=r"plan.json.*heads"):
        Plan.load(tmp_path / "plan.json")


def test_explicit_counts_are_checked_against_the_model():
    anatomy = anatomy_of([4, 4], [10, 10])
    Plan(heads=(1, 4), neurons=(3, 10)).check_fits(anatomy)
    with pytest.raises(SnapvitError, match="block 1: the plan keeps 5 heads of 4"):
        Plan(heads=(1, 5), neurons=(3, 10)).check_fits(anatomy)
    Plan(heads=(0, 4), neurons=(3, 0)).check_fits(anatomy)
    with pytest.raises(SnapvitError, match="1 blocks, the model has 2"):
        Plan(heads=(1,), neurons=(3,)).check_fits(anatomy)
