"""The precision that a graph computes in, and its weights in that precision. Light: numpy.

| precision    | weights stored as                      | computed in                                             |
|--------------|----------------------------------------|---------------------------------------------------------|
| fp32         | float32                                | float32                                                 |
| fp16         | float16                                | float16; float32 in parts whose values would not fit    |
| fp8          | float8 (E4M3), a scale for each layer  | float8 products, inputs quantised by calibration images |
| int8-dynamic | int8, a scale for each output feature  | int8 products of inputs quantised while it runs         |
| int8-static  | the same                               | int8 products of inputs quantised by calibration images |

int8 and fp8 are for the linear layers of the blocks alone: they are nearly all of the work, while norms, softmax,
embedding and classifier lose much and gain nothing. What is not quantised stays float32; in the flavour for TensorRT,
and in fp8, it is float16 where that fits, scales too. Stored values stay in rank order along axis 0, so the variants of
a family share one file in every precision; a scale serves every width, since it comes from the widest.

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
from .float8 import LARGEST_FP8, to_fp8

Tensors = dict[str, npt.NDArray[Any]]
IN_INT8 = ("q", "k", "v", "qkv", "proj", "fc1", "gate", "up", "fc2")  # layers of a block; qkv is all three
IN_FIRST = ("proj", "fc2")  # stored (in, out); the others (out, in)
STREAM, EMBED, OUTPUT = "stream", "embed", "output"  # parts of a graph, beside "blocks.0.attn" and "blocks.0.mlp"
OF_TENSORRT = {"proj": "attn.proj", "fc2": "mlp.fc2"}  # layers that are parts of their own there, within others
OF_STREAM = "of_stream"  # in the name of a value of the stream that lies in another part
LARGEST = 127  # weight in int8: -128 would not be symmetric
LARGEST_PAIR = 32767 // 255  # two neighbouring weights of one sign: 128
LEAST_SCALE = 1e-4  # of the largest in the layer: a feature with smaller weights hardly counts
LEAST_HALF = 2.0**-20  # a scale in float16: below it has too few bits, and what it scales is below those of the stream
INT32 = ".bias.int32"  # after the name of a layer
WIDE_SCALE = ".scale.wide"  # the same: its scales in float32, where it is in a part that stays so
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

    def step_about_zero(self, precision: Precision) -> np.float32:
        """Return the step of int8 or fp8 numbers about zero."""
        largest = max(-self.low, self.high, 1e-12)
        return np.float32(largest / (LARGEST_FP8 if precision == "fp8" else LARGEST))


@dataclass(frozen=True)
class GraphPrecision:
    """The precision of one variant; `checks.quantisation.calibrate` finds what depends on images."""

    precision: Precision = "fp32"
    wide: frozenset[str] = frozenset()  # of a graph in float16: parts that stay in float32, with all that is in them
    ranges: Mapping[str, Range] = field(default_factory=dict)  # int8-static and fp8: of the input of each layer
    half_around: bool = False  # int8-static: what is not int8 is float16, as in the flavour for TensorRT

    @property
    def is_half(self) -> bool:
        """True if floats are float16, where they fit."""
        return stores_half(self.precision, self.half_around)

    def quantises(self, layer: str) -> bool:
        """Return True if a layer, "blocks.0.q", multiplies in int8 or fp8."""
        return self.precision not in ("fp32", "fp16") and is_quantised(layer)

    def float_type(self, part: str) -> int:
        """Return the ONNX type of the floats in a part."""
        within = any(part == wide or part.startswith(f"{wide}.") for wide in self.wide)
        return HALF if self.is_half and not within else FLOAT


def stores_half(precision: Precision, half_around: bool) -> bool:
    """Return True if what is not quantised is stored in float16."""
    return half_around or precision in ("fp16", "fp8")


def is_quantised(layer: str) -> bool:
    """Return True for a layer that int8 and fp8 are for."""
    return layer.startswith("blocks.") and layer.rpartition(".")[2] in IN_INT8


def stored(
    tensors: Mapping[str, npt.NDArray[np.float32]],
    precision: Precision,
    sum_bits: SumBits = 16,
    half_around: bool = False,
) -> Tensors:
    """Return the tensors as the weight file of a precision has them.

    `sum_bits`: 32 for int8 weights of older families, which are not exact on every CPU. `half_around`: what is not int8
    in float16.
    """
    half, found = stores_half(precision, half_around), Tensors()
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not GraphPrecision(precision).quantises(layer):
            found[name] = _half(name, tensor) if half else tensor
        elif precision == "fp8":
            found[name], found[f"{layer}.scale"] = _fp8(tensor)
        else:
            in_first = layer.rpartition(".")[2] in IN_FIRST
            found[name], found[f"{layer}.scale"] = _int8(tensor, in_first, sum_bits, half)
    return found


def up_to_half(scale: npt.ArrayLike) -> npt.NDArray[np.float16]:
    """Return scales in float16, none of them smaller than it was: what they scale still fits."""
    wanted = np.maximum(np.asarray(scale, np.float32), np.float32(LEAST_HALF))
    found = np.asarray(wanted.astype(np.float16))
    return np.where(found < wanted, np.nextafter(found, np.float16(np.inf)), found)


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


def _fp8(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """Return the weight in float8, as bytes, and its one scale."""
    scale = up_to_half(np.abs(weight).max(initial=0) / LARGEST_FP8)
    return to_fp8(weight / scale.astype(np.float32)), scale


def _int8(
    weight: npt.NDArray[np.float32], in_first: bool, sum_bits: SumBits, half: bool = False
) -> tuple[npt.NDArray[np.int8], npt.NDArray[Any]]:
    """Quantise symmetrically, with one step for each output feature; return the weight and the steps."""
    largest = np.abs(weight).max(axis=0 if in_first else 1, initial=0)  # (out,)
    if sum_bits == 16:
        pair = _largest_pair(weight if in_first else weight.T)
        # A little less than the limit: two numbers below 128 in sum cannot be rounded to 129.
        largest = np.maximum(largest, pair * np.float32(LARGEST / (LARGEST_PAIR - 0.01)))
    scale = np.maximum(largest, max(LEAST_SCALE * float(largest.max(initial=0)), 1e-12)).astype(np.float32) / LARGEST
    kept = up_to_half(scale) if half else scale  # as it is written: the weights are whole steps of that
    scale = kept.astype(np.float32)
    steps = weight / (scale if in_first else scale[:, None])
    return np.rint(steps).clip(-LARGEST, LARGEST).astype(np.int8), kept


def _largest_pair(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the largest sum of weights of one sign of two neighbouring inputs: (in, out) -> (out,)."""
    odd = len(weight) % 2
    pairs = np.pad(weight, ((0, odd), (0, 0))).reshape((len(weight) + odd) // 2, 2, weight.shape[1])
    return np.maximum(pairs.clip(min=0).sum(1), -pairs.clip(max=0).sum(1)).max(axis=0, initial=0)
