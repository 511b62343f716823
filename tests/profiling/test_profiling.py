"""Timing: samples of real calls, side by side, on a described device, and how far they can be trusted."""

import itertools
import json
import os
import time
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

from snapvit_export.errors import FileFormatError, SnapvitError, UsageError
from snapvit_export.profiling import conditions, energy, in_process, timer
from snapvit_export.profiling.conditions import Conditions, EnergyCounter, LoadMonitor, ThrottleMonitor
from snapvit_export.profiling.profile import LEAST_RUNS, PERCENTILES, Profile, check_percentile, to_profile
from snapvit_export.profiling.sampling import BURST, MIN_RUNS, Samples, time_together
from snapvit_export.runtimes import ort
from snapvit_export.runtimes.device import Accelerator, DeviceCard, pin_to, this_device, usable_cores
from snapvit_export.storage.json import from_json, to_json
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=2, threads=3)
QUIET = Conditions(noise=0.0, drift=0.0, waited=0.0, others=None)


def profile_of(samples: Samples, **changes) -> Profile:
    given = dict(target=TARGET, sha256="ab", device=this_device("1"), conditions=QUIET)
    return to_profile(samples, **{**given, **changes})


def taken(*wall_ms: float, burst: int = BURST) -> Samples:
    return Samples(burst, list(wall_ms), list(wall_ms))


def test_longer_calls_measure_longer():
    samples = time_together({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.006)})
    profiles = {name: profile_of(found) for name, found in samples.items()}
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


def test_two_clocks_tell_sleeping_from_working():
    def work():
        end = time.process_time() + 0.003
        while time.process_time() < end:
            pass

    found = time_together({"sleeps": lambda: time.sleep(0.003), "works": work}, seconds=0.1)
    assert found["sleeps"].percentile(50) >= 3
    assert found["sleeps"].quiet_cpu_ms < 1
    assert found["works"].quiet_cpu_ms >= 2.9
    assert found["sleeps"].waited > 0.7


def test_with_a_pause_every_run_comes_after_a_sleep():
    calls: list[float] = []
    found = time_together({"a": lambda: calls.append(time.monotonic())}, seconds=0.0, pause_ms=5)
    assert found["a"].burst == 1
    gaps = np.diff(calls[-MIN_RUNS:])
    assert gaps.min() >= 0.005


def test_rounds_are_reported():
    rounds: list[int] = []
    first = time_together({"a": lambda: None}, seconds=0.0, report=lambda samples: rounds.append(len(samples["a"])))
    assert rounds == sorted(rounds)
    assert rounds[-1] == len(first["a"])


def test_percentiles_of_known_samples():
    profile = profile_of(taken(*range(101)))
    assert (profile.p50_ms, profile.p90_ms, profile.p99_ms, profile.spread_ms, profile.runs) == (50, 90, 99, 50, 101)
    assert (profile.batch, profile.threads, profile.sha256, profile.precision) == (2, 3, "ab", "fp32")
    assert profile.at_ms("p90") == 90
    assert from_json(to_json(profile), Profile, "x") == profile
    with pytest.raises(UsageError, match="no percentile is called 'p75'. Known: p50, p90, p99"):
        check_percentile("p75")


