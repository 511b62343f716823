"""The precision that a graph computes in, and its weights in that precision. Light: numpy.

| precision    | weights stored as                      | computed in                                             |
|--------------|----------------------------------------|---------------------------------------------------------|
| fp32         | float32                                | float32                                                 |
| fp16         | float16                                | float16; float32 in parts whose values would not fit    |
| int8-dynamic | int8, a scale for each output feature  | int8 products of inputs quantised while it runs         |
| int8-static  | the same                               | int8 products of inputs quantised by calibration images |

int8 is for the linear layers of the blocks alone: they are nearly all of the work, while norms, softmax, embedding and
classifier lose much and gain nothing. Stored values stay in rank order along axis 0, so the variants of a family share
one file in every precision; a scale serves every width, since it comes from the widest.

int8 weights are such that the products of two neighbouring inputs add up within 16 bits, whatever the inputs are. x86
CPUs with AVX2 or AVX-512 but without int8 dot products (VNNI) have only an instruction (vpmaddubsw) that multiplies
unsigned by signed bytes, adds neighbours and saturates at 16 bits. ONNX Runtime uses it there for both kinds of int8,
also where inputs are signed: it turns those into unsigned ones. Two weights of 127 would be cut off silently, and files
travel, so the CPU that exports cannot decide. With `w` and `v` beside each other and inputs from 0 to 255:

    255 (max(w, 0) + max(v, 0)) <= 32767    if the positive ones of a pair add up to 128 at most, and so the negative

That costs little of the 8 bits, since two large weights of one sign seldom meet: the quantisation step is wider by a
quarter in a DeiT-Tiny, where 7 bits for every weight would double it. Unsigned weights would be exact as well, but
their kernels take twice the time (`benchmarks/precision.py`). Any Plan keeps a prefix of the inputs, so pairs stay.

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
from ..target import Precision, SumBits

Tensors = dict[str, npt.NDArray[Any]]
IN_INT8 = ("q", "k", "v", "proj", "fc1", "gate", "up", "fc2")  # layers of a block
IN_FIRST = ("proj", "fc2")  # stored (in, out); the others (out, in)
STREAM, EMBED, OUTPUT = "stream", "embed", "output"  # parts of a graph, beside "blocks.0.attn" and "blocks.0.mlp"
OF_STREAM = "of_stream"  # in the name of a value of the stream that lies in another part
LARGEST = 127  # weight in int8: -128 would not be symmetric
LARGEST_PAIR = 32767 // 255  # two neighbouring weights of one sign: 128
LEAST_SCALE = 1e-4  # of the largest in the layer: a feature with smaller weights hardly counts
INT32 = ".bias.int32"  # after the name of a layer
MOST_STEPS = 2**30  # quantisation steps of a bias in int32, so that the sum of the products still fits
FLOAT, HALF = 1, 10  # onnx.TensorProto.FLOAT and FLOAT16


@dataclass(frozen=True)
class Range:
    """The range in which the inputs of a layer are quantised; values beyond it are clipped."""

    low: float
    high: float

    def step(self, symmetric: bool) -> tuple[np.float32, np.uint8 | np.int8]:
        """Return the quantisation step and zero point: uint8, or int8 about zero."""
        if symmetric:
            return np.float32(max(-self.low, self.high, 1e-12) / 127), np.int8(0)
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = max(high - low, 1e-12) / 255
        return np.float32(scale), np.uint8(round(-low / scale))


@dataclass(frozen=True)
class GraphPrecision:
    """The precision of one variant; `checks.quantisation.calibrate` finds what depends on images."""

    precision: Precision = "fp32"
    wide: frozenset[str] = frozenset()  # fp16: parts that stay in float32
    ranges: Mapping[str, Range] = field(default_factory=dict)  # int8-static: of the input of each layer

    def is_int8(self, layer: str) -> bool:
        """Return True if a layer, "blocks.0.q", multiplies in int8."""
        return self.precision.startswith("int8") and is_int8_layer(layer)

    def float_type(self, part: str) -> int:
        """Return the ONNX type of the floats in a part."""
        return HALF if self.precision == "fp16" and part not in self.wide else FLOAT


def is_int8_layer(layer: str) -> bool:
    return layer.startswith("blocks.") and layer.rpartition(".")[2] in IN_INT8


def stored(tensors: Mapping[str, npt.NDArray[np.float32]], precision: Precision, sum_bits: SumBits = 16) -> Tensors:
    """Return the tensors as the weight file of a precision has them.

    `sum_bits`: 32 for int8 weights of older families, which are not exact on every CPU.
    """
    if precision == "fp32":
        return dict(tensors)
    if precision == "fp16":
        return {name: _half(name, tensor) for name, tensor in tensors.items()}
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and is_int8_layer(layer):
            found[name], found[f"{layer}.scale"] = _int8(tensor, layer.rpartition(".")[2] in IN_FIRST, sum_bits)
        else:
            found[name] = tensor
    return found


def int32_biases(tensors: Mapping[str, npt.NDArray[Any]], precision: GraphPrecision) -> Tensors:
    """Return biases in quantisation steps of their layer's products, as ONNX Runtime wants them for int8-static.

    A layer is left out if its bias is too large for that: beside weights or inputs that are all zero.
    """
    found: Tensors = {}
    for layer, span in precision.ranges.items():
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


def _int8(
    weight: npt.NDArray[np.float32], in_first: bool, sum_bits: SumBits
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Quantise symmetrically, with one step for each output feature; return the weight and the steps."""
    largest = np.abs(weight).max(axis=0 if in_first else 1, initial=0)  # (out,)
    if sum_bits == 16:
        pair = _largest_pair(weight if in_first else weight.T)
        # A little less than the limit: two numbers below 128 in sum cannot be rounded to 129.
        largest = np.maximum(largest, pair * np.float32(LARGEST / (LARGEST_PAIR - 0.01)))
    scale = np.maximum(largest, max(LEAST_SCALE * float(largest.max(initial=0)), 1e-12)).astype(np.float32) / LARGEST
    steps = weight / (scale if in_first else scale[:, None])
    return np.rint(steps).clip(-LARGEST, LARGEST).astype(np.int8), scale


def _largest_pair(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the largest sum of weights of one sign of two neighbouring inputs: (in, out) -> (out,)."""
    odd = len(weight) % 2
    pairs = np.pad(weight, ((0, odd), (0, 0))).reshape((len(weight) + odd) // 2, 2, weight.shape[1])
    return np.maximum(pairs.clip(min=0).sum(1), -pairs.clip(max=0).sum(1)).max(axis=0, initial=0)
