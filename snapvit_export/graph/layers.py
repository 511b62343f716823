"""Linear layers in each precision, as nodes of a graph. Light.

Weights are stored (out, in), or (in, out) in proj and fc2. In int8 the inputs are quantised once, also where three
layers read them (q, k, v):

    int8-dynamic   DynamicQuantizeLinear -> MatMulInteger -> x scales -> + bias; ONNX Runtime makes one operator of it.
                   MatMulInteger wants (in, out); the Transpose before it is of a constant, so a runtime does it once.
    int8-static    QuantizeLinear -> DequantizeLinear -> Gemm of a dequantised weight: runtimes know this pattern. ONNX
                   Runtime wants uint8 inputs and int32 biases, TensorRT int8 inputs about zero and float biases; and
                   in float32 around it TensorRT-RTX fuses no attention, in float16 it does (`about_zero`).
    fp8            the same in float8, for TensorRT alone
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..target import Precision
from .nodes import Nodes
from .precision import FLOAT, HALF, INT32, WIDE_SCALE, Range, up_to_half


def gemm(n: Nodes, x: str, layer: str, biased: bool, in_first: bool) -> str:
    """Add x W^T + b in the floating-point type of this part."""
    inputs = [x, n.weight(f"{layer}.weight")] + ([n.weight(f"{layer}.bias")] if biased else [])
    return n.add("Gemm", *inputs, transB=int(not in_first))


def dynamic_int8(n: Nodes, x: str, layer: str, biased: bool, in_first: bool) -> str:
    """Add a layer whose inputs are quantised by their own range while the graph runs."""
    whole, scale, zero = n.once(x, lambda: n.add_many("DynamicQuantizeLinear", x, count=3))
    weight = n.weight(f"{layer}.weight")
    if not in_first:
        weight = n.add("Transpose", weight, perm=[1, 0])
    product = n.add("Cast", n.add("MatMulInteger", whole, weight, zero), to=FLOAT)
    y = n.add("Mul", product, n.add("Mul", scale, n.weight(f"{layer}.scale")))
    return n.add("Add", y, n.weight(f"{layer}.bias")) if biased else y


def static_int8(
    n: Nodes, x: str, layer: str, biased: bool, in_first: bool, out: int, span: Range, symmetric: bool, whole_bias: bool
) -> str:
    """Add a layer whose inputs are quantised by the range of calibration images; `symmetric`: as TensorRT wants it.

    `whole_bias`: the weights hold the bias in int32.
    """

    def quantised() -> list[str]:
        scale, zero = span.step(symmetric)
        steps = n.array(f"{layer}.input.scale", scale), n.array(f"{layer}.input.zero", zero)
        return [n.add("DequantizeLinear", n.add("QuantizeLinear", x, *steps), *steps)]

    read = n.once(x, quantised)[0]
    zeros = n.array(f"zeros.{out}", np.zeros(out, np.int8))  # without them ONNX Runtime does not see the pattern
    stored = n.weight(f"{layer}.weight"), n.weight(f"{layer}.scale"), zeros
    weight = n.add("DequantizeLinear", *stored, axis=1 if in_first else 0)
    bias = []
    if biased and whole_bias:
        whole, step = n.weight(f"{layer}{INT32}"), n.weight(f"{layer}.bias.step")
        bias = [n.add("DequantizeLinear", whole, step, axis=0)]
    elif biased:
        bias = [n.weight(f"{layer}.bias")]
    return n.add("Gemm", read, weight, *bias, transB=int(not in_first))


def about_zero(n: Nodes, x: str, layer: str, biased: bool, in_first: bool, span: Range, precision: Precision) -> str:
    """Add a layer in int8 or fp8 with everything around it in the type of this part, scales too: for TensorRT.

    fp8 has one scale for a whole weight, which is all that TensorRT's tools write for it; int8 one for each output.
    """

    def quantised() -> list[str]:
        step = span.step_about_zero(precision)
        scale = up_to_half(step) if n.float_type == HALF else np.asarray(step)
        steps = n.array(f"{layer}.input.scale", scale), n.zero_point(precision)
        return [n.add("DequantizeLinear", n.add("QuantizeLinear", x, *steps), *steps)]

    read = n.once(f"{x}.quantised", quantised)[0]
    axis: dict[str, Any] = {} if precision == "fp8" else {"axis": 1 if in_first else 0}
    stored = f"{layer}.scale" if n.float_type == HALF else f"{layer}{WIDE_SCALE}"  # no Cast: it must be a constant
    weight = n.add("DequantizeLinear", n.raw(f"{layer}.weight"), n.raw(stored), **axis)
    bias = [n.weight(f"{layer}.bias")] if biased else []
    return n.add("Gemm", read, weight, *bias, transB=int(not in_first))
