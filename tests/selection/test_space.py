"""The space of candidates: every point meets its limit, as densely as its place allows."""

import numpy as np
import pytest

from snapvit_export.allocation.levers import LEVERS
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.tokens import DEFAULT, SCHEDULES, merging_blocks
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.latency_model import LatencyModel, fit
from snapvit_export.profiling.sample_plans import sample_plans
from snapvit_export.selection.point import Point
from snapvit_export.selection.space import FILLED, Flops, ModelledLatency, Place, Space, grids_for

BLOCKS = (Block(heads=4, head_dim=8, hidden=64),) * 4
ANATOMY = Anatomy(family="vit", embed_dim=32, blocks=BLOCKS, image=(64, 64), patch=(8, 8), positions=65, classes=3)
SCHEDULE = SCHEDULES[DEFAULT]
SHARES = (0.95, 0.8, 0.62, 0.45, 0.3, 0.2)  # of the dense cost: limits to try


def curves(seed: int = 0) -> Ranking:
    """A ranking with damage curves that differ from block to block."""
    rng = np.random.default_rng(seed)
    losses = [(rng.random(4), rng.random(64)) for _ in BLOCKS]
    damage = tuple(tuple(np.append(np.cumsum(np.sort(kind))[::-1], 0) for kind in block) for block in losses)
    orders = [rng.permutation(4) for _ in BLOCKS], [rng.permutation(64) for _ in BLOCKS]
    return Ranking.from_orders(*orders, damage, anatomy=ANATOMY)  # type: ignore[arg-type]


def scores() -> Ranking:
    """A ranking by scores alone."""
    rng = np.random.default_rng(0)
    made = [tuple(rng.random(n, dtype=np.float32) for _ in BLOCKS) for n in (4, 64)]
    return Ranking(*made, anatomy=ANATOMY)


def model(slower: float = 1.0) -> LatencyModel:
    """A latency model of a machine on which every call costs something beside its FLOPs."""

    def takes(plan: Plan) -> float:
        there = sum(n > 0 for n in plan.heads + plan.neurons)
        return slower * (0.02 + 0.001 * there + 4e-8 * ANATOMY.flops(plan))

    return fit(ANATOMY, [(plan, takes(plan)) for plan in sample_plans(ANATOMY, removable=True, tokens=True)])


def space(levers=LEVERS, ranking=None, protection=Protection(), costs=None, **more) -> Space:
    planner = Planner(ranking or curves(), ANATOMY, protection)
    if costs is None:
        costs = {p: ModelledLatency(model(slower), ANATOMY) for p, slower in (("fp32", 1.0), ("int8-dynamic", 0.6))}
    return Space(planner, levers, costs, SCHEDULE, grids_for(ANATOMY), **more)


def limits(made: Space) -> list[float]:
    return [share * made.cost(made.own, Plan.dense(ANATOMY)) for share in SHARES]


def points(made: Space, limit: float) -> dict[Place, Point]:
    return {place: point for place in made.places() if (point := made.point(place, limit)) is not None}


@pytest.fixture(scope="module")
def whole() -> Space:
    """All levers, two precisions, five grids."""
    return space()


def test_every_point_meets_its_limit_by_its_cost(whole):
    found = [(p, limit) for limit in limits(whole) for p in points(whole, limit).items()]
    assert len(found) > 50
    for (place, point), limit in found:
        assert whole.cost(point.precision, point.plan) <= limit * (1 + 1e-9)
        assert point.precision == place.precision
        assert point.plan.grid == whole.grids[place.grid]


def test_merging_is_the_least_of_its_shape_that_meets_the_limit(whole):
    merging = 0
    for limit in limits(whole):
        for place, point in points(whole, limit).items():
            if not any(point.plan.merged):
                continue
            merging += 1
            sized = whole.widths[place.width].with_tokens(grid=whole.grids[place.grid])
            blocks, patches = merging_blocks(ANATOMY, sized)[SCHEDULE.first :: SCHEDULE.step], ANATOMY.patches_of(sized)
            for scale in np.linspace(0, patches, 300):
                merged = SCHEDULE._at(float(scale), len(BLOCKS), blocks, patches)
                if sum(merged) < sum(point.plan.merged):
                    assert whole.cost(place.precision, sized.with_tokens(merged, sized.grid)) > limit
    assert merging > 10


