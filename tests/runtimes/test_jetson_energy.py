"""Power, heat and power modes of the Jetson agent, against a fake sysfs root, a fake trtexec and a fake nvpmodel.

Nothing here was measured: rails have the numbers that a test writes into files. The fakes hold us to what the agent
computes from them, which files it reads, and what it leaves behind.
"""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from snapvit_export.runtimes import jetson_agent as agent
from snapvit_export.selection.known_profiles import FamilyProfile

ORIN = {"sys/class/hwmon/hwmon1/in1": ("VDD_IN", 5000, 1000), "sys/class/hwmon/hwmon1/in2": ("VDD_SOC", 5000, 200)}
RUNS, SECONDS, BUSY_MA = 20, 0.06, 2000

FAKE_TRTEXEC = r"""
import json, os, signal, sys, time
from pathlib import Path

here = Path(__file__).parent
how = json.loads((here / "how.json").read_text())
given = dict((word.split("=", 1) + [""])[:2] for word in sys.argv[1:])
print("&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec", flush=True)
if "--help" in given:
    sys.exit(0)
if "--onnx" in given:
    Path(given["--timingCacheFile"]).write_text("cache")
    Path(given["--saveEngine"]).write_text(Path(given["--onnx"]).stem)
    sys.exit(0)
mode = (here / "mode").read_text().strip() if (here / "mode").exists() else "-"
with open(here / "calls", "a") as file:
    file.write(mode + " " + " ".join(sys.argv[1:]) + "\n")
calls = len((here / "calls").read_text().splitlines())
if calls == how.get("stop_at"):
    os.kill(os.getppid(), how.get("stop_by", signal.SIGINT))
    signal.pause()
copies = "--noDataTransfers" not in given
rail = how.get("rail")
if rail and copies:
    Path(rail).write_text(str(how["busy_ma"]))
    time.sleep(0.02 + how["seconds"])
    print(f"[11/18/2025-12:00:00] [I] Timing trace has {how['runs']} queries over {how['seconds']} s", flush=True)
    for name, text in how.get("throttles", {}).items():
        Path(name).write_text(text)
    time.sleep(0.3)  # a busy machine may see that line late, and must still read what was drawn before it
    Path(rail).write_text(str(how["idle_ma"]))
d2h, ms = (0.1, how["ms"]) if copies else (0.0, how["ms"])
row = {"h2dMs": d2h, "computeMs": ms, "d2hMs": d2h, "latencyMs": ms + 2 * d2h}
Path(given["--exportTimes"]).write_text(json.dumps([row] * 40))
"""

FAKE_NVPMODEL = r"""
import sys
from pathlib import Path

here = Path(__file__).parent
names = {0: "15W", 1: "25W", 2: "MAXN_SUPER", 3: "7W"}
if "-q" in sys.argv:
    number = int((here / "mode").read_text())
    print(f"NV Power Mode: {names[number]}\n{number}")
    sys.exit(0)
number = int(sys.argv[sys.argv.index("-m") + 1])
assert sys.stdin.read() == "", "nobody may answer for the user"
if number == 3:
    print("NVPM WARN: Golden image context is already created")
    print("NVPM WARN: Reboot required for changing to this power mode: 3")
    print("NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:")
    print("NVPM ERROR: bad input!\nNVPM ERROR: optMask is 1, no request for power mode")
    sys.exit(255)
(here / "mode").write_text(str(number))
with open(here / "set", "a") as file:
    file.write(f"{number}\n")
"""


