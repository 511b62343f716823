"""The tests themselves: a file of tests depends on the library and on tests/helpers/ alone."""

import ast
from pathlib import Path

from helpers.shared import ROOT

TESTS = ROOT / "tests"


def imported_by(path: Path) -> set[str]:
    """The first name of every module that the file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else node.module.split(".")[0])
    return found


def test_nothing_is_imported_from_a_test_file_or_conftest():
    forbidden = {path.stem for path in TESTS.glob("*.py")} | {"tests", "."}
    found = {path.relative_to(TESTS).as_posix(): imported_by(path) & forbidden for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
