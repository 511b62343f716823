"""`run_engine.py`: classifies images with the engine, through the driver and the system's TensorRT. Light."""

from __future__ import annotations

from ...runtimes.jetson_agent import LEAST_UNDECIDED, NEAR_TIE, least_cosine
from ..layout import LABELS, RUN_ENGINE
from ..templates import filled, program, step_values
from .interface import Interface


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
        "asked": repr(least_cosine(about.precision)),
        "least_undecided": repr(LEAST_UNDECIDED),
        "near_tie": repr(NEAR_TIE),
        **step_values(about.steps, about.given, about.classes),
    }
