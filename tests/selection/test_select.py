"""From a budget to the Choice on a simulated machine, whose true latencies are known and whose speed wanders."""

import numpy as np
import pytest

from helpers.plans import anatomy_of
from snapvit_export.budget import Budget
from snapvit_export.errors import BudgetNotMet
from snapvit_export.family.manifest import Limits
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Plan
from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.profile import LEAST_RUNS, Profile, to_profile
from snapvit_export.profiling.sampling import Samples
from snapvit_export.progress import Silent
from snapvit_export.runtimes.device import this_device
from snapvit_export.selection import select as select_module
from snapvit_export.selection.candidates import DENSE, BuiltVariant, Candidates
from snapvit_export.selection.select import _falling, select_among
from snapvit_export.target import Target

BLOCKS = (Block(heads=4, head_dim=8, hidden=64),) * 2
TINY = Anatomy(family="vit", embed_dim=32, blocks=BLOCKS, image=(32, 32), patch=(8, 8), positions=17, classes=3)
TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
STEPS = 100  # candidates: the n-th takes 1 - n/100 of the dense one's time
DENSE_MS = 20.0


@pytest.fixture(autouse=True)
def six_configurations_were_timed_for_a_latency_model(monkeypatch) -> None:
    monkeypatch.setattr(select_module, "MOST_BUILT", 12 - 6)


class SimulatedBuilder:
    """Makes variants of known sizes, and no files."""

    def build(self, name: str, plan: Plan, keep: bool, before: BuiltVariant | None = None) -> BuiltVariant:
        size = 10**6 * (STEPS - number_of(name))
        return BuiltVariant(name, None, (), plan, name, size, None, None, None, keep or name == DENSE)


