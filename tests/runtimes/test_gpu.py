"""TensorRT and ONNX Runtime on a real NVIDIA GPU: build, run, compare, time, cache. Run with `pytest -m gpu`.

Every test leaves a dated JSON record in `records/`, which is what may be told of GPUs; without a GPU they are skipped.
"""

import json
import subprocess
from datetime import datetime, timezone

import msgspec
import numpy as np
import pytest

from helpers.graphs import exact_and
from helpers.models import make_model
from helpers.rankings import random_ranking
from helpers.shared import ROOT
from snapvit_export.allocation.planner import Planner
from snapvit_export.checks.comparison import compare
from snapvit_export.errors import SnapvitError
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.profiling.sampling import time_together
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes import cuda, jetson_agent
from snapvit_export.runtimes.device import board
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.runtimes.session import open_session, version_of
from snapvit_export.runtimes.tensorrt.engine_file import engine_path, record_path
from snapvit_export.runtimes.tensorrt.session import TensorRTSession, require_tensorrt
from snapvit_export.target import TAKES, Target

pytestmark = pytest.mark.gpu
VIT = dict(img_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3, num_classes=1000)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> cuda.Cuda:
    try:
        return cuda.require_gpu()
    except cuda.NoGPU as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")


@pytest.fixture(scope="module")
def tensorrt(gpu):
    try:
        return require_tensorrt()[0]
    except SnapvitError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def drawn():
    model = make_model(VIT)
    ranking = random_ranking(model.anatomy, seed=1)
    plans = {"dense": Plan.dense(model.anatomy), "s50": Planner(ranking, model.anatomy).sparsity(0.5)}
    return blueprint(model, ranking), plans


def images(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 3, 224, 224)).astype(np.float32)


def graph_of(drawn, folder, precision: str, name: str):
    print_of, plans = drawn
    if precision == "fp32":
        return GraphWriter(print_of, folder).write(name, plans[name]).graph
    return exact_and(precision, print_of, plans[name], folder, images(4), "portable")[1].graph


def note(what: str, gpu: cuda.Cuda, **found: object) -> None:
    """Leave a dated record."""
    folder = ROOT / "records"
    folder.mkdir(exist_ok=True)
    now = datetime.now(timezone.utc)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    told = {
        "what": what,
        "when": now.isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "gpu": gpu.name,
        "capability": gpu.capability,
        "driver": gpu.driver,
        "sm_count": gpu.sm_count,
        "memory_bytes": gpu.memory_bytes,
        "board": board(),
        "power_mode": jetson_agent.power_mode(),
        "clocks_mhz": jetson_agent.clocks(),
        "software": jetson_agent.software(jetson_agent.Version(0, 0, 0)),
        **found,
    }
    path = folder / f"{now:%Y-%m-%d}-{what}-{gpu.name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8-static"])
@pytest.mark.parametrize("name", ["dense", "s50"])
def test_engines_agree_with_onnx_runtime_and_are_timed(tensorrt, gpu, drawn, tmp_path, name, precision):
    graph = graph_of(drawn, tmp_path, precision, name)
    target = Target(runtime="tensorrt", precision=precision, batch=1, threads=1)
    with OrtSession(graph, 4) as session:
        wanted = session.run(images(8))
    with TensorRTSession(graph, target) as session:
        found = compare(wanted, session.run(images(8)), precision, scores=True)
        taken = session.taken
        times = sorted(session.gpu_ms() for _ in range(200))
        told = session.layers()
    assert found.passed, found.told
    assert 0 < times[100] < 1000
    assert told["Layers"]
    note(
        f"tensorrt-{name}-{precision}",
        gpu,
        tensorrt=tensorrt.version,
        compared=msgspec.to_builtins(found),
        taken=msgspec.to_builtins(taken),
        gpu_ms={"p50": times[100], "p99": times[198]},
    )


def test_a_pruned_engine_is_faster_than_the_dense_one(tensorrt, gpu, drawn, tmp_path):
    target = Target(runtime="tensorrt", precision="fp16", batch=8, threads=1)
    found = {}
    for name in ("dense", "s50"):
        with TensorRTSession(graph_of(drawn, tmp_path, "fp16", name), target) as session:
            session.run(images(8))
            found[name] = float(np.median([session.gpu_ms() for _ in range(200)]))
    note("tensorrt-speed-up", gpu, batch=8, gpu_ms=found)
    assert found["s50"] < found["dense"]


def test_an_engine_is_taken_from_disk_the_second_time_and_built_anew_for_another_graph(tensorrt, drawn, tmp_path):
    graph = graph_of(drawn, tmp_path, "fp16", "s50")
    target = Target(runtime="tensorrt", precision="fp16", batch=1, threads=1)
    with TensorRTSession(graph, target):
        pass
    first = engine_path(graph).stat().st_mtime_ns
    with TensorRTSession(graph, target):
        pass
    assert engine_path(graph).stat().st_mtime_ns == first
    stale = json.loads(record_path(graph).read_text())
    record_path(graph).write_text(json.dumps({**stale, "onnx_sha256": "of another graph"}))
    with TensorRTSession(graph, target):
        pass
    assert engine_path(graph).stat().st_mtime_ns != first


def test_the_timing_cache_is_shared_by_variants(tensorrt, drawn, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = Target(runtime="tensorrt", precision="fp16", batch=1, threads=1)
    for name in ("dense", "s50"):
        with TensorRTSession(graph_of(drawn, tmp_path, "fp16", name), target):
            pass
    if tensorrt.trt.__name__ == "tensorrt":
        assert len(list((tmp_path / "cache").rglob("*.cache"))) == 1


ON_GPU = [(runtime, p) for runtime in ("onnxruntime-cuda", "onnxruntime-tensorrt") for p in TAKES[runtime]]


@pytest.mark.parametrize(("runtime", "precision"), ON_GPU)
def test_onnx_runtime_really_runs_on_the_gpu(gpu, drawn, tmp_path, runtime, precision):
    graph = graph_of(drawn, tmp_path, precision, "s50")
    with OrtSession(graph, 4) as session:
        wanted = session.run(images(4))
    try:
        version_of(runtime)
    except SnapvitError as error:
        pytest.skip(str(error))
    with open_session(graph, Target(runtime=runtime, precision=precision, batch=4, threads=1)) as session:
        found = compare(wanted, session.run(images(4)), precision, scores=True)
        taken = time_together({"s50": lambda: session.run(images(4))}, seconds=2.0)["s50"]
    assert found.passed, found.told
    note(f"{runtime}-{precision}", gpu, compared=msgspec.to_builtins(found), batch=4, wall_ms=taken.percentile(50))


def test_an_export_keeps_a_budget_on_this_gpu(tensorrt, gpu, snapvit, tmp_path):
    outcome = snapvit(
        "export",
        "--runtime",
        "tensorrt",
        "--precision",
        "fp16",
        "--budget",
        "70%",
        "--images",
        32,
        "--out",
        tmp_path / "o",
    )
    assert outcome.code == 0, outcome.err
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    choice = manifest["choice"]
    measured = {m["variant"]: m for m in choice["measurements"]}
    assert measured[choice["variant"]]["latency_ms"] <= choice["budget_ms"]
    assert choice["compared"] is True
    note("export-budget", gpu, choice={k: choice[k] for k in ("variant", "next_denser", "budget_ms", "decided")})
