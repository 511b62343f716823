"""The decision among variants whose true latencies are known, on machines that are quiet, and on one that is not."""

import numpy as np
import pytest

from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.drift import DriftCorrection, Latency
from snapvit_export.profiling.profile import to_profile
from snapvit_export.profiling.sampling import Samples
from snapvit_export.runtimes.device import this_device
from snapvit_export.selection.decide import (
    FEWEST_RUNS,
    MOST_MOVES,
    MOST_RUNS,
    MOVES_BESIDE_OTHERS,
    RUNS_BESIDE_OTHERS,
    decide,
)
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
DEVICE = this_device("1")
CONDITIONS = Conditions(noise=0.0, drift=0.0, waited=0.0, others=None)
DENSE_MS, BUDGET_MS = 20.0, 10.0
QUIET, NOISY = (0.0002, 0.0005), (0.01, 0.03)  # of every file in a process, and of all files of a process
FINE = [BUDGET_MS * 1.04 ** (10 - n) for n in range(20)]  # steps of a line as wide as those of a selection


class SimulatedContest:
    """Variants on lines, such as `a3`: the fourth of line a, whose true latency is known here and to nobody else.

    The more milliseconds a variant takes, the less it loses; `worse` is what a whole line loses in addition.
    """

    budget_ms = BUDGET_MS
    is_contended = False

    def __init__(self, lines, machine=QUIET, seed=0, worse=None) -> None:
        self.lines, self.worse = lines, worse or {}
        self.own, self.common = machine
        self.rng, self.drift = np.random.default_rng(seed), DriftCorrection("dense")
        self.timed, self.moved = 0, 0

    def true_ms(self, name: str) -> float:
        return self.lines[name[0]][int(name[1:])] if name != "dense" else DENSE_MS

    def time(self, names) -> None:
        self.timed += 1
        speed = 1 + self.common * self.rng.standard_normal()
        run = {}
        for name in dict.fromkeys(["dense", *names]):
            ms = self.true_ms(name) * speed * (1 + self.own * self.rng.standard_normal())
            samples = list(ms * self.rng.normal(1, 0.002, 8))
            run[name] = to_profile(
                Samples(4, samples, samples), target=TARGET, sha256=name, device=DEVICE, conditions=CONDITIONS
            )
        self.drift.add(run)

    def runs(self, name: str) -> int:
        return self.drift.runs(name)

    def latency(self, name: str) -> Latency:
        return self.drift.latency(name, "p50")

    def best(self, names) -> str:
        return min(names, key=lambda name: self.worse.get(name[0], 0.0) - self.true_ms(name))

    def denser(self, name: str) -> str | None:
        return f"{name[0]}{int(name[1:]) - 1}" if int(name[1:]) else None

    def lower(self, name: str) -> str | None:
        self.moved += 1
        found, levels = self.latency(name), self.lines[name[0]]
        wanted = min(0.98 * BUDGET_MS, 0.98 * found.ms) * self.true_ms(name) / found.ms
        return next((f"{name[0]}{n}" for n, ms in enumerate(levels) if ms <= wanted), None)


@pytest.fixture(scope="module")
def on_a_noisy_machine() -> list[tuple[SimulatedContest, str | None]]:
    """A hundred choices; steps are anywhere beside the budget, and what enters is up to one step too slow or fast."""
    found = []
    for seed in range(100):
        shift = 1 + 0.04 * (seed / 100 - 0.5)
        contest = SimulatedContest({"a": [ms * shift for ms in FINE]}, NOISY, seed)
        found.append((contest, decide(contest, [f"a{10 + seed % 3 - 1}"])))
    return found


def test_on_a_quiet_machine_the_best_that_fits_is_found_with_the_fewest_runs():
    levels = [ms * 0.975 for ms in FINE]  # the eleventh takes 9.75 ms, the one before 10.14 ms
    contest = SimulatedContest({"a": levels, "b": levels, "c": levels}, worse={"b": 1.0, "c": 2.0})
    assert decide(contest, ["b10", "a10", "c10"]) == "a10"
    assert contest.timed == 1 + FEWEST_RUNS  # the first tells where the next better one is built
    assert contest.latency("a10").high <= BUDGET_MS < contest.latency("a9").low
    assert all(contest.runs(name) == FEWEST_RUNS for name in ("a9", "b10", "c10"))


def test_a_leader_that_fails_moves_down_its_line_or_gives_way_to_the_next_best():
    levels = [ms * 0.975 for ms in FINE]
    contest = SimulatedContest({"a": levels})
    assert decide(contest, ["a7"]) == "a10"
    assert contest.moved > 0
    gives_way = SimulatedContest({"a": levels, "b": levels}, worse={"b": 0.01})
    assert decide(gives_way, ["a9", "b10"]) == "a10"  # the same latency, and better than b10
    nothing_below = SimulatedContest({"a": levels[:10], "b": levels}, worse={"b": 9.0})
    assert decide(nothing_below, ["a9", "b10"]) == "b10"


