"""The pace of a machine: latencies that hold although it is faster in one look than in another."""

import msgspec
import numpy as np
import pytest

from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.drift import BEYOND, DriftCorrection, Spread
from snapvit_export.profiling.profile import Profile, to_profile
from snapvit_export.profiling.sampling import Samples
from snapvit_export.runtimes.device import this_device
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
BURST, ROUNDS = 4, 10


def profile(wall_ms, sha256: str = "ab") -> Profile:
    samples = Samples(BURST, list(wall_ms), list(wall_ms))
    conditions = Conditions(noise=0.0, drift=0.0, waited=0.0, others=None)
    return to_profile(samples, target=TARGET, sha256=sha256, device=this_device("1"), conditions=conditions)


def look(pace: float, rng: np.random.Generator, **ratios: float) -> dict[str, Profile]:
    """Candidates of these ratios to a dense one of 10 ms, on a machine that is so slow now."""
    wander = pace * 10 * np.repeat(rng.normal(1, 0.02, ROUNDS), BURST)  # which all of a round share
    noise = {name: rng.normal(1, 0.002, wander.size) for name in ("dense", *ratios)}
    return {name: profile(wander * noise[name] * ratios.get(name, 1.0)) for name in noise}


def test_a_ratio_holds_although_the_machine_wanders():
    rng = np.random.default_rng(0)
    pace = DriftCorrection("dense")
    for speed in (1.0, 0.97, 1.03, 1.0, 1.01):
        pace.add(look(speed, rng, t50=0.5))
    pace.add(look(1.2, rng, t60=0.6))  # a slow look
    average = (1.0 * 0.97 * 1.03 * 1.0 * 1.01 * 1.2) ** (1 / 6)
    assert pace.reference_ms("p50") == pytest.approx(10 * average, rel=0.02)
    slow = pace.latency("t60", "p50")
    assert slow.ms == pytest.approx(6.0 * average, rel=0.02)  # not 7.2
    assert slow.low <= slow.ms <= slow.high


def test_the_interval_grows_with_what_the_looks_disagree_in_unless_it_is_relative():
    widths = {}
    for name, speeds in (("steady", [1.0] * 7), ("wandering", [0.94, 1.0, 1.06, 0.95, 1.05, 0.97, 1.03])):
        rng = np.random.default_rng(0)
        pace = DriftCorrection("dense")
        for speed in speeds:
            pace.add(look(speed, rng, t50=0.5))
        absolute, relative = pace.latency("t50", "p50"), pace.latency("t50", "p50", relative=True)
        widths[name] = absolute.high - absolute.low
        assert relative.high - relative.low < 0.5 * widths[name]
        assert relative.ms == absolute.ms
    assert widths["wandering"] > 1.5 * widths["steady"]


def test_the_reference_relative_to_itself_is_sure():
    pace = DriftCorrection("dense")
    pace.add(look(1.0, np.random.default_rng(0)))
    found = pace.latency("dense", "p90", relative=True)
    assert found.low == found.ms == found.high == pace.reference_ms("p90")


def test_all_looks_at_a_file_count_and_none_at_an_older_one():
    rng = np.random.default_rng(0)
    pace = DriftCorrection("dense")
    before = look(1.0, rng)
    pace.add({**before, "t50": profile([9.0] * BURST * ROUNDS, sha256="old")})
    for ratio in (0.5, 0.52):
        pace.add(look(1.0, rng, t50=ratio))
    assert 5.0 < pace.latency("t50", "p50").ms < 5.2


def test_a_look_without_the_reference_is_a_mistake():
    with pytest.raises(AssertionError, match="dense measures the speed"):
        DriftCorrection("dense").add({"t50": profile([1.0] * BURST)})


def test_looks_of_different_lengths_are_compared_too():
    pace = DriftCorrection("dense")
    pace.add({"dense": profile([10.0] * BURST * 5), "t50": profile([5.0] * BURST * 9)})
    found = pace.latency("t50", "p50")
    assert found.low == found.ms == found.high == 5.0


def test_the_reference_has_its_own_latency_and_looks_are_counted_by_file():
    rng = np.random.default_rng(0)
    pace = DriftCorrection("dense")
    for speed, ratios in ((1.0, {"t50": 0.5}), (1.1, {}), (0.95, {"t50": 0.5})):
        pace.add(look(speed, rng, **ratios))
        assert pace.latency("dense", "p90").ms == pace.reference_ms("p90")
    assert [pace.runs(name) for name in ("dense", "t50", "t60")] == [3, 2, 0]
    pace.add({**look(1.0, rng), "t50": profile([5.0] * BURST * ROUNDS, sha256="new")})
    assert [pace.runs(name) for name in ("dense", "t50")] == [4, 1]


