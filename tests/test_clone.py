"""Python started in a clone, where nothing tells it of the packages that lie beside the library, as a plain install."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.shared import ROOT

BESIDE = ("calibration", "cli", "profiles")


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in that folder, with what is installed here but for what an editable install adds (-S: no .pth files)."""
    known = [entry for entry in map(Path, sys.path) if entry.is_dir() and ROOT not in (entry, *entry.parents)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, known))}
    call = [sys.executable, "-S", *arguments]
    return subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The tree as it is cloned, with folders beside it that are no part of the library."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("snapvit_export", *BESIDE):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    return folder


def test_the_command_line_runs_in_a_clone(clone):
    done = python(clone, "-m", "snapvit_export.cli", "--help")
    assert done.returncode == 0, done.stderr
    assert "export" in done.stdout


def test_all_of_the_library_is_found_in_a_clone_and_nothing_else(clone):
    done = python(
        clone,
        "-c",
        """
import json
from importlib.resources import files
from importlib.util import find_spec

import snapvit_export as sv

sv.load_model("bundled"), sv.prepare
packages = ["cli.app", "calibration.images", "profiles", "bundled"]
print(json.dumps({
    "found": [find_spec(f"snapvit_export.{name}").origin for name in packages],
    "others": [name for name in ("tests", "benchmarks", "snapvit_export") if find_spec(f"snapvit_export.{name}")],
    "cards": sorted(file.name for file in files("snapvit_export.profiles").iterdir() if file.name.endswith(".json")),
    "model": files("snapvit_export.bundled").joinpath("model.json").is_file(),
}))
""",
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert all(Path(origin).is_relative_to(clone) for origin in seen["found"])
    assert seen["others"] == []
    assert seen["cards"] == sorted(path.name for path in (ROOT / "profiles").glob("*.json"))
    assert seen["model"]


def test_what_is_installed_finds_its_own_packages_and_looks_nowhere_else(clone, tmp_path):
    installed = shutil.copytree(clone / "snapvit_export", tmp_path / "snapvit_export")
    for name in BESIDE:
        shutil.copytree(clone / name, installed / name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of somebody else')")
    code = "import sys; before = [*sys.meta_path]; import snapvit_export; print(sys.meta_path == before)"
    assert python(tmp_path, "-c", code).stdout == "True\n"
    done = python(tmp_path, "-m", "snapvit_export.cli", "--help")
    assert done.returncode == 0, done.stderr
