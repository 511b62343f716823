"""The controller on simulated machines: steps, drift, spikes, bursts, lying clocks; and its bounds on any machine."""

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.simulated_machine import RUNNABLE, every, hit_rate, mean_quality, noisy, simulate
from snapvit_export.serving.controller import (
    CALM,
    HALVING_RUNS,
    LEAST_NOISE,
    LOWER,
    MOST_LOG,
    REGIME,
    REMEMBERED,
    RUNS,
    STALE_MS,
    START_MARGIN,
    START_TOKENS,
    STEP,
    Controller,
    Settings,
    State,
    decide,
)

CALM_STATE = State(
    ratios=tuple((33.0 * n, 0.0) for n in range(RUNS)), regime=(0.0,) * 31, margin=0.3, tokens=2.0, factor=LEAST_NOISE
)
RECOVERED = 3 + CALM


def steady(slowness, count, **more):
    return simulate(noisy(lambda now: slowness), every(150.0, count), **more)


def stepping(slowness, **more):
    """A machine whose slowness is a function of the number of the request."""
    arrivals = every(150.0, 200)  # seldom enough for no request to wait for another
    return simulate(lambda now, number: slowness(number), arrivals, state=CALM_STATE, **more)


def test_a_calm_machine_runs_the_most_faithful_variant_that_fits():
    served = steady(1.0, 300)
    assert all(each.met for each in served)
    assert {each.decision.variant for each in served[RECOVERED:]} == {"dense"}


@pytest.mark.parametrize(
    ("slowness", "variant"), [(1.0, "dense"), (1.3, "s20"), (1.7, "s40"), (2.4, "s60"), (4.5, "s80")]
)
def test_a_machine_that_is_slower_all_the_time_runs_what_fits_there(slowness, variant):
    served = steady(slowness, 300)
    assert [each.decision.variant for each in served[-100:]] == [variant] * 100
    assert hit_rate(served) >= 0.99


@pytest.mark.parametrize("slowness", [1.5, 2.0, 4.0])
def test_a_step_to_slower_costs_one_request(slowness):
    served = stepping(lambda n: slowness if n >= 100 else 1.0)
    assert [n for n, each in enumerate(served) if not each.met] == [100]


def test_after_a_step_to_faster_the_best_variant_is_back_after_as_many_runs_as_promised():
    served = stepping(lambda n: 2.0 if 50 <= n < 100 else 1.0)
    back = next(n for n in range(100, 200) if served[n].decision.variant == "dense")
    assert back <= 100 + RECOVERED
    assert all(each.met for each in served[51:])
    assert all(each.decision.variant == "dense" for each in served[back:])


def test_without_a_token_recovery_takes_as_long_as_a_new_one():
    spent = msgspec.structs.replace(CALM_STATE, tokens=0.0, margin=1.0, factor=1.0)
    wanted = Settings(hit=0.9)
    served = simulate(lambda now, number: 1.0, every(33.0, 60), settings=wanted, state=spent)
    back = next(n for n, each in enumerate(served) if each.decision.variant == "dense")
    assert CALM < back <= 1 / wanted.allowed + RECOVERED


def test_one_spike_costs_one_request_and_a_few_runs_of_lesser_variants():
    served = stepping(lambda n: 5.0 if n == 100 else 1.0)
    assert [n for n, each in enumerate(served) if not each.met] == [100]
    lesser = [n for n, each in enumerate(served) if each.decision.variant != "dense"]
    assert lesser
    assert set(lesser) <= set(range(101, 101 + RECOVERED))


@pytest.mark.parametrize("spikes", [0.002, 0.005])
def test_rare_spikes_leave_the_hit_rate_and_most_of_the_quality(spikes):
    served = simulate(noisy(lambda now: 1.0, spikes=spikes), every(33.0, 5000))
    assert hit_rate(served) >= 0.99
    assert mean_quality(served) >= 0.95


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_frequent_spikes_are_provided_for(share):
    """Every so many runs take twice as long: the variants that fit even then are run, but for the misses allowed."""
    served = simulate(noisy(lambda now: 1.0, spikes=share, by=2.0), every(33.0, 5000))
    assert hit_rate(served) >= 0.985
    assert hit_rate(served[1000:]) >= 0.99
    assert mean_quality(served[1000:]) >= 0.84  # that of s60, which fits at twice its latency


