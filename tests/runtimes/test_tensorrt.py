"""TensorRT as far as it can be proved without a GPU: real parsing and building by TensorRT-RTX, and what is refused.

No mock of TensorRT. Nothing here runs or times an engine: tests/runtimes/test_gpu.py does, where there is a GPU.
"""

import hashlib
import json
import subprocess
import sys

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers.engines import engine_record
from helpers.graphs import exact_and, writer_of
from helpers.models import FAMILIES, as_model, make_model, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.errors import FileFormatError, GateFailed, SnapvitError, UsageError
from snapvit_export.graph.format import GraphFormat
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes import cuda
from snapvit_export.runtimes.tensorrt.engine_file import (
    EngineRecord,
    engine_path,
    mark_agreed,
    read_engine,
    record_path,
    write_engine,
)
from snapvit_export.runtimes.tensorrt.matmul_dtypes import MatmulDtypes, Product, require_precision
from snapvit_export.runtimes.tensorrt.network import BuildSettings
from snapvit_export.runtimes.tensorrt.opset_support import require_parseable
from snapvit_export.runtimes.tensorrt.session import BuildOnly, build_engine
from snapvit_export.target import Target, parse_precision

PRECISIONS = ["fp32", "fp16", "int8-static", "fp8"]
SHAPE = dict(img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4, num_classes=5)
PLANS = {
    "dense": dict(heads=(4, 4, 4), neurons=(256, 256, 256)),
    "pruned": dict(heads=(3, 1, 2), neurons=(200, 8, 77)),
    "without some sub-layers": dict(heads=(4, 0, 2), neurons=(0, 100, 256)),
}


@pytest.fixture(scope="module")
def drawn():
    model = make_model(SHAPE)
    return blueprint(model, random_ranking(model.anatomy, seed=1))


def graph_of(drawn, folder, precision: str, plan: str = "dense", flavour: str = "tensorrt", **options):
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32)).astype(np.float32)
    chosen = Plan(**PLANS[plan])
    if precision == "fp32":
        return writer_of(drawn, folder, flavour).write("x", chosen, format=GraphFormat(flavour, **options)).graph
    return exact_and(precision, drawn, chosen, folder, images, flavour)[1].graph


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_every_variant_parses_and_builds_in_the_precision_it_is_called(rtx, drawn, tmp_path, plan, precision):
    graph = graph_of(drawn, tmp_path, precision, plan)
    dtypes = build_engine(graph, precision, BuildSettings(), rtx, None)
    kinds = {"fp32": {"fp32"}, "fp16": {"fp16"}, "int8-static": {"int8", "fp16"}, "fp8": {"fp8", "fp16"}}[precision]
    assert set(dtypes.counts) == kinds
    record = msgspec.json.decode(record_path(graph).read_bytes(), type=EngineRecord)
    assert engine_path(graph).stat().st_size > 10_000
    assert (record.products, record.precision, record.agreed) == (dtypes.counts, precision, False)
    assert (record.package, record.device) == ("tensorrt_rtx", "any")
    assert read_engine(graph, record) == engine_path(graph).read_bytes()


@pytest.mark.parametrize("precision", ["fp16", "int8-static"])
def test_building_again_gives_the_same_bytes(rtx, drawn, tmp_path, precision):
    graph = graph_of(drawn, tmp_path, precision, "pruned")
    first, second = (rtx.parse(graph).build(BuildSettings()).engine for _ in range(2))
    assert first == second


def test_a_fixed_batch_needs_no_profile_and_takes_no_other(rtx, drawn, tmp_path):
    graph = graph_of(drawn, tmp_path, "fp32", batch=2)
    parsed = rtx.parse(graph)
    assert parsed.inputs == ("images", (2, 3, 32, 32))
    assert parsed.build(BuildSettings(batch=2)).engine
    with pytest.raises(SnapvitError, match="takes exactly 2 images, not 1"):
        rtx.parse(graph).build(BuildSettings(batch=1))


