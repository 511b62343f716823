"""The latency model: exact where it is true, honest where it is not, and a cost that Plans can be allocated under."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.models import make_model
from helpers.plans import anatomy_of
from helpers.rankings import random_ranking
from snapvit_export.allocation.costs import CostsByLast, linear_costs
from snapvit_export.allocation.planner import Planner
from snapvit_export.calibration.images import Images
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.sublayer import SubLayer
from snapvit_export.profiling.latency_model import KEYS_AND_VALUES, LatencyModel, fit
from snapvit_export.profiling.sample_plans import sample_plans
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.stats.observe import observe
from snapvit_export.storage.json import as_builtins, from_json, to_json


def tokens_read(anatomy):
    """The same model, but all tokens are read, so no block is free."""
    import msgspec

    return msgspec.structs.replace(anatomy, pooling="avg")


def truth(plan: Plan) -> float:
    return 0.5 + 0.3 * sum(plan.heads) + 0.01 * sum(plan.neurons)


def test_a_latency_that_is_a_sum_is_found_exactly():
    anatomy = tokens_read(anatomy_of([6] * 4, [200] * 4))
    model = fit(anatomy, [(plan, truth(plan)) for plan in sample_plans(anatomy)])
    assert model.fixed_ms == pytest.approx(0.5)
    assert model.head_ms == pytest.approx([0.3] * 4)
    assert model.neuron_ms == pytest.approx([0.01] * 4)
    assert model.most_error < 1e-9
    plan = Plan(heads=(1, 2, 3, 4), neurons=(7, 90, 3, 200))
    assert model.predict_ms(plan) == pytest.approx(truth(plan)) == pytest.approx(model.costs(anatomy).of(plan))
    assert from_json(to_json(model), LatencyModel, "x") == model


def test_what_a_sub_layer_costs_for_being_there_is_found_from_nets_that_lack_some():
    anatomy = tokens_read(anatomy_of([6] * 4, [200] * 4))

    def takes(plan: Plan) -> float:
        there = 0.2 * sum(n > 0 for n in plan.heads) + 0.1 * sum(n > 0 for n in plan.neurons)
        return truth(plan) + there

    plans = sample_plans(anatomy, removable=True)
    assert plans[: len(sample_plans(anatomy))] == sample_plans(anatomy)
    assert any(plan.removed for plan in plans)
    model = fit(anatomy, [(plan, takes(plan)) for plan in plans])
    assert (model.attention_ms, model.mlp_ms) == (pytest.approx([0.2] * 4), pytest.approx([0.1] * 4))
    assert model.fixed_ms == pytest.approx(0.5)
    plan = Plan(heads=(1, 0, 3, 0), neurons=(7, 0, 0, 200))
    assert model.predict_ms(plan) == pytest.approx(takes(plan)) == pytest.approx(model.costs(anatomy).of(plan))
    assert from_json(to_json(model), LatencyModel, "x") == model
    small = anatomy_of([6] * 2, [200] * 2)
    assert sample_plans(small, removable=True) == sample_plans(
        small
    )  # nothing could be lacking and the rest still be told apart
    for plan in sample_plans(anatomy_of([6] * 3, [200] * 3), removable=True):
        plan.check_fits(anatomy_of([6] * 3, [200] * 3))


def test_depth_is_cut_where_being_there_costs_much_and_width_where_it_costs_nothing():
    anatomy = tokens_read(anatomy_of([4] * 4, [40] * 4))
    even = np.linspace(1, 0, 41)
    steep = np.concatenate([[0.4], 0.3 * even[1:]])  # its last neurons are worth much
    damage = tuple((np.linspace(1, 0, 5), curve) for curve in (even, even, even, steep))
    ranking = Ranking.from_orders([range(4)] * 4, [range(40)] * 4, damage)
    free = Planner(ranking, anatomy, Protection(sublayers=False))
    for there, gone in ((3.0, ((3, "mlp"),)), (0.0, ())):
        costs = linear_costs(anatomy, 1.0, 0.1, per_attention=there, per_mlp=there)
        assert free.within(costs, costs.of(Plan.dense(anatomy)) - 6).removed == gone
    assert not Planner(ranking, anatomy).within(costs, costs.of(Plan.dense(anatomy)) - 6).removed


def test_held_out_errors_tell_of_noise_and_no_cost_is_negative():
    anatomy = tokens_read(anatomy_of([6] * 4, [200] * 4))
    random = np.random.default_rng(0)
    plans = sample_plans(anatomy)
    noisy = fit(anatomy, [(plan, truth(plan) * random.uniform(0.9, 1.1)) for plan in plans])
    assert 0.01 < noisy.mean_error <= noisy.most_error < 0.5
    flat = fit(anatomy, [(plan, 5.0 - 0.001 * sum(plan.heads)) for plan in plans])
    assert min(flat.fixed_ms, *flat.head_ms, *flat.neuron_ms) >= 0
    with pytest.raises(ValueError, match="at least four"):
        fit(anatomy, [(plans[0], 1.0)] * 3)


def works_for_one_token(plan: Plan) -> float:
    """0.3 a head, 0.01 a neuron, 0.2 an attention and 0.1 an MLP up to the last attention, which costs half of that."""
    last = max(i for i, kept in enumerate(plan.heads) if kept)
    before = Plan(heads=plan.heads[:last], neurons=plan.neurons[:last]) if last else None
    there = sum(0.2 * (h > 0) + 0.1 * (n > 0) for h, n in zip(plan.heads[:last], plan.neurons[:last]))
    return (truth(before) if before else 0.5) + there + 0.1


def test_from_the_last_attention_on_all_is_free_where_only_one_token_is_read():
    anatomy = anatomy_of([6] * 4, [200] * 4)
    assert anatomy.pooling == "token"
    model = fit(anatomy, [(plan, works_for_one_token(plan)) for plan in sample_plans(anatomy, removable=True)])
    assert (model.last_head, model.most_error) == (0, pytest.approx(0, abs=1e-9))
    costs = model.costs(anatomy)
    for heads, neurons in (((6, 5, 4, 3), (9, 8, 7, 6)), ((6, 5, 0, 0), (9, 8, 7, 6)), ((0, 1, 0, 0), (0, 0, 0, 9))):
        plan = Plan(heads=heads, neurons=neurons)
        assert model.predict_ms(plan) == pytest.approx(works_for_one_token(plan)) == pytest.approx(costs.of(plan))
    keys = fit(
        anatomy, [(p, works_for_one_token(p)) for p in sample_plans(anatomy, removable=True)], last_head=KEYS_AND_VALUES
    )
    assert keys.last_head == 0.5
    assert from_json(to_json(keys), LatencyModel, "x") == keys


def test_a_late_attention_goes_where_that_frees_all_that_follows():
    anatomy = anatomy_of([4] * 4, [40] * 4)
    even, little = np.linspace(1, 0, 41), np.linspace(0.01, 0, 5)
    damage = tuple((curve, even) for curve in (np.linspace(9, 0, 5), np.linspace(9, 0, 5), little, little))
    told = {"divergence": 0, "turned": 0}
    measured = [
        SubLayer(
            block=i, part=part, damage=float(curve[0]), onward=0.02 * (4 - i) if part == "attention" else None, **told
        )
        for i, curves in enumerate(damage)
        for part, curve in zip(("attention", "mlp"), curves)
    ]
    plain = Ranking.from_orders([range(4)] * 4, [range(40)] * 4, damage)
    ranking = replace(plain, provenance={"sublayers": as_builtins(measured)})
    model = fit(anatomy, [(plan, works_for_one_token(plan)) for plan in sample_plans(anatomy, removable=True)])
    costs = model.costs(anatomy)
    plan = Planner(ranking, anatomy, Protection(sublayers=False)).within(
        costs, 0.5 * model.predict_ms(Plan.dense(anatomy))
    )
    assert plan == Plan(heads=(4, 4, 0, 0), neurons=(40, 40, 40, 40))  # which takes 2.4 of 6.1
    unknown = Planner(plain, anatomy, Protection(sublayers=False))  # nobody measured what losing both costs
    assert unknown.within(costs, 0.5 * model.predict_ms(Plan.dense(anatomy))).last_attention == 3
    assert not Planner(ranking, anatomy).within(costs, 0.5 * model.predict_ms(Plan.dense(anatomy))).removed


def test_the_floor_is_what_costs_least_of_all_that_may_stay_alone():
    anatomy = anatomy_of([4, 4, 1], [40] * 3)
    damage = tuple((np.linspace(end, 0, n + 1), np.linspace(1, 0, 41)) for end, n in ((9, 4), (5, 4), (0.1, 1)))
    ranking = Ranking.from_orders([range(4), range(4), range(1)], [range(40)] * 3, damage)
    costs = CostsByLast(tuple(linear_costs(anatomy, [3.0, 2.0, 1.0], 0.1, 1.0) for _ in range(3)))
    for given, least in ((costs, 2.0), (linear_costs(anatomy, [3.0, 2.0, 1.0], 0.1, 1.0), 2.0)):
        planner = Planner(ranking, anatomy, Protection(sublayers=False))
        plan = planner.within(given, least)
        assert plan == Plan(heads=(0, 0, 1), neurons=(0, 0, 0))  # not the attention with the most damage
        with pytest.raises(SnapvitError, match="the sparsest plan costs 2"):
            planner.within(given, least - 0.01)


def test_the_nets_that_are_timed_are_few_apart_and_begin_with_the_dense_one():
    anatomy = anatomy_of([6] * 4, [200] * 4)
    plans = sample_plans(anatomy)
    assert plans[0] == Plan.dense(anatomy)
    assert 6 <= len(plans) <= 9
    assert len(sample_plans(anatomy, removable=True)) <= len(plans) + 4
    shares = np.array([[1, sum(p.heads), sum(p.neurons)] for p in plans], float)
    assert np.linalg.matrix_rank(shares) == 3
    for plan in sample_plans(anatomy_of([1], [3])):
        plan.check_fits(anatomy_of([1], [3]))


def test_steps_of_a_latency_model_fall_and_keep_what_costs_nothing():
    model = make_model()
    anatomy = model.anatomy
    pixels = np.random.default_rng(0).integers(0, 256, (24, *anatomy.image, 3), np.uint8)
    ranking, _ = damage_ranking(model, observe(model, Images(pixels, None, model.preprocessing, "noise")), "variance")
    latencies = fit(anatomy, [(plan, truth(plan)) for plan in sample_plans(anatomy)])
    steps = Planner(ranking, anatomy).steps_of(latencies.costs(anatomy))
    predicted = [latencies.predict_ms(plan) for plan in steps.values()]
    assert predicted == sorted(predicted, reverse=True)
    assert len(set(predicted)) == len(predicted) > 20
    for name, plan in steps.items():
        plan.check_fits(anatomy)
        if name.startswith("t"):
            assert latencies.predict_ms(plan) <= predicted[0] * int(name[1:]) / 100
        assert (plan.heads[-1], plan.neurons[-1]) == (anatomy.heads[-1], anatomy.neurons[-1])
    with pytest.raises(SnapvitError, match="damage curves"):
        Planner(random_ranking(anatomy), anatomy).steps_of(latencies.costs(anatomy))
