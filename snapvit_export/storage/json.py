"""Strict JSON: the one way values are written and read back, bounded, with errors that name the place.

Light: standard library and msgspec.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ..errors import FileFormatError, SnapvitError
from .atomic import write_atomically
from .reading import MOST_JSON, check_readable

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
Kept = Annotated[int, msgspec.Meta(ge=0, le=10**7)]  # structures kept of a size; 0: none
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An immutable value with a strict JSON form: unknown keys, wrong types and numbers out of bounds are refused."""


T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """Return indented JSON that ends in a newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def from_json(data: bytes | str, kind: type[T], where: str) -> T:
    """Read `kind` from JSON; `where` names the file in the error."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FileFormatError(f"{where}: not a valid {kind.__name__}: {error}") from error


def read_json(path: Path, kind: type[T]) -> T:
    """Read a value from a JSON file."""
    check_readable(path, MOST_JSON)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SnapvitError(f"{path}: cannot be read: {error.strerror or error}") from error
    return from_json(data, kind, str(path))


def as_builtins(value: Any) -> Any:
    """Return the value as plain dicts, lists, strings and numbers."""
    return msgspec.json.decode(msgspec.json.encode(value))  # to_builtins would leave tuples of numbers as tuples


def write_json(path: Path, value: Any) -> None:
    """Write a value, after making sure that it can be read back as the same value."""
    data = to_json(value)
    if from_json(data, type(value), str(path)) != value:
        raise ValueError(f"{path}: {type(value).__name__} does not survive its own file format")
    write_atomically(path, data)