def test_a_place_is_left_out_where_a_larger_one_meets_the_limit_without_a_merge(whole):
    left_out = 0
    for limit in limits(whole):
        found = points(whole, limit)
        for place in whole.places():
            p, grid, width = place
            if width == FILLED:
                continue
            sized, larger = whole._sized(place), []
            larger += [whole._sized(Place(p, grid - 1, width))] if grid else []
            larger += [whole._sized(Place(p, grid, width - 1))] if width else []
            is_idle = any(whole.cost(p, plan) <= limit for plan in larger) and whole.cost(p, sized) <= limit
            left_out += is_idle
            assert not (is_idle and place in found)
            if whole.cost(p, sized) <= limit and not is_idle:
                assert found[place] == Point(sized, p)
    assert left_out > 10


@pytest.mark.parametrize("protection", [Protection(), Protection(sublayers=False)], ids=["width", "width and depth"])
def test_filled_places_are_the_steps_that_width_and_depth_always_gave(protection):
    for cost in (ModelledLatency(model(), ANATOMY), Flops(ANATOMY)):
        made = space(("width", "depth"), protection=protection, costs={"fp32": cost})
        dense = cost.of(Plan.dense(ANATOMY))
        steps = made.planner.steps_of(cost.tables)
        assert len(steps) > 30
        for name, plan in steps.items():
            if not name.startswith("t"):
                continue
            found = made.point(Place("fp32", 0, FILLED), dense * int(name[1:]) / 100)
            assert found.plan == plan, name
            percent = int(made.step_name(plan)[1:])  # what it takes, which may be less than what was allowed
            assert percent - 1 < 100 * cost.of(plan) / dense <= percent + 1e-6
            assert percent <= int(name[1:])


def test_between_two_hundredths_the_lower_one_is_taken():
    made = space(("width", "depth"))
    place, hundredth = Place("fp32", 0, FILLED), made.cost("fp32", Plan.dense(ANATOMY)) / 100
    wanted = made.point(place, 60 * hundredth)
    for more in (0.001, 0.5, 0.999):
        assert made.point(place, (60 + more) * hundredth) == wanted
    assert made.point(place, 61 * hundredth) != wanted


def test_without_damage_curves_filled_places_are_steps_of_sparsity():
    for levers in (("width", "depth"), LEVERS):
        made = space(levers, scores())
        steps = made.planner.steps()
        for limit in limits(made)[:4]:
            found = made.point(Place("fp32", 0, FILLED), limit)
            fitting = [plan for plan in steps.values() if made.cost("fp32", plan) <= limit]
            assert made.cost("fp32", found.plan) <= limit
            # the densest of the line, but for the hundredth that limits are rounded down to
            assert found.plan in fitting[:2]
            assert steps[made.step_name(found.plan)] == found.plan


def test_what_is_out_of_reach_has_no_point(whole):
    assert points(whole, 1e-6) == {}
    narrow = space(("width", "depth"))
    least = narrow.cost("fp32", narrow.smallest("fp32"))
    assert narrow.point(Place("fp32", 0, FILLED), 0.98 * least) is None


@pytest.mark.parametrize("levers", [LEVERS, ("tokens",), ("width",), ("tokens", "width")])
def test_the_smallest_costs_no_more_than_any_point(levers):
    made = space(levers, protection=Protection(sublayers="depth" not in levers))
    for precision in made.costs:
        least = made.cost(precision, made.smallest(precision))
        for limit in limits(made):
            for place, point in points(made, limit).items():
                if place.precision == precision:
                    assert least <= made.cost(precision, point.plan) * (1 + 1e-9)
        assert points(made, 0.999 * min(made.cost(p, made.smallest(p)) for p in made.costs)) == {}


