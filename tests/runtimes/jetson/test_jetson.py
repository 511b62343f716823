"""On a real Jetson: the agent builds, compares and times families in every precision, and leaves dated records.

    python3 -m pytest tests/runtimes/jetson

Needs Python and pytest, no other package; anywhere else it is skipped. The families beside this file are tiny; they are
made by `python tools/make_board_families.py`. Records go into `records/`.
"""

import json
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
AGENT = ROOT / "snapvit_export" / "runtimes" / "jetson_agent.py"
FAMILIES = Path(__file__).parent / "families"

pytestmark = pytest.mark.jetson


@pytest.fixture(scope="module", autouse=True)
def jetson() -> None:
    if not Path("/etc/nv_tegra_release").is_file():
        pytest.skip("needs an NVIDIA Jetson: there is no /etc/nv_tegra_release")


@pytest.mark.parametrize("precision", sorted(path.name for path in FAMILIES.iterdir()))
def test_the_agent_times_a_family_with_the_real_trtexec(tmp_path, precision):
    out, family = tmp_path / "jetson.json", FAMILIES / precision
    call = [sys.executable, str(AGENT), str(family), "--out", str(out), "--seconds", "3"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, manifest = json.loads(out.read_text()), json.loads((family / "manifest.json").read_text())
    _keep(out, precision)
    assert set(found["profiles"]) == {variant["name"] for variant in manifest["variants"]}
    assert all(profile["p50_ms"] > 0 for profile in found["profiles"].values())
    assert found["target"]["runtime"] == "tensorrt"
    assert found["target"]["device"]["accelerator"]["power_mode"] != "unknown"
    if manifest.get("reference"):
        assert all(profile["compared"]["passed"] for profile in found["profiles"].values())


def _keep(out: Path, precision: str) -> None:
    """Copy what was measured into the records, whatever is thought of it afterwards."""
    records, day = ROOT / "records", datetime.now(timezone.utc).strftime("%Y-%m-%d")
    records.mkdir(exist_ok=True)
    for path in (out, out.with_name("jetson.record.json")):
        shutil.copy(str(path), str(records / f"{day}-{precision}-{path.name}"))
