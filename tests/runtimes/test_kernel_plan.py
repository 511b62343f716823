"""Kernel plans: read from real logs of TensorRT-RTX, from live builds and an inspector's JSON; never from garbage."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.graphs import exact_and
from helpers.models import make_model
from helpers.rankings import random_ranking
from snapvit_export.errors import FileFormatError
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes.tensorrt.engine_file import EngineRecord, engine_path, read_record, record_path
from snapvit_export.runtimes.tensorrt.kernel_plan import Kernel, KernelPlan, part_of
from snapvit_export.runtimes.tensorrt.network import BuildSettings
from snapvit_export.runtimes.tensorrt.plan_reader import parse_layers, parse_log
from snapvit_export.runtimes.tensorrt.session import build_engine
from snapvit_export.storage.json import from_json, to_json

FIXTURES = Path(__file__).parents[1] / "fixtures"
COMPILER = "tensorrt_rtx 1.7.1.116"
TWO_BLOCKS = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3, global_pool="avg")
ONE_SINGLE = Plan(heads=(2, 1), neurons=(128, 64))


def log_of(precision: str) -> str:
    return (FIXTURES / "tensorrt_rtx" / f"{precision}.log").read_text()


def two_blocks(folder: Path, precision: str, plan: Plan = ONE_SINGLE, flavour: str = "portable") -> Path:
    """The graph of which the logs in the fixtures are."""
    model = make_model(TWO_BLOCKS)
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    images = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
    return exact_and(precision, drawn, plan, folder, images, flavour)[1].graph


def test_a_real_log_of_fp16_gives_every_kernel_with_its_types_and_nodes():
    plan = parse_log(log_of("fp16"), COMPILER)
    assert (plan.compiler, len(plan.kernels)) == (COMPILER, 32)
    assert plan.kernels[0].reads == ("fp32",)  # images
    assert plan.kernels[-1].writes == ("fp32",)  # logits
    fused = plan.with_node("blocks.0.attn.softmax")
    assert [k.name for k in fused] == ["_gemm_mha_v2_myl0_7"]
    assert fused[0].part == "blocks.0.attn"
    assert fused[0].reads == ("fp16",) * 3
    assert set(fused[0].nodes) == {f"blocks.0.attn.{op}" for op in ("matmul", "softmax", "matmul_2")}
    (fc1,) = plan.with_node("blocks.0.mlp.gemm")
    assert (fc1.kind, fc1.weight, fc1.product_type, fc1.part) == ("runtime_fusion", "fp16", "fp16", "blocks.0.mlp")


def test_a_single_head_is_not_fused_and_two_are():
    first, second = parse_log(log_of("fp16"), COMPILER).by_block()
    assert (first.kernels, first.attention_fused, first.activation_fused, first.residuals_fused) == (
        9,
        True,
        True,
        True,
    )
    assert (second.kernels, second.attention_fused, second.activation_fused) == (17, False, True)
    assert second.residuals_fused is False
    assert first.products == second.products == {"fp16": 8}


def test_a_real_log_of_int8_shows_what_is_in_int8_and_what_is_not():
    plan = parse_log(log_of("int8-static"), COMPILER)
    assert plan.summary.products == {"fp32": 5, "int8": 12}
    types = plan.product_types
    assert {types[f"blocks.0.attn.{name}"] for name in ("gemm", "gemm_2", "gemm_3", "gemm_4")} == {"int8"}
    assert {types[f"blocks.1.attn.{name}"] for name in ("matmul", "matmul_2")} == {"fp32"}
    assert plan.summary.attention_fused == ()
    assert plan.summary.attention_not_fused == (0, 1)
    assert not any(block.activation_fused or block.residuals_fused for block in plan.by_block())


def test_every_kernel_is_counted_in_one_part():
    for precision in ("fp16", "int8-static"):
        plan = parse_log(log_of(precision), COMPILER)
        others = [k for k in plan.kernels if not k.part.startswith("blocks.")]
        assert sum(block.kernels for block in plan.by_block()) + len(others) == len(plan.kernels)
        assert len(plan.of("blocks.0")) == plan.by_block()[0].kernels
        assert len(plan.of("blocks.0.attn")) + len(plan.of("blocks.0.mlp")) == len(plan.of("blocks.0"))


@pytest.mark.parametrize("precision", ["fp16", "int8-static"])
def test_a_plan_survives_its_file_and_a_summary_of_other_kernels_is_refused(precision):
    plan = parse_log(log_of(precision), COMPILER)
    data = to_json(plan)
    assert from_json(data, KernelPlan, "x") == plan
    told = json.loads(data)
    told["summary"]["attention_fused"] = [0, 1]
    told["summary"]["attention_not_fused"] = []
    with pytest.raises(FileFormatError, match="the summary is not that of the kernels"):
        from_json(json.dumps(told), KernelPlan, "x")


def test_of_several_plans_in_a_log_the_last_one_counts():
    both = log_of("int8-static") + log_of("fp16")
    assert parse_log(both, COMPILER) == parse_log(log_of("fp16"), COMPILER)


@pytest.mark.parametrize(
    "text", ["", "Layers:", "Layers:\nName: x", "\0\xff Name: , LayerType", log_of("fp16").partition("Layers:")[0]]
)
def test_a_log_without_a_plan_is_refused_in_one_line(text):
    with pytest.raises(FileFormatError, match="^tensorrt_rtx 1.7.1.116: its log tells of no kernels") as refused:
        parse_log(text, COMPILER)
    assert "\n" not in str(refused.value)


def test_a_log_that_is_cut_off_within_a_kernel_is_refused():
    whole = log_of("fp16")
    with pytest.raises(FileFormatError, match=r"cut off in kernel 7: _gemm_mha_v2_myl0_7"):
        parse_log(whole[: whole.index("_gemm_mha_v2_myl0_7") + 100], COMPILER)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_damaged_log_is_a_plan_or_one_error_and_nothing_else(seed):
    rng, text = np.random.default_rng(seed), log_of("fp16")[4000:14000]
    for _ in range(int(rng.integers(1, 12))):
        start, size = int(rng.integers(len(text))), int(rng.integers(1, 60))
        put = str(rng.choice(["", "\n", "}, {", "], Outputs: [", "Dimensions: [--1,-]", "gemm_" + "9" * 40, "\x1b[2J"]))
        text = text[:start] + put + text[start + size :]
    try:
        plan = parse_log("Layers:\n" + text, COMPILER)
    except FileFormatError as error:
        assert "\n" not in str(error)
    else:
        assert len(plan.kernels) == plan.summary.kernels > 0
        assert from_json(to_json(plan), KernelPlan, "x") == plan


def kernel(**changes) -> Kernel:
    given = dict(name="k", kind="gemm", part="", reads=("fp16",), weight="fp16", writes=("fp16",), nodes=())
    return Kernel(**{**given, **changes})


def test_a_product_has_eight_bits_only_if_both_sides_have_them():
    assert kernel(reads=("int8",), weight="int8").product_type == "int8"
    assert kernel(reads=("fp16",), weight="int8").product_type == "fp16"  # only the weight is quantised
    assert kernel(reads=("fp16", "fp8"), weight="fp8").product_type == "fp8"  # beside a residual
    assert kernel(reads=("fp32",), weight="int8", nodes=("blocks.0.mlp.quantizelinear",)).product_type == "int8"
    assert kernel(reads=("fp32",), weight="fp16").product_type == "fp16"  # a norm in fp32 before it
    assert kernel(reads=("fp16", "fp16"), weight="").product_type == "fp16"  # of two inputs
    assert kernel(reads=(), weight="").product_type == ""


def test_kernels_that_only_scale_or_pad_do_not_decide_the_type_of_a_product():
    node = "blocks.0.mlp.gemm"
    kernels = (
        kernel(name="__myl_MoveConc_myl0_0", kind="kgen", reads=("fp32",), weight="fp32", nodes=(node,)),
        kernel(name=f"{node}_myl0_1", reads=("int8",), weight="int8", nodes=(node,)),
        kernel(name="__myl_MulAdd_myl0_2", kind="kgen", reads=("fp32",), weight="", nodes=(node, "blocks.0.stream")),
    )
    plan = KernelPlan(compiler="x", kernels=kernels)
    assert plan.product_types == {node: "int8"}
    assert plan.residual_fused(0, "mlp") is False
    assert (plan.attention_fused(0), plan.activation_fused(0), plan.residual_fused(0, "attn")) == (None, None, None)


def test_parts_are_told_by_the_names_of_nodes():
    assert part_of([]) == ""
    assert part_of(["blocks.10.mlp.gemm_2", "embed.conv"]) == "blocks.10.mlp"
    assert part_of(["blocks.1.attended"]) == "blocks.1.attn"
    assert part_of(["blocks.1.stream"]) == "blocks.1"
    assert part_of(["output.gemm"]) == "output"


def test_what_an_inspector_of_10_and_11_tells_becomes_the_same_value():
    for name in ("layers-10.json", "layers-11.json"):  # made by hand, see the README there
        plan = parse_layers(json.loads((FIXTURES / "trtexec" / name).read_text()), "tensorrt 10.3.0")
        gemm = plan.kernels[-1]
        assert (gemm.name, gemm.kind, gemm.reads, gemm.writes) == (
            "blocks.0.fc1 + blocks.0.gelu", "gemm", ("fp16",), ("fp16",)
        )  # fmt: skip
        assert plan.compiler == "tensorrt 10.3.0"
        assert all(k.kind != "signal" for k in plan.kernels)
    assert parse_layers(json.loads((FIXTURES / "trtexec" / "layers-10.json").read_text()), "x").kernels[0].nodes == (
        "patch.conv",
    )


def test_constants_among_the_inputs_of_an_inspector_are_weights():
    tensors = [
        {"Name": "x", "Dimensions": [17, 64], "Format/Datatype": "Int8"},
        {"Name": "__mye595_dconst", "Dimensions": [64, 192], "Format/Datatype": "Int8"},
        {"Name": "__mye574_const", "Dimensions": [1], "Format/Datatype": "Float"},
    ]
    layer = dict(Name="blocks.0.attn.gemm_myl0_3", LayerType="gemm", Inputs=tensors, Outputs=[])
    plan = parse_layers({"Layers": [{**layer, "Metadata": "[ONNX Layer: blocks.0.attn.gemm]"}]}, "tensorrt 10.3.0")
    assert (plan.kernels[0].reads, plan.kernels[0].weight) == (("int8",), "int8")
    assert plan.product_types == {"blocks.0.attn.gemm": "int8"}


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"Layers": 3},
        {"Layers": []},
        {"Layers": [{"Name": 3, "LayerType": "x"}]},
        {"Layers": [{"Name": "a", "LayerType": "b", "Inputs": ["x"]}]},
        {"Layers": [{"Name": "a", "LayerType": "b", "Inputs": [{"Name": "x", "Dimensions": [float("inf")]}]}]},
        {"Layers": [{"Name": "{ForeignNode[blocks.0.attn.gemm...logits]}", "LayerType": "Myelin"}]},
        json.loads((FIXTURES / "trtexec" / "layers-10-names.json").read_text()),
    ],
)
def test_an_inspector_that_tells_no_kernels_is_refused_in_one_line(found):
    with pytest.raises(FileFormatError, match="^tensorrt 10.3.0: ") as refused:
        parse_layers(found, "tensorrt 10.3.0")
    assert "\n" not in str(refused.value)


def test_a_live_build_fuses_two_heads_at_batch_one_and_not_a_single_one(rtx, tmp_path):
    plan = rtx.parse(two_blocks(tmp_path, "fp16")).build(BuildSettings(batch=1)).kernels
    assert plan.compiler == f"tensorrt_rtx {rtx.version}"
    assert (plan.summary.attention_fused, plan.summary.attention_not_fused) == ((0,), (1,))
    assert plan.summary.products == {"fp16": 17}
    assert len(plan.of("blocks.0")) < len(plan.of("blocks.1"))


@pytest.mark.parametrize("precision", ["fp16", "int8-static", "fp8"])
def test_in_graphs_for_tensorrt_too_a_single_head_is_fused_from_batch_two_on(rtx, tmp_path, precision):
    graph = two_blocks(tmp_path, precision, flavour="tensorrt")
    fused = [rtx.parse(graph).build(BuildSettings(batch=n)).kernels.summary.attention_fused for n in (1, 2)]
    assert fused == [(0,), (0, 1)]


def test_at_larger_batches_a_single_head_is_fused(rtx, tmp_path):
    plan = rtx.parse(two_blocks(tmp_path, "fp16")).build(BuildSettings(batch=4)).kernels
    assert plan.summary.attention_fused == (0, 1)


def test_a_live_build_of_fp16_fuses_layers_with_bias_activation_and_residual(rtx, tmp_path):
    graph = two_blocks(tmp_path, "fp16", Plan(heads=(2, 2), neurons=(128, 128)))
    block = rtx.parse(graph).build(BuildSettings()).kernels.by_block()[0]
    assert (block.attention_fused, block.activation_fused, block.residuals_fused) == (True, True, True)
    assert block.products == {"fp16": 8}


def test_a_plan_agrees_with_the_count_of_products_in_the_network(rtx, tmp_path):
    for precision in ("fp16", "int8-static"):
        parsed = rtx.parse(two_blocks(tmp_path, precision))
        assert parsed.build(BuildSettings()).kernels.summary.products == parsed.matmul_dtypes().counts


def test_a_log_is_kept_only_while_a_build_wants_it(rtx, tmp_path):
    rtx.parse(two_blocks(tmp_path, "fp16")).build(BuildSettings())
    assert rtx.log.plan is None
    rtx.log.log("Severity.VERBOSE", "Layers:\nName: x")
    assert rtx.log.plan is None
    with rtx.log.keeping_plan() as told:
        for text in ("thousands of other lines", "Layers:\n" + "x" * (1 << 24), "Layers:\nfirst", "Layers:\nlast"):
            rtx.log.log("Severity.VERBOSE", text)
    assert told == ["Layers:\nlast"]


def test_the_record_of_an_engine_keeps_its_kernels_and_older_records_are_read(rtx, tmp_path):
    graph = two_blocks(tmp_path, "fp16")
    build_engine(graph, "fp16", BuildSettings(), rtx, None)
    found = read_record(engine_path(graph))
    assert found.kernels.summary.attention_fused == (0,)
    older = json.loads(record_path(graph).read_text())
    del older["kernels"]
    record_path(graph).write_text(json.dumps(older))
    assert read_record(engine_path(graph)) == msgspec.structs.replace(found, kernels=None)
    assert found.differs_from(from_json(json.dumps(older), EngineRecord, "x")) is None
