"""Checksummed files: arrays and a JSON text in one safetensors file, with a hash over both. Light.

Any changed byte that matters is noticed. Equal contents give equal files: the metadata has a single key, since
safetensors writes several in any order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, SnapvitError
from .atomic import write_atomically
from .reading import MOST_ARRAYS, check_readable

Arrays = Mapping[str, npt.NDArray[Any]]


def save_checksummed(path: Path, kind: str, arrays: Arrays, text: str) -> None:
    """Write a file of this `kind`; it appears whole or not at all."""
    from safetensors.numpy import save

    copies = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    checked = json.dumps({"sha256": _digest(text, copies), "text": text})
    write_atomically(path, save(copies, metadata={kind: checked}))


def load_checksummed(path: Path, kind: str) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Read the arrays and the text of a file of this `kind`, after checking that they are what was written."""
    arrays, metadata = _read(path)
    if kind not in metadata:
        raise FileFormatError(f"{path}: not a {kind} file")
    try:
        checked = json.loads(metadata[kind])
        written, text = checked["sha256"], checked["text"]
        intact = isinstance(text, str) and written == _digest(text, arrays)
    except (ValueError, TypeError, KeyError, RecursionError):
        intact, text = False, ""
    if not intact:
        raise FileFormatError(f"{path}: damaged: its contents do not match its hash. Make or copy it again")
    return arrays, text


def is_checksummed(path: Path, kind: str) -> bool:
    """Return True if a file is of this `kind`, by its header alone: it may still be damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return kind in (file.metadata() or {})
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _digest(text: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"|{name}|{array.dtype.str}{array.shape}|".encode(errors="surrogatepass"))
        digest.update(np.ascontiguousarray(array).data)  # its bytes, without a copy of them
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    check_readable(path, MOST_ARRAYS)
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise SnapvitError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileFormatError(f"{path}: not a readable safetensors file: {error}") from error