def test_slow_drift_is_followed_down_and_up():
    def heat(now):
        return 1 + 1.5 * math.sin(math.pi * min(now / 60_000, 1)) ** 2

    served = simulate(noisy(heat), every(33.0, 2200))
    assert hit_rate(served) >= 0.99
    hottest = min(served, key=lambda each: abs(each.arrived_ms - 30_000))
    assert hottest.decision.variant == "s60"
    assert served[-1].decision.variant == "dense"


def test_a_burst_is_answered_in_time_by_lesser_variants():
    """Four at once with 60 ms each: in turns of the dense model, 20 ms, the last would be late."""
    arrivals = [400.0 * n + 0.001 * k for n in range(50) for k in range(4)]
    served = simulate(noisy(lambda now: 1.0), arrivals, deadline_ms=60.0, state=CALM_STATE)
    assert hit_rate(served) >= 0.99
    assert {each.decision.variant for each in served} - {"dense"}
    assert mean_quality(served) > 0.85


def test_the_head_of_a_queue_is_not_slowed_for_those_who_are_lost_anyway():
    left = [24.0, -5.0, 1.0]
    assert decide(RUNNABLE, Settings(), CALM_STATE, left, 0.0).variant == "dense"
    assert decide(RUNNABLE, Settings(), CALM_STATE, [24.0, 30.0], 0.0).variant == "dense"
    assert decide(RUNNABLE, Settings(), CALM_STATE, [24.0, 24.0], 0.0).variant == "s20"


def test_batches_are_predicted_by_their_size():
    two = [msgspec.structs.replace(each, more_ms=0.8 * each.ms) for each in RUNNABLE]
    assert decide(two, Settings(), CALM_STATE, [24.0, 24.0], 0.0, images=2, together=2).variant == "s40"
    assert decide(two, Settings(), CALM_STATE, [24.0, 24.0], 0.0, images=2, together=2).base_ms == 12.5 * 1.8


def test_what_nothing_can_answer_in_time_goes_to_the_fastest_and_is_marked():
    decision = decide(RUNNABLE, Settings(), CALM_STATE, [2.0], 0.0)
    assert (decision.variant, decision.fits, decision.refused) == ("s80", False, False)


def test_what_is_refused_is_tried_again_when_the_last_run_is_long_ago():
    """Otherwise nobody would ever learn that the machine is free again."""
    wanted = Settings(late="refuse")
    slow = State(ratios=((0.0, 3.0),), factor=3.1)
    assert decide(RUNNABLE, wanted, slow, [24.0], STALE_MS).refused
    assert not decide(RUNNABLE, wanted, slow, [24.0], STALE_MS + 1).refused
    served = simulate(lambda now, _: 20.0 if now < 5000 else 1.0, every(33.0, 400), settings=wanted)
    assert any(each.decision.refused for each in served)
    assert served[-1].decision.variant == "dense"


@pytest.mark.parametrize("told", [0.0, -5.0, 1e-12, 1e12])
def test_a_clock_that_lies_once_does_no_lasting_harm(told):
    controller = Controller(RUNNABLE, state=CALM_STATE)
    controller.learn(controller.decide([24.0], 300.0), told, 300.0)
    for n in range(RECOVERED):
        decision = controller.decide([24.0], 333.0 + 33 * n)
        controller.learn(decision, decision.base_ms, 333.0 + 33 * n)
    assert controller.decide([24.0], 900.0).variant == "dense"
    assert abs(controller.state.level) < 1e-9


