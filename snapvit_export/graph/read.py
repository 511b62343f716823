"""Read a graph without trusting it: its external weights must exist, inside its own folder. Light.

A runtime maps whatever an ONNX file names. So names that leave the folder, links among them, and pieces that reach
beyond the end of a file are refused here, before any runtime sees the file, wherever in it a tensor hides: in its
graph, in graphs inside nodes, in functions, in what is kept for training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import FileFormatError
from ..storage.atomic import inside
from ..storage.reading import MOST_GRAPH, why_not_read

OPENVINO = ".xml"
FLOAT8 = 17  # onnx.TensorProto.FLOAT8E4M3FN
_XML = (b"<?xml", b"<net")  # how OpenVINO's graphs begin; nothing that begins so is an ONNX file


def read_graph(path: Path | str) -> Any:
    """Return the ModelProto of a file, without the weights beside it, after checking that they are there.

    >>> len(read_graph("snapvit-family/s30.onnx").graph.node)
    """
    import onnx

    path = Path(path)
    if reason := why_not_read(path, MOST_GRAPH):
        raise FileFormatError(f"{path}: cannot be read: {reason}")
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever protobuf makes of bytes that are no message
        raise FileFormatError(f"{path}: damaged, or not an ONNX file") from error
    if not model.graph.node:
        raise FileFormatError(f"{path}: damaged, or not an ONNX file: it has no nodes")
    sizes: dict[Path, int] = {}
    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check(path, tensor, sizes)
    return model


def files_read_by(path: Path) -> set[str]:
    """Return the names of the files that a graph reads, ONNX or OpenVINO's, after checking that it may."""
    if path.suffix.lower() != OPENVINO:  # whatever it is called, a runtime would open it as ONNX
        return external_files(read_graph(path))
    with open(path, "rb") as file:
        if not file.read(8).startswith(_XML):
            raise FileFormatError(f"{path}: damaged, or not a graph of OpenVINO")
    return {openvino_weights(path).name}


def openvino_weights(path: Path) -> Path:
    """Return the one file that a graph of OpenVINO reads, that of its own name; no link that leaves the folder."""
    return inside(path.parent, path.with_suffix(".bin").name, path.name)


def placed_bytes(model: Any) -> int:
    """Return the size of the weights that a graph reads from other files."""
    entries = [entry for tensor in tensors_of(model) for entry in tensor.external_data]
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def external_files(model: Any) -> set[str]:
    """Return the names of the files that a graph points into."""
    return {entry.value for tensor in tensors_of(model) for entry in tensor.external_data if entry.key == "location"}


def tensors_of(model: Any) -> Iterator[Any]:
    """Yield all tensors of a ModelProto."""
    yield from _in_graph(model.graph)
    for function in model.functions:
        yield from _in_attributes(function.attribute_proto)  # the defaults of what its caller may give
        yield from _in_nodes(function.node)
    for training in model.training_info:
        yield from _in_graph(training.initialization)
        yield from _in_graph(training.algorithm)


def _in_graph(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _in_nodes(graph.node)


def _in_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield from _in_attributes(node.attribute)


def _in_attributes(attributes: Iterable[Any]) -> Iterator[Any]:
    for attribute in attributes:
        yield from (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else []))
        single = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        for sparse in (*attribute.sparse_tensors, *single):
            yield from (sparse.values, sparse.indices)
        for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            yield from _in_graph(inner)


def item_bytes(kind: int) -> int:
    """Return the bytes of a number of one of onnx's types; some releases of onnx have no size for float8."""
    from onnx import helper

    return 1 if kind == FLOAT8 else int(helper.tensor_dtype_to_np_dtype(kind).itemsize)


def _check(path: Path, tensor: Any, sizes: dict[Path, int]) -> None:
    external = {entry.key: entry.value for entry in tensor.external_data}
    where = inside(path.parent, external.get("location", ""), path.name)
    if where not in sizes:
        if not where.is_file():
            raise FileFormatError(f"{where}: missing, though {path.name} reads it. Copy the whole folder")
        sizes[where] = where.stat().st_size
    try:
        needed = math.prod(tensor.dims) * item_bytes(tensor.data_type)
        offset, length = int(external.get("offset", "0")), int(external.get("length", str(needed)))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path}: damaged: {tensor.name} names no valid place of its weights") from error
    if min(offset, length, *tensor.dims, 0) < 0 or length != needed or offset + length > sizes[where]:
        raise FileFormatError(f"{path}: damaged: {tensor.name} is not within {where.name}")


def differ_in_weights_alone(one: Path, other: Path) -> bool:
    """Return True if two graphs compute the same operators on tensors of the same shapes and types: equally fast.

    OpenVINO's own graphs are not compared.
    """
    if OPENVINO in (one.suffix.lower(), other.suffix.lower()):
        return False
    return _structure(read_graph(one)) == _structure(read_graph(other))


def _structure(model: Any) -> list[bytes | tuple[str, int, tuple[int, ...]]]:
    """Return the nodes of a graph, and the name, type and shape of its weights, in order."""
    graph = model.graph
    ends = [each.SerializeToString() for each in (*graph.node, *graph.input, *graph.output)]
    return [*ends, *sorted((tensor.name, tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer)]