def test_batches_are_one_and_the_same_unless_more_are_asked_for():
    assert BuildSettings(batch=4).batches == (4, 4, 4)
    assert BuildSettings(batch=4, most_batch=4).batches == (4, 4, 4)
    assert BuildSettings(batch=2, most_batch=8).batches == (1, 2, 8)


def test_an_engine_for_several_batches_is_built(rtx, drawn, tmp_path):
    graph = graph_of(drawn, tmp_path, "fp16")
    assert rtx.parse(graph).build(BuildSettings(batch=1, most_batch=8)).engine


def test_a_graph_in_another_precision_than_it_is_called_is_refused_before_building(rtx, drawn, tmp_path):
    graph = graph_of(drawn, tmp_path, "fp32")
    for called, says in (("fp16", "called fp16, but .* computes in fp32"), ("int8-static", "called int8-static")):
        with pytest.raises(GateFailed, match=says):
            build_engine(graph, called, BuildSettings(), rtx, None)
        assert not engine_path(graph).exists()
    half = graph_of(drawn, tmp_path, "fp16")
    with pytest.raises(GateFailed, match="called fp32, but .* computes in fp16"):
        build_engine(half, "fp32", BuildSettings(), rtx, None)


def test_parts_that_stay_in_float32_are_allowed_only_where_the_graph_says_so():
    found = MatmulDtypes((Product("blocks.0.mlp.gemm", "fp32"), Product("blocks.1.mlp.gemm", "fp16")))
    require_precision(found, "fp16", "x", wide=("blocks.0.mlp",))
    for wide in ((), ("blocks.1.mlp",), ("blocks.0.m",)):
        with pytest.raises(GateFailed, match=r"blocks.0.mlp.gemm computes in fp32 \(products: 1 in fp16, 1 in fp32\)"):
            require_precision(found, "fp16", "x", wide)
    mixed = MatmulDtypes(
        (Product("blocks.0.mlp.gemm", "int8"), Product("blocks.0.attn.matmul", "fp32", of_weight=False))
    )
    require_precision(mixed, "int8-static", "x")
    one_left = MatmulDtypes((*mixed.products, Product("blocks.1.mlp.gemm", "fp32")))
    with pytest.raises(GateFailed, match="called int8-static, but blocks.1.mlp.gemm computes in fp32"):
        require_precision(one_left, "int8-static", "x")
    with pytest.raises(GateFailed, match="no matrix products"):
        require_precision(MatmulDtypes(()), "fp32", "x")


def test_opsets_and_operators_that_a_version_does_not_take_are_refused_by_name(drawn, tmp_path):
    newer = graph_of(drawn, tmp_path, "fp32", flavour="ort")
    with pytest.raises(SnapvitError, match=r"up to 20 \(node .*, (Attention|Gelu)\). Export with --flavour tensorrt"):
        require_parseable(newer, "10.3.0")
    dynamic = graph_of(drawn, tmp_path, "int8-dynamic")
    with pytest.raises(SnapvitError, match="is DynamicQuantizeLinear, which TensorRT 11.0 is not known to take"):
        require_parseable(dynamic, "11.0")
    with pytest.raises(SnapvitError, match="TensorRT 8.6.1 is too old: 10.3 or newer"):
        require_parseable(dynamic, "8.6.1")
    for precision in PRECISIONS:
        require_parseable(graph_of(drawn, tmp_path, precision), "10.3.0")  # JetPack 6


