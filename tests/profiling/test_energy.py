"""What measures the energy of a run, what never does, and the interval of several rounds."""

import ctypes
import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from helpers.report_factory import make_profile
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.profiling import energy
from snapvit_export.profiling.conditions import EnergyCounter
from snapvit_export.profiling.energy import LEAST_ROUNDS, Energy, energy_of
from snapvit_export.profiling.profile import Profile
from snapvit_export.storage.json import from_json, to_json


def measured(*rounds_mj: float, source: str | None = "VDD_IN by INA3221") -> Profile:
    """A Profile of some rounds."""
    plain = make_profile(5.0, "ab", np.random.default_rng(0))
    told = dict(energy_mj=sum(rounds_mj) / len(rounds_mj), energy_rounds_mj=rounds_mj, energy_source=source)
    return msgspec.structs.replace(plain, **told)


def test_the_interval_of_rounds_is_students():
    found = energy_of([measured(10.0, 12.0, 11.0)])
    # 90 % of Student's t with two degrees of freedom: 2.92 standard errors of the mean, 1 / sqrt(3)
    assert found.mj == pytest.approx(11.0)
    assert (found.low, found.high) == pytest.approx((11 - 2.92 / 3**0.5, 11 + 2.92 / 3**0.5), abs=0.002)
    assert energy_of([measured(7.0, 7.0, 7.0)]) == Energy(7.0, 7.0, 7.0)


def test_of_several_runs_each_is_one_observation():
    runs = [measured(9.0, 11.0, 10.0), measured(13.0, 11.0, 12.0), measured(14.0, 14.0, 14.0)]
    found = energy_of(runs)
    assert found.mj == pytest.approx(12.0)
    assert found.high - found.mj == pytest.approx(2.92 * 2 / 3**0.5, abs=0.003)


@pytest.mark.parametrize(
    "profiles",
    [
        [],
        [make_profile(5.0, "ab", np.random.default_rng(0))],
        [measured(1.0, 1.0)],
        [measured(1.0, 1.0, 1.0, source=None)],  # what an older file says of a GPU may be the processor's
        [msgspec.structs.replace(measured(1.0), energy_rounds_mj=())] * LEAST_ROUNDS,
    ],
)
def test_energies_of_too_few_rounds_or_of_no_known_source_decide_nothing(profiles):
    assert energy_of(profiles) is None


def test_a_profile_whose_energy_contradicts_its_rounds_is_refused():
    good = measured(2.0, 4.0, 6.0)
    assert from_json(to_json(good), Profile, "x") == good
    wrong = to_json(good).replace(b'"energy_mj": 4.0', b'"energy_mj": 5.0')
    with pytest.raises(FileFormatError, match="its energy is not the mean of its rounds"):
        from_json(wrong, Profile, "x")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine with a fake counter of the processor, and nothing else that measures."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text("1000")
    monkeypatch.setattr(energy, "EnergyCounter", lambda: EnergyCounter(tmp_path / "powercap"))
    monkeypatch.setattr(energy, "LIBRARY", "libno-such-thing.so")
    monkeypatch.setattr(energy, "NVML_SECONDS", 0.05)
    return tmp_path


def test_a_run_on_a_gpu_is_never_measured_by_the_processor(machine):
    assert energy.meter_for("onnxruntime", machine).source == "processor packages by RAPL"
    for runtime in ("tensorrt", "onnxruntime-cuda", "onnxruntime-tensorrt"):
        assert energy.meter_for(runtime, machine) is None
    assert energy.measure_in_turns({"dense": lambda: None}, "tensorrt") == {}


def fake_rail(root: Path) -> Path:
    """The fake sensor of a board; the file with its current."""
    folder = root / "sys/class/hwmon/hwmon1"
    folder.mkdir(parents=True)
    for name, text in (("name", "ina3221"), ("in1_label", "VDD_IN"), ("in1_input", "5000"), ("curr1_input", "1000")):
        (folder / name).write_text(text)
    return folder / "curr1_input"


def test_on_a_board_with_rails_they_measure_a_gpu_and_a_processor_without_a_counter(machine, monkeypatch):
    monkeypatch.setattr(energy.board, "PERIOD", 0.02)  # a reading may be late by ten of these, beside other tests
    monkeypatch.setattr(energy, "NVML_SECONDS", 0.6)  # thirty readings, of which eight are needed
    current = fake_rail(machine)
    meter = energy.meter_for("tensorrt", machine)
    assert meter.source == "VDD_IN by INA3221"
    assert energy.meter_for("onnxruntime", machine).source == "processor packages by RAPL"
    (machine / "powercap" / "intel-rapl:0" / "energy_uj").unlink()
    assert energy.meter_for("onnxruntime", machine).source == "VDD_IN by INA3221"
    drawn = itertools.cycle((2000, 2010))  # a sensor that always tells the same is not believed

    def call() -> None:
        (machine / "next").write_text(str(next(drawn)))
        (machine / "next").replace(current)  # in one step: a file that is being written reads as empty
        energy.time.sleep(0.01)

    spent = meter.measure(call)  # ten watts for a hundredth of a second, and what sleeping takes longer
    assert spent is not None
    assert spent >= 10 * 10
    current.write_text("garbage")
    assert energy.meter_for("tensorrt", machine) is None


class FakeNvml:
    """A fake of NVIDIA's management library, which counts millijoules."""

    def __init__(self, code: int = 0) -> None:
        self.millijoules, self.code, self.asked = 5000, code, b""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, device: object) -> int:
        self.asked = address
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: object, found: object) -> int:
        found._obj.value = self.millijoules
        return self.code


class FakeGpu:
    """A fake of the CUDA driver: only where its GPU is."""

    pci_address = "0000:41:00.0"


def test_a_gpu_of_its_own_is_measured_by_its_counter_and_the_right_one(machine, monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(energy, "require_gpu", FakeGpu)

    def call() -> None:
        nvml.millijoules += 250

    found = energy.measure_in_turns({"dense": call, "s30": call}, "tensorrt", rounds=3)
    assert {name: each.rounds_mj for name, each in found.items()} == dict.fromkeys(("dense", "s30"), (250.0,) * 3)
    assert found["dense"].source == "GPU by NVML"
    assert nvml.asked == b"0000:41:00.0"
    assert energy.measure_in_turns({"dense": lambda: None}, "tensorrt", rounds=3) == {}  # a counter that stands still


def test_a_gpu_without_a_counter_or_a_driver_has_no_energy(machine, monkeypatch):
    def none() -> None:
        raise SnapvitError("no GPU")

    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml(code=3))
    monkeypatch.setattr(energy, "require_gpu", FakeGpu)
    assert energy.meter_for("tensorrt", machine) is None  # not supported
    monkeypatch.setattr(energy, "require_gpu", none)
    assert energy.nvml_counter() is None
    monkeypatch.setattr(energy, "require_gpu", FakeGpu)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert energy.nvml_counter() is None  # an older library
