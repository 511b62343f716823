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

# Where modules that have not moved yet will stand.
WILL_BE = {
    "allocate": "allocation.knapsack",
    "anatomy": "model.anatomy",
    "calibration.data_set": "calibration.dataset",
    "calibration.listing": "calibration.list_file",
    "calibration.opening": "calibration.open_source",
    "cases": "allocation.depth",
    "choose": "selection.bracket",
    "comparing": "workflows.compare",
    "comparison": "evaluate.comparison",
    "correction.damping": "correction.moments",
    "correction.factor": "correction.cholesky",
    "correction.factors": "correction.cholesky",
    "correction.statistics": "correction.moments",
    "costs": "allocation.costs",
    "decide": "selection.select",
    "device_stand": "selection.elastic_builder",
    "doctor": "workflows.doctor",
    "elastic.buffer": "storage.mapped",
    "elastic.description": "elastic.format",
    "elastic.names": "model.tensor_names",
    "elastic.packed": "elastic.format",
    "evaluate.about": "evaluate.exported_model",
    "evaluate.accuracy": "evaluate.exported_model",
    "evaluate.artefact": "evaluate.exported_model",
    "evaluate.evaluation": "family.evaluation",
    "evaluate.neighbours": "evaluate.knn",
    "evaluating": "workflows.evaluate",
    "exam": "evaluate.evaluator",
    "family": "family.manifest",
    "files": "storage.atomic",
    "fleet": "selection.known_profiles",
    "graph.calibrate": "checks.quantisation",
    "graph.emit": "graph.forward",
    "graph.emitter": "graph.writer",
    "graph.file": "graph.writer",
    "graph.gates": "checks.gates",
    "graph.inspect": "checks.inspect",
    "graph.linear": "graph.layers",
    "graph.numerics": "graph.precision",
    "graph.prepare": "graph.weights",
    "graph.probe": "checks.activations",
    "graph.tap": "checks.embedding_output",
    "jetson_agent": "runtimes.jetson_agent",
    "on_device": "selection.on_device",
    "packing": "workflows.pack",
    "pipeline": "workflows.export",
    "plan": "model.plan",
    "planner": "allocation.planner",
    "profiling.affinity": "runtimes.device",
    "profiling.device": "runtimes.device",
    "profiling.measure": "profiling.sampling",
    "profiling.pace": "profiling.drift",
    "profiling.samples": "profiling.sampling",
    "prune.catalogue": "prune.models.catalogue",
    "prune.checkpoint": "prune.rank.checkpoint",
    "prune.checks": "prune.models.checks",
    "prune.correct": "prune.correct.elastic",
    "prune.criteria": "prune.rank.criteria",
    "prune.criteria.base": "prune.rank.criteria.base",
    "prune.criteria.divergence": "prune.rank.criteria.flow_divergence",
    "prune.criteria.gradients": "prune.rank.criteria.gradients",
    "prune.criteria.losses": "prune.rank.criteria.losses",
    "prune.criteria.per_image": "prune.rank.criteria.per_image",
    "prune.criteria.record": "prune.rank.criteria.record",
    "prune.criteria.structures": "prune.rank.criteria.structures",
    "prune.criteria.variance": "prune.rank.criteria.variance",
    "prune.criteria.weights": "prune.rank.criteria.weights",
    "prune.damage": "prune.rank.damage",
    "prune.eva_attention": "prune.blocks.eva_attention",
    "prune.exact_sum": "prune.rank.exact_sum",
    "prune.features": "prune.models.extractor",
    "prune.halves": "prune.blocks.timm_blocks",
    "prune.iterate": "prune.rank.iterative",
    "prune.labels": "prune.models.class_names",
    "prune.load": "prune.models.load",
    "prune.masking": "prune.models.masking",
    "prune.observe": "prune.stats.observe",
    "prune.one_thread": "prune.single_thread",
    "prune.onnx_export": "prune.rank.search.onnx_export",
    "prune.parity": "prune.torch_parity",
    "prune.parts": "prune.blocks.timm_blocks",
    "prune.processes": "prune.rank.distributed",
    "prune.rank": "prune.rank.rank",
    "prune.reaching": "prune.stats.capture_input",
    "prune.refine": "prune.rank.iterative",
    "prune.refit": "prune.correct.refit",
    "prune.repair": "prune.correct.policy",
    "prune.running_moments": "prune.stats.moments",
    "prune.search": "prune.rank.search",
    "prune.search.allocation": "prune.rank.search.damage_fitness",
    "prune.search.bench": "prune.rank.search.candidate_runner",
    "prune.search.cka": "prune.rank.search.cka",
    "prune.search.divergence": "prune.stats.output_divergence",
    "prune.search.engine": "prune.rank.search.engine",
    "prune.search.fitness": "prune.rank.search.fitness",
    "prune.search.forward": "prune.blocks.functional",
    "prune.search.optimiser": "prune.rank.search.optimiser",
    "prune.search.run": "prune.rank.search.loop",
    "prune.search.snes": "prune.rank.search.snes",
    "prune.search.xnes": "prune.rank.search.xnes",
    "prune.sequential": "prune.correct.sequential",
    "prune.short_block": "prune.blocks.pruned_block",
    "prune.slicing": "prune.models.slicing",
    "prune.sublayers": "prune.stats.sublayer_stats",
    "prune.tokens": "prune.stats.token_weights",
    "prune.understand": "prune.models.read_anatomy",
    "prune.views": "prune.rank.criteria.views",
    "prune.workshop": "prune.build",
    "ranking": "model.ranking",
    "recipe": "allocation.recipe",
    "remote": "selection.remote",
    "removal": "allocation.depth",
    "report.bars": "report.terminal",
    "report.names": "family.layout",
    "report.numbers": "report.data",
    "report.table": "report.terminal",
    "report.words": "report.text",
    "rounds": "allocation.recipe",
    "runtimes.agreement": "checks.gates",
    "runtimes.batches": "runtimes.session",
    "runtimes.ceilings": "runtimes.tensorrt.opset_support",
    "runtimes.census": "runtimes.tensorrt.matmul_dtypes",
    "runtimes.engine_file": "runtimes.tensorrt.engine_file",
    "runtimes.opening": "runtimes.session",
    "runtimes.openvino_int8": "runtimes.openvino_nncf",
    "runtimes.tensorrt": "runtimes.tensorrt.network",
    "runtimes.tensorrt_session": "runtimes.tensorrt.session",
    "scores": "model.scores",
    "sealed": "storage.checksummed",
    "stand": "selection.candidates",
    "sublayer": "model.sublayer",
    "validate": "workflows.validate",
    "validation": "family.validation",
    "values": "storage.json",
}

# Imports that go the wrong way today.
KNOWN: set[tuple[str, str]] = set()


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


def place(name: str) -> str:
    """Where a module stands, without the name of the library."""
    inside = name.removeprefix("snapvit_export.")
    return WILL_BE.get(inside, inside)


def test_imports_only_go_up():
    wrong = set()
    for name in modules().keys() - {"snapvit_export"}:  # which only names what is public, for type checkers
        here = place(name)
        for other in imported(name) - {"snapvit_export"}:
            there = place(other)
            if here.split(".")[0] != there.split(".")[0] and LEVEL[there.split(".")[0]] >= LEVEL[here.split(".")[0]]:
                wrong.add((here, there))
    assert wrong == KNOWN
