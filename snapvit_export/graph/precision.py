"""In which numbers a graph computes, and its weights in those numbers. Light: numpy.

| precision    | weights stored as                      | computed in                                             |
|--------------|----------------------------------------|---------------------------------------------------------|
| fp32         | float32                                | float32                                                 |
| fp16         | float16                                | float16; float32 in parts whose values would not fit    |
| int8-dynamic | int8, a scale for each output feature  | int8 products of inputs scaled when they are seen       |
| int8-static  | the same                               | int8 products of inputs scaled by calibration images    |

int8 is for the linear layers of the blocks alone: they are nearly all of the work, while norms, softmax, embedding and
classifier lose much and gain nothing. Stored values stay in rank order along axis 0, so the variants of a family share
one file in every precision; a scale serves every width, since it comes from the widest.

Written here instead of by ONNX Runtime's quantiser or onnxconverter-common: these turn one finished file into another
with weights of its own, and a family has one weight file. `benchmarks/precision.py` times the quantiser beside ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..target import Precision

Tensors = dict[str, npt.NDArray[Any]]
IN_INT8 = ("q", "k", "v", "proj", "fc1", "gate", "up", "fc2")  # layers of a block
IN_FIRST = ("proj", "fc2")  # stored (in, out); the others (out, in)
STREAM, EMBED, OUTPUT = "stream", "embed", "output"  # parts of a graph, beside "blocks.0.attn" and "blocks.0.mlp"
OF_STREAM = "of_stream"  # in the name of a value of the stream that lies in another part
LEAST_SCALE = 1e-4  # of the largest in the layer: a feature with smaller weights hardly counts


@dataclass(frozen=True)
class Range:
    """Between which values the inputs of a layer are told apart; what lies beyond is clipped."""

    low: float
    high: float

    def step(self, symmetric: bool) -> tuple[np.float32, np.uint8 | np.int8]:
        """Scale and zero point: uint8, or int8 about zero."""
        if symmetric:
            return np.float32(max(-self.low, self.high, 1e-12) / 127), np.int8(0)
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = max(high - low, 1e-12) / 255
        return np.float32(scale), np.uint8(round(-low / scale))


@dataclass(frozen=True)
class Numerics:
    """How one variant computes; `measure_numerics` finds what depends on images."""

    precision: Precision = "fp32"
    wide: frozenset[str] = frozenset()  # fp16: parts that stay in float32
    ranges: Mapping[str, Range] = field(default_factory=dict)  # int8-static: of the input of each layer

    def is_int8(self, layer: str) -> bool:
        """Whether a layer, "blocks.0.q", multiplies in int8."""
        return self.precision.startswith("int8") and is_int8_layer(layer)

    def float_type(self, part: str) -> int:
        """The ONNX type of the floats in a part."""
        return HALF if self.precision == "fp16" and part not in self.wide else FLOAT


INT32 = ".bias.int32"  # after the name of a layer
MOST_STEPS = 2**30  # of a bias in int32, so that the sum of the products still fits
FLOAT, HALF = 1, 10  # onnx.TensorProto.FLOAT and FLOAT16


def is_int8_layer(layer: str) -> bool:
    return layer.startswith("blocks.") and layer.rpartition(".")[2] in IN_INT8


def stored(tensors: Mapping[str, npt.NDArray[np.float32]], precision: Precision) -> Tensors:
    """The tensors as the weight file of a precision has them."""
    if precision == "fp32":
        return dict(tensors)
    if precision == "fp16":
        return {name: _half(name, tensor) for name, tensor in tensors.items()}
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and is_int8_layer(layer):
            found[name], found[f"{layer}.scale"] = _int8(tensor, layer.rpartition(".")[2] in IN_FIRST)
        else:
            found[name] = tensor
    return found


def int32_biases(tensors: Mapping[str, npt.NDArray[Any]], numerics: Numerics) -> Tensors:
    """Biases in the steps of their layer's products, as ONNX Runtime wants them for int8 layers with a fixed range.

    A layer has none here if a bias is too large for that: beside weights or inputs that are all zero.
    """
    found: Tensors = {}
    for layer, span in numerics.ranges.items():
        if (bias := tensors.get(f"{layer}.bias")) is not None:
            step = span.step(symmetric=False)[0] * tensors[f"{layer}.scale"].astype(np.float32)  # (out,)
            whole = np.rint(bias.astype(np.float64) / step)
            if np.abs(whole).max(initial=0) < MOST_STEPS:
                found[f"{layer}{INT32}"] = whole.astype(np.int32)
                found[f"{layer}.bias.step"] = step.astype(np.float32)
    return found


def _half(name: str, tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    if np.abs(tensor).max(initial=0) > np.finfo(np.float16).max:
        raise SnapvitError(f"{name} has values beyond {np.finfo(np.float16).max:g}, which fp16 cannot hold. Use fp32")
    return tensor.astype(np.float16)


def _int8(weight: npt.NDArray[np.float32], in_first: bool) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Symmetric steps, one size for each output feature."""
    largest = np.abs(weight).max(axis=0 if in_first else 1, initial=0)  # (out,)
    scale = np.maximum(largest, max(LEAST_SCALE * float(largest.max(initial=0)), 1e-12)).astype(np.float32) / 127
    steps = weight / (scale if in_first else scale[:, None])
    return np.rint(steps).clip(-127, 127).astype(np.int8), scale
