"""Threads are bounded by the cores of this machine, wherever their number comes from."""

import json

import msgspec
import numpy as np
import pytest

from snapvit_export.errors import UsageError
from snapvit_export.family.loaded import load_family
from snapvit_export.runtimes.device import usable_cores
from snapvit_export.runtimes.session import open_session, with_cores_here
from snapvit_export.target import Target

TOO_MANY = 10**7
SAYS = f"{TOO_MANY} threads are more than the {usable_cores()} cores"


@pytest.fixture
def greedy_family(device_folder):
    """A family whose manifest asks for ten million threads."""
    path = device_folder / "family" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["target"]["threads"] = TOO_MANY
    path.write_text(json.dumps(manifest))
    return device_folder / "family"


def test_a_session_with_more_threads_than_cores_is_never_opened(family_and_elastic):
    target = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=usable_cores() + 1)
    path = family_and_elastic / "family" / "dense.onnx"
    with pytest.raises(UsageError, match=f"{usable_cores() + 1} threads are more than .* Give --threads"):
        open_session(path, target)
    with open_session(path, with_cores_here(target)) as session:
        assert len(session.run(np.zeros((1, 3, 96, 96), np.float32))) == 1


@pytest.mark.parametrize("command", ["profile", "choose", "validate"])
def test_threads_of_a_manifest_are_refused_before_any_work(command, snapvit, greedy_family, tmp_path):
    before = sorted(path.name for path in greedy_family.iterdir())
    more = {"profile": ["--out", tmp_path / "p.json"], "choose": ["--budget", "50%"], "validate": ["--data", "digits"]}
    outcome = snapvit(command, greedy_family, *more[command])
    assert (outcome.code, SAYS in outcome.error_line) == (2, True)
    assert sorted(path.name for path in greedy_family.iterdir()) == before
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    "command", [["export", "--budget", "10ms"], ["profile", "family"], ["choose", "family", "--budget", "9ms"]]
)
def test_threads_of_the_command_line_are_refused_with_the_number(command, snapvit, device_folder, monkeypatch):
    monkeypatch.chdir(device_folder)
    outcome = snapvit(*command, "--threads", 1024)
    assert (outcome.code, "1024 threads are more than" in outcome.error_line) == (2, True)


def test_predicting_takes_the_cores_that_there_are(greedy_family):
    image = np.zeros((40, 40, 3), np.uint8)
    assert len(load_family(greedy_family).dense.predict(image)) == 5


def test_a_family_for_a_device_with_more_cores_can_be_compared_here():
    target = Target(runtime="openvino", precision="fp32", batch=1, threads=TOO_MANY)
    assert with_cores_here(target) == msgspec.structs.replace(target, threads=usable_cores())
