"""The architecture holds: every package imports only what stands above it, and torch stays in its own half.

The picture is `LAYERS`, top first. Imports inside functions and those for type checkers count like any other.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "snapvit_export": ROOT / "snapvit_export",
    "snapvit_export.calibration": ROOT / "calibration",
    "snapvit_export.cli": ROOT / "cli",
    "snapvit_export.profiles": ROOT / "profiles",
}
LAYERS = """
errors progress
storage
target budget
calibration profiles
model
correction
allocation
elastic
graph
runtimes
checks
profiling
family
selection
evaluate
prune
report
workflows
bundled
cli
"""
LEVEL = {name: level for level, line in enumerate(LAYERS.split("\n")) for name in line.split()}


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by its full name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(name: str) -> set[str]:
    """The modules of the library that a module imports, anywhere in its text."""
    path, found = modules()[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= {each if each in modules() else base for each in names}
    return found & set(modules())


def test_imports_only_go_up():
    wrong = set()
    for name in modules().keys() - {"snapvit_export"}:  # which only names what is public, for type checkers
        here = name.removeprefix("snapvit_export.")
        for other in imported(name) - {"snapvit_export"}:
            there = other.removeprefix("snapvit_export.")
            if here.split(".")[0] != there.split(".")[0] and LEVEL[there.split(".")[0]] >= LEVEL[here.split(".")[0]]:
                wrong.add((here, there))
    assert wrong == set()