APART = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jetson_agent", sys.argv[1])
agent = sys.modules["jetson_agent"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent)
agent.is_root, agent.SOAK_STEP, agent.IDLE_SECONDS = (lambda: True), 1.0, 0.03
agent.end_in_order()
sys.exit(agent.main(sys.argv[2:]))
"""


def fake_rails(root: Path, rails: dict[str, tuple[str, int, int]], chip: str = "ina3221") -> None:
    """Write sensors into a fake sysfs: by the place of a channel its label, millivolts and milliamperes."""
    for place, (label, volts, amperes) in rails.items():
        folder, channel = (root / place).parent, Path(place).name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(f"{chip}\n")
        (folder / f"{channel}_label").write_text(f"{label}\n")
        (folder / f"{channel}_input").write_text(f"{volts}\n")
        (folder / f"{channel.replace('in', 'curr')}_input").write_text(f"{amperes}\n")


def write(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))
    return path


def make_family(folder: Path) -> None:
    """The least family that the agent takes: a manifest and one small graph for each of two variants."""
    folder.mkdir()
    port = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 4, 4])
    variants = []
    for name in ("dense", "s30"):
        graph = helper.make_graph([helper.make_node("Identity", ["images"], ["out"])], name, [port], [port])
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder / f"{name}.onnx")
        digest = hashlib.sha256((folder / f"{name}.onnx").read_bytes()).hexdigest()
        variants.append({"name": name, "file": f"{name}.onnx", "sha256": digest, "precision": "fp32"})
    manifest = dict(format_version=1, model="tiny", dense="dense", weights=[], variants=variants, input={"batch": None})
    manifest["target"] = {"precision": "fp32", "batch": 1, "threads": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Board:
    """A fake board: a folder with a family, fake programs in `bin` and a fake sysfs in `root`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.bin = folder, folder / "root", folder / "bin"
        make_family(folder / "family")
        for name, text in (("trtexec", FAKE_TRTEXEC), ("nvpmodel", FAKE_NVPMODEL)):
            write(self.bin / name, f"#!{sys.executable} -S\n{text}").chmod(0o755)
        self.how = {"ms": 2.0, "runs": RUNS, "seconds": SECONDS, "busy_ma": BUSY_MA, "idle_ma": 1000}

    def powered(self) -> None:
        """Give it the rails of an Orin Nano; the fake trtexec draws current on the first."""
        fake_rails(self.root, ORIN)
        self.how["rail"] = str(self.root / "sys/class/hwmon/hwmon1/curr1_input")

    def with_modes(self) -> None:
        """Give it four power modes, of which the third is set."""
        names = ("15W", "25W", "MAXN_SUPER", "7W")
        modes = "".join(f"< POWER_MODEL ID={n} NAME={name} >\n" for n, name in enumerate(names))
        write(self.root / "etc/nvpmodel.conf", modes)
        write(self.bin / "mode", 2)

    def words(self, *words: object) -> list[str]:
        (self.bin / "how.json").write_text(json.dumps(self.how))
        short = ("--seconds", 0.3, "--rounds", 3, "--warm-up", 0)
        return [str(w) for w in ("family", "--out", "orin.json", "--root", self.root, *short, *words)]

    def run(self, *words: object) -> int:
        return agent.main(self.words(*words))

    def interrupted(self, stop_at: int, *words: object) -> str:
        """Run the agent in a process of its own, whose so-many-th trtexec interrupts it; what it says."""
        self.how["stop_at"] = stop_at
        command = [sys.executable, "-c", APART, agent.__file__, *self.words(*words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        self.how["stop_at"] = None
        assert done.returncode == 130, done.stderr
        return done.stderr

    def read(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    @property
    def timed_in(self) -> list[str]:
        """The modes in which something was timed, in order."""
        path = self.bin / "calls"
        return list(dict.fromkeys(line.split()[0] for line in path.read_text().splitlines())) if path.exists() else []


@pytest.fixture
def board(tmp_path, monkeypatch) -> Board:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "PERIOD", 0.004)
    monkeypatch.setattr(agent, "IDLE_SECONDS", 0.03)
    monkeypatch.setattr(agent, "is_root", lambda: True)
    made = Board(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}{os.environ['PATH']}")
    return made


# --- Rails and the integral ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rails", "source", "watts"),
    [
        ({"a/in1": ("VDD_IN", 5000, 1500), "a/in2": ("VDD_CPU_GPU_CV", 5000, 300)}, "VDD_IN by INA3221", 7.5),
        (
            {
                "a/in1": ("VDD_GPU_SOC", 20000, 200),
                "a/in2": ("VDD_CPU_CV", 20000, 100),
                "a/in3": ("VIN_SYS_5V0", 5000, 1000),
                "b/in1": ("NC", 0, 0),
                "b/in2": ("VDDQ_VDD2_1V8AO", 5000, 100),
            },
            "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0 by INA3221",
            4 + 2 + 5,
        ),
        (
            {
                "a/in1": ("VDD_GPU", 20000, -20),  # an offset of the sensor: seen on a Thor at rest
                "a/in2": ("VDD_CPU_SOC_MSS", 20000, 200),
                "a/in3": ("VIN_SYS_5V0", 5000, 1000),
            },
            "VDD_GPU + VDD_CPU_SOC_MSS + VIN_SYS_5V0 by INA3221",
            -0.4 + 4 + 5,
        ),
    ],
)
def test_the_rails_of_each_board_add_up_to_its_power(tmp_path, rails, source, watts):
    numbers = {"a": "hwmon3", "b": "hwmon4"}
    fake_rails(tmp_path, {f"sys/class/hwmon/{numbers[p[0]]}{p[1:]}": rail for p, rail in rails.items()})
    power, reason = agent.power_of(tmp_path)
    assert (power.source, reason) == (source, "")
    assert sum(power.watts().values()) == pytest.approx(watts)


def test_on_a_thor_the_input_of_the_board_is_taken_in_microwatts(tmp_path):
    fake_rails(tmp_path, {"sys/class/hwmon/hwmon2/in1": ("VDD_GPU", 20000, 500)})
    fake_rails(tmp_path, {"sys/class/hwmon/hwmon3/in1": ("VIN", 20000, 999)}, chip="ina238")
    write(tmp_path / "sys/class/hwmon/hwmon3/power1_input", 31500000)
    write(tmp_path / "sys/class/hwmon/hwmon3/update_interval", 250)
    power, _ = agent.power_of(tmp_path)
    assert (power.source, power.refresh) == ("VIN by INA238", 0.25)
    assert power.watts() == {"VIN": 31.5}


def test_rails_are_found_by_their_driver_where_the_class_has_none(tmp_path):
    fake_rails(tmp_path, {"sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1/in1": ("VDD_IN", 5000, 1000)})
    assert agent.power_of(tmp_path)[0].watts() == {"VDD_IN": 5.0}


@pytest.mark.parametrize("text", ["", "garbage", "nan", "inf", "1e30", "\0\0", "-"])
def test_what_is_no_number_is_no_power(tmp_path, text):
    fake_rails(tmp_path, ORIN)
    write(tmp_path / "sys/class/hwmon/hwmon1/curr1_input", text)
    assert agent.power_of(tmp_path) == (None, "VDD_IN by INA3221 cannot be read")


def test_a_file_that_refuses_to_be_read_is_no_power(tmp_path):
    fake_rails(tmp_path, ORIN)
    refusing = tmp_path / "sys/class/hwmon/hwmon1/curr1_input"
    refusing.unlink()
    refusing.mkdir()  # root may read every file; no one reads a folder
    assert agent.power_of(tmp_path) == (None, "VDD_IN by INA3221 cannot be read")


def test_where_nothing_tells_the_whole_power_the_reason_is_told(tmp_path):
    assert agent.power_of(tmp_path) == (None, "no INA3221 or INA238 tells the power of this board")
    fake_rails(tmp_path, {"sys/class/hwmon/hwmon1/in1": ("VDD_WHATEVER", 5000, 1000)})
    fake_rails(tmp_path, {"sys/class/hwmon/hwmon2/in1": ("VDD_IN", 5000, 1000)}, chip="nct6775")  # another chip
    assert agent.power_of(tmp_path) == (None, "the rails VDD_WHATEVER are not known to add up to the board's power")


def test_the_integral_has_the_known_answers():
    ramp = [(t / 10, 2 * t / 10) for t in range(101)]  # 2 t watts
    assert agent.joules(ramp, 0, 10) == pytest.approx(100)
    assert agent.joules(ramp, 2.55, 7.13) == pytest.approx(7.13**2 - 2.55**2)
    assert agent.joules([(0.0, 5.0), (1.0, 5.0)], -1, 3) == pytest.approx(20)  # beyond both ends as it was
    uneven = [(0.0, 10.0), (0.1, 10.0), (3.0, 10.0), (3.05, 10.0)]
    assert agent.joules(uneven, 0.05, 3.0) == pytest.approx(29.5)


def readings(watts: float = 10.0, seconds: float = 2.0, step: float = 0.05) -> list[tuple[float, float]]:
    return [(n * step, watts + (n == 0)) for n in range(int(seconds / step) + 1)]


def test_the_energy_of_a_run_is_that_of_the_time_from_run_to_run():
    spent = agent.spent_in(readings(), 0.5, 1.5, 40, 0.05)
    assert spent.energy_mj == pytest.approx(250)
    assert (spent.watts, spent.seconds, spent.reason) == (pytest.approx(10), pytest.approx(0.025), "")
    assert spent.above(4.0) == pytest.approx(250 - 100)
    assert spent.above(None) is None


@pytest.mark.parametrize(
    ("samples", "start", "end", "runs", "refresh", "says"),
    [
        (readings(), 0.5, 0.6, 40, 0.05, "it ran for 0.1 s, and the sensor needs 0.2"),
        (readings(), 0.5, 1.5, 40, 0.43, "it ran for 1.0 s, and the sensor needs 1.7"),
        (readings(), 0.5, 1.5, 0, 0.05, "it ran for 1.0 s"),
        (readings(step=0.25), 0.5, 1.5, 40, 0.05, "its power was read 5 times, and 8 are needed"),
        ([*readings(seconds=0.9), *[(3 + n / 20, 10.0) for n in range(9)]], 0.0, 3.4, 9, 0.05, "not be read for 2.1 s"),
        ([(n / 20, 10.0) for n in range(40)], 0.5, 1.5, 40, 0.05, "the sensor told the same value all the time"),
        ([(n / 20, -0.1 - n / 1e3) for n in range(40)], 0.5, 1.5, 40, 0.05, "the sensor told no power"),
        ([], 0.5, 1.5, 40, 0.05, "its power was read 0 times"),
    ],
)
def test_what_does_not_tell_the_energy_gives_none_and_the_reason(samples, start, end, runs, refresh, says):
    spent = agent.spent_in(samples, start, end, runs, refresh)
    assert spent.energy_mj is None
    assert says in spent.reason


# --- Heat ---------------------------------------------------------------------------------------------------------


def test_throttling_is_told_by_counters_alerts_and_a_held_clock_that_falls(tmp_path):
    oc = write(tmp_path / "sys/class/hwmon/hwmon3/oc3_event_cnt", (1 << 32) - 2)
    still = write(tmp_path / "sys/class/hwmon/hwmon3/oc1_event_cnt", 5)
    write(tmp_path / "sys/class/hwmon/hwmon3/oc2_event_cnt", "garbage")
    gpu = tmp_path / "sys/class/devfreq/17000000.gpu"
    for name in ("min_freq", "max_freq", "cur_freq"):
        write(gpu / name, 1020000000)
    for n, (kind, state) in enumerate({"pwm-fan": 3, "gpu-throttle-alert": 0, "cpu-throttle-alert": "x"}.items()):
        write(tmp_path / f"sys/class/thermal/cooling_device{n}/type", kind)
        write(tmp_path / f"sys/class/thermal/cooling_device{n}/cur_state", state)
    with agent.Watch(None, tmp_path) as cool:
        pass
    assert cool.throttled() == []
    with agent.Watch(None, tmp_path) as hot:
        oc.write_text("3")  # the counter began again
        write(tmp_path / "sys/class/thermal/cooling_device1/cur_state", 1)
        write(gpu / "cur_freq", 510000000)
        _until(lambda: any(clock < 1e9 for _, clock in hot.clocks) and hot.alerts)
        write(tmp_path / "sys/class/thermal/cooling_device1/cur_state", 0)  # it was throttled all the same
    assert hot.throttled() == ["over-current oc3, 5 times", "gpu-throttle-alert", "GPU clock 510 of 1020 MHz"]
    assert still.read_text() == "5"
    write(gpu / "min_freq", 306000000)  # a clock that may move and does is not throttled
    with agent.Watch(None, tmp_path) as free:
        _until(lambda: free.clocks)
    assert free.throttled() == []


def _until(holds) -> None:
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    assert holds()


def test_a_sensor_that_cannot_be_read_for_a_while_leaves_a_gap_and_no_guess(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "PERIOD", 0.001)
    fake_rails(tmp_path, ORIN)
    power, _ = agent.power_of(tmp_path)
    with agent.Watch(power, tmp_path) as watch:
        _until(lambda: watch.samples)
        write(tmp_path / "sys/class/hwmon/hwmon1/curr1_input", "")
        seen = len(watch.samples)
        time.sleep(0.05)
        assert len(watch.samples) <= seen + 1
    start = watch.samples[0][0]
    assert watch.spent((start, start + 5.0, 10)).energy_mj is None
    assert agent.Watch(None, tmp_path).spent().reason == "nothing measures it"
    assert watch.spent().reason == "trtexec did not tell when it timed"


# --- The whole agent ----------------------------------------------------------------------------------------------


def test_the_energy_of_every_engine_is_in_profile_record_and_table(board, capsys):
    board.powered()
    assert board.run("--only", "dense") == 0
    found = FamilyProfile.load("orin.json").profiles["dense"]
    busy = 5 * BUSY_MA / 1000  # watts
    assert found.energy_mj == pytest.approx(1000 * busy * SECONDS / RUNS)
    assert found.energy_rounds_mj == pytest.approx([found.energy_mj] * 3)
    assert found.energy_source == "VDD_IN by INA3221"
    assert found.power_w == pytest.approx(busy)
    assert found.energy_above_idle_mj == pytest.approx(1000 * (busy - 5) * SECONDS / RUNS)
    assert found.conditions.throttled == 0
    record = board.read("orin.record.json")
    assert record["power"] == {"source": "VDD_IN by INA3221", "idle_w": 5.0, "reason": ""}
    assert [visit["rails_w"] for visit in record["visits"]["dense"]] == [{"VDD_IN": busy}] * 3
    shown = capsys.readouterr().out
    assert "Energy of the board while it runs without a pause, VDD_IN by INA3221; idle 5.00 W" in shown
    assert ["dense", "10.00", "30.00", "15.00", "0", "of", "3"] in [line.split() for line in shown.splitlines()]


def test_a_throttled_visit_is_marked_and_warned_about_in_one_line(board, capsys):
    board.powered()
    oc = write(board.root / "sys/class/hwmon/hwmon3/oc3_event_cnt", 7)
    board.how["throttles"] = {str(oc): "9"}
    assert board.run("--only", "dense") == 0
    found = FamilyProfile.load("orin.json").profiles["dense"]
    assert found.conditions.throttled == pytest.approx(1 / 3)  # then the counter stands still
    visits = board.read("orin.record.json")["visits"]["dense"]
    assert [visit["throttled"] for visit in visits] == [["over-current oc3, 2 times"], [], []]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "throttled" in line]
    assert "dense was throttled in 1 of 3 rounds: over-current oc3, 2 times. Cool the board" in line
    assert "heat or current throttled it in 33 % of its rounds" in found.conditions.warnings()[-1][2]


