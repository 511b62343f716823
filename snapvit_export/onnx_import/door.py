"""What is checked of a foreign file before its graph is gone through: traps that have a clear answer. Light."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..errors import ModelNotUnderstood, UsageError
from .arrays import MOST
from .nodes import Graph, is_half

OLDEST = 11  # the opset that Slice, Pad and Clip took constants as inputs with; exporters of 2019 and later write it
QUANTISED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "MatMulInteger",
    "DynamicQuantizeLinear",
    "MatMulNBits",
    "ConvInteger",
)
CONTROL = ("Loop", "Scan")  # an If whose condition is a constant is none
DOMAINS = ("", "com.microsoft")
LARGEST = 1 << 24  # numbers of an image, 2300 pixels a side: a damaged size must not take minutes
BLOCKED = "com.microsoft.nchwc"


TokensRead = Literal["token", "mean", "patches"]  # of an output of all tokens: the first, their mean, that of patches


@dataclass(frozen=True)
class Entrance:
    """How a file is entered: its input and output."""

    input_name: str
    output_name: str
    tokens_read: TokensRead | None
    shape: tuple[int, int, int, int]  # of the images that the graph is gone through with
    batch: int | None  # None: any
    dtype: np.dtype
    is_half: bool
    notes: tuple[str, ...] = ()


def enter(graph: Graph, output: str | None, image: tuple[int, int] | None) -> Entrance:
    """Return how a file is entered, or refuse it."""
    _check_operators(graph)
    name, value = _input(graph)
    batch, shape = _shape(graph, name, value, image)
    notes = [] if batch is None else [f"the file takes a batch of {batch} alone; exported variants take any"]
    half = _computes_in_half(graph)
    if half:
        notes.append("the file computes in fp16; its weights are read as fp32")
    wanted, read = _output(graph, output)
    return Entrance(name, wanted, read, shape, batch, _dtype(graph, name, value), half, tuple(notes))


def _refuse(graph: Graph, reason: str) -> ModelNotUnderstood:
    return ModelNotUnderstood(f"{graph.path}: {reason}")


def _check_operators(graph: Graph) -> None:
    if graph.opset < OLDEST:
        raise _refuse(graph, f"opset {graph.opset} is too old, {OLDEST} is the oldest that is read. Export it again")
    if graph.model.graph.sparse_initializer:
        raise _refuse(graph, "sparse weights are not read. Export it with dense ones")
    for node in graph.nodes:
        if node.op in QUANTISED or node.op.startswith("QLinear"):
            raise _refuse(
                graph,
                f"already quantised ({node}). Give the file in fp32: int8 is one of the levers that are tried here",
            )
        if node.op in CONTROL:
            raise _refuse(
                graph, f"{node} is control flow, which a plain ViT has none of. Export it for a fixed image size"
            )
        if node.domain == BLOCKED:
            raise _refuse(
                graph,
                f"{node} is laid out for one kind of CPU: ONNX Runtime has saved it optimised for all. Give the "
                "original file, or save it at level basic or extended",
            )
        if node.domain not in DOMAINS:
            raise _refuse(graph, f"{node} is of the domain '{node.domain}', whose operators are not known here")


def _input(graph: Graph) -> tuple[str, Any]:
    if len(graph.inputs) != 1:
        names = ", ".join(graph.inputs) or "none"
        text = ": this looks like a model of text" if {"input_ids", "attention_mask"} & set(graph.inputs) else ""
        raise _refuse(graph, f"one input was expected, images; there are {len(graph.inputs)} ({names}){text}")
    return next(iter(graph.inputs.items()))


def _dtype(graph: Graph, name: str, value: Any) -> np.dtype:
    from onnx import TensorProto, helper

    kind = value.type.tensor_type.elem_type
    if kind == TensorProto.UINT8:
        raise _refuse(graph, f"'{name}' takes bytes: preprocessing is expected outside of the file. Export it without")
    if kind in (TensorProto.INT32, TensorProto.INT64):
        raise _refuse(graph, f"'{name}' takes integers: this looks like a model of text, not of images")
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    except (KeyError, TypeError, ValueError):
        dtype = np.dtype(np.void)
    if not (is_half(dtype) or dtype in (np.float32, np.float64)):
        raise _refuse(graph, f"'{name}' takes {dtype.name}, images of floating-point numbers were expected")
    return dtype


def _shape(
    graph: Graph, name: str, value: Any, image: tuple[int, int] | None
) -> tuple[int | None, tuple[int, int, int, int]]:
    """Return the batch, None for any, and the shape of the images that the graph is gone through with."""
    dims = list(value.type.tensor_type.shape.dim)
    shown = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in dims]
    if len(dims) != 4:
        raise _refuse(graph, f"'{name}' is {shown}: images of (batch, channels, height, width) were expected")
    sizes = [dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None for dim in dims]
    batch, channels, *sides = sizes
    if channels not in (None, 3):
        last = " Images with channels last are not read: export it with channels first" if sizes[3] == 3 else ""
        raise _refuse(graph, f"'{name}' is {shown}: images of 3 channels were expected.{last}")
    height, width = (own or given for own, given in zip(sides, image or (None, None)))
    if height is None or width is None:
        names = [dim.dim_param for dim, side in zip(dims[2:], sides) if side is None]
        fixed = " ".join(f"--dim_param {each} --dim_value 224" for each in names)
        fixed = fixed if all(names) else f"--input_name {name} --input_shape {batch or 1},3,224,224"
        raise _refuse(
            graph,
            f"'{name}' is {shown}: it takes images of any size. Fix one in the file, for example "
            f"python -m onnxruntime.tools.make_dynamic_shape_fixed {fixed} {graph.path.name} fixed.onnx",
        )
    if 3 * height * width > LARGEST or (batch or 1) * 3 * height * width > MOST:
        raise _refuse(graph, f"'{name}' is {shown}: images of such a size are not read")
    if image is not None and image != (height, width):
        raise UsageError(f"{graph.path}: takes images of {height}x{width}, not {image[0]}x{image[1]}")
    return batch, (batch or 1, 3, height, width)


def _output(graph: Graph, output: str | None) -> tuple[str, TokensRead | None]:
    """Return the name of the output, and what is read of it if it is all tokens: `NAME:token` says so."""
    if output is None:
        if len(graph.outputs) != 1:
            raise UsageError(
                f"{graph.path}: has {len(graph.outputs)} outputs. Say which is the model's: "
                + ", ".join(f"--output {name}" for name in graph.outputs)
            )
        return next(iter(graph.outputs)), None
    known = {name for node in graph.nodes for name in node.outputs if name}
    if output in known:
        return output, None
    name, _, read = output.rpartition(":")
    for each in get_args(TokensRead):
        if name in known and read == each:
            return name, each
    raise UsageError(f"{graph.path}: no value is called '{output}'. Its outputs: {', '.join(graph.outputs)}")


def _computes_in_half(graph: Graph) -> bool:
    """Return True if any node but a Cast reads weights of 16 bits, or if anything is cast to them."""
    from onnx import TensorProto

    kinds = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    halves = {name for name, tensor in graph.tensors.items() if tensor.data_type in kinds}
    casts = any(node.op == "Cast" and node.get("to", 0) in kinds for node in graph.nodes)
    return casts or any(name in halves for node in graph.nodes if node.op != "Cast" for name in node.inputs)


def looks_like(graph: Graph) -> str:
    """Return what a graph that is no plain ViT looks like, as the beginning of a sentence; nothing if that is open."""
    ops = Counter(node.op for node in graph.nodes)
    wide = [node for node in graph.nodes if node.op in ("Conv", "FusedConv") and max(node.get("kernel_shape", [1])) > 1]
    windows = [node for node in graph.nodes if node.op == "Transpose" and len(node.get("perm", ())) == 6]
    if len(wide) > 3 and not ops["Softmax"] and not ops["Attention"]:
        return f"looks like a convolutional network ({len(wide)} convolutions), not like a plain ViT: "
    if len(wide) > 3:
        return f"looks like a hybrid of convolutions ({len(wide)}) and attention, not like a plain ViT: "
    if len(windows) > 2:
        return "looks like windowed attention (Swin), not like a plain ViT: "
    if not any(ops[op] for op in ("Softmax", "Attention", "MultiHeadAttention")):
        return "has no attention, so it is no ViT: "
    return ""
