"""Timing in a new process: the same Profiles, of another process, that fails in one line and never outlives us."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers.shared import ROOT
from snapvit_export.errors import SnapvitError
from snapvit_export.profiling import new_process
from snapvit_export.profiling.timer import File, Timer
from snapvit_export.runtimes.session import device_for
from snapvit_export.storage.atomic import sha256
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
SIZE = 256  # of the images that the graph takes
TELL = "; import json, os; json.dump([os.getpid(), sorted(sys.modules), {cores}], open({path!r}, 'w'))"
CORES = "sorted(os.sched_getaffinity(0))" if hasattr(os, "sched_getaffinity") else "[]"


@pytest.fixture
def file(tmp_path) -> File:
    """A graph of one product, that takes about a millisecond."""
    images, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3, SIZE, SIZE]) for n in ("images", "y"))
    graph = helper.make_graph([helper.make_node("MatMul", ["images", "images"], ["y"])], "product", [images], [result])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return File(path, sha256(path))


@pytest.fixture
def timer() -> Timer:
    inputs = np.random.default_rng(0).normal(size=(1, 3, SIZE, SIZE)).astype(np.float32)
    return Timer(TARGET, device_for(TARGET.runtime), inputs)


@pytest.mark.parametrize("fresh", [False, True])
def test_every_file_has_the_profile_of_its_own_precision(timer, file, fresh):
    files = {"dense": file, "int8": File(file.path, "cd", precision="int8-dynamic")}
    found = timer.time(files, 0.01, at="p90", fresh=fresh)
    assert {name: profile.precision for name, profile in found.items()} == {"dense": "fp32", "int8": "int8-dynamic"}
    assert {name: profile.sha256 for name, profile in found.items()} == {"dense": file.sha256, "int8": "cd"}
    for profile in found.values():
        assert profile.method == ("new process" if fresh else "in-process")
        assert profile.device == timer.device
        assert profile.runs >= 100
        assert (profile.batch, profile.threads, profile.pause_ms) == (1, 1, 0.0)


def test_files_of_smaller_images_and_pauses_are_timed_as_asked(timer, file):
    larger = Timer(TARGET, timer.device, np.zeros((1, 3, SIZE + 8, SIZE), np.float32), pause_ms=1.0)
    found = larger.time({"dense": File(file.path, "ab", image=(SIZE, SIZE))}, 0.01, fresh=True)["dense"]
    assert (found.burst, found.pause_ms) == (1, 1.0)
    with pytest.raises(SnapvitError, match="product.onnx: ONNX Runtime cannot run it"):
        larger.time({"dense": file}, 0.01, fresh=True)


def test_it_is_another_light_process_on_the_same_cores_whatever_lies_in_the_folder(timer, file, tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise ValueError('not the one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_process, "START", new_process.START + TELL.format(cores=CORES, path=str(tmp_path / "told")))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    try:
        if cores:
            os.sched_setaffinity(0, {max(cores)})
        timer.time({"dense": file}, 0.01, fresh=True)
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
    pid, modules, used = json.loads((tmp_path / "told").read_text())
    assert pid != os.getpid()
    assert not {"torch", "timm", "onnx", "rich", "PIL", "typer", "snapvit_export.selection"} & set(modules)
    assert used == ([max(cores)] if cores else [])


def test_samples_are_reported_while_they_are_taken(timer, file):
    seen: list[tuple[float, list[float], int]] = []

    def report(samples):
        taken = samples["dense"]
        assert len(taken.cpu_ms) == len(taken)
        seen.append((time.monotonic(), list(taken.wall_ms), taken.burst))

    found = timer.time({"dense": file, "again": file}, 0.8, report, fresh=True)["dense"]
    assert len(seen) >= 2
    assert time.monotonic() - seen[0][0] > 0.5  # long before the end
    lengths = [len(wall_ms) for _, wall_ms, _ in seen]
    assert 0 < lengths[0] < lengths[-1] <= found.runs
    for _, wall_ms, burst in seen:
        assert burst == found.burst
        assert [round(ms, 4) for ms in wall_ms] == list(found.samples_ms[: len(wall_ms)])


def test_a_file_that_cannot_be_opened_is_told_as_in_this_process(timer, tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"nonsense")
    texts = []
    for fresh in (False, True):
        with pytest.raises(SnapvitError, match="x.onnx: ONNX Runtime cannot open it") as caught:
            timer.time({"x": File(tmp_path / "x.onnx", "ab")}, fresh=fresh)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("import sys; sys.exit('bad\\nno luck')", "no luck"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", "it ended with code 3 and said nothing"),
        ('import os; os.write(1, b\'{"type": "ti\'); os.kill(os.getpid(), 9)', "it was ended by SIGKILL"),
    ],
)
def test_a_process_that_dies_is_one_line(timer, file, monkeypatch, start, says):
    monkeypatch.setattr(new_process, "START", start)
    large = Timer(TARGET, timer.device, np.zeros((1, 3, 1000, 1000), np.float32))  # more than a pipe holds
    with pytest.raises(SnapvitError) as caught:
        large.time({"dense": file, "s40": file}, fresh=True)
    assert str(caught.value) == f"timing dense, s40 in a new process failed: {says}"


def test_what_a_runtime_prints_is_no_message(timer, file, monkeypatch):
    printing = new_process.START.replace(
        "main()",
        "from snapvit_export.profiling import new_process as n; plain = n.time_in_process; "
        "n.time_in_process = lambda *given: (print('noise', flush=True), plain(*given))[1]; main()",
    )
    monkeypatch.setattr(new_process, "START", printing)
    assert timer.time({"dense": file}, 0.01, fresh=True)["dense"].method == "new process"


PARENT = """
import numpy as np, sys
from pathlib import Path
from snapvit_export.profiling.timer import File, Timer
from snapvit_export.runtimes.session import device_for
from snapvit_export.target import Target
target = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
timer = Timer(target, device_for("onnxruntime"), np.zeros((1, 3, {size}, {size}), np.float32))
shown = lambda samples: print("timing", flush=True)
timer.time({{"dense": File(Path(sys.argv[1]), "ab")}}, 60, shown, fresh=True)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not list processes as files")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_process_that_started_it_and_leaves_no_file(file, tmp_path, how):
    (tmp_path / "temporary").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(size=SIZE), file.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)},
    )
    with parent:
        assert parent.stdout.readline() == b"timing\n"
        children = children_of(parent.pid)
        parent.send_signal(how)
        parent.wait(timeout=10)
    assert len(children) == 1
    end = time.monotonic() + 5
    while is_alive(children[0]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_alive(children[0])
    left = {path.name for path in (tmp_path / "temporary").iterdir()}
    assert left <= {".ses"}  # which ONNX Runtime itself writes when it is imported


def children_of(pid: int) -> list[int]:
    found = [path for path in Path("/proc").glob("[0-9]*/stat") if state_and_parent(path)[1] == str(pid)]
    return [int(path.parent.name) for path in found]


def is_alive(pid: int) -> bool:
    return state_and_parent(Path(f"/proc/{pid}/stat"))[0] not in ("", "Z")  # nobody may be there to bury it


def state_and_parent(stat: Path) -> tuple[str, str]:
    try:
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", ""
    return state, parent
