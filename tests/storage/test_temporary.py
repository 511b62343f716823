"""What killed runs leave behind goes, what living ones make stays, and of two runs with one goal one wins whole."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from snapvit_export.errors import SnapvitError
from snapvit_export.storage import temporary
from snapvit_export.storage.atomic import check_place, check_writable, staged_folder, write_atomically
from snapvit_export.storage.temporary import (
    is_temporary,
    remove_leftovers,
    scratch_folder,
    temporary_file,
    temporary_folder,
)

BEGINS = """
import sys, time
from pathlib import Path
from snapvit_export.storage.atomic import staged_folder
from snapvit_export.storage.temporary import temporary_file
goal = Path(sys.argv[1])
with temporary_file(goal.parent, "profile.json"), staged_folder(goal, ["mine"]) as stage:
    (stage / "mine").write_text("new")
    print("begun", flush=True)
    time.sleep(60)
"""
ENDS = """
import sys, time
from pathlib import Path
from snapvit_export.errors import SnapvitError
from snapvit_export.storage.atomic import staged_folder
goal, who, at = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
time.sleep(max(0, at - time.time()))
try:
    with staged_folder(goal, ["part0", "part1"]) as stage:
        for i in range(2):
            (stage / f"part{i}").write_text(who)
            time.sleep(0.2)
except SnapvitError as error:
    sys.exit(str(error))