def test_the_next_better_one_is_built_only_after_a_first_run_and_not_beside_one_that_is_too_slow():
    class Watched(SimulatedContest):
        def denser(self, name: str) -> str | None:
            asked.append((name, self.runs(name)))
            return super().denser(name)

    asked: list[tuple[str, int]] = []
    levels = [ms * 0.975 for ms in FINE]
    assert decide(Watched({"a": levels}), ["a7"]) == "a10"  # a7 takes 10.97 ms
    assert asked
    assert "a7" not in {name for name, _ in asked}
    assert all(runs for _, runs in asked)


def test_a_leader_that_seemed_too_slow_at_first_still_gets_its_next_better_one():
    class Slow(SimulatedContest):
        def time(self, names) -> None:
            self.lines = {"a": [9.5, 10.6 if not self.timed else 9.0]}
            super().time(names)

    contest = Slow({"a": [9.5, 9.0]})
    assert decide(contest, ["a1"]) == "a0"


def test_a_neighbour_that_fits_moves_up():
    levels = [ms * 0.975 for ms in FINE]
    contest = SimulatedContest({"a": levels})
    assert decide(contest, ["a13"]) == "a10"
    assert contest.moved == 0
    highest = SimulatedContest({"a": levels[10:]})
    assert decide(highest, ["a0"]) == "a0"  # nothing is above it


def test_a_better_line_wins_over_a_denser_point_of_a_worse_one():
    lines = {"a": [12.0, 9.0], "b": [12.0, 9.9]}
    assert decide(SimulatedContest(lines, worse={"b": 2.0}), ["a1", "b1"]) == "a1"
    assert decide(SimulatedContest(lines, worse={"b": 0.5}), ["a1", "b1"]) == "b1"


def test_nothing_that_fits_is_none():
    contest = SimulatedContest({"a": [14.0, 12.0, 10.5]})
    assert decide(contest, ["a1"]) is None
    assert decide(SimulatedContest({"a": FINE}), []) is None


def test_on_a_noisy_machine_what_is_chosen_fits_in_truth_nine_times_of_ten(on_a_noisy_machine):
    """One look errs once in twenty (`drift.BEYOND`), and a choice takes a few looks that share most of their runs.

    So twice that is allowed: ninety of a hundred.
    """
    fits = [name is not None and contest.true_ms(name) <= BUDGET_MS for contest, name in on_a_noisy_machine]
    assert sum(fits) >= 90


def test_on_a_noisy_machine_most_of_the_budget_is_used(on_a_noisy_machine):
    """The machine alone, 3 % of three runs or more with Student's t, costs up to two steps; moving down one more."""
    used = [contest.true_ms(name) / BUDGET_MS for contest, name in on_a_noisy_machine if name is not None]
    assert len(used) == 100
    assert np.median(used) >= 1 / 1.04**3


def test_never_more_runs_and_moves_than_stated(on_a_noisy_machine):
    for contest, _ in on_a_noisy_machine:
        assert contest.timed <= MOST_RUNS * MOST_MOVES
        assert contest.moved <= MOST_MOVES
    assert max(contest.timed for contest, _ in on_a_noisy_machine) > MOST_RUNS  # it had a reason to go on


def test_runs_end_even_where_they_can_never_tell():
    contest = SimulatedContest({"a": [10.0, 10.0 - 1e-9]}, NOISY, seed=1)  # the very budget
    decide(contest, ["a1"])
    assert contest.timed <= MOST_RUNS * MOST_MOVES


def test_few_runs_are_enough_where_the_budget_is_far_and_more_are_taken_where_it_is_near():
    far, near = [], []
    for seed in range(20):
        for levels, taken in (([13.0, 7.5], far), ([10.3, 9.7], near)):
            contest = SimulatedContest({"a": levels}, NOISY, seed)
            decide(contest, ["a1"])
            taken.append(contest.timed)
    assert np.mean(far) < 1 + FEWEST_RUNS + 1
    assert np.mean(near) > np.mean(far) + 1


def test_runs_end_early_where_the_latency_is_so_near_to_the_budget_that_they_cannot_tell():
    """A variant that takes just the budget costs less than all runs; one that is near it is told all the same."""
    at, near = ([SimulatedContest({"a": [ms]}, (0.004, 0.01), seed) for seed in range(40)] for ms in (10.0, 9.85))
    for contest in (*at, *near):
        decide(contest, ["a0"])
    assert np.mean([contest.timed for contest in at]) < 0.8 * MOST_RUNS
    assert np.mean([contest.latency("a0").high <= BUDGET_MS for contest in near]) > 0.8


def test_beside_other_work_no_more_runs_and_moves_are_made_than_needed():
    contest = SimulatedContest({"a": FINE}, machine=(0.1, 0.3))
    contest.is_contended = True
    decide(contest, ["a5"])
    assert contest.timed <= RUNS_BESIDE_OTHERS * MOVES_BESIDE_OTHERS
    assert contest.moved <= MOVES_BESIDE_OTHERS
    free = SimulatedContest({"a": FINE}, machine=(0.1, 0.3))
    decide(free, ["a5"])
    assert free.timed > contest.timed  # it would have gone on
