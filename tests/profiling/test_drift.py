"""The pace of a machine: latencies that hold although it is faster in one look than in another."""

import numpy as np
import pytest

from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.drift import DriftCorrection
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
    assert pace.reference_ms("p50") == pytest.approx(10, rel=0.02)
    slow = pace.latency("t60", "p50")
    assert slow.ms == pytest.approx(6.0, rel=0.02)  # not 7.2
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
