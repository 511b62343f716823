"""Files that mean harm."""

from __future__ import annotations

from pathlib import Path


class Bomb:
    """Pickles to a call that would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))
