"""The architecture holds: every package imports only what stands above it, and torch stays in its own half.

The layers are those that docs/architecture.md shows, top first. Imports inside functions and for type checkers count
like any other. A subfolder is a part of its folder.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from helpers.shared import ROOT

FOLDERS = {
    "snapvit_export": ROOT / "snapvit_export",
    "snapvit_export.calibration": ROOT / "calibration",
    "snapvit_export.cli": ROOT / "cli",
    "snapvit_export.profiles": ROOT / "profiles",
}
PAGE = (ROOT / "docs" / "architecture.md").read_text()
INSIDE_PRUNE = """
blocks released_files
models
stats
correct
rank
pack
build compare import_scores released_features torch_parity
importance_scores
elastic_vit
recover
"""
HEAVY = {"torch", "timm", "torchvision"}


def layers() -> str:
    """The lines of the picture: units of the library, without what the page says of each."""
    shown = re.search(r"<!-- layers -->\n```\n(.*?)```", PAGE, re.DOTALL).group(1)
    return "\n".join(line.split("  ")[0].replace("/", "") for line in shown.splitlines())


def levels(lines: str) -> dict[str, int]:
    return {name: level for level, line in enumerate(lines.split("\n")) for name in line.split()}


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by its full name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def package_of(name: str) -> str:
    return name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]


def base_of(node: ast.ImportFrom, package: str) -> str:
    """The full name of what stands between `from` and `import`."""
    above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def all_imports(name: str) -> list[tuple[str, bool]]:
    """Everything that a module imports, anywhere in its text, and whether that is for type checkers alone."""
    tree, package, found = ast.parse(modules()[name].read_text()), package_of(name), []
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    typing_only = {id(inner) for node in checked for inner in ast.walk(node)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node, package)
            names = [each if (each := f"{base}.{alias.name}") in modules() else base for alias in node.names]
        found += [(each, id(node) in typing_only) for each in names]
    return found


def imported(name: str, at_run_time: bool = False) -> set[str]:
    """The modules of the library that a module imports; `at_run_time`: not those for type checkers."""
    found = {other for other, typing_only in all_imports(name) if not (at_run_time and typing_only)}
    return (found & modules().keys()) - {"snapvit_export", name}


def wrong_ways(prefix: str, lines: str) -> list[tuple[str, str]]:
    """Imports within a package that do not go from one line up to another."""
    level = levels(lines)

    def unit(name: str) -> str:
        return name.removeprefix(prefix).split(".")[0]

    inside = [name for name in modules() if name.startswith(prefix)]
    pairs = [(name, other) for name in inside for other in imported(name) if other.startswith(prefix)]
    return [(a, b) for a, b in pairs if unit(a) != unit(b) and level[unit(b)] >= level[unit(a)]]


def test_imports_only_go_up():
    assert wrong_ways("snapvit_export.", layers()) == []


def test_imports_inside_the_torch_half_only_go_up_too():
    assert wrong_ways("snapvit_export.prune.", INSIDE_PRUNE) == []


def test_every_package_has_a_place_and_every_place_a_package():
    top = {name.split(".")[1] for name in modules() if "." in name}
    assert top == set(levels(layers()))
    inside = {name.split(".")[2] for name in modules() if name.startswith("snapvit_export.prune.")}
    assert inside == set(levels(INSIDE_PRUNE))


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: imported(name, at_run_time=True) for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
        circle = None
    except CycleError as error:
        circle = error.args[1]
    assert circle is None


def test_the_light_half_never_imports_torch_not_even_inside_a_function():
    heavy = {
        name: {other.split(".")[0] for other, _ in all_imports(name)} & HEAVY
        for name in modules()
        if not name.startswith(("snapvit_export.prune", "snapvit_export.workflows"))
    }
    assert {name: found for name, found in heavy.items() if found} == {}


def test_only_workflows_import_the_torch_half():
    outside = [name for name in modules() if not name.startswith(("snapvit_export.prune", "snapvit_export.workflows"))]
    found = {name: [other for other in imported(name) if ".prune" in other] for name in outside}
    assert {name: others for name, others in found.items() if others} == {}


def test_nobody_goes_round_the_layers_by_the_public_names():
    found = set()
    for name, path in modules().items():
        package = package_of(name)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and base_of(node, package) == "snapvit_export":
                names = {alias.name for alias in node.names} - {"__version__"}
                found |= {(name, each) for each in names if f"snapvit_export.{each}" not in modules()}
    assert found == set()


def test_the_way_of_an_export_is_at_most_50_files_and_they_exist():
    shown = re.search(r"<!-- call chain -->\n(.*?)<!-- end of call chain -->", PAGE, re.DOTALL).group(1)
    files = re.findall(r"^\| `(.*?\.py)` \|", shown, re.MULTILINE)
    assert 30 < len(files) == len(set(files)) <= 50
    for file in files:
        assert (ROOT / file).is_file() or (ROOT / "snapvit_export" / file).is_file(), file


def test_the_list_of_modules_in_the_docs_is_up_to_date():
    script = ROOT / "tools" / "list_modules.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
