"""Timing: samples of real calls, side by side, on a described device."""

import itertools
import time

import pytest

from snapvit_export.errors import SnapvitError
from snapvit_export.profiling.device import this_device, usable_cores
from snapvit_export.profiling.measure import MIN_RUNS, time_together, to_profile
from snapvit_export.runtimes import ort


def test_longer_calls_measure_longer():
    samples = time_together({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.006)})
    device = this_device("none")
    profiles = {
        name: to_profile(taken, batch=1, threads=1, sha256="", device=device) for name, taken in samples.items()
    }
    assert all(profile.runs >= MIN_RUNS for profile in profiles.values())
    assert 2 <= profiles["short"].p50_ms < profiles["long"].p50_ms
    assert profiles["long"].p50_ms >= 6
    assert profiles["long"].p50_ms <= profiles["long"].p90_ms <= profiles["long"].p99_ms


def test_candidates_alternate_in_bursts():
    calls: list[str] = []
    time_together(
        {"a": lambda: (calls.append("a"), time.sleep(0.001)), "b": lambda: (calls.append("b"), time.sleep(0.001))}
    )
    switches = sum(x != y for x, y in itertools.pairwise(calls))
    assert switches > 10


def test_percentiles_of_known_samples():
    profile = to_profile(list(range(101)), batch=2, threads=3, sha256="ab", device=this_device("1"))
    assert (profile.p50_ms, profile.p90_ms, profile.p99_ms, profile.spread_ms, profile.runs) == (50, 90, 99, 50, 101)
    assert (profile.batch, profile.threads, profile.sha256) == (2, 3, "ab")


def test_the_device_card_describes_this_machine():
    card = this_device("1.2.3")
    assert card.cpu
    assert card.cores == usable_cores() >= 1
    assert card.memory_bytes > 2**28
    assert card.runtime_version == "1.2.3"


def test_both_onnxruntime_packages_are_explained(monkeypatch):
    monkeypatch.setattr(ort, "_is_installed", lambda name: True)
    with pytest.raises(SnapvitError, match="both installed.*pip uninstall"):
        ort.version()


def test_a_file_that_onnxruntime_cannot_open_is_named(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"nonsense")
    with pytest.raises(SnapvitError, match="x.onnx: ONNX Runtime cannot open it"):
        ort.OrtSession(tmp_path / "x.onnx", 1)
