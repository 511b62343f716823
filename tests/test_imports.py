"""The light half stays light, and help answers at once."""

import os
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
)
LIGHT = [
    "snapvit_export",
    "snapvit_export.allocate",
    "snapvit_export.anatomy",
    "snapvit_export.budget",
    "snapvit_export.calibration.data_set",
    "snapvit_export.calibration.digits",
    "snapvit_export.calibration.folder",
    "snapvit_export.calibration.hub",
    "snapvit_export.calibration.images",
    "snapvit_export.calibration.known_sets",
    "snapvit_export.calibration.labels",
    "snapvit_export.calibration.listing",
    "snapvit_export.calibration.masks",
    "snapvit_export.calibration.npz",
    "snapvit_export.calibration.opening",
    "snapvit_export.calibration.preprocessing",
    "snapvit_export.calibration.sampling",
    "snapvit_export.calibration.source",
    "snapvit_export.calibration.voc",
    "snapvit_export.cases",
    "snapvit_export.choose",
    "snapvit_export.comparing",
    "snapvit_export.comparison",
    "snapvit_export.cli.app",
    "snapvit_export.correction.damping",
    "snapvit_export.correction.factor",
    "snapvit_export.correction.orders",
    "snapvit_export.correction.factors",
    "snapvit_export.correction.sparsegpt",
    "snapvit_export.correction.statistics",
    "snapvit_export.costs",
    "snapvit_export.decide",
    "snapvit_export.device_stand",
    "snapvit_export.doctor",
    "snapvit_export.elastic.buffer",
    "snapvit_export.elastic.description",
    "snapvit_export.elastic.folder",
    "snapvit_export.elastic.names",
    "snapvit_export.elastic.packed",
    "snapvit_export.elastic.write",
    "snapvit_export.errors",
    "snapvit_export.evaluate.about",
    "snapvit_export.evaluate.accuracy",
    "snapvit_export.evaluate.artefact",
    "snapvit_export.evaluate.evaluation",
    "snapvit_export.evaluate.features",
    "snapvit_export.evaluate.fidelity",
    "snapvit_export.evaluate.head",
    "snapvit_export.evaluate.linear",
    "snapvit_export.evaluate.neighbours",
    "snapvit_export.evaluate.pareto",
    "snapvit_export.evaluate.samples",
    "snapvit_export.evaluate.segmentation",
    "snapvit_export.evaluating",
    "snapvit_export.exam",
    "snapvit_export.pipeline",
    "snapvit_export.family",
    "snapvit_export.files",
    "snapvit_export.fleet",
    "snapvit_export.graph.calibrate",
    "snapvit_export.graph.emit",
    "snapvit_export.graph.emitter",
    "snapvit_export.graph.file",
    "snapvit_export.graph.gates",
    "snapvit_export.graph.inspect",
    "snapvit_export.graph.linear",
    "snapvit_export.graph.nodes",
    "snapvit_export.graph.numerics",
    "snapvit_export.graph.prepare",
    "snapvit_export.graph.probe",
    "snapvit_export.graph.read",
    "snapvit_export.graph.tap",
    "snapvit_export.jetson_agent",
    "snapvit_export.on_device",
    "snapvit_export.packing",
    "snapvit_export.plan",
    "snapvit_export.profiles",
    "snapvit_export.profiling.affinity",
    "snapvit_export.profiling.conditions",
    "snapvit_export.profiling.device",
    "snapvit_export.profiling.latency_model",
    "snapvit_export.profiling.measure",
    "snapvit_export.profiling.pace",
    "snapvit_export.profiling.profile",
    "snapvit_export.profiling.samples",
    "snapvit_export.profiling.timer",
    "snapvit_export.progress",
    "snapvit_export.ranking",
    "snapvit_export.planner",
    "snapvit_export.recipe",
    "snapvit_export.remote",
    "snapvit_export.removal",
    "snapvit_export.report.bars",
    "snapvit_export.report.charts.depth",
    "snapvit_export.report.charts.labels",
    "snapvit_export.report.charts.latencies",
    "snapvit_export.report.charts.look",
    "snapvit_export.report.charts.methods",
    "snapvit_export.report.charts.pareto",
    "snapvit_export.report.charts.proof",
    "snapvit_export.report.charts.search",
    "snapvit_export.report.charts.widths",
    "snapvit_export.report.draw",
    "snapvit_export.report.markdown",
    "snapvit_export.report.methods_table",
    "snapvit_export.report.names",
    "snapvit_export.report.numbers",
    "snapvit_export.report.page",
    "snapvit_export.report.table",
    "snapvit_export.report.variants",
    "snapvit_export.report.words",
    "snapvit_export.report.write",
    "snapvit_export.runtimes.agreement",
    "snapvit_export.runtimes.batches",
    "snapvit_export.runtimes.ceilings",
    "snapvit_export.runtimes.census",
    "snapvit_export.runtimes.cuda",
    "snapvit_export.runtimes.engine_file",
    "snapvit_export.runtimes.opening",
    "snapvit_export.runtimes.openvino",
    "snapvit_export.runtimes.openvino_int8",
    "snapvit_export.runtimes.ort",
    "snapvit_export.runtimes.tensorrt",
    "snapvit_export.runtimes.tensorrt_api",
    "snapvit_export.runtimes.tensorrt_session",
    "snapvit_export.rounds",
    "snapvit_export.scores",
    "snapvit_export.sealed",
    "snapvit_export.stand",
    "snapvit_export.sublayer",
    "snapvit_export.target",
    "snapvit_export.validate",
    "snapvit_export.validation",
    "snapvit_export.values",
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_light_half_imports_with_the_heavy_packages_blocked():
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"  # None in sys.modules: import fails
    imports = "; ".join(f"import {name}" for name in LIGHT)
    result = python(f"{blocked}; {imports}; print('fine')")
    assert result.stdout.strip() == "fine", result.stderr


def test_the_list_above_names_every_module_outside_prune():
    import pkgutil

    found = {
        module.name
        for module in pkgutil.walk_packages(snapvit_export.__path__, "snapvit_export.")
        if not module.ispkg and ".prune" not in module.name and not module.name.endswith("__main__")
    }
    found = {name for name in found if not name.startswith("snapvit_export.cli.") or name.endswith("app")}
    assert found - set(LIGHT) == set()


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


COMMANDS = ["export", "rank", "pack", "evaluate", "validate", "report", "import-scores", "inspect", "models", "doctor"]


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


def test_public_names_are_all_there():
    for name in snapvit_export.__all__:
        assert getattr(snapvit_export, name) is not None
    assert callable(snapvit_export.export)
    with pytest.raises(AttributeError, match="nonsense"):
        snapvit_export.nonsense  # noqa: B018
