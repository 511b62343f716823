"""Graphs written, run in ONNX Runtime and compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx.reference import ReferenceEvaluator

from snapvit_export.checks.quantisation import calibrate
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import Blueprint, GraphWriter, WrittenGraph
from snapvit_export.model.plan import Plan
from snapvit_export.runtimes.ort import OrtSession

FLAVOURS = ("portable", "ort", "tensorrt")


def run(path: Path, images: np.ndarray) -> np.ndarray:
    """What the graph says of these inputs, on one thread."""
    with OrtSession(path, 1) as session:
        return session.run(images)


def close(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal but for float32 rounding."""
    return got.shape == wanted.shape and np.abs(got - wanted).max() <= 2e-5 * max(1, np.abs(wanted).max())


def writer_of(
    drawn: Blueprint, folder: Path, flavour: str, precision: str = "fp32", takes_bytes: bool = False
) -> GraphWriter:
    """A writer into `folder`/PRECISION; graphs for TensorRT have other weights, and so a folder of their own."""
    place = folder / (f"{precision}-tensorrt" if flavour == "tensorrt" else precision)
    place.mkdir(exist_ok=True)
    return GraphWriter(drawn, place, takes_bytes, precision, flavour=flavour)


def exact_and(
    precision: str, drawn: Blueprint, plan: Plan, folder: Path, images, flavour: str, **options
) -> tuple[WrittenGraph, WrittenGraph, GraphPrecision]:
    """The float32 graph of a Plan and the one in that precision, calibrated on `images`."""
    takes_bytes, corrected = options.pop("takes_bytes", False), options.pop("corrected", None)
    format = GraphFormat(flavour, **options)
    floats = flavour if flavour == "tensorrt" else "portable"
    exact = writer_of(drawn, folder, floats, "fp32", takes_bytes).write(
        "x", plan, corrected, format=GraphFormat(floats)
    )
    numerics = calibrate(precision, exact, [image[None] for image in images], flavour)
    emitter = writer_of(drawn, folder, flavour, precision, takes_bytes)
    written = emitter.write(flavour, plan, corrected, format=format, precision=numerics)
    return exact, written, numerics


def step_by_step(written: WrittenGraph, images: np.ndarray) -> np.ndarray:
    """Every operator in the type it is written in: ONNX Runtime leaves halves out on a CPU that has none."""
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(str(written.graph)).run(None, {"images": images})[0]