def test_without_a_sensor_nothing_is_told_but_the_reason(board, capsys):
    write(board.root / "etc/nv_tegra_release", "# R36 (release), REVISION: 4.3")
    assert board.run("--only", "dense") == 0
    found = FamilyProfile.load("orin.json").profiles["dense"]
    assert (found.energy_mj, found.energy_rounds_mj, found.energy_source) == (None, (), None)
    streams = capsys.readouterr()
    assert "warning: no energy is measured: no INA3221 or INA238" in streams.err
    assert "mJ" not in streams.out


def test_a_run_that_is_too_short_for_its_sensor_has_no_energy(board, capsys):
    board.powered()
    write(board.root / "sys/class/hwmon/hwmon1/update_interval", 100)
    assert board.run("--only", "dense") == 0
    assert FamilyProfile.load("orin.json").profiles["dense"].energy_mj is None
    assert "the energy of dense is not known: it ran for 0.1 s, and the sensor needs 0.4" in capsys.readouterr().err


def test_a_soak_tells_each_minute_and_the_latency_after_heat(board, monkeypatch, capsys):
    board.powered()
    monkeypatch.setattr(agent, "SOAK_STEP", 1.0)
    write(board.root / "sys/class/thermal/thermal_zone0/type", "tj-thermal")
    write(board.root / "sys/class/thermal/thermal_zone0/temp", 71500)
    assert board.run("--only", "s30", "--soak", 2.5 / 60) == 0
    profiles = FamilyProfile.load("orin.json").profiles
    assert profiles["s30"].steady_ms == pytest.approx(2.2)
    assert profiles["dense"].steady_ms is None  # --only named another
    rows = board.read("orin.record.json")["soak"]["s30"]["rows"]
    assert [row["seconds"] for row in rows] == pytest.approx([1.0, 1.0, 0.5])
    assert [row["energy_mj"] for row in rows] == pytest.approx([30.0] * 3)
    line = next(
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("s30  ") and "tj" in line
    )
    assert line == ["s30", "1", "2.20", "2.20", "72", "C", "tj-thermal", "-", "10.00", "30.00", "no"]


