"""Graphs for TensorRT as its compiler sees them: kernel plans of TensorRT-RTX, which builds without a GPU.

The numbers are those of TensorRT-RTX 1.7.1: another compiler may fuse more or less (docs/runtimes.md).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm

from helpers.graphs import exact_and, run, writer_of
from helpers.images import noise_arrays
from helpers.models import EVERY_KIND, as_model, make_model, randomise
from helpers.rankings import random_ranking
from snapvit_export.checks.gates import agreement
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes.tensorrt.kernel_plan import KernelPlan
from snapvit_export.runtimes.tensorrt.network import BuildSettings, TensorRT

SHAPE = dict(img_size=64, patch_size=16, embed_dim=128, depth=3, num_heads=2, num_classes=7)
MOST = {"fp16": 30, "int8-static": 34, "fp8": 32}  # kernels of three blocks; of the portable flavour 39 and 60
PRODUCTS = {"fp16": {"fp16"}, "int8-static": {"fp16", "int8"}, "fp8": {"fp16", "fp8"}}
ISLANDS = {  # parts that stay in float32, as a calibration would find them
    "the hidden units of a block": {"blocks.1.mlp"},
    "what MLPs add to the stream": {"blocks.0.mlp.fc2", "blocks.1.mlp.fc2", "stream", "output"},
    "what an attention adds to the stream": {"blocks.0.attn.proj", "stream", "output"},
}


@pytest.fixture(scope="module")
def model():
    return make_model(SHAPE)


@pytest.fixture(scope="module")
def drawn(model):
    return blueprint(model, random_ranking(model.anatomy, seed=1))


def kernels_of(rtx: TensorRT, graph: Path, batch: int = 1) -> KernelPlan:
    plan = rtx.parse(graph).build(BuildSettings(batch=batch)).kernels
    assert plan is not None
    return plan


def calibrated(precision: str, model, drawn, folder: Path, flavour: str = "tensorrt", plan: Plan | None = None):
    wanted = plan or Plan.dense(model.anatomy)
    return exact_and(precision, drawn, wanted, folder, noise_arrays(model.anatomy, 2), flavour)


@pytest.mark.parametrize("precision", sorted(MOST))
def test_every_attention_is_one_kernel_and_nothing_computes_in_float32(rtx, model, drawn, tmp_path, precision):
    plan = kernels_of(rtx, calibrated(precision, model, drawn, tmp_path)[1].graph)
    assert [plan.attention_fused(i) for i in range(3)] == [True] * 3
    assert len(plan.kernels) <= MOST[precision]
    assert set(plan.product_types.values()) == PRODUCTS[precision]
    assert len(plan.product_types) == 3 * 6 + 1  # one Gemm for q, k and v; and the classifier


def test_in_fp16_bias_and_gelu_and_bias_and_residual_are_in_the_kernels_of_their_products(rtx, model, drawn, tmp_path):
    plan = kernels_of(rtx, calibrated("fp16", model, drawn, tmp_path)[1].graph)
    for i in (0, 1):  # in the last block one token is left, and a product is a sum
        assert plan.activation_fused(i)
        assert plan.residual_fused(i, "attn")
        assert plan.residual_fused(i, "mlp")
        assert len(plan.of(f"blocks.{i}")) <= 8
    assert len(plan.of("blocks.2")) <= 9


@pytest.mark.parametrize("precision", ["int8-static", "fp8"])
def test_all_between_two_quantised_products_is_one_kernel(rtx, model, drawn, tmp_path, precision):
    """Bias, GELU and the next quantisation; and bias, residual, norm and the next quantisation."""
    plan = kernels_of(rtx, calibrated(precision, model, drawn, tmp_path)[1].graph)
    for i in (0, 1):
        (active,) = plan.with_node(f"blocks.{i}.mlp.erf")
        assert f"blocks.{i}.mlp.fc2.quantizelinear" in active.nodes
        (added,) = plan.with_node(f"blocks.{i}.attended")
        assert {f"blocks.{i}.mlp.layernormalization", f"blocks.{i}.mlp.quantizelinear"} <= set(added.nodes)
        (fused,) = plan.with_node(f"blocks.{i}.attn.softmax")
        assert f"blocks.{i}.attn.proj.quantizelinear" in fused.nodes  # attention writes what proj reads
        assert len(plan.of(f"blocks.{i}")) <= (10 if precision == "int8-static" else 9)


def test_portable_graphs_take_more_kernels(rtx, model, drawn, tmp_path):
    found = {
        precision: len(kernels_of(rtx, calibrated(precision, model, drawn, tmp_path, "portable")[1].graph).kernels)
        for precision in ("fp16", "int8-static")
    }
    assert found["fp16"] > MOST["fp16"]
    assert found["int8-static"] > 1.5 * MOST["int8-static"]


@pytest.mark.parametrize("precision", sorted(MOST))
@pytest.mark.parametrize("case", sorted(ISLANDS))
def test_parts_in_float32_leave_every_attention_one_kernel(rtx, model, drawn, tmp_path, case, precision):
    exact, _, numerics = calibrated(precision, model, drawn, tmp_path)
    wide = replace(numerics, wide=frozenset(ISLANDS[case]))
    writer = writer_of(drawn, tmp_path, "tensorrt", precision)
    graph = writer.write("y", Plan.dense(model.anatomy), format=GraphFormat("tensorrt"), precision=wide).graph
    images = noise_arrays(model.anatomy, 2)
    assert agreement(run(exact.graph, images), run(graph, images)).cosine > (0.9999 if precision == "fp16" else 0.995)
    plan = kernels_of(rtx, graph)
    assert [plan.attention_fused(i) for i in range(3)] == [True] * 3
    assert len(plan.kernels) <= MOST[precision] + 1


def test_an_attention_in_float32_is_not_one_kernel(rtx, model, drawn, tmp_path):
    """So it stays so only if its own values do not fit; this compiler fuses none in float32."""
    writer = writer_of(drawn, tmp_path, "tensorrt", "fp16")
    wide = GraphPrecision("fp16", wide=frozenset({"blocks.1.attn"}))
    plan = kernels_of(
        rtx, writer.write("x", Plan.dense(model.anatomy), format=GraphFormat("tensorrt"), precision=wide).graph
    )
    assert [plan.attention_fused(i) for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_giant_patch14_dinov2"])
@pytest.mark.parametrize("precision", sorted(MOST))
def test_a_stream_that_is_too_large_leaves_attention_and_hidden_units_in_float16(rtx, tmp_path, name, precision):
    model = as_model(of_kind(name, depth=3), name, {})
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    bias = np.zeros(model.anatomy.embed_dim, np.float32)
    bias[5] = 20_000  # one feature of the stream, as in large models
    large = {
        f"blocks.{i}.fc2.bias": (bias / drawn.dense.get(f"blocks.{i}.scale2", 1)).astype(np.float32) for i in (0, 1)
    }
    drawn = replace(drawn, dense={**drawn.dense, **large})
    exact, written, numerics = calibrated(precision, model, drawn, tmp_path)
    assert numerics.wide == {"stream", "output", "blocks.0.mlp.fc2", "blocks.1.mlp.fc2"}
    images = noise_arrays(model.anatomy, 2)
    assert agreement(run(exact.graph, images), run(written.graph, images)).cosine > 0.99
    plan = kernels_of(rtx, written.graph)
    assert [plan.attention_fused(i) for i in range(3)] == [True] * 3


def of_kind(name: str, **extra):
    """A model of a family with heads of a size that compilers fuse: 64."""
    kwargs = dict(img_size=64, patch_size=16, embed_dim=128, depth=2, num_heads=2, num_classes=7)
    return randomise(timm.create_model(name, **{**kwargs, **extra}), scale=0.05)


@pytest.mark.parametrize(("name", "extra"), EVERY_KIND, ids=[f"{n} {e}" for n, e in EVERY_KIND])
def test_attention_is_one_kernel_in_every_kind_of_block(rtx, tmp_path, name, extra):
    """Rotated, normed, with an inner norm, before GLU and plain MLPs, with any pooling."""
    model = as_model(of_kind(name, **extra), name, {})
    drawn = blueprint(model, random_ranking(model.anatomy, seed=1))
    quantised = "int8-static" if len(name + str(extra)) % 2 else "fp8"  # both of all would take twice as long
    for precision in ("fp16", quantised):
        plan = kernels_of(rtx, calibrated(precision, model, drawn, tmp_path)[1].graph)
        assert [plan.attention_fused(i) for i in range(2)] == [True, True], precision
        assert set(plan.product_types.values()) <= PRODUCTS[precision]


@pytest.mark.parametrize(("precision", "most"), [("fp16", 39), ("int8-static", 43), ("fp8", 41)])
def test_merging_tokens_needs_no_scatter_and_leaves_attention_one_kernel(rtx, model, drawn, tmp_path, precision, most):
    merging = Plan.dense(model.anatomy).with_tokens((4, 3, 0))
    graph = calibrated(precision, model, drawn, tmp_path, plan=merging)[1].graph
    operators = {node.op_type for node in onnx.load(graph, load_external_data=False).graph.node}
    assert not {name for name in operators if name.startswith("Scatter")}
    plan = kernels_of(rtx, graph)
    assert [plan.attention_fused(i) for i in range(3)] == [True] * 3  # with the logarithms of sizes in it
    assert len(plan.kernels) <= most


def test_several_images_at_a_time_are_fused_as_well(rtx, model, drawn, tmp_path):
    plan = kernels_of(rtx, calibrated("int8-static", model, drawn, tmp_path)[1].graph, batch=8)
    assert [plan.attention_fused(i) for i in range(3)] == [True] * 3