def test_a_coarse_clock_changes_nothing_that_matters():
    """Windows tells times in steps of 15.6 ms to some: then runs of 5 ms take 0 or 15.6."""
    controller, now = Controller(RUNNABLE), 0.0
    for _ in range(500):
        decision = controller.decide([40.0], now)
        before, now = now, now + decision.base_ms
        controller.learn(decision, 15.6 * (now // 15.6 - before // 15.6), now)
        now += 7.0
    assert math.isfinite(controller.state.factor)
    assert decision.base_ms <= 40.0


def test_three_runs_move_the_level_and_two_do_not():
    for count, moved in ((2, False), (3, True)):
        ratios = tuple((10.0 * n, 0.0 if n < RUNS - count else 1.0) for n in range(RUNS))
        assert (State(ratios=ratios).level == 1.0) == moved
    assert sum(0.5 ** (n / HALVING_RUNS) for n in range(2, RUNS)) > 1 + 0.5 ** (1 / HALVING_RUNS)


def test_runs_of_long_ago_count_little_beside_a_new_one():
    ratios = (*((10.0 * n, 0.0) for n in range(RUNS - 1)), (10_000.0, 1.0))
    assert State(ratios=ratios).level == 1.0


# Any machine. The properties below hold for whatever sequence of slowness, not only for likely ones.

machines = st.lists(st.floats(0.5, 8.0), min_size=1, max_size=400)
repeated = st.lists(st.tuples(st.floats(0.5, 8.0), st.integers(1, 80)), min_size=1, max_size=12).map(
    lambda parts: [slowness for slowness, count in parts for _ in range(count)]
)
hits = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
deadlines = st.floats(4.0, 80.0)


def run_on(machine, hit, deadline_ms=24.0):
    wanted = Settings(hit=hit)
    arrivals = every(1000.0, len(machine))
    return simulate(lambda now, number: machine[number], arrivals, deadline_ms, wanted)


@settings(deadline=None)
@given(machines | repeated, hits, deadlines)
def test_requests_that_were_predicted_to_be_in_time_are_missed_no_more_often_than_derived(machine, hit, deadline_ms):
    served = run_on(machine, hit, deadline_ms)
    missed = sum(each.decision.fits and not each.met for each in served)
    largest = max(math.log(slowness) - each.state.level for slowness, each in zip(machine, served))
    allowed = (1 - hit) * len(served)
    assert missed <= allowed + 2 * (max(0.0, largest - START_MARGIN) / STEP + 1) + START_TOKENS + 1e-6


@settings(deadline=None)
@given(machines | repeated, hits)
def test_the_hit_rate_is_reached_where_the_fastest_variant_can(machine, hit):
    """At 8 times its 5 ms it takes 40: what is marked as late is in time too, so all misses are those derived."""
    served = run_on(machine, hit, deadline_ms=40.0)
    missed = sum(not each.met for each in served)
    assert missed <= (1 - hit) * len(served) + 2 * ((math.log(16) - START_MARGIN) / STEP + 1) + START_TOKENS + 1e-6


@settings(deadline=None)
@given(machines | repeated, hits, deadlines)
def test_moves_to_slower_variants_are_at_most_one_in_so_many_runs(machine, hit, deadline_ms):
    served = run_on(machine, hit, deadline_ms)
    base = [each.decision.base_ms for each in served]
    ups = sum(after > before for before, after in pairwise(base))
    assert ups <= len(served) / CALM


@settings(deadline=None)
@given(machines | repeated, hits)
def test_after_a_run_beyond_its_prediction_the_next_is_predicted_to_be_at_least_as_slow(machine, hit):
    served = run_on(machine, hit)
    for slowness, before, after in zip(machine, served, served[1:]):
        if math.log(slowness) > before.decision.factor + 1e-9:
            assert after.decision.factor >= math.log(slowness)


@settings(deadline=None)
@given(machines, hits, st.floats(0.5, 2.0))
def test_a_machine_that_comes_to_rest_is_used_again_after_as_many_runs_as_derived(machine, hit, slowness):
    wanted = Settings(hit=hit)
    rest = math.ceil(1 / wanted.allowed) + RECOVERED + REGIME  # where it is as slow as some runs before
    served = run_on([*machine, *([slowness] * (rest + 1))], hit)
    assert served[-1].decision.factor <= math.log(slowness) + LEAST_NOISE + LOWER + 1e-9


@settings(deadline=None)
@given(machines | repeated, hits)
def test_the_state_stays_small_and_finite_and_survives_json(machine, hit):
    state = run_on(machine, hit)[-1].state
    assert msgspec.json.decode(msgspec.json.encode(state), type=State) == state
    assert len(state.ratios) <= REMEMBERED
    assert len(state.regime) <= REGIME
    assert 0 <= state.tokens <= 2
    assert 0 <= state.margin <= 2 * MOST_LOG + STEP


@settings(deadline=None)
@given(machines, hits, deadlines, st.floats(1.0, 3.0))
def test_more_time_never_gives_a_lesser_variant(machine, hit, deadline_ms, longer):
    state = run_on(machine, hit)[-1].state
    wanted, quality = Settings(hit=hit), {each.name: each.quality for each in RUNNABLE}
    less, more = (decide(RUNNABLE, wanted, state, [ms], 0.0).variant for ms in (deadline_ms, deadline_ms * longer))
    assert quality[more] >= quality[less]


@settings(deadline=None)
@given(machines, deadlines, st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_units_do_not_matter(machine, deadline_ms, unit):
    state = run_on(machine, 0.99)[-1].state
    scaled = [msgspec.structs.replace(each, ms=each.ms * unit) for each in RUNNABLE]
    plain = decide(RUNNABLE, Settings(), state, [deadline_ms], 0.0)
    assert decide(scaled, Settings(), state, [deadline_ms * unit], 0.0).variant == plain.variant