@pytest.mark.parametrize(("at", "often"), [("p50", 0.8), ("p90", 0.6), ("p99", 0.6)])
def test_intervals_of_the_least_runs_hold_the_truth_about_as_often_as_they_say(at, often):
    random, held, percent = np.random.default_rng(0), 0, PERCENTILES[at]
    truth = np.percentile(random.normal(10, 0.1, 10**6) + random.exponential(0.3, 10**6), percent)
    for _ in range(100):  # a slow machine every now and then, for a whole burst
        bursts = -(-LEAST_RUNS[at] // BURST)
        wall = np.concatenate([random.normal(10, 0.1, BURST) + random.exponential(0.3) for _ in range(bursts)])
        low, high = taken(*wall).interval(percent)
        held += low <= truth <= high
    assert held / 100 >= often


def test_many_runs_are_summed_up_in_little_memory():
    import tracemalloc

    samples = taken(*np.random.default_rng(0).normal(10, 1, 80000))
    tracemalloc.start()
    low, high = samples.interval(90)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert low < samples.percentile(90) < high
    assert most < 100e6  # all draws at once would be 256 MB


def test_a_call_that_gets_faster_is_warmed_up_before_it_is_timed():
    lasted: list[float] = []

    def gets_faster():
        lasted.append(0.02 / (len(lasted) + 1) + 0.001)
        time.sleep(lasted[-1])

    found = time_together({"a": gets_faster}, seconds=0.0)
    assert len(lasted) - len(found["a"]) > 12
    assert max(found["a"].wall_ms[:8]) < 1000 * lasted[3]


def test_runs_are_as_many_as_a_percentile_needs_and_pauses_count():
    found = time_together({"a": lambda: None}, seconds=0.0, least_runs=LEAST_RUNS["p99"])
    assert len(found["a"]) >= 1000
    assert len(time_together({"a": lambda: None}, seconds=0.3, pause_ms=5)["a"]) < 120


def test_a_crowded_machine_is_known_by_waiting_and_by_the_work_of_others():
    device = msgspec.structs.replace(this_device("1"), cores=4)
    for waited, others, crowded in ((0.0, 0.5, False), (0.4, None, True), (0.0, 2.0, True), (0.0, None, False)):
        conditions = Conditions(noise=0.0, drift=0.0, waited=waited, others=others)
        assert profile_of(taken(1.0, burst=1), device=device, conditions=conditions).is_contended is crowded


def test_intervals_are_narrow_where_nothing_varies_and_wide_where_bursts_differ():
    assert taken(*[5.0] * 80).interval(50) == (5.0, 5.0)
    uneven = [10.0 + (n // BURST) % 2 for n in range(80)]
    low, high = taken(*uneven).interval(50)
    assert high - low >= 0.5


def test_noise_drift_and_load_are_found():
    same = [10.0, 10.1] * 60
    assert taken(*same).noise == pytest.approx(0, abs=0.01)
    odd_bursts = [10.0 + 2 * ((n // BURST) % 2) for n in range(120)]
    assert taken(*odd_bursts).noise == pytest.approx(0.2)
    heating = list(np.linspace(10, 13, 120))
    assert taken(*heating).drift > 0.15
    kinds = {kind for kind, _, _ in Conditions(noise=0.1, drift=0.2, waited=0.0, others=1.5).warnings()}
    assert kinds == {"load", "heat", "noise"}
    assert not QUIET.warnings()


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not tell how busy it is")
def test_work_of_others_is_seen(tmp_path):
    import subprocess
    import sys

    before = LoadMonitor()
    time.sleep(0.5)
    idle = before.conditions(taken(1.0)).others
    watch = LoadMonitor()
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        others = watch.conditions(taken(1.0)).others
    finally:
        hog.kill()
        hog.wait()
    assert others > min(idle + 0.4, 0.9 * usable_cores())


def test_throttling_is_told_by_the_counters_and_alerts_of_a_board(tmp_path):
    assert ThrottleMonitor(tmp_path).share is None
    events, alert = tmp_path / "sys/class/hwmon/hwmon2/oc3_event_cnt", tmp_path / "sys/class/thermal/cooling_device1"
    events.parent.mkdir(parents=True)
    events.write_text("7")
    before = ThrottleMonitor(tmp_path)
    assert before.share == 0.0
    events.write_text("8")
    assert before.share == 1.0
    alert.mkdir(parents=True)
    (alert / "type").write_text("gpu-throttle-alert")
    (alert / "cur_state").write_text("0")
    after = ThrottleMonitor(tmp_path)
    assert after.share == 0.0  # what was counted before does not count
    (alert / "cur_state").write_text("1")
    assert after.share == 1.0
    kinds = {kind for kind, _, _ in msgspec.structs.replace(QUIET, throttled=1.0).warnings()}
    assert kinds == {"throttling"}


@pytest.mark.parametrize("events", [0, 1])
def test_a_run_in_this_process_tells_if_the_board_was_throttled(monkeypatch, tmp_path, events):
    counts = iter([5, 5 + events])
    monkeypatch.setattr(conditions.board, "over_currents", lambda root: {"oc1": next(counts)})

    class Works:
        def run(self, inputs):
            pass

    monkeypatch.setattr(in_process, "open_session", lambda path, target: nullcontext(Works()))
    files = {name: timer.File(tmp_path / "x.onnx", "ab") for name in ("dense", "s30")}
    found = timer.Timer(TARGET, this_device("1"), np.zeros(1)).time(files, 0.01)
    assert [profile.conditions.throttled for profile in found.values()] == [events] * 2


def test_energy_is_read_where_there_is_a_counter_and_absent_elsewhere(tmp_path):
    assert not EnergyCounter(tmp_path).known
    assert EnergyCounter(tmp_path).since([]) is None
    zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    for name, text in zip(zones, ("1000", "7", "90", "2000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(zones[name])
        (tmp_path / name / "energy_uj").write_text(text)
        (tmp_path / name / "max_energy_range_uj").write_text("100")
    counter = EnergyCounter(tmp_path)
    before = counter.read()
    assert before == [1000, 90]  # packages, not their parts, nor the whole system
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("5000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("20")  # the counter began again
    assert counter.since(before) == pytest.approx((4000 + 30) / 1000)


def test_a_profile_of_another_file_device_or_way_is_not_used_again():
    profile, device = profile_of(taken(1.0, 2.0, burst=1)), this_device("1")
    assert profile.belongs_to("ab", TARGET, device)
    assert not profile.belongs_to("cd", TARGET, device)
    assert not profile.belongs_to("ab", TARGET, this_device("2"))
    other = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=3)
    assert not profile.belongs_to("ab", other, device)
    assert not profile.belongs_to("ab", TARGET, device, pause_ms=5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process")
def test_pinning_keeps_the_process_on_the_cores_that_were_named():
    before = os.sched_getaffinity(0)
    try:
        pin_to(str(min(before)))
        assert os.sched_getaffinity(0) == {min(before)}
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    for text, says in (("x", "not a list of cores"), ("99999", "may use the cores")):
        with pytest.raises(UsageError, match=says):
            pin_to(text)


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


GPU = Accelerator(
    name="Orin", software={"cuda": "12.6"}, power_mode="unknown", clocks_mhz={}, temperatures_c={}, memory_bytes=8
)


def test_a_profile_says_how_it_was_taken_and_one_from_before_is_read():
    profile = profile_of(taken(*[1.0] * 20), method="in-process")
    assert from_json(to_json(profile), Profile, "x") == profile
    before = json.loads(to_json(profile))
    assert before.pop("method") == "in-process"
    assert from_json(json.dumps(before), Profile, "x") == msgspec.structs.replace(profile, method=None)
    before["method"] = "x" * 65  # new ways of timing may come, but a name is short
    with pytest.raises(FileFormatError, match="length <= 64"):
        from_json(json.dumps(before), Profile, "x")


def test_boards_tell_devices_apart_but_those_that_nobody_looked_at():
    cards = {
        board: this_device("1", msgspec.structs.replace(GPU, board=board, sm_count=count))
        for board, count in ((None, None), ("Orin Nano", 8), ("AGX Orin", 16))
    }
    nano, agx, before = cards["Orin Nano"], cards["AGX Orin"], cards[None]
    assert not nano.same_machine(agx)
    assert not nano.same_machine(this_device("1", msgspec.structs.replace(nano.accelerator, sm_count=4)))
    for card in cards.values():
        assert card.same_machine(card)
        assert card.same_machine(before)
        assert before.same_machine(card)
    old = json.loads(to_json(before))
    for name in ("board", "sm_count"):
        del old["accelerator"][name]
    read = from_json(json.dumps(old), DeviceCard, "x")
    assert read == before
    profile = profile_of(taken(*[1.0] * 20), device=read)
    assert profile.belongs_to("ab", TARGET, nano)
    assert not nano.same_machine(this_device("1"))


@pytest.mark.parametrize(("runtime", "told"), [("onnxruntime", True), ("tensorrt", False), ("onnxruntime-cuda", False)])
def test_the_energy_of_the_processor_is_not_told_as_that_of_a_gpu(runtime, told, monkeypatch, tmp_path):
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("1000")

    class Works:
        def run(self, inputs):
            (zone / "energy_uj").write_text(str(int((zone / "energy_uj").read_text()) + 2000))

    monkeypatch.setattr(in_process, "open_session", lambda path, target: nullcontext(Works()))
    monkeypatch.setattr(energy, "EnergyCounter", lambda: EnergyCounter(tmp_path))
    monkeypatch.setattr(energy, "RAPL_SECONDS", 0.002)
    monkeypatch.setattr(energy.board, "power_of", lambda root: (None, "no sensor"))
    monkeypatch.setattr(energy, "LIBRARY", "libno-such-thing.so")
    target = msgspec.structs.replace(TARGET, runtime=runtime)
    card = this_device("1", None if runtime == "onnxruntime" else GPU)
    files = {"dense": timer.File(tmp_path / "x.onnx", "ab")}
    found = timer.Timer(target, card, np.zeros(1)).time(files, 0.01, energy=True)["dense"]
    assert found.energy_mj == (pytest.approx(2.0) if told else None)
    assert len(found.energy_rounds_mj) == (energy.ROUNDS if told else 0)
    assert found.energy_source == ("processor packages by RAPL" if told else None)
    assert found.method == "in-process"
