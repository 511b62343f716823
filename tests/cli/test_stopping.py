"""Signals end a command soon, whatever it does, and nothing half-written is left.

The promise is two seconds. The tests wait for ten: on a machine that does other work a process may not run for seconds.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.endless import endless_graph, make_endless
from helpers.images import make_image_folder

GONE = 10.0  # seconds
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
# A program that is in a block with a staged folder and a temporary file when the signal comes.
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from snapvit_export.cli.stopping import ends_when_stopped
from snapvit_export.storage.atomic import staged_folder
from snapvit_export.storage.temporary import scratch_folder
with ends_when_stopped(), staged_folder(Path("out"), None) as stage, scratch_folder(Path(".")) as scratch:
    (stage / "half.bin").write_bytes(bytes(1000))
    (scratch / "half.bin").write_bytes(bytes(1000))
    try:
        {work}
    finally:
        {tidy}
"""
NATIVE = """
        from snapvit_export.runtimes.ort import OrtSession
        with OrtSession(Path(sys.argv[1]), 1) as session:
            print("running", flush=True)
            session.run(np.zeros((1, 4), np.float32))
"""
IN_PYTHON = """
        print("running", flush=True)
        while True: time.sleep(0.01)
"""


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A graph that ONNX Runtime never finishes."""
    return endless_graph(tmp_path / "endless.onnx")


@pytest.fixture
def endless_variant(family_and_elastic: Path, tmp_path: Path) -> Path:
    """The dense variant of a family, alone with its weights, that never ends either."""
    folder = tmp_path / "variant"
    folder.mkdir()
    for path in (family_and_elastic / "family").iterdir():
        if path.suffix in (".onnx", ".bin"):
            shutil.copy(path, folder / path.name)
    make_endless(folder / "dense.onnx")
    return folder / "dense.onnx"


@pytest.fixture
def start():
    """Start Python; whatever is still running after the test is killed, as some of these would never end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object, at: Path) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=at,
                stdout=pipe,
                stderr=pipe,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which nohup has these tests ignore
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], how: int) -> str:
    """Send a signal; return what it said on standard error before it was gone."""
    process.send_signal(how)
    try:
        _, err = process.communicate(timeout=GONE)
    finally:
        process.kill()
    assert process.returncode == 128 + how
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("how", SIGNALS)
def test_a_command_in_a_native_call_ends_and_leaves_nothing(how, endless_variant, tmp_path, start):
    folder, images = endless_variant.parent, make_image_folder(tmp_path / "images", 10)
    before = sorted(path.name for path in folder.iterdir())
    asked = ["evaluate", endless_variant, "--by", "head", "--data", images]
    process = start("-m", "snapvit_export.cli", *asked, at=tmp_path)
    for line in process.stderr:
        if line.startswith("running"):  # images through the file
            break
    assert any(path.name.startswith(".tap.") for path in folder.iterdir())  # a copy of the file, with more outputs
    time.sleep(0.5)  # it is inside the call
    ended(process, how)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("work", [NATIVE, IN_PYTHON], ids=["native", "python"])
def test_staged_folders_and_scratch_are_removed(how, work, endless, tmp_path, start):
    (tmp_path / "here").mkdir()
    process = start("-c", PROGRAM.format(work=work.strip(), tidy="pass"), endless, at=tmp_path / "here")
    assert process.stdout.readline() == "running\n"
    assert len(list((tmp_path / "here").iterdir())) == 2
    time.sleep(0.2)  # it is inside the call
    err = ended(process, how)
    assert list((tmp_path / "here").iterdir()) == []
    assert ("stopped from outside" in err) == (how != signal.SIGINT)


def test_a_second_interrupt_does_not_keep_it_from_tidying_up(tmp_path, start):
    tidy = 'print("tidying", flush=True); time.sleep(0.5); Path("tidied").touch()'
    process = start("-c", PROGRAM.format(work=IN_PYTHON.strip(), tidy=tidy), at=tmp_path)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "tidying\n"
    ended(process, signal.SIGINT)
    assert [path.name for path in tmp_path.iterdir()] == ["tidied"]


def test_tidying_up_for_ever_ends_too(tmp_path, start):
    process = start("-c", PROGRAM.format(work=IN_PYTHON.strip(), tidy="time.sleep(600)"), at=tmp_path)
    assert process.stdout.readline() == "running\n"
    ended(process, signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_what_was_ignored_stays_ignored(tmp_path, start):
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start("-c", ignoring + PROGRAM.format(work=IN_PYTHON.strip(), tidy="pass"), at=tmp_path)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.5)
    ended(process, signal.SIGTERM)


def test_handlers_are_given_back_when_the_command_is_over(snapvit):
    before = [signal.getsignal(number) for number in SIGNALS]
    assert snapvit("--version").code == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    assert fd == -1
