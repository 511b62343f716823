"""Calibrate a precision on images: the parts that do not fit fp16, and the ranges of int8 and fp8 inputs. Light.

Measured on the fp32 graph of the very variant, with its corrected weights, in ONNX Runtime: no torch, so a device can
do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..graph.format import Flavour
from ..graph.precision import (
    EMBED,
    OF_STREAM,
    OF_TENSORRT,
    OUTPUT,
    STREAM,
    GraphPrecision,
    Range,
    is_quantised,
)
from ..graph.writer import WrittenGraph
from ..target import Precision
from .activations import all_values, largest_values

Floats = npt.NDArray[np.float32]
MARGIN = 4  # for larger values in other images: a part stays in float32 if that many times more would not fit
SAMPLES = 1 << 16  # values of a layer's input that decide its range
CLIPS = np.linspace(0.3, 1.0, 29)  # shares of the full range that are tried


def calibrate(
    precision: Precision, written: WrittenGraph, images: Sequence[Any], flavour: Flavour = "ort", threads: int = 1
) -> GraphPrecision:
    """Return the precision of a variant that is written in a flavour, from its fp32 graph.

    That must be a portable one, which hides no values, or one for TensorRT for that flavour. Only graphs for ONNX
    Runtime have ranges that are not about zero. Images are single ones, (1, 3, H, W): the values of all blocks are in
    memory at once.

    >>> precision = calibrate("fp16", writer.write("s30", plan), list(images.batches(1)))
    """
    found = GraphPrecision(precision, half_around=flavour == "tensorrt" and precision == "int8-static")
    if found.is_half:
        found = replace(found, wide=too_large(largest_values(written.graph, images, threads)))
    if precision in ("int8-static", "fp8"):
        choose = full_range if precision == "fp8" else partial(best_range, symmetric=flavour != "ort")
        found = replace(found, ranges=input_ranges(written, images, choose, threads))
    return found


def too_large(largest: Mapping[str, float]) -> frozenset[str]:
    """Return the parts with values that may not fit fp16, and those that receive such values from another part."""
    limit = float(np.finfo(np.float16).max) / MARGIN
    parts = {_part(name) for name, value in largest.items() if not value <= limit and ".wide." not in name}
    parts |= {STREAM} if EMBED in parts else set()
    return frozenset(parts | ({OUTPUT} if STREAM in parts else set()))


def _part(value: str) -> str:
    """Return the part of the graph that a value belongs to, by its name."""
    if value.endswith((".attended", ".stream")) or OF_STREAM in value:
        return STREAM
    words = value.split(".")
    if words[0] != "blocks":
        return words[0] if words[0] == EMBED else OUTPUT
    return ".".join(words[: 4 if ".".join(words[2:4]) in OF_TENSORRT.values() else 3])


def input_ranges(
    written: WrittenGraph, images: Sequence[Any], choose: Callable[[Floats], Range], threads: int = 1
) -> dict[str, Range]:
    """Return for each quantised layer the range that is chosen for the values of its input."""
    wanted = {layer: value for layer, value in written.layer_inputs.items() if is_quantised(layer)}
    taken: dict[str, list[Floats]] = {value: [] for value in wanted.values()}
    random = np.random.default_rng(0)
    for found in all_values(written.graph, taken, images, threads):
        for name, chunks in taken.items():
            chunks.extend(_sample(found[name], max(1, SAMPLES // len(images)), random))
    ranges = {name: choose(np.concatenate(chunks)) for name, chunks in taken.items()}
    return {layer: ranges[value] for layer, value in wanted.items()}


def _sample(values: Floats, count: int, random: np.random.Generator) -> list[Floats]:
    """Subsample values at random, since evenly spaced ones can all be of one feature; and add the two outermost."""
    flat = values.reshape(-1)
    return [flat[random.integers(0, flat.size, count)], np.array([flat.min(), flat.max()], np.float32)]


def full_range(values: Floats) -> Range:
    """Return the range of all values: fp8 is as fine for small ones whatever the largest is."""
    return Range(float(values.min()), float(values.max()))


def best_range(values: Floats, symmetric: bool = False) -> Range:
    """Return the range, of some that clip the outermost values, whose 256 steps are nearest to all values."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    spans = [Range(low * share, high * share) for share in CLIPS]
    return min(spans, key=lambda span: _squared_error(values, span, symmetric))


def _squared_error(values: Floats, span: Range, symmetric: bool) -> float:
    scale, zero = span.step(symmetric)
    least, most = (-128, 127) if symmetric else (0, 255)
    whole = np.clip(np.rint(values / scale) + int(zero), least, most)
    return float(np.square((whole - int(zero)) * scale - values).mean())
