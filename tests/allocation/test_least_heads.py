"""On a card that wants it, a block keeps no heads or at least so many; without such a card nothing changes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import anatomy_of
from helpers.rankings import random_ranking
from snapvit_export import profiles
from snapvit_export.allocation.costs import flops_costs
from snapvit_export.allocation.planner import Planner, check_reach
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import DeviceProtection, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.sample_plans import held_out_plans, sample_plans, with_least_heads
from snapvit_export.target import Target, in_precision
from snapvit_export.workflows.export_request import Request
from snapvit_export.workflows.requested_plans import planner_of

ANATOMY = anatomy_of([6, 3, 2, 4], [64, 96, 64, 80])
ON_TENSORRT = [name for name in profiles.names() if profiles.load(name).target.runtime == "tensorrt"]


def with_curves(anatomy, seed: int) -> Ranking:
    rng = np.random.default_rng(seed)
    made, blocks = random_ranking(anatomy, seed), range(len(anatomy.blocks))
    losses = [(rng.random(h), rng.random(n)) for h, n in zip(anatomy.heads, anatomy.neurons)]
    damage = tuple(tuple(np.append(np.cumsum(np.sort(kind))[::-1], 0) for kind in block) for block in losses)
    return Ranking.from_orders(
        [made.head_order(i) for i in blocks], [made.neuron_order(i) for i in blocks], damage, anatomy=anatomy
    )


def planner(seed: int, sublayers: bool, least: int, multiple: int = 1, anatomy=ANATOMY) -> Planner:
    protection = DeviceProtection.of(Protection(sublayers=sublayers), least)
    return Planner(with_curves(anatomy, seed), anatomy, protection, multiple, corrected=True)


def all_plans(made: Planner, share: float):
    """Plans by every way to ask for one, as far as they are in reach."""
    dense = flops_costs(made.anatomy).of(made.dense)
    ways = [
        lambda: [made.sparsity(share)],
        lambda: [made.flops(1 - share)],
        lambda: [made.params(1 - share)],
        lambda: [made.within(flops_costs(made.anatomy), (1 - share) * dense)],
        lambda: [made.with_tokens(0.6).flops(1 - share)],
        lambda: list(made.steps().values()),
        lambda: [made.sparsest],
    ]
    for way in ways:
        try:
            yield from way()
        except SnapvitError as error:
            assert "out of reach" in str(error)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), share=st.floats(0.05, 0.95), sublayers=st.booleans())
def test_no_plan_of_any_budget_keeps_a_single_head_and_widths_are_on_the_grid(seed, share, sublayers):
    made = planner(seed, sublayers, least=2, multiple=8)
    for plan in all_plans(made, share):
        assert 1 not in plan.heads
        for kept, have in zip(plan.neurons, ANATOMY.neurons):
            assert kept % 8 == 0 or kept == have


def test_without_the_rule_single_heads_do_occur():
    plans = [plan for seed in range(5) for plan in all_plans(planner(seed, True, least=1), 0.7)]
    assert any(1 in plan.heads for plan in plans)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), mlp=st.floats(0, 0.9), head=st.floats(0, 0.9))
def test_a_pair_keeps_two_heads_or_is_refused_with_the_reason(seed, mlp, head):
    made = Planner(random_ranking(ANATOMY, seed), ANATOMY, DeviceProtection.of(Protection(), 2))
    try:
        plan = made.pair(mlp, head)
    except SnapvitError as error:
        assert "protected part of each block (0 or at least 2 heads in a block)" in str(error)
        assert int(sum(ANATOMY.heads) * head) > sum(ANATOMY.heads) - 2 * len(ANATOMY.blocks)
        return
    assert min(plan.heads) >= 2
    assert sum(plan.heads) == sum(ANATOMY.heads) - int(sum(ANATOMY.heads) * head)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), share=st.floats(0.05, 0.95), sublayers=st.booleans())
def test_a_model_of_single_heads_is_left_alone(seed, share, sublayers):
    single = anatomy_of([1, 1, 1], [64, 64, 64])
    with_rule, without = (planner(seed, sublayers, least, anatomy=single) for least in (2, 1))
    assert list(all_plans(with_rule, share)) == list(all_plans(without, share))


def test_what_is_out_of_reach_by_the_rule_is_told_early_and_late_in_the_same_words():
    made = planner(0, True, least=2)
    for kind, fraction in (("sparsity", 0.99), ("flops", 0.001), ("params", 0.001)):
        with pytest.raises(SnapvitError, match=r"\(0 or at least 2 heads in a block\) is out of reach") as late:
            getattr(made, kind)(fraction)
        with pytest.raises(SnapvitError) as early:
            check_reach(ANATOMY, made.protection, corrected=True, **{kind: [fraction]})
        assert str(early.value) == str(late.value)


@pytest.mark.parametrize("name", profiles.names())
def test_cards_for_tensorrt_have_the_rule_at_batch_one_and_no_other_does(name):
    card = profiles.load(name)
    assert card.least_heads == (2 if name in ON_TENSORRT else 1)
    assert card.least_heads_for(card.target) == card.least_heads
    for other in (replace_target(card.target, batch=2), replace_target(card.target, runtime="onnxruntime")):
        assert card.least_heads_for(other) == 1
    assert card.least_heads_for(in_precision(card.target, "int8-static")) == card.least_heads


def replace_target(target: Target, **changes) -> Target:
    given = {name: getattr(target, name) for name in ("runtime", "precision", "batch", "threads")}
    return Target(**{**given, **changes})


def test_without_a_card_the_protection_is_that_of_the_ranking_itself():
    ranking = with_curves(ANATOMY, 3)
    made = planner_of(Request(), ranking, ANATOMY)
    assert type(made.protection) is Protection
    assert made.least_heads == 1
    ruled = planner_of(replace(Request(), least_heads=2), ranking, ANATOMY)
    assert (ruled.least_heads, ruled.with_tokens(0.5).least_heads) == (2, 2)


def test_samples_of_a_latency_model_obey_it_and_still_tell_heads_apart():
    plans = [*sample_plans(ANATOMY, removable=True, tokens=True), *held_out_plans(ANATOMY)]
    assert with_least_heads(ANATOMY, plans, 1) == list(dict.fromkeys(plans))
    ruled = with_least_heads(ANATOMY, plans, 2)
    assert all(1 not in plan.heads for plan in ruled)
    assert any(0 in plan.heads for plan in ruled)
    assert len({plan.heads for plan in ruled}) > 3
    for plan in ruled:
        plan.check_fits(ANATOMY)


def test_an_export_for_a_jetson_keeps_the_rule_and_says_where_it_changed_a_plan(
    snapvit, tiny_folder, image_folder, tmp_path
):
    words = [
        "export",
        "--model",
        tiny_folder,
        "--data",
        image_folder,
        "--images",
        16,
        "--sparsity",
        "0.6",
        "--no-depth",
    ]
    free = snapvit(*words, "--runtime", "onnxruntime", "--out", tmp_path / "free")
    ruled = snapvit(*words, "--for", "jetson-orin-nano", "--out", tmp_path / "ruled")
    assert (free.code, ruled.code) == (0, 0), free.err + ruled.err
    assert 1 in heads_of(tmp_path / "free")
    assert 1 not in heads_of(tmp_path / "ruled")
    assert "would keep fewer than 2 heads, whose attention TensorRT does not compute in one kernel" in ruled.err
    assert "fewer than 2 heads" not in free.err


def heads_of(family) -> list[int]:
    variants = json.loads((family / "manifest.json").read_text())["variants"]
    return [kept for variant in variants if variant["name"] == "s60" for kept in variant["heads"]]
