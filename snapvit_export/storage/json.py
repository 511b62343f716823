"""Strict JSON: the one way values are written and read back, bounded, with errors that name the place.

Light: standard library and msgspec.
"""

from __future__ import annotations

import re
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
# Of a variant or a file in a folder: a path that is made from it stays in that folder, and can be shown and typed. The
# length leaves room for what a temporary name adds; a $ in place of \Z would let a newline pass.
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_+-][A-Za-z0-9_.+-]*\Z", max_length=180)]
NAME_RULE = "a name of letters, digits and _ . + - that does not begin with a dot"


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An immutable value with a strict JSON form: unknown keys, wrong types and numbers out of bounds are refused."""


T = TypeVar("T")


def is_name(text: str) -> bool:
    """Return True if a path may be made from this text.

    >>> is_name("s30"), is_name("../s30"), is_name(".s30")
    (True, False, False)
    """
    try:
        return bool(msgspec.convert(text, Name))
    except msgspec.ValidationError:
        return False


def to_json(value: Any) -> bytes:
    """Return indented JSON that ends in a newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def from_json(data: bytes | str, kind: type[T], where: str) -> T:
    """Read `kind` from JSON; `where` names the file in the error."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = re.sub("Expected `str` matching regex '.*'", f"Expected {NAME_RULE}", str(error))
        raise FileFormatError(f"{where}: not a valid {kind.__name__}: {why}") from error


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
