"""Joint allocation: optimal where it says so, never above the budget, and as dense as can be."""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from helpers.plans import along_line, anatomy_of, line
from snapvit_export.allocation.costs import Costs, CostsByLast, flops_costs, linear_costs, params_costs, prunable_costs
from snapvit_export.allocation.depth import DepthAllocator, Removal
from snapvit_export.allocation.knapsack import Allocator
from snapvit_export.allocation.planner import Planner
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Damage, Ranking


def falling(steps: list[float]) -> np.ndarray:
    """A damage curve with these losses, the first structure's first."""
    return np.concatenate([np.cumsum(np.array(steps, float)[::-1])[::-1], [0.0]])


def rising(steps: list[float]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.array(steps, float))])


def full(damage: Damage) -> Plan:
    return Plan(heads=tuple(len(h) - 1 for h, _ in damage), neurons=tuple(len(n) - 1 for _, n in damage))


@st.composite
def problems(draw, cost=st.integers(0, 5)) -> tuple[Damage, Costs, Plan, int, list[tuple[bool, bool]]]:
    """Damage of any shape, costs with steps and flat parts, a floor, a grid of widths, and what may go whole."""
    loss = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0, 10.0])
    depth = draw(st.integers(1, 3))
    sizes = [(draw(st.integers(1, 3)), draw(st.integers(1, 4))) for _ in range(depth)]
    lists = lambda of, n: draw(st.lists(of, min_size=n, max_size=n))  # noqa: E731
    damage = tuple((falling(lists(loss, h)), falling(lists(loss, n))) for h, n in sizes)
    costs = Costs(
        tuple(rising(lists(cost, h)) for h, _ in sizes),
        tuple(rising(lists(cost, n)) for _, n in sizes),
        draw(cost),
    )
    least = Plan(
        heads=tuple(draw(st.integers(1, h)) for h, _ in sizes), neurons=tuple(draw(st.integers(1, n)) for _, n in sizes)
    )
    removable = [(draw(st.booleans()), draw(st.booleans())) for _ in range(depth)]
    return damage, costs, least, draw(st.integers(1, 3)), removable


def all_plans(damage: Damage, least: Plan, multiple: int, removable: Sequence[tuple[bool, bool]] = ()) -> list[Plan]:
    top, goes = full(damage), removable or [(False, False)] * len(damage)
    heads = [[*[0] * h, *range(low, high + 1)] for low, high, (h, _) in zip(least.heads, top.heads, goes)]
    neurons = [
        [*[0] * m, *(n for n in range(low, high + 1) if n % multiple == 0 or n == high)]
        for low, high, (_, m) in zip(least.neurons, top.neurons, goes)
    ]
    return [Plan(heads=h, neurons=n) for h in product(*heads) for n in product(*neurons)]


