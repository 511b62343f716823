"""Plans that meet a fraction of tokens and a cost at once: they agree with their merges, and meet both."""

from dataclasses import replace
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import anatomy_of
from helpers.rankings import random_ranking
from snapvit_export.allocation.costs import Costs, CostsByLast, flops_costs, linear_costs, params_costs
from snapvit_export.allocation.planner import Planner, check_reach
from snapvit_export.allocation.resolution import grid_for
from snapvit_export.allocation.token_target import TokenTarget, smallest_plans
from snapvit_export.allocation.tokens import DEFAULT, SCHEDULES
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.sublayer import SubLayer

TWELVE = msgspec.structs.replace(anatomy_of([3] * 12, [48] * 12), image=(112, 112), positions=197)
SIX = msgspec.structs.replace(anatomy_of([3] * 6, [48] * 6), image=(112, 112), positions=197)
AVERAGED = msgspec.structs.replace(TWELVE, pooling="avg")
REMOVABLE = Protection(sublayers=False)


def ranking_of(anatomy: Anatomy, seed: int, joint: bool = True) -> Ranking:
    """Damage curves of random heights; `joint`: what the loss of several attentions does is known too."""
    rng = np.random.default_rng(seed)
    made = random_ranking(anatomy, seed)
    blocks = range(len(anatomy.blocks))
    losses = [(rng.random(h) * rng.random() * 9, rng.random(n)) for h, n in zip(anatomy.heads, anatomy.neurons)]
    damage = tuple(tuple(np.append(np.cumsum(np.sort(kind))[::-1], 0) for kind in block) for block in losses)
    orders = [made.head_order(i) for i in blocks], [made.neuron_order(i) for i in blocks]
    found = Ranking.from_orders(*orders, damage, anatomy=anatomy)
    measured = [
        SubLayer(block=i, part=part, divergence=0.1, turned=0.1, damage=float(damage[i][part == "mlp"][0]), weight=1.0)
        for i in blocks
        for part in ("attention", "mlp")
    ]
    if joint:
        ends = [float(heads[0]) for heads, _ in damage]
        measured = [
            msgspec.structs.replace(m, onward=1.1 * sum(ends[m.block :])) if m.part == "attention" else m
            for m in measured
        ]
    return replace(found, provenance={"sublayers": msgspec.to_builtins(measured)})


def agrees(plan: Plan, anatomy: Anatomy, fraction: float, grid: tuple[int, int] | None = None) -> bool:
    """Its merges are those of the attentions that it keeps, and as many tokens are left as were asked for."""
    plan.check_fits(anatomy)
    left = anatomy.tokens_after(plan)[-1] - anatomy.prefix
    same = plan.merged == SCHEDULES[DEFAULT].counts(anatomy, plan.with_tokens(grid=grid), fraction)
    return same and plan.grid == grid and left == round(fraction * anatomy.patches_of(plan))


@pytest.mark.parametrize("anatomy", [TWELVE, AVERAGED], ids=["class token", "average"])
@pytest.mark.parametrize("sublayers", [True, False])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), fraction=st.sampled_from([0.25, 0.5, 0.8]), share=st.floats(0.03, 0.9))
def test_a_plan_meets_the_tokens_and_the_flops(anatomy, sublayers, seed, fraction, share):
    protection = Protection(sublayers=sublayers)
    planner = Planner(ranking_of(anatomy, seed), anatomy, protection).with_tokens(fraction)
    try:
        plan = planner.flops(share)
    except SnapvitError as refused:
        assert share < planner.sparsest.flops_ratio(anatomy)
        assert f"{planner.sparsest.flops_ratio(anatomy):.4f}" in str(refused)
    else:
        assert plan.flops_ratio(anatomy) <= share
        assert agrees(plan, anatomy, fraction)


@pytest.mark.parametrize("anatomy", [TWELVE, AVERAGED], ids=["class token", "average"])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
@pytest.mark.parametrize("sublayers", [True, False])
def test_all_that_is_not_refused_is_reached(anatomy, fraction, sublayers):
    planner = Planner(ranking_of(anatomy, 3), anatomy, Protection(sublayers=sublayers)).with_tokens(fraction)
    smallest = planner.sparsest.flops_ratio(anatomy)
    assert agrees(planner.sparsest, anatomy, fraction)
    for share in np.linspace(smallest, min(1.0, 3 * smallest), 12):
        plan = planner.flops(float(share))
        assert plan.flops_ratio(anatomy) <= share
        assert agrees(plan, anatomy, fraction)
    with pytest.raises(SnapvitError, match=f"with tokens {fraction:g} is out of reach: .* at least {smallest:.4f}"):
        planner.flops(smallest * 0.99)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("pooling", ["token", "avg"])