def test_the_latency_after_heat_is_that_of_the_last_third():
    rows = [{"p50_ms": ms} for ms in (1.0, 1.2, 1.4, 1.5, 1.6, 1.6)]
    assert agent.steady_ms(rows) == 1.6
    assert agent.steady_ms(rows[:1]) == 1.0


def test_an_interrupted_soak_begins_anew_and_a_finished_one_is_kept(board, monkeypatch):
    monkeypatch.setattr(agent, "SOAK_STEP", 1.0)
    board.interrupted(
        2 * 2 * 3 + 2 + 1, "--soak", 2.0 / 60
    )  # two variants, with and without copying, in three rounds; then a soak
    kept = board.read("orin.partial.json")["soak"]
    assert list(kept) == ["dense"]
    before = len((board.bin / "calls").read_text().splitlines())
    assert board.run("--soak", 2.0 / 60) == 0
    assert len((board.bin / "calls").read_text().splitlines()) - before == 2  # both minutes of s30, nothing else
    assert set(board.read("orin.record.json")["soak"]) == {"dense", "s30"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s["visits"][0].update(energy_mj="12"),
        lambda s: s["visits"][0].update(watts=1e300),
        lambda s: s["visits"][0].update(rails_w=[1]),
        lambda s: s.update(soak={"dense": {"minutes": 1, "rows": []}}),
        lambda s: s.update(soak={"dense": {"rows": [{}]}}),
    ],
)
def test_a_damaged_file_of_an_interrupted_run_is_refused(board, capsys, damage):
    board.interrupted(4, "--only", "dense")
    state = board.read("orin.partial.json")
    damage(state)
    (board.folder / "orin.partial.json").write_text(json.dumps(state))
    assert board.run("--only", "dense") == 1
    assert "orin.partial.json: damaged: " in capsys.readouterr().err.splitlines()[-1]


