"""A matrix product computes in the type behind both inputs: fp8 is not int8, and a stored weight alone is neither."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from snapvit_export.errors import GateFailed
from snapvit_export.runtimes.tensorrt.matmul_dtypes import (
    MatmulDtypes,
    Product,
    kind_of_product,
    require_precision,
)
from snapvit_export.runtimes.tensorrt.network import BuildSettings

STORED = {"int8": TensorProto.INT8, "fp8": TensorProto.FLOAT8E4M3FN}
FLOATS = {"fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT}


def one_layer(folder: Path, floats: str, inputs: str | None, weight: str | None) -> Path:
    """A Gemm called blocks.0.mlp.gemm whose input and weight are quantised as those types, or not."""
    kind = FLOATS[floats]
    array = np.float16 if floats == "fp16" else np.float32
    scale = numpy_helper.from_array(np.array(0.05, array), "scale")
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(array)
    initializers, nodes, read = [scale], [], "x"
    for stored in {*filter(None, (inputs, weight))}:
        initializers.append(helper.make_tensor(f"zero.{stored}", STORED[stored], [], [0]))
    if inputs is not None:
        zero = f"zero.{inputs}"
        nodes.append(
            helper.make_node("QuantizeLinear", ["x", "scale", zero], ["q"], name="blocks.0.mlp.quantizelinear")
        )
        nodes.append(
            helper.make_node("DequantizeLinear", ["q", "scale", zero], ["dq"], name="blocks.0.mlp.dequantizelinear")
        )
        read = "dq"
    if weight is None:
        initializers.append(numpy_helper.from_array(values, "w"))
    else:
        initializers.append(helper.make_tensor("stored", STORED[weight], [64, 32], [1] * values.size))
        names = ["stored", "scale", f"zero.{weight}"]
        nodes.append(helper.make_node("DequantizeLinear", names, ["w"], name="blocks.0.mlp.dequantizelinear_2"))
    nodes.append(helper.make_node("Gemm", [read, "w"], ["y"], name="blocks.0.mlp.gemm", transB=1))
    ports = [helper.make_tensor_value_info("x", kind, [8, 32]), helper.make_tensor_value_info("y", kind, [8, 64])]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], initializers)
    path = folder / "layer.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), path)
    return path


@pytest.mark.parametrize("floats", ["fp16", "fp32"])
@pytest.mark.parametrize(
    ("inputs", "weight", "computes_in"),
    [
        ("int8", "int8", "int8"),
        ("fp8", "fp8", "fp8"),
        (None, "int8", None),
        (None, None, None),
    ],
)
def test_a_product_computes_in_the_type_behind_both_inputs(rtx, tmp_path, floats, inputs, weight, computes_in):
    parsed = rtx.parse(one_layer(tmp_path, floats, inputs, weight))
    (product,) = parsed.matmul_dtypes().products
    assert (product.kind, product.of_weight) == (computes_in or floats, True)


def test_an_fp8_graph_is_no_int8_graph_and_the_other_way_round(rtx, tmp_path):
    for stored, precision, other in (("fp8", "fp8", "int8-static"), ("int8", "int8-static", "fp8")):
        found = rtx.parse(one_layer(tmp_path, "fp16", stored, stored)).matmul_dtypes()
        require_precision(found, precision, "x")
        with pytest.raises(GateFailed, match=f"called {other}, but blocks.0.mlp.gemm computes in {stored}"):
            require_precision(found, other, "x")
        with pytest.raises(GateFailed, match=f"called fp16, but blocks.0.mlp.gemm computes in {stored}"):
            require_precision(found, "fp16", "x")


def test_a_weight_that_is_only_stored_in_int8_makes_no_int8_model(rtx, tmp_path):
    found = rtx.parse(one_layer(tmp_path, "fp16", None, "int8")).matmul_dtypes()
    require_precision(found, "fp16", "x")
    with pytest.raises(GateFailed, match=r"computes in fp16 \(products: 1 in fp16\)"):
        require_precision(found, "int8-static", "x")


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_the_kernel_that_is_built_computes_in_that_type_too(rtx, tmp_path, stored):
    plan = rtx.parse(one_layer(tmp_path, "fp16", stored, stored)).build(BuildSettings(batch=8)).kernels
    assert plan.summary.products == {stored: 1}


def test_kinds_of_products():
    assert kind_of_product("fp16", ["int8", "int8"]) == "int8"
    assert kind_of_product("fp32", ["fp8", "fp8"]) == "fp8"
    for behind in ([None, None], ["int8", None], [None, "fp8"], ["int8", "fp8"], []):
        assert kind_of_product("fp16", behind) == "fp16"


def test_in_fp8_the_linear_layers_of_all_blocks_must_be_fp8_and_attention_may_be_floats():
    layers = [Product(f"blocks.{i}.mlp.gemm", "fp8") for i in range(2)]
    attention, head = Product("blocks.0.attn.matmul", "fp16", of_weight=False), Product("output.gemm", "fp16")
    require_precision(MatmulDtypes((*layers, attention, head)), "fp8", "x")
    with pytest.raises(GateFailed, match="called fp8, but blocks.1.attn.gemm computes in int8"):
        require_precision(MatmulDtypes((*layers, Product("blocks.1.attn.gemm", "int8"))), "fp8", "x")
