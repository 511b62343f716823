"""Look at the values inside a graph while it runs. Light: onnx and ONNX Runtime.

A copy of the graph with more outputs stands beside it for as long as it is looked at, since it reads the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph.read import read_graph
from ..runtimes.ort import OrtSession
from ..storage.atomic import write_atomically

Array = npt.NDArray[Any]


def streams(path: Path, images: Array, threads: int = 1) -> dict[int, npt.NDArray[np.float32]]:
    """The output of each block, (images, tokens, E); from the last attention on perhaps only those read."""
    names = [name for node in read_graph(path).graph.node for name in node.output if name.endswith(".stream")]
    with _looking_at(path, names, {}, threads) as session:
        found = session.run_all(images)
    shaped = {name: found[name].astype(np.float32) for name in names}
    return {int(name.split(".")[1]): x.reshape(len(images), -1, x.shape[-1]) for name, x in shaped.items()}


def all_values(
    path: Path, names: Iterable[str], batches: Iterable[Array], threads: int = 1
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Values of a graph for many batches, one after the other."""
    with _looking_at(path, list(names), {}, threads) as session:
        for images in batches:
            yield session.run_all(images)


def largest_values(path: Path, batches: Iterable[Array], threads: int = 1) -> dict[str, float]:
    """The largest magnitude that each floating-point value has in any of the batches."""
    graph = read_graph(path).graph
    inner = [name for node in graph.node if not _is_shape(node) for name in node.output]
    largest = {f"{name}.largest": name for name in inner}
    found = dict.fromkeys(inner, 0.0)
    with _looking_at(path, [], largest, threads) as session:
        for images in batches:
            for key, value in session.run_all(images).items():
                if key in largest:
                    found[largest[key]] = float(np.maximum(found[largest[key]], value))  # NaN stays
    return found


def _is_shape(node: Any) -> bool:
    """Whether a node computes with sizes, as those before the Expand of prefix tokens do."""
    return node.op_type == "Shape" or (node.op_type == "Concat" and any("shape" in name for name in node.input))


@contextmanager
def _looking_at(path: Path, names: list[str], largest: Mapping[str, str], threads: int) -> Iterator[OrtSession]:
    """Open a graph that gives these values as well; `largest` maps names of magnitudes to values."""
    from onnx import helper

    model = read_graph(path)
    for magnitude, name in largest.items():
        model.graph.node.append(helper.make_node("Abs", [name], [f"{magnitude}.abs"]))
        model.graph.node.append(helper.make_node("ReduceMax", [f"{magnitude}.abs"], [magnitude], keepdims=0))
    known = {output.name for output in model.graph.output}
    for name in (*names, *largest):
        if name not in known:
            model.graph.output.append(helper.make_empty_tensor_value_info(name))
    copy = path.with_name(f".{path.name}.probe")
    write_atomically(copy, model.SerializeToString())
    try:
        with OrtSession(copy, threads) as session:
            yield session
    finally:
        copy.unlink(missing_ok=True)
