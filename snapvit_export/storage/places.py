"""The places that commands write to, checked before the work begins. Light.

No command writes over a file that it did not make, nor over a part of what it reads, unless the user says `--force`. It
knows its own files by their contents: a profile is replaced by a profile, a ranking by one of the same model and
settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import FileFormatError, SnapvitError
from .atomic import check_place
from .json import read_json


def check_output(
    path: Path,
    kind: str,
    is_ours: Callable[[Path], bool],
    inputs: Iterable[Path | None] = (),
    force: bool = False,
    option: str = "--out",
) -> None:
    """Refuse, before long work, a file that may not or cannot be written after it.

    `kind`: what is written, such as "a profile". `inputs`: files that the command reads, and others that nothing may
    take the place of. Folders, devices and pipes are refused with `force` too.

    >>> check_output(Path("new.json"), "a profile", lambda path: False)
    """
    advice = f"Choose another {option}"
    if path.is_dir():
        raise SnapvitError(f"{path}: is a folder. Give {option} a file in it")
    if path.exists() and not path.is_file():
        raise SnapvitError(f"{path}: is not an ordinary file. {advice}")
    if not force:
        if any(_is_same(path, each) for each in inputs if each is not None):
            raise SnapvitError(f"{path}: is read by this command, or a part of its folder. {advice}, or give --force")
        if os.path.lexists(path) and not is_ours(path):
            raise SnapvitError(f"{path}: is there already, and not {kind} that snapvit made. {advice}, or give --force")
    check_place(path)


def is_json_of(kind: type) -> Callable[[Path], bool]:
    """Return what tells if a file is the JSON form of a value."""

    def is_ours(path: Path) -> bool:
        try:
            return path.is_file() and read_json(path, kind) is not None
        except FileFormatError:
            return False

    return is_ours


def _is_same(path: Path, other: Path) -> bool:
    if path.parent.resolve() / path.name == other.parent.resolve() / other.name:
        return True
    return path.exists() and other.exists() and path.samefile(other)
