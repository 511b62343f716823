"""What may be read as a file: a regular one, of a size that makes sense for its kind. Light.

A pipe or a device would be waited for, or read, for ever, and a file of a terabyte fills the memory before anything can
be said about its contents. So every file that a command is given is looked at here before it is opened.
"""

from __future__ import annotations

import os
import stat
import zipfile
from pathlib import Path

from ..errors import SnapvitError
from .memory import memory_bytes

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
# Generous: many times the largest that was ever seen of each kind.
MOST_JSON = 256 * MB
MOST_TEXT = 256 * MB  # a list of all images of ImageNet has 80 MB
MOST_GRAPH = 2 * GB  # protobuf's own limit; weights beyond it lie beside the graph
MOST_ARRAYS = 64 * GB  # weights, rankings, features, images in one file
MOST_IMAGE = 1 * GB


def check_readable(path: Path | str, most_bytes: int) -> None:
    """Refuse what is there but no regular file, or too large; who opens it finds out what is missing."""
    if reason := why_not_read(path, most_bytes):
        raise SnapvitError(f"{path}: cannot be read: {reason}")


def why_not_read(path: Path | str, most_bytes: int) -> str | None:
    """Return why a file will not be read; None if nothing is known against it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    except ValueError:  # a NUL in it
        return "no file can have this name"
    if not stat.S_ISREG(found.st_mode):
        return f"it is {_kind(found.st_mode)}. Give a file"
    if found.st_size > most_bytes:
        return f"it has {_size(found.st_size)}, more than the {_size(most_bytes)} that make sense. Give the right file"
    return None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _size(count: int) -> str:
    for unit, size in (("GB", GB), ("MB", MB), ("KB", KB)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def check_archive(path: Path) -> None:
    """Refuse a zip archive, as `.npz` files and torch's checkpoints are, that unpacks to more than there is memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):  # whoever reads it says what is wrong
        return
    if unpacked > (most := memory_bytes() or MOST_ARRAYS):
        raise SnapvitError(
            f"{path}: cannot be read: it unpacks to {_size(unpacked)}, this machine has {_size(most)} of memory. "
            "Give a smaller file"
        )
