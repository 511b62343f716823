"""Turn a finished graph into one that takes pixels times one number, such as DeepStream gives. Light: onnx, when used.

DeepStream scales all channels by one number, while models want each channel less its mean, divided by its deviation. So
both go into the patch embedding W x + b, with p in 0..255 and s = 2^-8, which is exact in every precision:

    W (p/255 - mean)/std + b  =  (W 256/(255 std)) (s p)  +  (b - sum of W mean/std)

A graph that takes bytes has this in its weights already, and only loses the nodes that scale and turn them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..calibration.preprocessing import Preprocessing
from ..errors import SnapvitError
from .format import INPUT

SCALE = 2**-8  # of the pixels that the graph takes
WEIGHT, BIAS = "patch.weight.scaled", "patch.bias.scaled"
PROBABILITIES = "probabilities"  # the output in the place of class scores


def take_scaled_pixels(model: Any, preprocessing: Preprocessing) -> None:
    """Change a graph that holds its own weights: it then takes (B, C, H, W) float32, RGB pixels times `SCALE`."""
    from onnx import TensorProto, helper

    graph = model.graph
    patches = _patch_embedding(graph)
    (given,) = graph.input
    if given.type.tensor_type.elem_type == TensorProto.UINT8:
        kind = _type_of(graph, patches.input[1])
        batch, height, width, channels = [d.dim_value or d.dim_param for d in given.type.tensor_type.shape.dim]
        shape = [batch, channels, height, width]
        given.CopyFrom(helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, shape))
        patches.input[0] = INPUT
        if kind != TensorProto.FLOAT:
            patches.input[0] = f"{INPUT}.cast"
            graph.node.insert(0, helper.make_node("Cast", [INPUT], [patches.input[0]], patches.input[0], to=kind))
    else:
        _fold(graph, patches, preprocessing)
    _remove_unread(graph)


def give_probabilities(model: Any) -> None:
    """Let a graph that gives class scores give their softmax instead."""
    from onnx import TensorProto, helper

    (result,) = model.graph.output
    classes = result.type.tensor_type.shape
    model.graph.node.append(helper.make_node("Softmax", [result.name], [PROBABILITIES], PROBABILITIES, axis=-1))
    new = helper.make_tensor_value_info(PROBABILITIES, TensorProto.FLOAT, None)
    new.type.tensor_type.shape.CopyFrom(classes)
    result.CopyFrom(new)


def _fold(graph: Any, patches: Any, preprocessing: Preprocessing) -> None:
    """Give the patch embedding weights and a bias that do the normalising."""
    from onnx import helper, numpy_helper

    kind = helper.tensor_dtype_to_np_dtype(_type_of(graph, patches.input[1]))
    weight = _values_of(graph, patches.input[1])  # (E, C, ph, pw)
    bias = _values_of(graph, patches.input[2]) if len(patches.input) > 2 else np.zeros(len(weight))
    mean, std = (np.array(values, np.float64)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    scaled = weight / (255 * SCALE * std)
    moved = bias - (weight * mean / std).sum((1, 2, 3))
    for name, array in ((WEIGHT, scaled), (BIAS, moved)):
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array, kind), name))
    del patches.input[1:]
    patches.input.extend([WEIGHT, BIAS])


def _patch_embedding(graph: Any) -> Any:
    """Return the convolution that reads the pixels."""
    made_by = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type == "Conv":
            name = node.input[0]
            while name in made_by and made_by[name].op_type in ("Cast", "Transpose", "Mul"):
                name = made_by[name].input[0]
            if name == INPUT:
                return node
    raise SnapvitError(
        "the graph has no convolution that reads its pixels, so they cannot be normalised by its weights"
    )


def _stored(graph: Any, name: str) -> tuple[Any, Any]:
    """Return the initialiser behind a value, and the Cast between them if there is one."""
    cast = next((node for node in graph.node if name in node.output and node.op_type == "Cast"), None)
    stored = name if cast is None else cast.input[0]
    return next(tensor for tensor in graph.initializer if tensor.name == stored), cast


def _type_of(graph: Any, name: str) -> int:
    """Return the ONNX type that a weight is computed in."""
    tensor, cast = _stored(graph, name)
    return int(tensor.data_type if cast is None else cast.attribute[0].i)


def _values_of(graph: Any, name: str) -> npt.NDArray[np.float64]:
    from onnx import numpy_helper

    return numpy_helper.to_array(_stored(graph, name)[0]).astype(np.float64)


def _remove_unread(graph: Any) -> None:
    """Remove the nodes and weights that nothing reads any more."""
    while True:
        read = {name for node in graph.node for name in node.input} | {result.name for result in graph.output}
        unread = [node for node in graph.node if not read & set(node.output)]
        if not unread:
            break
        for node in unread:
            graph.node.remove(node)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)
