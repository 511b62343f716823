"""What a precision must know of the images: which parts do not fit fp16, and between which values int8 has its steps.

Measured on the fp32 graph of the very variant, with its corrected weights, in ONNX Runtime: no torch, so a device can
do it. Light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..target import Precision
from .emitter import Written
from .numerics import EMBED, STREAM, Numerics, Range, is_int8_layer
from .probe import all_values, largest_values

MARGIN = 4  # other images have larger values than these; a part stays in float32 if that much more would not fit
SAMPLES = 1 << 16  # values of a layer's input that decide its range
CLIPS = np.linspace(0.3, 1.0, 29)  # shares of the full range that are tried


def calibrate(precision: Precision, written: Written, batches: Sequence[Any]) -> Numerics:
    """The numerics of a variant from its fp32 graph, which must be a portable one: it hides no values.

    >>> numerics = calibrate("fp16", emitter.write("s30", plan), list(images.batches(8)))
    """
    if precision == "fp16":
        return Numerics(precision, wide=too_large(largest_values(written.graph, batches)))
    if precision == "int8-static":
        return Numerics(precision, ranges=input_ranges(written, batches))
    return Numerics(precision)


def too_large(largest: Mapping[str, float]) -> frozenset[str]:
    """Parts with values that may not fit fp16."""
    limit = float(np.finfo(np.float16).max) / MARGIN
    parts = {_part(name) for name, value in largest.items() if not value <= limit and ".wide." not in name}
    return frozenset(parts | ({STREAM} if EMBED in parts else set()))


def _part(value: str) -> str:
    """The part of the graph that a value belongs to, by its name."""
    if value.endswith((".attended", ".stream")):
        return STREAM
    words = value.split(".")
    return ".".join(words[:3]) if words[0] == "blocks" else words[0] if words[0] == EMBED else "output"


def input_ranges(written: Written, batches: Sequence[Any]) -> dict[str, Range]:
    """For each int8 layer the range of its input with the least squared error."""
    wanted = {layer: value for layer, value in written.layer_inputs.items() if is_int8_layer(layer)}
    taken: dict[str, list[npt.NDArray[np.float32]]] = {value: [] for value in wanted.values()}
    for found in all_values(written.graph, taken, batches):
        for name, chunks in taken.items():
            chunks.extend(_sample(found[name], SAMPLES // len(batches)))
    ranges = {name: best_range(np.concatenate(chunks)) for name, chunks in taken.items()}
    return {layer: ranges[value] for layer, value in wanted.items()}


def _sample(values: npt.NDArray[np.float32], count: int) -> list[npt.NDArray[np.float32]]:
    """Evenly spaced values, about so many, and the two outermost."""
    flat = values.reshape(-1)
    return [flat[:: max(1, flat.size // max(count, 1))], np.array([flat.min(), flat.max()], np.float32)]


def best_range(values: npt.NDArray[np.float32]) -> Range:
    """Of ranges that clip the outermost values, the one whose 256 steps are nearest to all of them."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    spans = [Range(low * share, high * share) for share in CLIPS]
    return min(spans, key=lambda span: _squared_error(values, span))


def _squared_error(values: npt.NDArray[np.float32], span: Range) -> float:
    scale, zero = span.step(symmetric=False)
    whole = np.clip(np.rint(values / scale) + int(zero), 0, 255)
    return float(np.square((whole - int(zero)) * scale - values).mean())