# --- Power modes --------------------------------------------------------------------------------------------------


def test_a_sweep_times_every_mode_into_its_own_file_and_sets_the_first_again(board, capsys):
    board.with_modes()
    assert board.run("--power-modes") == 0
    assert board.timed_in == ["2", "0", "1"]  # that which was set first, and 7W needs a restart
    assert (board.bin / "mode").read_text() == "2"
    for name in ("15W", "25W", "MAXN_SUPER"):
        found = FamilyProfile.load(f"orin.{name}.json")
        assert found.target.device.accelerator.power_mode == name
    table = board.read("orin.modes.json")["modes"]
    assert [(mode["id"], mode["mode"], mode["left_out"]) for mode in table][2:] == [
        (2, "MAXN_SUPER", None),
        (3, "7W", "power mode 3 needs a restart of the board"),
    ]
    streams = capsys.readouterr()
    assert "power mode 3 needs a restart of the board, so 7W is left out" in streams.err
    assert ["25W", "s30", "2.20", "2.20", "-", "-", "-"] in [line.split() for line in streams.out.splitlines()]
    left = {path.name for path in board.folder.iterdir()}
    assert left == {"bin", "root", "family", "orin.modes.json"} | {
        f"orin.{name}.{kind}" for name in ("15W", "25W", "MAXN_SUPER") for kind in ("json", "record.json")
    }


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_sweep_sets_the_mode_again_and_goes_on(board, how):
    """By Ctrl-C, by the system, or because the terminal or the connection that it runs in is gone."""
    board.with_modes()
    board.how["stop_by"] = how
    of_one_mode = 2 * 2 * 3
    said = board.interrupted(of_one_mode + 3, "--power-modes", "0,MAXN_SUPER")  # in the second mode
    assert (board.bin / "mode").read_text() == "2"
    assert "the power mode is MAXN_SUPER again" in said
    assert "The same command goes on where it stopped" in said
    assert (board.bin / "set").read_text().split() == ["0", "2"]
    before = len((board.bin / "calls").read_text().splitlines())
    assert board.run("--power-modes", "0,MAXN_SUPER") == 0
    assert len((board.bin / "calls").read_text().splitlines()) - before == of_one_mode - 2
    assert (board.bin / "mode").read_text() == "2"
    assert not (board.folder / "orin.modes.partial.json").exists()


