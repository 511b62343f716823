"""Read a graph without trusting it: its external weights must exist, inside its own folder. Light.

A runtime maps whatever an ONNX file names. So names that leave the folder, links among them, and pieces that reach
beyond the end of a file are refused here, before any runtime sees the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import FileFormatError
from ..storage.atomic import inside
from ..storage.reading import MOST_GRAPH, why_not_read


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
    for tensor in tensors_of(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check(path, tensor, sizes)
    return model


def placed_bytes(model: Any) -> int:
    """Return the size of the weights that a graph reads from other files."""
    entries = [entry for tensor in tensors_of(model.graph) for entry in tensor.external_data]
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def external_files(model: Any) -> set[str]:
    """Return the names of the files that a graph points into."""
    return {
        entry.value for tensor in tensors_of(model.graph) for entry in tensor.external_data if entry.key == "location"
    }


def tensors_of(graph: Any) -> Iterator[Any]:
    """Yield all tensors of a graph and of the graphs inside it."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else []))
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from tensors_of(inner)


def _check(path: Path, tensor: Any, sizes: dict[Path, int]) -> None:
    from onnx import helper

    external = {entry.key: entry.value for entry in tensor.external_data}
    where = inside(path.parent, external.get("location", ""), path.name)
    if where not in sizes:
        if not where.is_file():
            raise FileFormatError(f"{where}: missing, though {path.name} reads it. Copy the whole folder")
        sizes[where] = where.stat().st_size
    try:
        bits = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * 8
        needed = math.prod(tensor.dims) * bits // 8
        offset, length = int(external.get("offset", "0")), int(external.get("length", str(needed)))
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path}: damaged: {tensor.name} names no valid place of its weights") from error
    if min(offset, length, *tensor.dims, 0) < 0 or length != needed or offset + length > sizes[where]:
        raise FileFormatError(f"{path}: damaged: {tensor.name} is not within {where.name}")