def wider(plan: Plan, top: Plan, multiple: int = 1, least: Plan | None = None) -> list[Plan]:
    """The Plans with one step more somewhere; from nothing the next step is to the least."""
    more, least = [], least or Plan(heads=(1,) * len(top.heads), neurons=(1,) * len(top.heads))
    for i in range(len(plan.heads)):
        if plan.heads[i] < top.heads[i]:
            more.append(Plan(heads=_with(plan.heads, i, max(plan.heads[i] + 1, least.heads[i])), neurons=plan.neurons))
        if plan.neurons[i] < top.neurons[i]:
            wanted = max(plan.neurons[i] + 1, least.neurons[i])
            step = min(-(-wanted // multiple) * multiple, top.neurons[i])
            more.append(Plan(heads=plan.heads, neurons=_with(plan.neurons, i, step)))
    return more


def _with(counts: tuple[int, ...], i: int, count: int) -> tuple[int, ...]:
    return (*counts[:i], count, *counts[i + 1 :])


@settings(deadline=None)  # the brute force, not ours
@given(problems(), st.floats(0, 1))
def test_no_plan_within_the_budget_has_less_damage(problem, share):
    damage, costs, least, multiple, removable = problem
    allocator = Allocator(*problem)
    lowest, highest = costs.of(allocator.sparsest), costs.of(full(damage))
    budget = round(lowest + share * (highest - lowest))
    plan = allocator.within(budget)
    plans = all_plans(damage, least, multiple, removable)
    assert plan in plans
    assert costs.of(plan) <= budget
    assert allocator.damage(plan) == min(allocator.damage(p) for p in plans if costs.of(p) <= budget)
    assert all(costs.of(p) > budget for p in wider(plan, full(damage), multiple, least))


@settings(deadline=None)
@given(problems(), st.data(), st.sampled_from(["token", "avg"]), st.booleans(), st.floats(0, 1))
def test_of_all_ways_to_leave_sub_layers_out_none_has_less_damage(problem, data, pooling, by_last, share):
    damage, costs, least, multiple, _ = problem
    top = full(damage)
    anatomy = replace(anatomy_of(list(top.heads), list(top.neurons)), pooling=pooling)
    if by_last and pooling == "token":
        costs = CostsByLast(tuple(replaced(costs, data.draw(st.integers(0, 5))) for _ in damage))
    beyond = tuple(data.draw(st.sampled_from([0.0, 2.0, 7.0])) for _ in damage) if data.draw(st.booleans()) else None
    plans = [p for p in all_plans(damage, least, multiple, [(True, True)] * len(damage)) if fits(p, anatomy)]
    most = data.draw(st.sampled_from([top, *plans]))
    cases = DepthAllocator(Removal(damage, beyond), costs, least, anatomy, multiple, most)
    plans = [p for p in plans if most.keeps_all_of(p)]
    if pooling == "token" and beyond is None:  # nobody knows what losing the last ones costs, so they stay
        plans = [p for p in plans if p.last_attention == most.last_attention]
    lowest = min(costs.of(p) for p in plans)
    assert costs.of(cases.sparsest) == lowest
    budget = round(lowest + share * (costs.of(most) - lowest))
    if budget < lowest:
        with pytest.raises(SnapvitError, match="out of reach"):
            cases.within(budget)
        return
    plan = cases.within(budget)
    assert plan in plans
    assert costs.of(plan) <= budget
    assert cases.damage(plan) == min(cases.damage(p) for p in plans if costs.of(p) <= budget)


def replaced(costs: Costs, fixed: float) -> Costs:
    return Costs(costs.heads, costs.neurons, fixed)


def fits(plan: Plan, anatomy) -> bool:
    try:
        plan.check_fits(anatomy)
    except SnapvitError:
        return False
    return True


@settings(deadline=None)
@given(problems(), st.floats(0, 1), st.integers(0, 10**6))
def test_an_allocation_inside_another_plan_is_the_best_of_those_inside(problem, share, number):
    damage, costs, least, multiple, removable = problem
    plans = all_plans(damage, least, multiple, removable)
    most = plans[number % len(plans)]
    allocator = Allocator(*problem, most=most)
    inside = [plan for plan in plans if most.keeps_all_of(plan)]
    lowest = costs.of(allocator.sparsest)
    budget = round(lowest + share * (costs.of(most) - lowest))
    plan = allocator.within(budget)
    assert most.keeps_all_of(plan)
    assert allocator.damage(plan) == min(allocator.damage(p) for p in inside if costs.of(p) <= budget)
    assert allocator.within(costs.of(most)) == most


def test_an_allocation_inside_a_plan_that_is_no_option_is_refused():
    damage, anatomy = ((falling([3.0, 1.0]), falling([3.0, 2.0, 1.0])),), anatomy_of([2], [3])
    costs, least = linear_costs(anatomy, [3], [1], fixed=7), Plan(heads=(1,), neurons=(2,))
    with pytest.raises(SnapvitError, match="block 0: at most 1 structures are to be kept"):
        Allocator(damage, costs, least, most=Plan(heads=(2,), neurons=(1,)))
    with pytest.raises(SnapvitError, match="do not belong together"):
        Allocator(damage, costs, least, most=Plan(heads=(2, 2), neurons=(3, 3)))


@settings(deadline=None)
@given(problems())
def test_a_larger_budget_never_has_more_damage(problem):
    damage, costs, *_ = problem
    allocator = Allocator(*problem)
    budgets = range(int(costs.of(allocator.sparsest)), int(costs.of(full(damage))) + 1)
    damages = [allocator.damage(allocator.within(budget)) for budget in budgets]
    assert damages == sorted(damages, reverse=True)


@settings(deadline=None, max_examples=300)
@given(problems(cost=st.floats(0, 10)), st.floats(0, 1))
def test_measured_costs_are_never_exceeded_and_nothing_more_fits(problem, share):
    damage, costs, least, multiple, _ = problem
    allocator = Allocator(*problem)
    lowest, highest = costs.of(allocator.sparsest), costs.of(full(damage))
    budget = lowest + share * (highest - lowest)
    plan = allocator.within(budget)
    assert costs.of(plan) <= budget
    assert all(costs.of(p) > budget for p in wider(plan, full(damage), multiple, least))
    assert costs.of(along_line(allocator, budget)) <= budget


@given(problems())
def test_the_line_is_nested_from_dense_to_the_sparsest(problem):
    allocator = Allocator(*problem)
    plans = line(allocator)
    assert (plans[0], plans[-1]) == (full(problem[0]), allocator.sparsest)
    assert all(dense.keeps_all_of(sparse) for dense, sparse in pairwise(plans))
    costs = [allocator.costs.of(plan) for plan in plans]
    for budget in costs:
        assert allocator.costs.of(along_line(allocator, budget)) == budget
        assert along_line(allocator, budget).keeps_all_of(plans[costs.index(budget)])


def test_on_convex_curves_every_point_of_the_line_is_optimal():
    rng = np.random.default_rng(0)
    for _ in range(20):
        losses = lambda n: np.sort(rng.random(n))[::-1].tolist()  # noqa: E731
        damage = tuple((falling(losses(3)), falling(losses(5))) for _ in range(2))
        anatomy = anatomy_of([3, 3], [5, 5])
        costs = linear_costs(anatomy, [3, 4], [1, 2], fixed=7)
        least = Plan(heads=(1, 1), neurons=(1, 1))
        allocator = Allocator(damage, costs, least)
        plans = all_plans(damage, least, 1)
        for plan in line(allocator):
            best = min(allocator.damage(p) for p in plans if costs.of(p) <= costs.of(plan))
            assert allocator.damage(plan) == pytest.approx(best)


def lower_bound(damage: Damage, costs: Costs, least: Plan, budget: float) -> float:
    """No Plan within the budget can have less: the best of damage + price * (cost - budget) over many prices."""
    bounds = []
    for price in np.geomspace(1e-9, 1e3, 2000):
        total = price * (costs.fixed - budget)
        for i, (of_heads, of_neurons) in enumerate(damage):
            total += (of_heads + price * costs.heads[i])[least.heads[i] :].min()
            total += (of_neurons + price * costs.neurons[i])[least.neurons[i] :].min()
        bounds.append(total)
    return float(max(bounds))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_thinned_options_and_rounded_costs_stay_within_two_percent_of_a_lower_bound(share, noise):
    rng = np.random.default_rng(1)

    def losses(n: int) -> list[float]:
        smooth = np.sort(rng.lognormal(0, 1.5, n))[::-1] * np.exp(noise * rng.normal(size=n))
        return (smooth / smooth.sum() * rng.lognormal(0, 1)).tolist()

    damage = tuple((falling(losses(6)), falling(losses(700))) for _ in range(8))
    anatomy = anatomy_of([6] * 8, [700] * 8)
    costs, least = flops_costs(anatomy), Protection().least(anatomy)
    budget = share * anatomy.block_flops()
    allocator = Allocator(damage, costs, least)
    plan = allocator.within(budget)
    assert costs.of(plan) <= budget
    assert all(costs.of(p) > budget for p in wider(plan, full(damage)))
    bound = lower_bound(damage, costs, least, budget)
    assert bound <= allocator.damage(plan) <= 1.02 * bound


def test_what_cannot_be_reached_or_does_not_belong_together_is_refused():
    damage = ((falling([2, 1]), falling([3, 2, 1])),)
    costs = linear_costs(anatomy_of([2], [3]), per_head=5, per_neuron=1)
    allocator = Allocator(damage, costs, Plan(heads=(1,), neurons=(2,)))
    with pytest.raises(SnapvitError, match="a cost of 6.5 is out of reach: the sparsest plan costs 7"):
        allocator.within(6.5)
    with pytest.raises(SnapvitError, match="a cost of nan is out of reach"):
        along_line(allocator, float("nan"))
    with pytest.raises(SnapvitError, match="damage of 1 blocks, costs of 2"):
        Allocator(damage, linear_costs(anatomy_of([2, 2], [3, 3]), 1, 1), Plan(heads=(1,), neurons=(2,)))
    with pytest.raises(SnapvitError, match="block 0: damage of 2 structures, costs of 2 and at least 3 kept"):
        Allocator(damage, costs, Plan(heads=(3,), neurons=(2,)))
    with pytest.raises(SnapvitError, match="block 0: .* costs of 4"):
        Allocator(damage, linear_costs(anatomy_of([2], [4]), 1, 1), Plan(heads=(1,), neurons=(2,)))
    for table in ([0, 2, 1], [0, np.nan, 1], []):  # [0] is of a sub-layer that a model lacks
        with pytest.raises(SnapvitError, match="block 0: the costs of neurons"):
            Costs(([0, 1],), (table,))  # type: ignore[arg-type]
    with pytest.raises(SnapvitError, match="same blocks"):
        Costs(([0, 1],), ())  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4), st.randoms())
