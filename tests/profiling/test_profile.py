"""A Profile checks itself: what was not measured so is no Profile."""

import json

import msgspec
import numpy as np
import pytest

from helpers.report_factory import make_profile
from snapvit_export.errors import FileFormatError
from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.latency_model import LatencyModel
from snapvit_export.profiling.profile import Profile, to_profile
from snapvit_export.profiling.sampling import Samples
from snapvit_export.runtimes.device import this_device
from snapvit_export.storage.json import from_json, to_json
from snapvit_export.target import Target

QUIET = Conditions(noise=0.0, drift=0.0, waited=0.0, others=None)


def written(**changes: object) -> bytes:
    found = json.loads(to_json(make_profile(10.0, "ab", np.random.default_rng(0), runs=80)))
    return json.dumps({**found, **changes}).encode()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(p50_ms=0.0, p90_ms=0.0, p99_ms=0.0, samples_ms=[0.0] * 80), "Expected `float` > 0"),
        (dict(samples_ms=[0.0] * 80), "Expected `float` > 0"),
        (dict(samples_ms=[10.0] * 79), "79 samples are not 80 runs"),
        (dict(samples_ms=[]), "0 samples are not 80 runs"),
        (dict(samples_ms=[], runs=0), "Expected `int` >= 1"),
        (dict(burst=81), "not 80 runs in bursts of 81"),
        (dict(burst=0), "Expected `int` >= 1"),
        (dict(samples_ms=[1e300] * 80), "Expected `float` <="),
        (dict(samples_ms=[-1.0] * 80), "Expected `float` > 0"),
        (dict(p50_ms=11.0, p90_ms=10.5), "do not rise"),
        (dict(samples_ms=[10.0] * 80), "ms by its samples"),
        (dict(p50_ms=1.0), "p50 is 1 ms"),
        (dict(p99_ms=1e6), "p99 is 1e+06 ms"),
        (dict(intervals_ms={}), "p50 has no interval"),
        (dict(intervals_ms={"p50": [9, 11], "p90": [9, 12]}), "p99 has no interval"),
        (dict(intervals_ms={"p50": [11, 9], "p90": [9, 12], "p99": [9, 12]}), "ends before it begins"),
        (dict(batch=0), "Expected `int` >= 1"),
        (dict(threads=0), "Expected `int` >= 1"),
        (dict(cpu_ms=1e300), "Expected `float` <="),
        (dict(conditions=dict(noise=-1.0, drift=0.0, waited=0.0, others=None)), "Expected `float` >= 0"),
        (dict(conditions=dict(noise=0.0, drift=0.0, waited=2.0, others=None)), "Expected `float` <= 1"),
    ],
)
def test_latencies_that_contradict_themselves_are_refused(changes, says):
    assert from_json(written(), Profile, "orin.json").runs == 80
    with pytest.raises(FileFormatError) as refused:
        from_json(written(**changes), Profile, "orin.json")
    assert says in str(refused.value)


def test_rounded_samples_and_a_coarse_clock_make_a_profile():
    target = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
    rng = np.random.default_rng(1)
    for scale in (1e-4, 1e-2, 1.0, 1e4):
        wall = (scale * rng.lognormal(size=44)).tolist() + [0.0] * 4
        found = to_profile(
            Samples(8, wall, wall), target=target, sha256="ab", device=this_device("1"), conditions=QUIET
        )
        assert from_json(to_json(found), Profile, "x") == found
        assert found.samples_ms[-1] > 0


def test_a_latency_model_of_no_blocks_or_of_different_ones_is_refused():
    model = dict(fixed_ms=1.0, head_ms=(1.0, 1.0), neuron_ms=(1.0, 1.0), nets=4, mean_error=0.1, most_error=0.2)
    assert LatencyModel(**model).is_sound
    for changes in (
        dict(head_ms=(), neuron_ms=()),
        dict(head_ms=(1.0,)),
        dict(attention_ms=(1.0,), mlp_ms=(1.0,)),
        dict(attention_ms=(1.0, 1.0)),
    ):
        with pytest.raises(ValueError, match="not of the same blocks"):
            LatencyModel(**{**model, **changes})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**model, "head_ms": [-1.0, 1.0]}, LatencyModel)