@pytest.mark.parametrize("heads", [[3] * 8, [3, 6, 9, 3, 5, 3, 6, 4]], ids=["alike", "unlike"])
def test_the_smallest_plan_is_that_of_all_sets_of_attentions(fraction, pooling, heads):
    anatomy = msgspec.structs.replace(anatomy_of(heads, [48] * 8), image=(112, 112), positions=197, pooling=pooling)
    target, least = TokenTarget(fraction), REMOVABLE.least(anatomy)
    sets = [tuple(h * keep for h, keep in zip(least.heads, kept)) for kept in product((0, 1), repeat=8)]
    plans = [target.fits(anatomy, Plan(heads=heads, neurons=(0,) * 8)) for heads in sets if any(heads)]
    exact = min(anatomy.block_flops(plan) for plan in plans if plan is not None)
    found = min(map(anatomy.block_flops, smallest_plans(anatomy, REMOVABLE, target, anatomy.block_flops)))
    assert found == exact


def test_tokens_alone_keep_the_dense_width_where_they_are_enough():
    planner = Planner(ranking_of(TWELVE, 0), TWELVE, REMOVABLE).with_tokens(0.5)
    assert planner.dense.flops_ratio(TWELVE) < 0.8
    for plan in (planner.flops(0.8), planner.sparsity(0.0), planner.params(1.0), planner.pair(0.0, 0.0)):
        assert plan == planner.dense
    assert (planner.dense.heads, planner.dense.neurons) == (TWELVE.heads, TWELVE.neurons)
    assert agrees(planner.dense, TWELVE, 0.5)


def test_shorter_sequences_leave_more_width_for_the_same_flops():
    planner = Planner(ranking_of(TWELVE, 0), TWELVE, REMOVABLE)
    halved, smaller = planner.with_tokens(0.5), planner.with_tokens(grid=(10, 10))
    for share in (0.2, 0.35, 0.5):
        kept = TWELVE.prunable_params(planner.flops(share))
        assert TWELVE.prunable_params(halved.flops(share)) > kept
        assert TWELVE.prunable_params(smaller.flops(share)) > kept


@pytest.mark.parametrize("sublayers", [True, False])
def test_every_target_carries_the_tokens_and_is_met(sublayers):
    protection = Protection(sublayers=sublayers)
    ranking = ranking_of(SIX, 5)
    for grid in (None, (10, 12)):
        planner = Planner(ranking, SIX, protection, corrected=True).with_tokens(0.5, grid)
        cut, small = planner.sparsity(0.4), planner.params(0.6)
        assert cut.sparsity(SIX) >= 0.4
        assert SIX.with_output_biases().params(small) <= 0.6 * SIX.params()
        for plan in (cut, small, planner.pair(0.35, 0.2), *planner.steps().values()):
            assert agrees(plan, SIX, 0.5, grid)
        ratios = [plan.flops_ratio(SIX) for plan in planner.steps().values()]
        assert ratios == sorted(ratios, reverse=True)
        assert len(set(ratios)) == len(ratios) > 5


def test_a_line_without_damage_curves_ends_where_tokens_could_not_be_merged():
    measured = ranking_of(TWELVE, 2)
    plain = replace(random_ranking(TWELVE, 2), provenance=measured.provenance)
    planner = Planner(plain, TWELVE, REMOVABLE)
    merging = planner.with_tokens(0.25)
    assert sum(map(bool, planner.sparsest.heads)) == 1 < sum(map(bool, merging.sparsest.heads))
    for share in (0.4, 0.2, merging.sparsest.flops_ratio(TWELVE)):
        plan = merging.flops(share)
        assert plan.flops_ratio(TWELVE) <= share
        assert agrees(plan, TWELVE, 0.25)


