"""On a real Jetson: the agent builds, compares, times, and writes what `snapvit` reads. Anywhere else it is skipped.

It needs what a board has: Python, trtexec, pytest (`sudo apt install python3-pytest`), this repository, and a family
that was exported on a workstation, best in several precisions (`snapvit export --for jetson-orin-nano ...`):

    SNAPVIT_FAMILY=~/snapvit-family python3 -m pytest -c /dev/null --noconftest -m jetson tests/runtimes/test_jetson.py

Nothing of snapvit is installed for it; if it is, with TensorRT's Python package, its own process is tried too. Leaves
dated JSON records in `records/`.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
AGENT = ROOT / "snapvit_export" / "runtimes" / "jetson_agent.py"
pytestmark = pytest.mark.jetson


@pytest.fixture(scope="module", autouse=True)
def jetson() -> None:
    if not Path("/etc/nv_tegra_release").is_file():
        pytest.skip("needs an NVIDIA Jetson: there is no /etc/nv_tegra_release")


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A copy of the family that was brought along."""
    brought = Path(os.environ.get("SNAPVIT_FAMILY", "snapvit-family")).expanduser()
    if not (brought / "manifest.json").is_file():
        pytest.skip(f"needs a family: there is none at {brought}. Copy one here and set SNAPVIT_FAMILY to its folder")
    return Path(shutil.copytree(brought, tmp_path / "family"))


def run_agent(family: Path, out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    call = [sys.executable, str(AGENT), str(family), "--out", str(out), "--seconds", "3", "--rounds", "3", *words]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def agent() -> ModuleType:
    """The agent as a module, by its path: snapvit is not installed on a board."""
    spec = importlib.util.spec_from_file_location("jetson_agent", AGENT)
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def keep(path: Path, what: str) -> None:
    """Leave a dated record."""
    (ROOT / "records").mkdir(exist_ok=True)
    shutil.copy(path, ROOT / "records" / f"{datetime.now(timezone.utc):%Y-%m-%d}-jetson-{what}.json")


def test_the_agent_compares_and_times_a_family_with_the_real_trtexec(family, tmp_path):
    out = tmp_path / "jetson.json"
    done = run_agent(family, out)
    assert done.returncode == 0, done.stderr
    found, manifest = json.loads(out.read_text()), json.loads((family / "manifest.json").read_text())
    assert set(found["profiles"]) | set(found["failed"]) == {variant["name"] for variant in manifest["variants"]}
    assert found["target"]["runtime"] == "tensorrt"
    gpu = found["target"]["device"]["accelerator"]
    assert gpu["power_mode"] != "unknown"
    assert gpu["sm_count"] > 0
    assert gpu["board"]
    for profile in found["profiles"].values():
        assert profile["compared"]["passed"]
        assert profile["taken"]["cuda_graph"]
        assert 0 < profile["gpu_ms"] <= profile["p99_ms"]
    keep(out, "agent")
    keep(tmp_path / "jetson.record.json", "agent-record")
    assert found["failed"] == {}, "compared on this board, and found to be wrong"


def test_answers_of_another_variant_are_told_from_those_of_its_own(family, tmp_path):
    manifest = json.loads((family / "manifest.json").read_text())
    reference = manifest["reference"]
    answers = family / reference["answers"]["dense"]["file"]
    row = 4 * reference["outputs"]
    rows = [answers.read_bytes()[at : at + row] for at in range(0, row * reference["images"], row)]
    answers.write_bytes(b"".join([*rows[1:], rows[0]]))  # of the next image
    reference["answers"]["dense"]["sha256"] = hashlib.sha256(answers.read_bytes()).hexdigest()
    reference["dense"] = dict(reference["answers"]["dense"])
    (family / "manifest.json").write_text(json.dumps(manifest))
    done = run_agent(family, tmp_path / "jetson.json", "--only", "dense")
    assert done.returncode == 1
    assert "does not answer as its graph does" in done.stderr.splitlines()[-1]


def test_the_process_of_snapvit_times_the_same_family(family, tmp_path):
    for package in ("numpy", "onnx", "msgspec", "tensorrt", "snapvit_export"):
        pytest.importorskip(package)
    from snapvit_export.progress import Silent
    from snapvit_export.selection.on_device import TimingOptions, profile_family

    found = profile_family(family, TimingOptions(runtime="tensorrt"), Silent())
    assert found.failed == {}
    assert all(profile.compared is not None for profile in found.profiles.values())
    found.save(tmp_path / "profile.json")
    keep(tmp_path / "profile.json", "in-process")


def test_the_board_tells_its_power_and_what_throttles_it(tmp_path):
    jetson_agent = agent()
    power, reason = jetson_agent.power_of()
    assert power is not None, reason
    idle = jetson_agent.idle_watts(power)
    assert idle is not None
    assert 0.5 < idle < 500
    assert jetson_agent.over_currents(), "no oc*_event_cnt below /sys/class/hwmon"
    assert jetson_agent.power_modes()
    assert jetson_agent.current_mode() in jetson_agent.power_modes()
    told = {"power": power.source, "idle_w": idle, "rails": list(jetson_agent.rails_of()), "refresh_s": power.refresh}
    (tmp_path / "power.json").write_text(json.dumps(told))
    keep(tmp_path / "power.json", "power")