def test_what_the_parser_does_not_understand_is_told_with_its_node(rtx, drawn, tmp_path):
    (tmp_path / "torn.onnx").write_bytes(graph_of(drawn, tmp_path, "fp32").read_bytes()[:500])
    with pytest.raises(SnapvitError, match="torn.onnx: TensorRT .* cannot parse it"):
        rtx.parse(tmp_path / "torn.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(SnapvitError, match="empty.onnx: TensorRT .* finds no layers"):
        rtx.parse(tmp_path / "empty.onnx")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("a", "b")]
    node = helper.make_node("NoSuchThing", ["a"], ["b"], name="the.odd.one", domain="somebody")
    model = helper.make_model(
        helper.make_graph([node], "g", ports[:1], ports[1:]),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("somebody", 1)],
    )
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(SnapvitError, match=r"odd.onnx: TensorRT .* cannot parse it: node the.odd.one \(NoSuchThing\)"):
        rtx.parse(tmp_path / "odd.onnx")


def test_a_stale_foreign_or_damaged_engine_is_refused(tmp_path):
    graph, engine = tmp_path / "s30.onnx", b"an engine"
    with pytest.raises(FileFormatError, match="there is no engine of s30.onnx"):
        read_engine(graph, engine_record())
    sha = hashlib.sha256(engine).hexdigest()
    write_engine(graph, engine, engine_record(engine_sha256=sha))
    assert read_engine(graph, engine_record()) == engine
    others = dict(onnx_sha256="bb", version="10.13.0", device="RTX 4090", capability="8.9", batch=2, precision="fp32")
    others |= dict(package="tensorrt_rtx", most_batch=8, workspace_bytes=2, level=5, least_batch=2)
    others |= dict(board="NVIDIA Jetson AGX Orin Developer Kit", sm_count=16)  # both are Orin of 8.7
    for what, value in others.items():
        with pytest.raises(FileFormatError, match=f"built for another {what} .*Build it on this device"):
            read_engine(graph, engine_record(**{what: value}))
    mark_agreed(graph)
    assert json.loads(record_path(graph).read_text())["agreed"] is True
    assert read_engine(graph, engine_record()) == engine
    engine_path(graph).write_bytes(b"an engine!")
    with pytest.raises(FileFormatError, match="damaged"):
        read_engine(graph, engine_record())


def test_an_engine_that_was_built_without_a_gpu_is_for_any_card(tmp_path):
    graph, engine = tmp_path / "s30.onnx", b"an engine"
    made = dict(package="tensorrt_rtx", version="1.7", engine_sha256=hashlib.sha256(engine).hexdigest())
    write_engine(graph, engine, engine_record(**made, device="any", capability="any"))
    assert read_engine(graph, engine_record(**made)) == engine
    assert read_engine(graph, engine_record(**made, board="a board", sm_count=8)) == engine
    write_engine(graph, engine, engine_record(**{**made, "package": "tensorrt"}, device="any", capability="any"))
    with pytest.raises(FileFormatError, match="another device"):
        read_engine(graph, engine_record(**{**made, "package": "tensorrt"}))


def has_gpu() -> bool:
    try:
        cuda.require_gpu()
    except cuda.NoGPU:
        return False
    return True


without_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU here: what happens without one cannot be seen")


