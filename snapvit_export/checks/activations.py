"""Activations: the values inside a graph while it runs. Light: onnx and ONNX Runtime.

They are read from a temporary copy of the graph with more outputs, beside it, since it reads the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph.read import read_graph
from ..runtimes.ort import OrtSession
from ..storage.atomic import write_atomically
from ..storage.unfinished import begun, ended

Array = npt.NDArray[Any]
OWN = ".own"  # after the name of a value that is given: what the graph itself computes there


def streams(path: Path, images: Array, threads: int = 1) -> dict[int, npt.NDArray[np.float32]]:
    """Return the output of each block, (images, tokens, E); after the last attention perhaps only the tokens read."""
    names = [name for node in read_graph(path).graph.node for name in node.output if name.endswith(".stream")]
    with with_outputs(path, names, threads=threads) as session:
        found = session.run_all(images)
    shaped = {name: found[name].astype(np.float32) for name in names}
    return {int(name.split(".")[1]): x.reshape(len(images), -1, x.shape[-1]) for name, x in shaped.items()}


def all_values(
    path: Path, names: Iterable[str], batches: Iterable[Array], threads: int = 1
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield values of a graph for many batches, one after the other."""
    with with_outputs(path, list(names), threads=threads) as session:
        for images in batches:
            yield session.run_all(images)


def largest_values(path: Path, batches: Iterable[Array], threads: int = 1) -> dict[str, float]:
    """Return the largest magnitude that each floating-point value has in any of the batches."""
    graph = read_graph(path).graph
    inner = [name for node in graph.node if not _is_shape(node) for name in node.output]
    largest = {f"{name}.largest": name for name in inner}
    found = dict.fromkeys(inner, 0.0)
    with with_outputs(path, [], largest, threads=threads) as session:
        for images in batches:
            for key, value in session.run_all(images).items():
                if key in largest:
                    found[largest[key]] = float(np.maximum(found[largest[key]], value))  # NaN stays
    return found


def _is_shape(node: Any) -> bool:
    """Return True if a node computes with sizes, as those before the Expand of prefix tokens do."""
    return node.op_type == "Shape" or (node.op_type == "Concat" and any("shape" in name for name in node.input))


@contextmanager
def with_outputs(
    path: Path,
    names: list[str],
    largest: Mapping[str, str] = MappingProxyType({}),
    given: Mapping[str, Array] = MappingProxyType({}),
    threads: int = 1,
) -> Iterator[OrtSession]:
    """Open a graph with these values as more outputs; `largest` maps names of magnitudes to values.

    `given` has values that take the place of the graph's own ones, which are then called NAME.own.
    """
    from onnx import helper, numpy_helper

    model = read_graph(path)
    for node in model.graph.node:
        node.output[:] = [f"{name}{OWN}" if name in given else name for name in node.output]
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in given.items())
    for magnitude, name in largest.items():
        model.graph.node.append(helper.make_node("Abs", [name], [f"{magnitude}.abs"]))
        model.graph.node.append(helper.make_node("ReduceMax", [f"{magnitude}.abs"], [magnitude], keepdims=0))
    known = {output.name for output in model.graph.output}
    for name in (*names, *largest):
        if name not in known:
            model.graph.output.append(helper.make_empty_tensor_value_info(name))
    copy = begun(path.with_name(f".{path.name}.probe"))
    try:
        write_atomically(copy, model.SerializeToString())
        with OrtSession(copy, threads) as session:
            yield session
    finally:
        copy.unlink(missing_ok=True)
        ended(copy)