def test_other_limits_hold_and_widths_that_meet_them_exactly_are_losses():
    most = round(0.7 * ANATOMY.params())
    exact = Planner(curves(), ANATOMY).params(0.7)
    made = space(allows=lambda point: ANATOMY.params(point.plan) <= most, widths=[exact])
    assert exact in made.widths
    found = [point for limit in limits(made) for point in points(made, limit).values()]
    assert found
    assert all(ANATOMY.params(point.plan) <= most for point in found)
    generous = points(made, 10 * made.cost("fp32", Plan.dense(ANATOMY)))
    assert Point(exact, "fp32") in generous.values()  # all larger widths have too many parameters


def test_levers_that_are_not_named_are_not_used():
    for levers in (("tokens",), ("width", "depth"), ("width",)):
        made = space(levers, costs={"fp32": ModelledLatency(model(), ANATOMY)})
        for limit in limits(made):
            for point in points(made, limit).values():
                assert set(point.levers(ANATOMY, "fp32")) <= set(levers)


def test_neighbours_are_one_step_away_and_symmetric(whole):
    known = set(whole.places())
    for place in known:
        for other in whole.neighbours(place):
            assert other in known
            assert place in whole.neighbours(other)
            assert other.precision == place.precision
            assert abs(other.grid - place.grid) + abs(other.width - place.width) == 1
    assert len(whole.neighbours(Place("fp32", 1, 1))) == 4
    assert FILLED not in {place.width for place in whole.neighbours(Place("fp32", 0, 0))}


def test_the_first_places_of_a_race_are_known_and_apart(whole):
    for limit in limits(whole):
        for precision in whole.costs:
            first = whole.first(precision, limit)
            assert set(first) <= set(whole.places())
            assert len(first) == len(set(first)) >= 3
            assert Place(precision, 0, FILLED) in first


def test_the_next_larger_place_costs_more_and_merges_nothing(whole):
    for place in whole.places():
        larger = whole.larger(place)
        if place.width == FILLED or place[1:] == (0, 0):
            assert larger is None
            continue
        there, point = larger
        assert point.plan == whole._sized(there)
        assert not any(point.plan.merged)
        assert whole.cost(place.precision, point.plan) > whole.cost(place.precision, whole._sized(place))


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (14, 14), (8, 16), (37, 37), (1, 1), (2, 3)])
def test_grids_shrink_both_sides_alike_down_to_half(rows, columns):
    image = (8 * rows, 8 * columns)
    anatomy = Anatomy(
        family="vit", embed_dim=32, blocks=BLOCKS, image=image, patch=(8, 8), positions=rows * columns + 1, classes=3
    )
    own, *smaller = grids_for(anatomy)
    assert own is None
    assert len(smaller) < 8
    last = (rows, columns)
    for high, wide in smaller:
        assert (high, wide) != (rows, columns)
        assert high <= last[0]
        assert wide <= last[1]
        assert abs(high / rows - wide / columns) <= 0.5 / min(rows, columns) + 1e-9  # but for whole patches
        assert max(high / rows, wide / columns) >= 0.5 - 0.5 / max(rows, columns)
        last = high, wide
    if rows == columns == 8:
        assert smaller == [(7, 7), (6, 6), (5, 5), (4, 4)]
    if max(rows, columns) > 3:
        assert max(last[0] / rows, last[1] / columns) <= 0.65


def test_a_name_tells_the_levers_of_a_point():
    dense = Plan.dense(ANATOMY)
    half = Plan(heads=(2,) * 4, neurons=(32,) * 4)
    assert Point(dense, "fp32").name(ANATOMY, "fp32") == "dense"
    assert Point(dense, "int8-dynamic").name(ANATOMY, "fp32") == "dense-int8"
    merging = half.with_tokens((0, 16, 8, 0), grid=(6, 6))
    assert Point(merging, "int8-static").name(ANATOMY, "fp32") == "res48-tokens33-w50-int8s"
    assert Point(merging, "int8-static").levers(ANATOMY, "fp32") == ("precision", "tokens", "width")
    without = Plan(heads=(4, 0, 4, 4), neurons=(64,) * 4)
    assert Point(without, "fp32").levers(ANATOMY, "fp32") == ("depth",)
