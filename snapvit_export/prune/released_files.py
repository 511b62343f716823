"""Reads files of the released SnapViT code, `.pt`: dictionaries of tensors and plain values. Nothing is executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import FileFormatError, SnapvitError, first_line
from ..storage.reading import MOST_ARRAYS, check_archive, check_readable


def load_released(path: Path, what: str, allowed: Sequence[Any] = ()) -> Mapping[Any, Any]:
    """Read a dictionary that should be `what`, such as a "score file"; `allowed`: further classes of its values."""
    if not path.is_file():
        raise SnapvitError(f"{path}: no such {what}")
    check_readable(path, MOST_ARRAYS)
    check_archive(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere inside the reader
        raise FileFormatError(f"{path}: not a readable {what}: {first_line(error)}") from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError(f"{path}: not a {what} of the released SnapViT code")
    return loaded