PROCESS, DRIFT, WITHIN = 0.015, 0.02, 0.01  # standard deviations: of each file by process, of all by run, of samples
TRUE_MS = {"dense": 10.0, "s40": 5.0, "s60": 4.0}
TEMPLATE = profile([1.0] * BURST * ROUNDS)


def looks(count: int, rng: np.random.Generator) -> list[dict[str, Profile]]:
    """Timing runs in processes of their own, each of which makes each file faster or slower."""
    found = []
    for _ in range(count):
        shared = rng.normal(0, DRIFT)
        walls = {
            name: ms * np.exp(shared + rng.normal(0, PROCESS) + rng.normal(0, WITHIN, BURST * ROUNDS))
            for name, ms in TRUE_MS.items()
        }
        found.append({name: _with(wall) for name, wall in walls.items()})
    return found


def _with(wall: np.ndarray) -> Profile:
    """The template with other samples, and their percentiles."""
    percentiles = dict(zip(("p50_ms", "p90_ms", "p99_ms"), np.percentile(wall, [50, 90, 99]).tolist()))
    return msgspec.structs.replace(TEMPLATE, samples_ms=tuple(wall), **percentiles)


def pooled_interval(looks: list[dict[str, Profile]], rng: np.random.Generator) -> tuple[float, float]:
    """The interval of the median ratio if rounds of all processes were alike."""
    dense, s40 = (
        np.concatenate([np.reshape(run[name].samples_ms, (-1, BURST)) for run in looks]) for name in ("dense", "s40")
    )
    drawn = rng.integers(0, len(s40), (100, len(s40)))  # (draws, rounds)
    ratios = np.median(s40[drawn], axis=(1, 2)) / np.median(dense[drawn], axis=(1, 2))
    low, high = np.percentile(ratios, [100 * BEYOND, 100 * (1 - BEYOND)])
    return float(low), float(high)


@pytest.mark.slow  # thousands of timing runs, each drawn again 400 times
@pytest.mark.parametrize("count", [3, 5, 8])
def test_intervals_hold_the_truth_as_often_as_they_say_where_processes_differ(count):
    rng, cases = np.random.default_rng(count), 1000
    held = dict.fromkeys(("absolute", "relative", "pooled"), 0)
    for _ in range(cases):
        runs, pace = looks(count, rng), DriftCorrection("dense")
        for run in runs:
            pace.add(run)
        absolute, relative = pace.latency("s40", "p50"), pace.latency("s40", "p50", relative=True)
        dense_ms = pace.reference_ms("p50")
        low, high = pooled_interval(runs, rng)
        held["absolute"] += absolute.low <= TRUE_MS["s40"] <= absolute.high
        held["relative"] += relative.low / dense_ms <= 0.5 <= relative.high / dense_ms
        held["pooled"] += low <= 0.5 <= high
    enough = 0.88 * cases  # they say 90 %, and two standard errors of so many cases are 2 %
    assert held["absolute"] >= enough
    assert held["relative"] >= enough
    assert held["pooled"] < enough


def test_a_candidate_that_missed_looks_pays_with_the_noise_of_its_ratio_only():
    rng, widths = np.random.default_rng(0), {"all": [], "two of eight": [], "two alone": []}
    for _ in range(60):
        runs = looks(8, rng)
        less = [{name: run[name] for name in ("dense", "s60")} for run in runs]
        for kind, given in (("all", runs), ("two of eight", [*less[:6], *runs[6:]]), ("two alone", runs[6:])):
            pace = DriftCorrection("dense")
            for run in given:
                pace.add(run)
            found = pace.latency("s40", "p50")
            widths[kind].append(found.high - found.low)
    widest = {kind: np.median(found) for kind, found in widths.items()}
    assert widest["all"] < widest["two of eight"] < widest["two alone"]


def test_runs_that_agree_by_chance_are_not_believed_more_than_their_samples():
    rng, wall = np.random.default_rng(0), 10 * np.exp(np.random.default_rng(1).normal(0, 0.05, BURST * ROUNDS))
    pace = DriftCorrection("dense")
    for _ in range(3):  # the very same samples, so that runs differ in nothing
        pace.add({"dense": profile(wall), "s40": profile(rng.permutation(wall / 2), sha256="cd")})
    found = pace.latency("s40", "p50")
    assert found.high / found.low > 1.01


def test_the_spread_of_a_sum_is_as_sure_as_its_larger_part():
    large, small, nothing = Spread(4.0, 2.0), Spread(1e-6, 100.0), Spread(0.0, 1.0)
    assert large.plus(small).freedom == pytest.approx(2.0, rel=1e-3)
    assert large.plus(nothing) == nothing.plus(large) == large
    assert Spread(1.0, 5.0).plus(Spread(1.0, 5.0)) == Spread(2.0, 10.0)
    assert nothing.plus(nothing).margin == 0
