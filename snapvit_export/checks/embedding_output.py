"""The embedding of an exported file together with its class scores, from one run. Light: onnx or OpenVINO.

k-NN and linear probes evaluate what the classifier reads. It is an output of a temporary copy of the graph, beside it,
since it reads the same weights; the one output of the copy is both, embedding first: (B, E + classes). All else is the
exported file as it is, so that any runtime that opens the one opens the other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError
from ..graph.precision import FLOAT
from ..graph.read import OPENVINO, external_files, read_graph
from ..runtimes.tensorrt.engine_file import engine_files
from ..storage.atomic import copy_beside, writing
from ..storage.temporary import scratch_folder

CLASSIFIERS = ("head.weight", "distillation_head.weight")
LOGITS, FEATURES, BOTH = "logits", "features", "both"
TAP = "tap"  # what copies are called


@dataclass(frozen=True)
class EmbeddingModel:
    """A file whose output is the embedding, followed by as many class scores as the model has."""

    path: Path
    classes: int  # 0: it has no head


@contextmanager
def with_embedding(path: Path) -> Iterator[EmbeddingModel]:
    """Yield a temporary copy that outputs both; the file itself if that outputs the embedding alone."""
    make = _openvino_copy if path.suffix.lower() == OPENVINO else _onnx_copy
    with place_beside_its_weights(path) as folder, copy_beside(path, TAP, folder) as copy:
        try:
            classes = make(path, copy)
            yield EmbeddingModel(copy if classes else path, classes)
        finally:
            for file in (copy.with_suffix(".bin"), *engine_files(copy)):
                file.unlink(missing_ok=True)


@contextmanager
def place_beside_its_weights(path: Path) -> Iterator[Path]:
    """Yield the file's own folder or, if it is read-only, another one with copies of the files that the graph reads."""
    if os.access(path.parent, os.W_OK):
        yield path.parent
        return
    with scratch_folder() as scratch:
        for name in external_files(read_graph(path)) if path.suffix.lower() != OPENVINO else ():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path.parent / name, scratch / name)
        yield scratch


def _onnx_copy(path: Path, copy: Path) -> int:
    """Write the copy and count the class scores; 0 if the file gives the embedding as it is."""
    from onnx import helper

    model = read_graph(path)
    graph = model.graph
    (given,) = [output.name for output in graph.output] if len(graph.output) == 1 else ("",)
    if given == FEATURES:
        return 0
    read = [node.input[0] for node in graph.node if len(node.input) > 1 and plain_name(node.input[1]) in CLASSIFIERS]
    if given != LOGITS or not read:
        raise FileFormatError(f"{path}: not made by snapvit, so where its embedding lies is not known")
    wide = [helper.make_node("Cast", [name], [f"{BOTH}.{i}"], to=FLOAT) for i, name in enumerate(read)]
    feature, middle = wide[0].output[0], []
    if len(wide) == 2:  # two tokens, two classifiers: as features their mean
        middle = [
            helper.make_node("Mean", [node.output[0] for node in wide], [f"{BOTH}.mean"]),
        ]
        feature = f"{BOTH}.mean"
    graph.node.extend([*wide, *middle, helper.make_node("Concat", [feature, LOGITS], [BOTH], axis=1)])
    sizes = [dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim]
    classes = int(sizes[1]) if len(sizes) == 2 else 0
    if classes < 1:
        raise FileFormatError(f"{path}: damaged: its output does not say how many classes it has")
    del graph.output[:]
    graph.output.append(helper.make_empty_tensor_value_info(BOTH))
    with writing(copy):
        copy.write_bytes(model.SerializeToString())
    return classes


def plain_name(weight: str) -> str:
    """Return the name of a weight, also where it is read in a higher precision than it is stored in."""
    return weight.removesuffix(".wide")


def _openvino_copy(path: Path, copy: Path) -> int:
    import openvino
    from openvino import opset13

    from ..runtimes.openvino import read_model

    model = read_model(path)
    (result,) = model.outputs
    if FEATURES in result.get_names():
        return 0
    products = _last_products(result.node.input_value(0).node)
    if LOGITS not in result.get_names() or not products:
        raise FileFormatError(f"{path}: not made by snapvit, so where its embedding lies is not known")
    read = [product.input_value(0) for product in products]
    feature = read[0]
    if len(read) == 2:
        feature = opset13.multiply(opset13.add(*read), opset13.constant(np.float32(0.5))).output(0)
    both = opset13.concat([feature, result.node.input_value(0)], 1)
    new = openvino.Model([opset13.result(both.output(0))], model.get_parameters(), "tapped")
    openvino.save_model(new, copy, compress_to_fp16=False)
    return int(result.partial_shape[1].get_length())


def _last_products(node: Any) -> list[Any]:
    """Return the last matrix products before a value, looking through sums and factors."""
    kind = node.get_type_name()
    if kind == "MatMul":
        return [node]
    if kind not in ("Identity", "Add", "Multiply", "Convert"):
        return []
    return [found for value in node.input_values() for found in _last_products(value.get_node())]