def test_tables_add_up_to_what_the_anatomy_says(sizes, random):
    anatomy = anatomy_of([h for h, _ in sizes], [n for _, n in sizes])
    plan = Plan(
        heads=tuple(random.randint(1, h) for h, _ in sizes), neurons=tuple(random.randint(1, n) for _, n in sizes)
    )
    assert flops_costs(anatomy).of(plan) == anatomy.block_flops(plan)
    assert prunable_costs(anatomy).of(plan) == anatomy.prunable_params(plan)
    assert params_costs(anatomy).of(plan) == anatomy.params(plan)


@st.composite
def planners(draw) -> Planner:
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    flat = draw(st.booleans())  # curves with long flat parts

    def losses(n: int) -> list[float]:
        return (rng.lognormal(0, 2, n) * (rng.random(n) > 0.5 * flat)).tolist()

    damage = tuple((falling(losses(h)), falling(losses(n))) for h, n in sizes)
    orders = [rng.permutation(h) for h, _ in sizes], [rng.permutation(n) for _, n in sizes]
    anatomy = anatomy_of([h for h, _ in sizes], [n for _, n in sizes])
    multiple = draw(st.sampled_from([1, 1, 4, 8]))
    protection = Protection(sublayers=draw(st.booleans()))
    return Planner(Ranking.from_orders(*orders, damage), anatomy, protection, multiple=multiple)