@pytest.mark.parametrize("by_last", [False, True])
def test_costs_that_depend_on_tokens_are_those_of_the_plan(by_last):
    """As a latency model's: a function of tokens, and where one token is read of the last attention too."""

    def tables(plan: Plan) -> Costs | CostsByLast:
        heads, neurons = zip(*SIX.structure_flops(plan))
        if not by_last:
            return linear_costs(SIX, heads, neurons, fixed=1e5, per_attention=1e4)
        cases = [[n * (0.1 if i > last else 1) for i, n in enumerate(neurons)] for last in range(6)]
        return CostsByLast(tuple(linear_costs(SIX, heads, case, fixed=1e5, per_attention=1e4) for case in cases))

    planner = Planner(ranking_of(SIX, 1), SIX, REMOVABLE).with_tokens(0.5)
    whole = tables(planner.dense).of(planner.dense)
    for share in (0.8, 0.4, 0.15):
        plan = planner.within(tables, share * whole)
        assert tables(plan).of(plan) <= share * whole
        assert agrees(plan, SIX, 0.5)
    steps = planner.steps_of(tables)
    assert all(agrees(plan, SIX, 0.5) for plan in steps.values())
    timed = {name: tables(plan).of(plan) for name, plan in steps.items() if name.startswith("t")}
    assert len(timed) > 20
    assert all(cost <= int(name[1:]) / 100 * whole for name, cost in timed.items())


def test_tables_of_costs_are_those_of_plans_with_tokens():
    plan = Plan(heads=(2, 0, 3, *[1] * 9), neurons=(5, 0, *[7] * 10)).with_tokens((20, 0, 9, *[0] * 9), (10, 12))
    assert flops_costs(TWELVE, plan).of(plan) == TWELVE.block_flops(plan)
    assert params_costs(TWELVE, plan).of(plan) == TWELVE.params(plan) < TWELVE.params(plan.with_tokens())


@pytest.mark.parametrize("sublayers", [True, False])
def test_what_cannot_be_reached_with_tokens_is_known_before_any_ranking(sublayers):
    protection = Protection(sublayers=sublayers)
    planner = Planner(ranking_of(TWELVE, 0), TWELVE, protection).with_tokens(0.25)
    for kind, fraction in (("sparsity", 0.9999), ("flops", 0.0001), ("params", 0.0001)):
        with pytest.raises(SnapvitError) as late:
            getattr(planner, kind)(fraction)
        with pytest.raises(SnapvitError) as early:
            check_reach(TWELVE, protection, tokens=planner.tokens, **{kind: [fraction]})
        assert str(early.value) == str(late.value)
    check_reach(TWELVE, protection, tokens=planner.tokens, flops=[planner.sparsest.flops_ratio(TWELVE)])


def test_tokens_that_a_model_cannot_have_are_refused_with_the_reason():
    planner = Planner(Ranking.flat(TWELVE), TWELVE)
    for fraction in (0, -0.5, 1.01, float("nan")):
        with pytest.raises(UsageError, match="is not above 0 and at most 1"):
            planner.with_tokens(fraction)
    shallow = anatomy_of([3] * 3, [48] * 3)
    with pytest.raises(SnapvitError, match=r"token fraction 0.1 is out of reach: 2 blocks leave at least"):
        Planner(Ranking.flat(shallow), shallow).with_tokens(0.1)
    single = anatomy_of([3], [48])
    with pytest.raises(SnapvitError, match="tokens cannot be merged: no attention follows"):
        Planner(Ranking.flat(single), single).with_tokens(0.5)
    with pytest.raises(SnapvitError, match="tokens cannot be merged: it has one patch"):
        planner.with_tokens(0.5, (1, 1))
    merging = TWELVE.with_counts(planner.with_tokens(0.5).dense)
    with pytest.raises(SnapvitError, match="merges tokens already"):
        Planner(Ranking.flat(merging), merging).with_tokens(0.5)


def test_resolutions_become_grids():
    assert grid_for(TWELVE, 80) == (10, 10)
    assert grid_for(TWELVE, (96, 80)) == (12, 10)
    assert grid_for(TWELVE, 112) is grid_for(TWELVE, (112, 112)) is None
    wide = msgspec.structs.replace(TWELVE, image=(64, 128), positions=129)
    assert grid_for(wide, (32, 128)) == (4, 16)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (100, "resolution 100 is no multiple of the patch, 8 pixels. Take 96 or 104"),
        ((96, 81), "resolution 96x81 is no multiple of the patch, 8 pixels. Take 80 or 88"),
        (120, "resolution 120 is larger than the model's own 112x112"),
        (7, "resolution 7 is smaller than one patch of 8 pixels"),
        (0, "a resolution of 0 pixels is no size of an image"),
    ],
)
def test_resolutions_that_a_model_cannot_have_are_refused(asked, said):
    with pytest.raises(UsageError) as refused:
        grid_for(TWELVE, asked)
    assert said in str(refused.value)


def test_a_square_is_refused_for_a_model_that_takes_none():
    wide = msgspec.structs.replace(TWELVE, image=(64, 128), positions=129)
    with pytest.raises(UsageError, match="64x128 pixels, which is no square. Write height and width"):
        grid_for(wide, 32)
