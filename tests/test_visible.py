"""Control characters of names, labels and messages become visible, on every way out."""

import ast
import json
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from helpers.shared import ROOT
from snapvit_export.runtimes import jetson_agent
from snapvit_export.visible import heard, visible, visible_json

EVERY = "".join(map(chr, range(sys.maxunicode + 1)))
BIDI = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
# The only places that print: the one way out, tables and notes of what went through it, and two programs that stand
# alone on a device.
PRINTERS = {"visible.py": 1, "report/terminal.py": 1, "cli/progress.py": 1, "runtimes/jetson_agent.py": 1}
PRINTERS |= {"runtimes/board_side.py": 1}  # for the other end of a connection, whose way out it takes
PRINTERS |= {"prune/models/plain_timm.py": 1}  # a number, in the program that is shipped with a model for torch


def controls(text: str) -> set[str]:
    """Characters that do something to a terminal or to the writing direction, or that cannot be written at all."""
    found = {c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    return found | {c for c in text if unicodedata.bidirectional(c) in BIDI or c in "\u200e\u200f\u061c"}


def test_every_control_character_becomes_an_escape_and_everything_else_stays():
    hidden = controls(EVERY) | {"\ufffe", "\uffff"}
    assert {c for c in EVERY if visible(c) != c} == hidden
    assert all(visible(c).isascii() and visible(c).isprintable() for c in hidden)
    assert visible("a\x1b[2Jb\nc\x9b\u202e\udcff") == r"a\x1b[2Jb\nc\x9b\u202e\udcff"


@given(st.text())
def test_what_is_visible_is_one_line_and_stays_as_it_is(text):
    shown = visible(text)
    assert not controls(shown)
    assert len(shown.splitlines()) <= 1
    assert visible(shown) == shown


def test_the_agent_that_runs_alone_shows_the_same():
    assert [jetson_agent.visible(c) for c in EVERY] == [visible(c) for c in EVERY]


@given(st.recursive(st.text(st.characters(exclude_categories=["Cs"])), st.lists, max_leaves=5))
def test_json_says_the_same_without_control_characters_in_any_encoding(value):
    text = json.dumps(value, ensure_ascii=False, indent=1)
    for encoding in ("utf-8", "ascii", "latin-1"):
        shown = visible_json(text, encoding)
        assert json.loads(shown) == value
        assert controls(shown) <= {"\n"}
        shown.encode(encoding)


def test_what_a_foreign_library_prints_is_said_on_standard_error(capsys):
    with heard():
        print("first\x1b[31m\nsecond")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "first\\x1b[31m\nsecond\n"


def test_all_output_goes_through_one_function():
    folders = {"": ROOT / "snapvit_export", "cli/": ROOT / "cli", "calibration/": ROOT / "calibration"}
    found: dict[str, int] = {}
    for prefix, folder in folders.items():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("print", "secho", "echo"):
                    name = f"{prefix}{path.relative_to(folder)}"
                    found[name] = found.get(name, 0) + 1
                wrote = isinstance(node, ast.Attribute) and node.attr in ("write", "writelines")
                assert not (wrote and ast.unparse(node.value) in ("sys.stdout", "sys.stderr")), path
    assert found == PRINTERS
