"""On a real Jetson: the agent builds, times and writes what `snapvit` reads. Run with `pytest -m jetson` there.

Leaves a dated JSON record in `records/`; anywhere else it is skipped.
"""

import json
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from helpers.images import make_image_folder
from helpers.models import make_model_folder
from helpers.shared import ROOT
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.runtimes import jetson_agent
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.workflows.export import Request, export

pytestmark = pytest.mark.jetson


@pytest.fixture(scope="module", autouse=True)
def jetson() -> None:
    if not Path("/etc/nv_tegra_release").is_file():
        pytest.skip("needs an NVIDIA Jetson: there is no /etc/nv_tegra_release")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8-static"])
def test_the_agent_times_a_family_with_the_real_trtexec(tmp_path, precision):
    from snapvit_export.target import Target

    make_model_folder(tmp_path / "model")
    make_image_folder(tmp_path / "images")
    target = Target(runtime="onnxruntime", precision=precision, batch=1, threads=1)
    request = Request(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "images"),
        out=tmp_path / "family",
        settings=make_settings("default", images=16),
        sparsity=[0.5],
        target=target,
        flavour="portable",
    )
    export(request)
    out = tmp_path / "jetson.json"
    call = [sys.executable, jetson_agent.__file__, str(tmp_path / "family"), "--out", str(out), "--seconds", "3"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = FamilyProfile.load(out)
    assert set(found.profiles) == {"dense", "s50"}
    assert found.target.device.accelerator is not None
    assert found.target.device.accelerator.power_mode != "unknown"
    records = ROOT / "records"
    records.mkdir(exist_ok=True)
    now = datetime.now(timezone.utc)
    shutil.copy(out, records / f"{now:%Y-%m-%d}-jetson-{precision}.json")
    assert json.loads(out.read_text())["target"]["runtime"] == "tensorrt"


def test_the_board_tells_its_power_and_what_throttles_it():
    power, reason = jetson_agent.power_of()
    assert power is not None, reason
    idle = jetson_agent.idle_watts(power)
    assert idle is not None
    assert 0.5 < idle < 500
    assert jetson_agent.over_currents(), "no oc*_event_cnt below /sys/class/hwmon"
    assert jetson_agent.power_modes()
    assert jetson_agent.current_mode() in jetson_agent.power_modes()
    told = {"power": power.source, "idle_w": idle, "rails": list(jetson_agent.rails_of()), "refresh_s": power.refresh}
    records = ROOT / "records"
    records.mkdir(exist_ok=True)
    (records / f"{datetime.now(timezone.utc):%Y-%m-%d}-jetson-power.json").write_text(json.dumps(told))