class SimulatedTimer:
    """Times variants on a machine that is now faster, now slower, and sometimes full of other work."""

    def __init__(self, seed: int, wander: float, noise: float, others: float | None) -> None:
        self.rng, self.wander, self.noise, self.others = np.random.default_rng(seed), wander, noise, others
        self.device = this_device("1")

    def time(self, files, seconds: float = 1.0, report=None, at="p50") -> dict[str, Profile]:
        speed = self.rng.normal(1, self.wander)
        rounds = max(LEAST_RUNS[at] // 8, int(seconds * 6))
        run = {}
        for name in files:
            wall = true_ms(name) * speed * np.abs(self.rng.normal(1, self.noise, 8 * rounds))
            samples = Samples(8, list(wall), list(wall))
            conditions = Conditions(noise=0.0, drift=0.0, waited=0.0, others=self.others)
            run[name] = to_profile(samples, target=TARGET, sha256=name, device=self.device, conditions=conditions)
        return run


def simulated(seed: int, wander: float = 0.03, noise: float = 0.01, others: float | None = None) -> Candidates:
    timer = SimulatedTimer(seed, wander, noise, others)
    candidates = Candidates(TINY, TARGET, Silent(), SimulatedBuilder(), timer, advice="wait")
    candidates.add(DENSE, Plan.dense(TINY))
    return candidates


def number_of(name: str) -> int:
    return 0 if name == DENSE else int(name[1:])


def true_ms(name: str) -> float:
    return DENSE_MS * (1 - number_of(name) / STEPS)


def chosen_on(candidates: Candidates, budget: str, limits: Limits = Limits(), guess_error: float = 0.03):
    candidates.time([DENSE], at=limits.at)
    least = Plan(heads=tuple(1 for _ in TINY.heads), neurons=tuple(1 for _ in TINY.neurons))
    grid = {DENSE: Plan.dense(TINY), **{f"n{n}": least for n in range(1, STEPS)}}
    guesses = [3 * true_ms(name) * (1 + guess_error * number_of(name) / STEPS) for name in grid]
    return select_among(candidates, grid, guesses, Budget.parse(budget), limits)


@pytest.fixture(scope="module")
def for_12_ms():
    """Thirty choices for 12 ms, on machines that wander in different ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_module, "MOST_BUILT", 12 - 6)
        return [chosen_on(simulated(seed), "12ms") for seed in range(30)]


@pytest.mark.parametrize("budget", ["60%", "83%"])
def test_a_share_of_the_dense_latency_is_kept_and_near_whatever_the_machine_does(budget):
    share = float(budget[:-1]) / 100
    for seed in range(15):
        choice = chosen_on(simulated(seed), budget)
        assert share - 0.025 <= 1 - number_of(choice.variant) / STEPS <= share + 0.002
        assert number_of(choice.next_denser) == number_of(choice.variant) - 1
        by_name = {m.variant: m for m in choice.measurements}
        assert by_name[choice.variant].fits or not choice.decided  # the proof says what the choice says
        assert by_name[choice.variant].latency_ms <= choice.budget_ms
        assert len(by_name) <= 6  # with the six samples of a latency model: twelve


@pytest.mark.slow  # thirty simulated choices, each with its intervals
def test_milliseconds_are_kept_tomorrow_and_nearly_used_up(for_12_ms):
    kept, shares = 0, []
    for choice in for_12_ms:
        kept += true_ms(choice.variant) <= 12
        shares.append(true_ms(choice.variant) / 12)
        assert len(choice.measurements) <= 6
    assert kept >= 27
    assert np.mean(shares) > 0.95


def test_on_a_quiet_machine_the_choice_is_the_best_and_decided():
    for seed in range(20):
        choice = chosen_on(simulated(seed, wander=0.0005, noise=0.002), "12.1ms")
        assert (choice.variant, choice.next_denser, choice.decided, choice.doubt) == ("n40", "n39", True, None)


def test_beside_other_work_the_choice_is_in_doubt_and_says_what_to_do():
    choice = chosen_on(simulated(0, wander=0.0005, noise=0.002, others=16.0), "12.1ms")
    assert not choice.decided
    assert "other work" in choice.doubt
    assert "Stop it" in choice.doubt


def test_a_neighbour_that_may_fit_is_named_with_a_budget_that_would_do(for_12_ms):
    doubts = [choice.doubt for choice in for_12_ms if not choice.decided]
    assert doubts
    assert any("may fit or not" in doubt and "or allow" in doubt for doubt in doubts)
    assert all("Choose again" in doubt for doubt in doubts)


def test_limits_beside_the_budget_bracket_the_choice_with_few_candidates():
    choice = chosen_on(simulated(0), "20ms", Limits(max_size_bytes=55 * 10**6))
    assert (choice.variant, choice.next_denser, choice.decided) == ("n45", "n44", True)
    assert len(choice.measurements) <= 10


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(max_size_bytes=1), "no variant is as small as 1e-06 MB: the smallest has 1 MB"),
        (Limits(max_params=1), "no variant is as small as 1e-06 M parameters"),
    ],
)
def test_limits_that_nothing_keeps_are_refused_in_one_line(limits, says):
    with pytest.raises(BudgetNotMet, match=says):
        chosen_on(simulated(0), "20ms", limits)


def test_a_budget_out_of_reach_names_the_smallest():
    with pytest.raises(BudgetNotMet, match=r"no variant fits 0.1 ms: the smallest reaches 0.(19|2).* or wait"):
        chosen_on(simulated(0), "0.1ms")


def test_p99_is_told_from_enough_runs():
    choice = chosen_on(simulated(0), "60%", Limits(at="p99"))
    assert min(m.profile.runs for m in choice.measurements) >= LEAST_RUNS["p99"]


def test_under_a_limit_of_size_candidates_that_are_faster_but_larger_are_left_out():
    anatomy = anatomy_of([4] * 3, [40] * 3)
    plans = [Plan.dense(anatomy), Plan(heads=(1, 1, 4), neurons=(2, 2, 40)), Plan(heads=(4, 0, 0), neurons=(40,) * 3)]
    last = Plan(heads=(1, 0, 0), neurons=(2, 2, 2))
    grid = dict(zip(("dense", "t60", "t40", "t10"), [*plans, last]))
    assert list(_falling(grid, anatomy)) == ["dense", "t60", "t10"]
