"""The light half stays light, and help answers at once."""

import ast
import os
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import snapvit_export
from helpers.rankings import random_ranking

HEAVY = (
    "torch",
    "timm",
    "rich",
    "onnx",
    "onnxruntime",
    "sklearn",
    "torchvision",
    "PIL",
    "datasets",
    "jinja2",
    "vl_convert",
    "starlette",
    "uvicorn",
    "prometheus_client",
)
LIGHT = [
    module.name
    for module in pkgutil.walk_packages(snapvit_export.__path__, "snapvit_export.", onerror=lambda name: None)
    if ".prune" not in module.name and not module.name.endswith("__main__")
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_light_half_imports_with_the_heavy_packages_blocked():
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"  # None in sys.modules: import fails
    imports = "; ".join(f"import {name}" for name in LIGHT)
    result = python(f"{blocked}; {imports}; print('fine')")
    assert result.stdout.strip() == "fine", result.stderr


def test_a_file_can_be_run_and_a_plan_made_without_torch(tmp_path, tiny_model):
    random_ranking(tiny_model.anatomy).save(tmp_path / "r.safetensors")
    result = python(
        "import sys; sys.modules['torch'] = None; from snapvit_export import Ranking, Planner;"
        f"r = Ranking.load({str(tmp_path / 'r.safetensors')!r}); print(Planner(r, r.anatomy).sparsity(0.5).heads)"
    )
    assert result.stdout.startswith("("), result.stderr


def test_missing_packages_are_named_with_the_remedy():
    result = python(
        "import sys; sys.modules['torch'] = None; sys.argv = ['snapvit', 'export', '--budget', '10ms'];"
        "from snapvit_export.cli.app import main; main()"
    )
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "error: exporting needs torch, which is not installed. Try: pip install 'snapvit-export[all]'"
    )


COMMANDS = [
    "export",
    "rank",
    "pack",
    "evaluate",
    "validate",
    "report",
    "run",
    "serve",
    "import-scores",
    "export-scores",
    "inspect",
    "models",
    "doctor",
]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_takes_less_than_300_ms_of_cpu(command):
    script = Path(sys.executable).parent / "snapvit"
    assert script.exists(), "install the project: pip install -e '.[test]'"

    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run([script, *command, "--help"], capture_output=True, text=True, env={**os.environ})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert result.returncode == 0
        assert "Usage: snapvit" in result.stdout
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_seconds() for _ in range(3)) < 0.3


def test_type_checkers_see_the_public_names_where_they_are_loaded_from():
    stub = ast.parse((Path(snapvit_export.__file__).parent / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: f".{node.module}" for node in imports for alias in node.names} == snapvit_export._HOME


def test_public_names_are_all_there():
    for name in snapvit_export.__all__:
        assert getattr(snapvit_export, name) is not None
    assert callable(snapvit_export.export)
    with pytest.raises(AttributeError, match="nonsense"):
        snapvit_export.nonsense  # noqa: B018