"""


def begun(goal: Path) -> subprocess.Popen:
    """A process that has begun to write a folder, and a file beside it."""
    process = subprocess.Popen([sys.executable, "-c", BEGINS, str(goal)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("again", ["staged_folder", "check_writable", "check_place"])
def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path, again):
    kill(begun(tmp_path / "out"))
    left = hidden(tmp_path)
    assert len(left) == 2
    assert all(map(is_temporary, left))
    if again == "check_writable":
        check_writable(tmp_path / "out", None)
    elif again == "check_place":
        check_place(tmp_path / "profile.json")
    else:
        with staged_folder(tmp_path / "out", None) as stage:
            assert hidden(tmp_path) == [stage.name]
    assert hidden(tmp_path) == []


def test_a_run_that_lives_keeps_what_it_has_begun_and_the_second_one_is_refused_at_its_start(tmp_path):
    first = begun(tmp_path / "out")
    try:
        left = hidden(tmp_path)
        with pytest.raises(SnapvitError, match="another run is writing it"), staged_folder(tmp_path / "out", None):
            pytest.fail("the block must not run")
        with pytest.raises(SnapvitError, match="out: another run is writing it"):
            check_writable(tmp_path / "out", None)
        with staged_folder(tmp_path / "other", None) as stage:
            (stage / "x").write_text("x")
        check_place(tmp_path / "profile.json")
        assert hidden(tmp_path) == left
    finally:
        kill(first)


def test_of_two_processes_with_one_goal_one_wins_whole_and_the_other_says_so(tmp_path):
    goal, at = tmp_path / "out", str(time.time() + 1.5)
    command = [sys.executable, "-c", ENDS, str(goal)]
    both = [subprocess.Popen([*command, who, at], stderr=subprocess.PIPE, text=True) for who in ("one", "two")]
    said = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    winner = ("one", "two")[[process.returncode for process in both].index(0)]
    assert {path.name: path.read_text() for path in goal.iterdir()} == {"part0": winner, "part1": winner}
    assert [line for text in said for line in text.splitlines()] == [
        f"{goal}: another run is writing it at this moment. Wait for it, or choose another --out"
    ]
    assert hidden(tmp_path) == []


def test_a_run_that_could_not_see_the_other_one_does_not_replace_its_result(tmp_path, monkeypatch):
    """As on two machines whose locks are their own."""
    monkeypatch.setattr("snapvit_export.storage.atomic.is_being_written", lambda goal: False)
    goal = tmp_path / "out"
    with pytest.raises(SnapvitError, match="somebody else wrote it meanwhile"), staged_folder(goal, ["mine"]) as late:
        (late / "mine").write_text("late")
        with staged_folder(goal, ["mine"]) as stage:
            (stage / "mine").write_text("first")
    assert (goal / "mine").read_text() == "first"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("blind", [False, True])
def test_many_threads_with_one_goal_leave_one_whole_folder(tmp_path, monkeypatch, blind):
    if blind:
        monkeypatch.setattr("snapvit_export.storage.atomic.is_being_written", lambda goal: False)
    goal, ends = tmp_path / "out", []

    def run(who: int) -> None:
        for _ in range(10):
            try:
                with staged_folder(goal, ["part0", "part1"]) as stage:
                    for i in range(2):
                        (stage / f"part{i}").write_text(str(who))
                ends.append("won")
            except SnapvitError as error:
                ends.append(str(error))

    threads = [threading.Thread(target=run, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 40
    assert "won" in ends
    assert all(end == "won" or "another run is writing" in end or "somebody else wrote" in end for end in ends), ends
    parts = [(goal / f"part{i}").read_text() for i in range(2)]
    assert parts[0] == parts[1]
    assert hidden(tmp_path) == []


def test_a_replacement_that_was_cut_off_between_its_renames_is_put_back(tmp_path):
    goal = tmp_path / "out"
    goal.mkdir()
    (goal / "mine").write_text("old")
    with temporary_folder(tmp_path, "out.replaced") as aside:
        name = aside.name
    (tmp_path / name).mkdir()
    goal.rename(tmp_path / name / "old")
    remove_leftovers(tmp_path)
    assert (goal / "mine").read_text() == "old"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("goal", ["", ".", ".."])
def test_a_replacement_of_nothing_is_not_put_back(tmp_path, goal):
    """Names that a stranger may have given."""
    inside = tmp_path / "inside"
    left = inside / f".{goal}.replaced.snapvit-{temporary._machine()}-00000000"
    (left / "old").mkdir(parents=True)
    remove_leftovers(inside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
    assert list(inside.iterdir()) == []


def left_by(machine: str, folder: Path, age: float = 0.0) -> Path:
    """A leftover as a machine would have named it, touched so many seconds ago."""
    path = folder / f".out.snapvit-{machine}-01234567"
    path.mkdir()
    (path / "part").write_text("x")
    for each in (path / "part", path):
        os.utime(each, (time.time() - age,) * 2)
    return path


def test_what_another_machine_made_stays_until_it_is_two_days_old(tmp_path):
    path = left_by("deadbeef", tmp_path, age=3600)
    remove_leftovers(tmp_path)
    assert path.exists()
    old = left_by("deadbeee", tmp_path, age=temporary.OTHERS_SECONDS + 60)
    remove_leftovers(tmp_path)
    assert path.exists()
    assert not old.exists()


def test_where_nothing_can_be_locked_only_old_leftovers_go(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary, "_lock", lambda handle: "unknown")
    young, old = tmp_path / "a", tmp_path / "b"
    young.mkdir()
    old.mkdir()
    left_by(temporary._machine(), young)
    left_by(temporary._machine(), old, age=temporary.OTHERS_SECONDS + 60)
    remove_leftovers(young)
    remove_leftovers(old)
    assert len(hidden(young)) == 1
    assert hidden(old) == []
    write_atomically(young / "x", b"x")
    with staged_folder(young / "out", None) as stage:
        (stage / "x").write_text("x")
    assert (young / "out" / "x").read_text() == "x"


def test_names_of_others_links_and_pipes_are_left_alone(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("x")
    machine = temporary._machine()
    (tmp_path / f".link.snapvit-{machine}-00000000").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / f".pipe.snapvit-{machine}-00000001")
    for name in (".env", ".out.backup", ".out.snapvit-1", f"out.snapvit-{machine}-00000002"):
        (tmp_path / name).write_text("somebody's")
    before = sorted(path.name for path in tmp_path.iterdir())
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "victim" / "file").read_text() == "x"


def test_files_beside_a_locked_one_of_the_same_number_stay_with_it(tmp_path):
    with ExitStack() as open_files:
        copy = open_files.enter_context(temporary_file(tmp_path, "tap", ".xml"))
        copy.with_suffix(".bin").write_bytes(b"weights")
        remove_leftovers(tmp_path)
        assert copy.with_suffix(".bin").exists()
    remove_leftovers(tmp_path)
    assert hidden(tmp_path) == []


def test_a_file_that_many_threads_write_at_once_is_one_of_theirs(tmp_path):
    contents = [bytes([65 + i]) * 10000 for i in range(4)]

    def write(content: bytes) -> None:
        for _ in range(20):
            write_atomically(tmp_path / "x.bin", content)
            check_place(tmp_path / "x.bin")

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "x.bin").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_a_scratch_folder_of_a_killed_run_is_removed_by_the_next_one_and_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "from snapvit_export.storage.temporary import scratch_folder\nimport time\n"
    program += "with scratch_folder():\n    print('begun', flush=True)\n    time.sleep(60)"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        assert process.stdout.readline() == "begun\n"
        left = hidden(tmp_path)
        assert len(left) == 1
        with scratch_folder() as scratch:
            assert hidden(tmp_path) == sorted([*left, scratch.name])
    finally:
        kill(process)
    with scratch_folder() as scratch:
        (scratch / "x").write_text("x")
        assert hidden(tmp_path) == [scratch.name]
        with scratch_folder() as second:  # of the same process
            assert hidden(tmp_path) == sorted([scratch.name, second.name])
    assert hidden(tmp_path) == []
