"""Inspect an ONNX file: its blocks, precision, operators and size, and if a target can run it. Light.

ONNX Runtime and OpenVINO open the file to find out. TensorRT would need a GPU for that, so for it rules must do: its
parser stops at opset 20 in JetPack 6, and no release up to 11 builds the Attention operator in fp32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import SnapvitError, UsageError, first_line, needs
from ..graph.read import FLOAT8, external_files, item_bytes, read_graph
from ..model.plan import Plan
from ..storage.json import Count, Size, Value, from_json

TENSORRT_OPSET = 20
Tokens = tuple[Size, ...]


class Port(Value, frozen=True, kw_only=True):
    """An input or output; sizes that are not fixed have a name."""

    name: str
    type: str
    shape: tuple[int | str, ...]


class Inspection(Value, frozen=True, kw_only=True):
    """The contents of a file; of a graph that is not ours, model, variant and counts are unknown."""

    file: str
    opset: int
    nodes: Count
    operators: dict[str, int]
    weights: dict[str, int]  # bytes by type
    size_bytes: Count  # of the graph and the weights that it reads
    reads: tuple[str, ...]  # files beside it
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    model: str | None = None
    variant: str | None = None
    correction: str | None = None
    precision: str | None = None
    int8_sum_bits: int | None = None  # 16: its int8 layers compute the same on every CPU
    plan: Plan | None = None
    tokens: tuple[int, ...] | None = None  # after each block; older files do not tell
    correction_tokens: str | None = None  # "all": corrected by statistics of all tokens, though it has fewer


def inspect(path: Path | str) -> Inspection:
    """Inspect a file without running it.

    >>> inspect("snapvit-family/s30.onnx").plan.heads
    """
    path = Path(path)
    model = read_graph(path)
    graph = model.graph
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    weights: Counter[str] = Counter()
    outside = 0
    for tensor in graph.initializer:
        size = _bytes(tensor)
        weights[_type(tensor.data_type)] += size
        outside += size if tensor.external_data else 0
    return Inspection(
        file=path.name,
        opset=max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0),
        nodes=len(graph.node),
        operators=dict(Counter(node.op_type for node in graph.node).most_common()),
        weights=dict(weights),
        size_bytes=path.stat().st_size + outside,
        reads=tuple(sorted(external_files(model))),
        inputs=tuple(_port(value) for value in graph.input),
        outputs=tuple(_port(value) for value in graph.output),
        model=metadata.get("snapvit.model"),
        variant=metadata.get("snapvit.variant"),
        correction=metadata.get("snapvit.correction"),
        precision=metadata.get("snapvit.precision"),
        int8_sum_bits=int(bits) if (bits := metadata.get("snapvit.int8_sum_bits", "")).isdecimal() else None,
        plan=from_json(metadata["snapvit.plan"], Plan, str(path)) if "snapvit.plan" in metadata else None,
        tokens=from_json(metadata["snapvit.tokens"], Tokens, str(path)) if "snapvit.tokens" in metadata else None,
        correction_tokens=metadata.get("snapvit.correction_tokens"),
    )


def why_not(path: Path, found: Inspection, target: str) -> str | None:
    """Return the reason why a target cannot run the file; None if it can."""
    if target not in TARGETS:
        raise UsageError(f"no runtime is called '{target}'. Known: {', '.join(TARGETS)}")
    return TARGETS[target](path, found)


def _onnxruntime(path: Path, found: Inspection) -> str | None:
    from ..runtimes.ort import OrtSession

    try:
        OrtSession(path, 1).close()
    except SnapvitError as error:
        return str(error)
    return None


def _openvino(path: Path, found: Inspection) -> str | None:
    with needs("asking OpenVINO", extra="openvino"):
        import openvino
    try:
        openvino.Core().compile_model(str(path), "CPU")
    except Exception as error:  # its own exception types share no base
        return f"{path}: OpenVINO cannot open it: {first_line(error)}"
    return None


def _tensorrt(path: Path, found: Inspection) -> str | None:
    if found.opset > TENSORRT_OPSET:
        reads = f"TensorRT 10.3 reads up to {TENSORRT_OPSET}"
        return f"{path}: opset {found.opset}, and {reads}. Export with --flavour tensorrt"
    if (stray := _not_cast(path)) is not None:
        return f"{path}: {stray} reads bytes, and TensorRT only casts them. Export without --uint8-input, or cast first"
    if "DynamicQuantizeLinear" in found.operators:
        return f"{path}: scales inputs while it runs, which TensorRT does not do. Export with --precision int8-static"
    if "Attention" in found.operators:
        return f"{path}: has the Attention operator, which TensorRT does not build. Export with --flavour tensorrt"
    return None


def _not_cast(path: Path) -> str | None:
    """Return an operator other than Cast that reads an input of bytes; None if there is none."""
    graph = read_graph(path).graph
    inputs = {value.name for value in graph.input if _type(value.type.tensor_type.elem_type) == "uint8"}
    readers = (node.op_type for node in graph.node if inputs & set(node.input))
    return next((reader for reader in readers if reader != "Cast"), None)


TARGETS: dict[str, Callable[[Path, Inspection], str | None]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "tensorrt": _tensorrt,
}


def _bytes(tensor: Any) -> int:
    if _numpy_type(tensor.data_type) is None or min(tensor.dims, default=0) < 0:
        return len(tensor.raw_data)
    return math.prod(tensor.dims) * item_bytes(tensor.data_type)


def _type(number: int) -> str:
    if number == FLOAT8:
        return "float8"
    kind = _numpy_type(number)
    return f"type {number}" if kind is None else str(kind.name)


def _numpy_type(number: int) -> Any:
    """Return the numpy type of a number of onnx; None if it has no such number, or none yet."""
    from onnx import helper

    try:
        return helper.tensor_dtype_to_np_dtype(number)
    except (KeyError, ValueError, TypeError):
        return None


def _port(value: Any) -> Port:
    kind = value.type.tensor_type
    shape = tuple(d.dim_param or int(d.dim_value) for d in kind.shape.dim)
    return Port(name=value.name, type=_type(kind.elem_type), shape=shape)
