"""`run_engine.py`: classifies images with the engine, through the driver and the system's TensorRT. Light."""

from __future__ import annotations

from ..layout import LABELS, RUN_ENGINE
from ..templates import filled, program, step_values
from .interface import Interface

# Of centred answers to those of the same graph in ONNX Runtime, as the Jetson agent asks them.
LEAST_COSINES, LEAST_QUANTISED = {"fp32": 0.99999, "fp16": 0.9995}, 0.99


def files(about: Interface) -> dict[str, str]:
    """Return the program as text by its path in the family's folder."""
    return {RUN_ENGINE: filled(program("applications/run_engine.py.in"), _values(about))}


def _values(about: Interface) -> dict[str, str]:
    return {
        "title": about.title,
        "files": f"{LABELS}, {RUN_ENGINE}" if about.labels else RUN_ENGINE,
        "variant": about.variant,
        "source": repr(about.source),
        "result": repr(about.result),
        "type": repr(about.given.type),
        "shape": repr(about.shape),
        "outputs": str(about.outputs),
        "build": repr(about.own_build),
        "asked": repr(LEAST_COSINES.get(about.precision, LEAST_QUANTISED)),
        **step_values(about.steps, about.given, about.classes),
    }