@without_gpu
def test_without_a_driver_running_is_refused_in_one_line_and_nothing_crashes(drawn, tmp_path):
    graph = graph_of(drawn, tmp_path, "fp16")
    program = """
import sys
from pathlib import Path
from snapvit_export.errors import SnapvitError
from snapvit_export.runtimes.tensorrt.session import TensorRTSession
from snapvit_export.target import Target
try:
    TensorRTSession(Path(sys.argv[1]), Target(runtime="tensorrt", precision="fp16", batch=1, threads=1))
except SnapvitError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(graph)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # no segfault
    assert done.stdout.startswith("timing in TensorRT needs an NVIDIA GPU: no NVIDIA driver")
    assert len(done.stdout.splitlines()) == 1
    assert not engine_path(graph).exists()


@without_gpu
def test_an_export_for_tensorrt_says_what_is_missing_and_what_can_be_done(snapvit, tmp_path):
    out = tmp_path / "out"
    wanted = ("export", "--runtime", "tensorrt", "--precision", "fp16", "--budget", "10ms", "--out", out)
    for arguments in (wanted, ("export", "--card", "jetson-orin-nano", "--budget", "10ms", "--out", out)):
        outcome = snapvit(*arguments)
        assert outcome.code == 1
        for part in ("needs an NVIDIA GPU", "--build-only", "tensorrt-rtx", "docs/jetson.md"):
            assert part in outcome.error_line
        assert not out.exists()


def test_build_only_writes_engines_with_their_records_and_times_nothing(
    rtx, snapvit, tiny_folder, image_folder, tmp_path
):
    out = tmp_path / "out"
    words = ["export", "--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", out]
    words += ["--runtime", "tensorrt", "--precision", "fp16", "--build-only", "--sparsity", "0.3"]
    outcome = snapvit(*words)
    assert outcome.code == 0, outcome.err
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["target"]["runtime"] == "tensorrt"
    assert "built without a GPU" in manifest["target"]["device"]["runtime_version"]
    for variant in manifest["variants"]:
        assert variant["profile"] is None
        assert variant["engines"] == [f"{variant['name']}.engine", f"{variant['name']}.engine.json"]
        assert all((out / name).is_file() for name in variant["engines"])
    assert snapvit(*words).code == 0  # an own folder is replaced, engines too


def test_build_only_asks_for_what_it_can_do(snapvit, tmp_path):
    for words, says in (
        (("--build-only", "--sparsity", "0.3"), "--build-only builds TensorRT engines"),
        (("--runtime", "tensorrt", "--build-only", "--budget", "10ms"), "a budget is met by timing"),
        (("--runtime", "tensorrt", "--precision", "int8-dynamic", "--sparsity", "0.3"), "does not compute in int8-dyn"),
        (("--runtime", "toaster", "--sparsity", "0.3"), "no runtime is called 'toaster'"),
    ):
        outcome = snapvit("export", *words, "--out", tmp_path / "out")
        assert (outcome.code, says in outcome.error_line) == (2, True), outcome.err


def test_int8_means_what_the_runtime_has():
    assert parse_precision("int8", "onnxruntime") == "int8-dynamic"
    assert parse_precision("int8", "tensorrt") == parse_precision("int8", "openvino") == "int8-static"
    with pytest.raises(UsageError, match="onnxruntime-cuda does not compute in int8-static"):
        parse_precision("int8-static", "onnxruntime-cuda")


def test_build_only_without_the_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(SnapvitError, match="needs TensorRT-RTX. Try: pip install tensorrt-rtx"):
        BuildOnly.here()


def test_a_build_for_a_target_uses_its_batch(rtx, drawn, tmp_path):
    graph = graph_of(drawn, tmp_path, "fp16", batch=None)
    BuildOnly(rtx).build(graph, Target(runtime="tensorrt", precision="fp16", batch=4, threads=1))
    assert json.loads(record_path(graph).read_text())["batch"] == 4


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_every_family_of_models_builds_pruned(rtx, tmp_path, name, precision):
    module, _ = small(name)
    model = as_model(module, name, {})
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    images = np.random.default_rng(0).standard_normal((4, 3, *model.anatomy.image)).astype(np.float32)
    plan = uneven_plan(model.anatomy)
    if precision == "fp32":
        graph = writer_of(drawn, tmp_path, "tensorrt").write("x", plan, format=GraphFormat("tensorrt")).graph
    else:
        graph = exact_and(precision, drawn, plan, tmp_path, images, "tensorrt")[1].graph
    build_engine(graph, precision, BuildSettings(), rtx, None)
    assert engine_path(graph).is_file()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8-static"])
def test_portable_graphs_of_older_families_still_build(rtx, drawn, tmp_path, precision):
    dtypes = build_engine(
        graph_of(drawn, tmp_path, precision, "pruned", "portable"), precision, BuildSettings(), rtx, None
    )
    assert set(dtypes.counts) == {"fp32": {"fp32"}, "fp16": {"fp16"}, "int8-static": {"int8", "fp32"}}[precision]
