"""What is being written: files and folders under temporary names, for a program that must end before its time. Light.

Whoever makes one removes it when its block ends. A long call into native code keeps a block from ending; then
`remove_unfinished` can do it from another thread.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

_begun: set[Path] = set()


def begun(path: Path) -> Path:
    """Know a file or folder as unfinished from now on; return it."""
    _begun.add(path.absolute())
    return path


def ended(path: Path) -> None:
    """Forget it: it was renamed or removed."""
    _begun.discard(path.absolute())


def remove_unfinished() -> None:
    """Remove all that is unfinished: the program ends."""
    for path in tuple(_begun):
        shutil.rmtree(path, ignore_errors=True)  # of a file it is an error
        with contextlib.suppress(OSError):
            path.unlink()
