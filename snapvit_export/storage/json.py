"""Strict JSON: the one way values are written and read back, bounded, with errors that name the place.

A file of a stranger is refused where JSON itself is vague: keys that are given twice, nesting without end, numbers that
no computer holds, characters that end a name early. Light: standard library and msgspec.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ..errors import FileFormatError, SnapvitError
from .atomic import write_atomically
from .reading import MOST_JSON, check_readable

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Some = Annotated[int, msgspec.Meta(ge=1, le=2**53)]  # a count of what cannot be none
Size = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
Kept = Annotated[int, msgspec.Meta(ge=0, le=10**7)]  # structures kept of a size; 0: none
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
# Of a variant or a file in a folder: a path that is made from it stays in that folder, and can be shown and typed. The
# length leaves room for what a temporary name adds; a $ in place of \Z would let a newline pass.
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_+-][A-Za-z0-9_.+-]*\Z", max_length=180)]
NAME_RULE = "a name of letters, digits and _ . + - that does not begin with a dot"
# Numbers that are finite in sums, products and percent too: 1e308 is not.
Finite = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e100)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e100)]

DEEPEST = 64  # levels of lists and objects within each other; our own files have a dozen
LONGEST_NUMBER = 40  # digits in a row; our own have 17
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # or the rest, where its end is missing
_DIGITS = re.compile(rb"\d{%d}" % (LONGEST_NUMBER + 1))
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


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
        raw = data.encode() if isinstance(data, str) else data
        _check_form(raw)
        found = msgspec.json.decode(raw, type=kind)
        json.loads(raw.decode(), object_pairs_hook=_each_key_once)
        return found
    except (msgspec.MsgspecError, SnapvitError, ValueError, ArithmeticError, RecursionError) as error:
        why = re.sub("Expected `str` matching regex '.*'", f"Expected {NAME_RULE}", str(error))
        raise FileFormatError(f"{where}: not a valid {kind.__name__}: {why}") from error


def _check_form(data: bytes) -> None:
    """Refuse what no file of ours has and what readers take in different ways, or never come back from."""
    if _NUL.search(data):
        raise ValueError("a text has a NUL character")
    outside = _STRING.sub(b"", data)
    if _DIGITS.search(outside):
        raise ValueError(f"a number has more than {LONGEST_NUMBER} digits")
    level = 0
    for bracket in outside.translate(None, _NOT_BRACKETS):
        level += 1 if bracket in b"[{" else -1
        if level > DEEPEST:
            raise ValueError(f"its values are nested more than {DEEPEST} deep")


def _each_key_once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"{name!r} is given twice")
        seen.add(name)


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
