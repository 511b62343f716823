"""The tests themselves: a file of tests depends on the library, on tests/helpers/, and on benchmarks/torch_export."""

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
    files = [path for path in TESTS.rglob("*.py") if path.name.startswith("test_") or path.name == "conftest.py"]
    forbidden = {path.stem for path in files} | {"tests", "."}
    found = {path.relative_to(TESTS).as_posix(): imported_by(path) & forbidden for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_folders_of_tests_are_packages_of_the_library():
    packages = {path.parent.name for path in (ROOT / "snapvit_export").glob("*/__init__.py")}
    packages |= {"calibration", "cli", "profiles", "fuzz"}  # the last is of all of them
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/test_*.py")}
    assert folders <= packages


def test_no_two_files_of_tests_have_the_same_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))
