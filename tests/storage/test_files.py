"""Nothing half-written, nothing foreign overwritten, and a full disk said in one line."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from snapvit_export.errors import SnapvitError
from snapvit_export.storage import atomic
from snapvit_export.storage.atomic import sha256, staged_folder, write_atomically
from snapvit_export.storage.temporary import remove_leftovers
from snapvit_export.storage.unfinished import remove_unfinished


def test_a_file_appears_whole(tmp_path):
    write_atomically(tmp_path / "new" / "x.bin", b"abc")
    write_atomically(tmp_path / "new" / "x.bin", b"abcd")
    assert (tmp_path / "new" / "x.bin").read_bytes() == b"abcd"
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["x.bin"]
    assert (tmp_path / "new" / "x.bin").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sha256(tmp_path / "new" / "x.bin") == "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EIO, "Input/output error")],
)
def test_what_the_system_refuses_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, code, says):
    write_atomically(tmp_path / "x.bin", b"old")

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(SnapvitError, match=says):
        write_atomically(tmp_path / "x.bin", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]
    assert (tmp_path / "x.bin").read_bytes() == b"old"


def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        with pytest.raises(SnapvitError, match="the disk is full"):
            write_atomically(disk / "x.bin", b"x" * 200_000)
        with pytest.raises(SnapvitError, match="the disk is full"), staged_folder(disk / "out", None) as stage:
            write_atomically(stage / "y.bin", b"y" * 200_000)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_large_file_is_hashed_once_and_again_when_it_has_changed(tmp_path, monkeypatch):
    path, read = tmp_path / "weights.bin", []
    plain = atomic._digest
    monkeypatch.setattr(atomic, "_digest", lambda name: read.append(name) or plain(name))
    path.write_bytes(bytes(atomic.LARGE))
    first = sha256(path)
    assert (sha256(path), len(read)) == (first, 1)
    with open(path, "r+b") as file:
        file.write(b"x")
    assert sha256(path) != first
    assert len(read) == 2


def test_a_staged_folder_appears_only_when_all_went_well(tmp_path):
    goal = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), staged_folder(goal, None) as stage:
        (stage / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with staged_folder(goal, None) as stage:
        (stage / "whole").write_text("x")
    assert [p.name for p in goal.iterdir()] == ["whole"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_our_own_files_are_replaced(tmp_path):
    goal = tmp_path / "out"
    goal.mkdir()
    (goal / "ours").write_text("old")
    with staged_folder(goal, ["ours"]) as stage:
        (stage / "new").write_text("x")
    assert [p.name for p in goal.iterdir()] == ["new"]
    with pytest.raises(SnapvitError, match=r"not ours \(new\)"), staged_folder(goal, None):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_swap_keeps_the_old_folder(tmp_path, monkeypatch, stop):
    goal, real = tmp_path / "out", Path.rename
    goal.mkdir()
    (goal / "ours").write_text("old")

    def rename(self: Path, target: Path) -> Path:
        if Path(target) == goal and self.name != "old":
            raise stop
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((stop, SnapvitError)), staged_folder(goal, ["ours"]) as stage:
        (stage / "new").write_text("x")
    assert (goal / "ours").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_swap_that_somebody_else_comes_between_keeps_the_old_folder_and_names_it(tmp_path, monkeypatch):
    goal, real = tmp_path / "out", Path.rename
    goal.mkdir()
    (goal / "ours").write_text("old")

    def rename(self: Path, target: Path) -> Path:
        moved = real(self, target)
        if self == goal:
            goal.mkdir()
            (goal / "theirs").write_text("somebody's")
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(SnapvitError, match="somebody else wrote it") as refused, staged_folder(goal, ["ours"]) as stage:
        (stage / "new").write_text("x")
    (kept,) = [path for path in tmp_path.iterdir() if path != goal]
    assert str(kept) in str(refused.value)
    remove_leftovers(tmp_path)
    assert (kept / "ours").read_text() == "old"
    assert (goal / "theirs").read_text() == "somebody's"


@pytest.mark.parametrize("before", [True, False])
def test_a_program_that_ends_while_a_folder_is_renamed_takes_nothing_from_it(tmp_path, monkeypatch, before):
    goal, real = tmp_path / "out", Path.rename
    if before:
        goal.mkdir()

    def rename(self: Path, target: Path) -> Path:
        remove_unfinished()  # as another thread does when a signal came
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with staged_folder(goal, ()) as stage:
        (stage / "new").write_text("x")
    assert (goal / "new").read_text() == "x"


@pytest.mark.parametrize("place", ["file/out", "file/a/b/out", "/proc/a/b/out"])
def test_places_that_cannot_be_made_are_refused_in_one_line(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SnapvitError, match="cannot be written"), staged_folder(Path(place), None):
        pytest.fail("the block must not run")
    with pytest.raises(SnapvitError, match="cannot be written"):
        write_atomically(Path(place), b"x")


def test_a_relative_file_in_a_place_without_permission(tmp_path, monkeypatch):
    monkeypatch.chdir("/proc")
    with pytest.raises(SnapvitError, match="^x.bin: cannot be written"):
        write_atomically(Path("x.bin"), b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SnapvitError, match="folder: cannot be written"):
        write_atomically(tmp_path / "folder", b"x")


def test_files_that_arrive_meanwhile_are_not_lost(tmp_path):
    goal = tmp_path / "out"
    with pytest.raises(SnapvitError, match="not ours"), staged_folder(goal, None):
        goal.mkdir()
        (goal / "late").write_text("somebody's")
    assert (goal / "late").read_text() == "somebody's"


def test_files_and_links_in_the_way_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(SnapvitError, match="not a folder"), staged_folder(tmp_path / name, None):
            pytest.fail("the block must not run")


def test_a_place_without_permission(tmp_path: Path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SnapvitError, match="no permission to write"), staged_folder(tmp_path / "out", None):
        pytest.fail("the block must not run")
