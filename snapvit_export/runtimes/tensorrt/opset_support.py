"""Opsets and operators that each version of TensorRT's ONNX parser supports, checked before parsing. Light.

A parser that meets a newer opset warns, guesses, and may fail much later. Here the file is refused first, with the node
and what to do. Operators are those that our graphs for TensorRT and our portable ones use, and that tests build for
real; an operator outside the table is untested.
"""

from __future__ import annotations

from pathlib import Path

from ...errors import SnapvitError
from ...graph.read import read_graph
from ..jetson_agent import LEAST_VERSION, SINCE, Version, highest_opset

OPERATORS = frozenset(
    {
        "Add",
        "Cast",
        "Concat",
        "Conv",
        "DequantizeLinear",
        "Div",
        "Erf",
        "Expand",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gemm",
        "Identity",
        "LayerNormalization",
        "Log",
        "LpNormalization",
        "MatMul",
        "Mul",
        "OneHot",
        "Pad",
        "QuantizeLinear",
        "ReduceMax",
        "ReduceMean",
        "ReduceSum",
        "Relu",
        "Reshape",
        "Shape",
        "Sigmoid",
        "Slice",
        "Softmax",
        "Split",
        "Sqrt",
        "Sub",
        "Tanh",
        "TopK",
        "Transpose",
    }
)


def require_parseable(path: Path, version: str) -> None:
    """Refuse a graph that this version of TensorRT does not take, naming the node."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < LEAST_VERSION[:2]:
        least = ".".join(map(str, LEAST_VERSION[:2]))
        raise SnapvitError(f"TensorRT {version} is too old: {least} or newer is needed, which JetPack 6 brings")
    model = read_graph(path)
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    highest = highest_opset(Version(major, minor, 0))
    if opset > highest:
        newer = [node for node in model.graph.node if SINCE.get(node.op_type, 0) > highest]
        node = newer[0] if newer else model.graph.node[0]
        raise SnapvitError(
            f"{path}: opset {opset}, and TensorRT {version} reads up to {highest} (node {node.name}, {node.op_type})"
            ". Export with --flavour tensorrt"
        )
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS:
            raise SnapvitError(
                f"{path}: node {node.name or node.output[0]} is {node.op_type}, which TensorRT {version} is not known "
                "to take. Export with --flavour tensorrt, and int8-static for int8"
            )