def test_a_sweep_that_was_killed_sets_the_mode_of_before_it_again(board):
    board.with_modes()
    write(board.bin / "mode", 1)  # where the killed one had left it
    state = {"key": "of other options", "mode_before": 2, "done": {"1": {"left_out": None}}}
    write(board.folder / "orin.modes.partial.json", json.dumps(state))
    assert board.run("--power-modes", "1") == 0
    assert (board.bin / "mode").read_text() == "2"
    assert board.timed_in == ["1"]  # its rows were of other options


@pytest.mark.parametrize(
    ("words", "is_root", "says"),
    [
        (("--power-modes", "9"), True, "--power-modes 9: no power mode is called that. There are: 0 (15W), 1 (25W)"),
        (("--power-modes",), False, "only root can set them. Run it with sudo"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything(board, monkeypatch, capsys, words, is_root, says):
    board.with_modes()
    monkeypatch.setattr(agent, "is_root", lambda: is_root)
    assert board.run(*words) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert board.timed_in == []
    shutil.rmtree(board.root)
    assert board.run("--power-modes") == 2
    assert "no /etc/nvpmodel.conf tells the power modes" in capsys.readouterr().err


def test_a_mode_that_alone_was_asked_for_and_needs_a_restart_is_refused(board, capsys):
    board.with_modes()
    assert board.run("--power-modes", "7W") == 1
    assert "no power mode could be timed: power mode 3 needs a restart" in capsys.readouterr().err.splitlines()[-1]
    assert (board.bin / "mode").read_text() == "2"


def test_held_clocks_are_held_again_after_every_change_of_mode(board):
    board.with_modes()
    write(board.bin / "jetson_clocks", f"#!/bin/sh\necho held >> {board.bin}/held\n").chmod(0o755)
    for name in ("min_freq", "max_freq", "cur_freq"):
        write(board.root / "sys/class/devfreq/17000000.gpu" / name, 1020000000)
    assert board.run("--power-modes", "0,2", "--only", "dense") == 0
    assert (board.bin / "held").read_text().split() == ["held"] * 2  # for 15W, and for the mode of before


def test_what_nohup_lets_go_on_goes_on():
    kinds = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        agent.end_in_order()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for kind, handler in kinds.items():
            signal.signal(kind, handler)


def test_nothing_of_a_watch_goes_on_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "IDLE_SECONDS", 0.01)
    fake_rails(tmp_path, ORIN)
    before = threading.active_count()
    with agent.Watch(agent.power_of(tmp_path)[0], tmp_path):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert math.isfinite(agent.idle_watts(agent.power_of(tmp_path)[0]))