@settings(deadline=None)
@given(planners(), st.floats(0.01, 1.0))
def test_every_target_is_kept_by_a_plan_to_which_nothing_can_be_added(planner, fraction):
    anatomy, least = planner.anatomy, planner.protection.least(planner.anatomy)
    dense = Plan.dense(anatomy)
    for plan_for, fits in (
        (lambda f: planner.sparsity(1 - f), lambda plan: plan.sparsity(anatomy) >= 1 - fraction),
        (planner.flops, lambda plan: plan.flops_ratio(anatomy) <= fraction),
        (planner.params, lambda plan: anatomy.params(plan) <= fraction * anatomy.params()),
    ):
        if not fits(planner.sparsest):
            with pytest.raises(SnapvitError, match="out of reach"):
                plan_for(fraction)
            continue
        plan = plan_for(fraction)
        plan.check_fits(anatomy)
        assert fits(plan)
        assert all(a >= b or not a for a, b in zip(plan.heads + plan.neurons, least.heads + least.neurons))
        assert plan.keeps_all_of(least) or not planner.protection.sublayers
        assert all(n % planner.multiple == 0 or n == all_ for n, all_ in zip(plan.neurons, anatomy.neurons))
        assert not any(fits(p) for p in wider(plan, dense, planner.multiple, least))


@given(planners())
def test_nothing_asked_is_nothing_cut_and_the_sparsest_keeps_what_is_protected(planner):
    dense = Plan.dense(planner.anatomy)
    assert planner.sparsity(0) == planner.flops(1) == planner.params(1) == planner.pair(0, 0) == dense
    if planner.multiple == 1 and planner.protection.sublayers:
        assert planner.sparsest == planner.protection.least(planner.anatomy)
    if not planner.protection.sublayers:
        assert sum(n > 0 for n in planner.sparsest.heads + planner.sparsest.neurons) == 1
    assert planner.flops(planner.sparsest.flops_ratio(planner.anatomy)) == planner.sparsest


