"""Temporary files and folders beside their goal: locked while in use; what a killed process left is removed. Light.

    .snapvit-family.snapvit-3f9c21aa-0b77d1c4       goal, this machine since its last start, a number of its own

The lock of a process (flock) ends with it, however it ends. So the next run can tell what is nobody's any more: what is
named like this and can be locked. A disk may be shared with machines whose locks are not seen here; what they made, or
this machine before its last start, is removed only when it has not been touched for two days.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

from .unfinished import begun, ended

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no locks on this system: nothing is ever taken for left behind
    fcntl = None

OTHERS_SECONDS = 2 * 24 * 3600  # without a change, after which a leftover of another machine is removed too
WAIT_SECONDS = 10.0  # for another process that looks around or renames, which takes milliseconds
REPLACED, KEPT = "replaced", "old"  # a folder GOAL.replaced holds what GOAL was, as `old`, until the new one is there
SCRATCH = "scratch"  # the goal of folders that become nothing
_NAMED = re.compile(
    r"\.(?P<goal>.+)\.snapvit-(?P<machine>[0-9a-f]{8})-(?P<number>[0-9a-f]{8})(?P<suffix>\.[\w.]+)?", re.DOTALL
)
Lock = Literal["ours", "taken", "unknown"]  # unknown: the file system has no locks


def is_temporary(name: str) -> bool:
    """Return True for names that are given here.

    >>> is_temporary(".profile.json.snapvit-3f9c21aa-0b77d1c4"), is_temporary(".profile.json")
    (True, False)
    """
    return _NAMED.fullmatch(name) is not None


@contextmanager
def temporary_file(parent: Path, goal: str, suffix: str = "") -> Iterator[Path]:
    """Yield a new empty file to be written in place or renamed; it is removed afterwards if it is still there."""
    path, lock = _locked(parent, goal, suffix, lambda new: os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600)))
    try:
        yield begun(path)
    finally:
        path.unlink(missing_ok=True)
        ended(path)
        os.close(lock)


@contextmanager
def temporary_folder(parent: Path, goal: str, is_disposable: bool = True) -> Iterator[Path]:
    """Yield a new empty folder; it is removed afterwards if it is still there.

    `is_disposable`: False if it holds what must not be lost when the program ends before its time, or the block badly.
    """
    path, lock = _locked(parent, goal, "", lambda new: os.mkdir(new, 0o700))
    may_remove = is_disposable
    try:
        yield begun(path) if is_disposable else path
        may_remove = True
    finally:
        with suppress(OSError):
            shutil.rmtree(path, ignore_errors=True) if may_remove else path.rmdir()
        ended(path)
        os.close(lock)


@contextmanager
def scratch_folder(inside: Path | None = None) -> Iterator[Path]:
    """Yield a folder for files that nobody needs afterwards, in the system's own place or inside another folder."""
    place = inside or Path(tempfile.gettempdir())
    remove_leftovers(place, SCRATCH)
    with temporary_folder(place, SCRATCH) as folder:
        yield folder


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time look around in a folder and rename something there."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # it may be written and not read: then without
        yield
        return
    try:
        until = time.monotonic() + WAIT_SECONDS
        while _lock(handle) == "taken" and time.monotonic() < until:
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def is_being_written(goal: Path) -> bool:
    """Return True if a living process has begun a folder or file that is to become `goal`."""
    return any(
        found["goal"] == goal.name and not found["suffix"] and _lock_at(path) == "taken"
        for path, found in _temporaries(goal.parent)
    )


def remove_leftovers(folder: Path, goal: str | None = None) -> None:
    """Remove what dead processes have begun in a folder, or for one goal; a folder that was being replaced is put back.

    Other goals are not looked at where a place is everybody's, such as that for temporary files.
    """
    groups: dict[tuple[str, str], list[tuple[Path, str]]] = defaultdict(list)
    for path, found in _temporaries(folder):
        if goal is None or found["goal"] == goal:
            groups[found["machine"], found["number"]].append((path, found["goal"]))
    for (machine, _), members in groups.items():
        try:
            _remove_dead(machine, dict(members))
        except OSError:  # another process removes it at this moment, or it is another user's
            continue


def _locked(parent: Path, goal: str, suffix: str, make: Callable[[Path], None]) -> tuple[Path, int]:
    """Make something new and lock it before anybody can take it for left behind; return it and its handle."""
    while True:
        path = parent / f".{goal}.snapvit-{_machine()}-{secrets.token_hex(4)}{suffix}"
        make(path)
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # it was taken for left behind in between
        if _lock(handle) != "taken" and _is_at(handle, path):
            return path, handle
        os.close(handle)
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _temporaries(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [(folder / name, found) for name in names if (found := _NAMED.fullmatch(name)) is not None]


def _remove_dead(machine: str, members: dict[Path, str]) -> None:
    """Remove temporaries of one number, unless one of them is in use: those beside the first have no lock."""
    handles: list[int] = []
    try:
        for path in members:
            handles.append(_open(path))
            lock = _lock(handles[-1])
            if lock == "taken" or ((lock == "unknown" or machine != _machine()) and not _is_old(path)):
                return
        for path, goal in members.items():
            _put_back(path, goal)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        for handle in handles:
            os.close(handle)


def _put_back(path: Path, goal: str) -> None:
    """Undo a replacement that was cut off between its two renames."""
    before, name = path / KEPT, goal.removesuffix(f".{REPLACED}")
    if name in (goal, "", ".", "..") or not before.is_dir():
        return
    if not os.path.lexists(path.with_name(name)):
        before.rename(path.with_name(name))


def _is_old(path: Path) -> bool:
    """Return True if neither the path nor anything right inside it has changed for long."""
    inside = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)] if path.is_dir() else []
    return time.time() - max([os.lstat(path).st_mtime, *inside]) > OTHERS_SECONDS


def _lock_at(path: Path) -> Lock:
    try:
        handle = _open(path)
    except OSError:
        return "unknown"
    try:
        return _lock(handle)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    """Open a file or folder to lock it; links are refused, and a pipe does not block."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    kind = os.fstat(handle).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        os.close(handle)
        raise OSError(f"{path} is neither a file nor a folder")
    return handle


def _lock(handle: int) -> Lock:
    if fcntl is None:
        return "unknown"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError:
        return "unknown"
    return "ours"


@cache
def _machine() -> str:
    """Return what tells this machine, since its last start, from others: containers on it have its locks in common."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = os.uname().nodename if hasattr(os, "uname") else ""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
