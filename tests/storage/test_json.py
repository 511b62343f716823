"""Strict JSON: what no file of ours has is refused in one line, whatever the value would be."""

import json

import msgspec
import pytest

from snapvit_export.errors import FileFormatError
from snapvit_export.storage.json import DEEPEST, Finite, Value, from_json, read_json, write_json


class Thing(Value, frozen=True, kw_only=True):
    name: str = ""
    number: Finite = 0.0
    free: dict = msgspec.field(default_factory=dict)


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"free": {"x": ' + "[" * 900 + "]" * 900 + "}}", f"nested more than {DEEPEST} deep"),
        ('{"free": ' + '{"x": ' * 900 + "1" + "}" * 900 + "}", f"nested more than {DEEPEST} deep"),
        ("[" * 10**6, f"nested more than {DEEPEST} deep"),
        ('{"name": "a", "name": "b"}', "'name' is given twice"),
        ('{"free": {"x": {"y": 1, "y": 2}}}', "'y' is given twice"),
        ('{"number": ' + HUGE + "}", "more than 40 digits"),
        ('{"free": {"x": ' + HUGE + "}}", "more than 40 digits"),
        ('{"number": NaN}', "not a valid Thing"),
        ('{"number": Infinity}', "not a valid Thing"),
        ('{"free": {"x": NaN}}', "not a valid Thing"),
        ('{"number": 1e999}', "not a valid Thing"),
        ('{"free": {"x": 1e999}}', "not a valid Thing"),
        ('{"number": 1e308}', "not a valid Thing"),
        ('{"name": "a\\u0000b"}', "NUL"),
        ('{"free": {"a\\\\\\u0000": 1}}', "NUL"),
        ('{"name": "\\ud800"}', "not a valid Thing"),
        ('{"free": {"\\udc00": 1}}', "not a valid Thing"),
        ('{"name": "' + '\\"' * 10**5, "not a valid Thing"),
        ('{"name": "\\', "not a valid Thing"),
        ('{"name": "\ud800"}', "not a valid Thing"),
        ("", "not a valid Thing"),
    ],
)
def test_what_readers_take_in_different_ways_or_fall_over_is_refused(text, says):
    with pytest.raises(FileFormatError) as refused:
        from_json(text, Thing, "thing.json")
    assert str(refused.value).startswith("thing.json: not a valid Thing: ")
    assert says in str(refused.value)


def test_brackets_digits_and_escapes_inside_of_texts_are_texts(tmp_path):
    thing = Thing(name='[{"' * 100 + "\\u0000" + "1" * 100, free={"x": [[["]]]"]]], "é\\": 1.5})
    write_json(tmp_path / "thing.json", thing)
    assert read_json(tmp_path / "thing.json", Thing) == thing


def test_values_as_deep_as_allowed_are_read():
    inner = "[" * (DEEPEST - 2) + "]" * (DEEPEST - 2)
    assert from_json('{"free": {"x": ' + inner + "}}", Thing, "thing.json").free["x"] == json.loads(inner)


class Picky(Value, frozen=True, kw_only=True):
    number: int

    def __post_init__(self) -> None:
        _ = 1 / self.number


def test_a_value_that_fails_while_it_checks_itself_is_refused_with_the_name_of_its_file():
    with pytest.raises(FileFormatError, match="picky.json: not a valid Picky"):
        from_json('{"number": 0}', Picky, "picky.json")