@settings(deadline=None, max_examples=30)  # two hundred Plans in each
@given(planners())
def test_steps_fall_in_flops_and_are_named_by_what_was_asked(planner):
    steps = planner.steps()
    names, plans = list(steps), list(steps.values())
    ratios = [plan.flops_ratio(planner.anatomy) for plan in plans]
    assert (names[0], plans[-1]) == ("dense", planner.sparsest)
    assert all(a > b for a, b in pairwise(ratios))
    for name, plan in steps.items():
        if name.startswith("flops"):
            assert plan == planner.flops(float(f"0.{int(name[5:]):02d}"))


def test_without_curves_steps_are_of_sparsity_and_nested():
    rng = np.random.default_rng(0)
    ranking = Ranking((rng.random(4),) * 3, (rng.random(50),) * 3)  # type: ignore[arg-type]
    planner = Planner(ranking, anatomy_of([4] * 3, [50] * 3))
    steps = planner.steps()
    assert list(steps)[:3] == ["dense", "s1", "s2"]
    assert list(steps.values())[-1] == planner.sparsest
    plans = list(steps.values())
    assert all(a.keeps_all_of(b) and a != b for a, b in pairwise(plans))
    for name in list(steps)[1:-1]:
        assert steps[name] == planner.sparsity(float(f"0.{int(name[1:]):02d}"))


def test_curves_leave_pairs_alone_and_move_heads_against_neurons():
    damage = ((falling([1, 1]), falling([100] * 10)), (falling([1000, 1000]), falling([1] * 10)))
    ranking = Ranking.from_orders([[0, 1]] * 2, [range(10)] * 2, damage)
    plain = Ranking(ranking.head_scores, ranking.neuron_scores)
    anatomy = anatomy_of([2, 2], [10, 10])
    with_curves, without = Planner(ranking, anatomy), Planner(plain, anatomy)
    assert with_curves.pair(0.35, 0.25) == without.pair(0.35, 0.25)
    plan = with_curves.flops(0.78)
    assert plan == Plan(heads=(1, 2), neurons=(10, 8))
    reversed_weights = Planner(ranking.weighted([[1e6, 1e-6], [1e-6, 1e6]]), anatomy).flops(0.78)
    assert reversed_weights == Plan(heads=(2, 1), neurons=(8, 10))


def test_factors_of_a_search_also_move_pairs_between_blocks_and_keep_the_order_within():
    rng = np.random.default_rng(0)
    damage = tuple((falling([1, 1]), falling(sorted(rng.random(10), reverse=True))) for _ in range(2))
    ranking = Ranking.from_orders([[0, 1], [1, 0]], [rng.permutation(10), rng.permutation(10)], damage)
    weighted = ranking.weighted([[1, 1e-6], [1, 1e6]])
    assert weighted.order_sha256 == ranking.order_sha256
    anatomy = anatomy_of([2, 2], [10, 10])
    assert Planner(weighted, anatomy).pair(0.4, 0).neurons == (2, 10)
    assert min(Planner(ranking, anatomy).pair(0.4, 0).neurons) > 2


@pytest.mark.parametrize("curves", [True, False])
def test_biases_that_a_correction_adds_count_as_parameters(curves):
    anatomy = anatomy_of([4] * 3, [64] * 3)
    bare = replace(anatomy, blocks=tuple(replace(b, biases=()) for b in anatomy.blocks))
    damage = tuple((falling([1.0] * 4), falling([1.0] * 64)) for _ in range(3))
    ranking = Ranking.from_orders([range(4)] * 3, [range(64)] * 3, damage)
    ranking = ranking if curves else Ranking(ranking.head_scores, ranking.neuron_scores)
    planner = Planner(ranking, bare, corrected=True)
    for fraction in (0.5, 0.8, 0.95):
        assert bare.with_output_biases().params(planner.params(fraction)) <= fraction * bare.params()
    assert planner.params(1) == Plan.dense(bare)


def test_widths_on_a_grid_need_curves():
    ranking = Ranking((np.ones(2, np.float32),), (np.ones(8, np.float32),))
    with pytest.raises(UsageError, match="multiples of 4 need a ranking with damage curves"):
        Planner(ranking, anatomy_of([2], [8]), multiple=4)
