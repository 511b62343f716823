"""Atomic writes of files and folders: under a temporary name beside the goal, then one rename. Light.

`write_atomically` is for one file, `staged_folder` for a family. Both turn the system's refusals (read-only place,
full disk) into one line and remove what they had begun.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath

from ..errors import FileFormatError, SnapvitError
from .temporary import KEPT, REPLACED, alone_in, is_being_written, remove_leftovers, temporary_file, temporary_folder
from .unfinished import ended

LARGE = 1 << 24  # bytes: takes far longer to write than the clock of a file system needs for a tick
_ADVICE = {
    errno.ENOSPC: "the disk is full. Free some space or choose another place",
    errno.EDQUOT: "the disk quota is used up. Free some space or choose another place",
    errno.EACCES: "no permission to write there. Choose another place",
    errno.EPERM: "no permission to write there. Choose another place",
    errno.EROFS: "the place is read-only. Choose another one",
}


def cache_folder(what: str) -> Path:
    """Return this user's cache folder for one kind of files, all of which can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapvit" / what


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into one line that says why `path` could not be written."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise SnapvitError(f"{path}: cannot be written: {advice}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_file(path.parent, path.name) as temporary:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())  # until here only its owner can read it
            temporary.replace(path)


@contextmanager
def copy_beside(path: Path, what: str, folder: Path | None = None) -> Iterator[Path]:
    """Yield an empty file in the folder of another, or in `folder`, for a changed copy; it is removed afterwards."""
    with ExitStack() as begun:
        with writing(path):
            copy = begun.enter_context(temporary_file(folder or path.parent, what, path.suffix))
        yield copy


@contextmanager
def staged_folder(goal: Path, replaceable: Collection[str] | None) -> Iterator[Path]:
    """Yield an empty folder that becomes `goal` when the block ends well, and vanishes when it does not.

    `replaceable` names the files that a folder already there may hold, looked for after `settle`; None if nothing may
    be there. Whatever else is found is somebody's work, and the whole is refused. Of two runs with one goal the second
    is refused at its start; where it cannot see the first, on another machine, the one that ends first wins and the
    other says so.
    """
    refuse_foreign(goal, replaceable)
    with ExitStack() as begun:
        with writing(goal):
            goal.parent.mkdir(parents=True, exist_ok=True)
            with alone_in(goal.parent):
                _refuse_second(goal)
                stage = begun.enter_context(temporary_folder(goal.parent, goal.name))
                before = _identity(goal)
        yield stage
        with writing(goal), alone_in(goal.parent):
            if _identity(goal) != before:
                raise SnapvitError(
                    f"{goal}: somebody else wrote it meanwhile, so it is not ours to replace. Choose another --out, or "
                    "run the same command again"
                )
            refuse_foreign(goal, replaceable)  # the work took a while: check again
            stage.chmod(0o777 & ~_umask())
            ended(stage)  # or a signal now would have it emptied under its new name
            _swap(stage, goal)


def settle(goal: Path) -> None:
    """Remove what dead runs left beside the goal and put back what they were replacing: then look what is there."""
    with alone_in(goal.parent):
        remove_leftovers(goal.parent)


def check_writable(goal: Path, replaceable: Collection[str] | None) -> None:
    """Refuse, before long work, a folder that `staged_folder` would refuse after it."""
    refuse_foreign(goal, replaceable)
    with writing(goal):
        goal.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(goal.parent):
            _refuse_second(goal)
            with temporary_folder(goal.parent, goal.name):
                pass


def check_place(path: Path) -> None:
    """Refuse, before long work, a file that could not be written after it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(path.parent):
            remove_leftovers(path.parent)
        with temporary_file(path.parent, path.name):
            pass


def _refuse_second(goal: Path) -> None:
    """Remove what dead runs left beside the goal; refuse if a living one is about to write it."""
    remove_leftovers(goal.parent)
    if is_being_written(goal):
        raise SnapvitError(f"{goal}: another run is writing it at this moment. Wait for it, or choose another --out")


def _identity(goal: Path) -> tuple[int, int] | None:
    """Return which folder it is; None if there is none."""
    try:
        found = os.lstat(goal)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def refuse_foreign(goal: Path, replaceable: Collection[str] | None) -> None:
    """Refuse to replace anything but an empty folder or one with only `replaceable` files."""
    if not goal.exists() and not goal.is_symlink():
        return
    if not goal.is_dir() or goal.is_symlink():
        raise SnapvitError(f"{goal}: exists and is not a folder. Choose another --out")
    foreign = sorted(entry.name for entry in goal.iterdir() if entry.name not in (replaceable or ()))
    if foreign:
        raise SnapvitError(f"{goal}: holds files that are not ours ({', '.join(foreign[:3])}). Choose another --out")


def inside(folder: Path, name: str, listed_in: str) -> Path:
    """Return the file of that name in `folder`; refuse names and links that leave it. `listed_in`: who names it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
        raise FileFormatError(f"{folder / listed_in}: '{name}' leaves the folder")
    found = folder / path
    if not found.resolve().is_relative_to(folder.resolve()):
        raise FileFormatError(f"{found}: a link that leaves the folder")
    return found


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file without holding it in memory; a large one that has not changed is read once."""
    known = os.stat(path)
    if known.st_size < LARGE:
        return _digest(str(path))
    return _digest_once(str(path), known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns)


@lru_cache(maxsize=64)
def _digest_once(path: str, *_: int) -> str:
    return _digest(path)


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _swap(stage: Path, goal: Path) -> None:
    """Put `stage` in the place of `goal`; whatever interrupts this, one of the two is there afterwards."""
    if not goal.exists():
        stage.rename(goal)
        return
    with temporary_folder(goal.parent, f"{goal.name}.{REPLACED}", is_disposable=False) as aside:
        old = aside / KEPT
        try:
            goal.rename(old)
            stage.rename(goal)
        except BaseException as error:
            if stage.exists() and old.exists():
                _restore(old, goal, error)
            raise


def _restore(old: Path, goal: Path, reason: BaseException) -> None:
    """Put back what was in the goal's place; if something else is there by now, keep it under a name to be told."""
    try:
        old.rename(goal)
        return
    except OSError:
        kept = goal.with_name(f"{goal.name}.{REPLACED}-{secrets.token_hex(4)}")  # nobody takes it for left behind
        old.rename(kept)
    raise SnapvitError(
        f"{goal}: somebody else wrote it meanwhile. What was there before is now {kept}. Choose another --out"
    ) from reason


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
