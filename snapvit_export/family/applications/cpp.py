"""`tensorrt-cpp/`: a short C++ program for the engine, with Pillow's resizing written out. Light.

`main.cpp` and `CMakeLists.txt` are the same for all models; `model.h` has what differs.
"""

from __future__ import annotations

from pathlib import Path

from ...calibration.decode import MOST_PIXELS, MOST_PROPORTION
from ...calibration.preprocessing import FAR_MORE
from ..templates import filled
from .interface import Interface

HERE = Path(__file__).parent
FOLDER = "tensorrt-cpp"


def files(about: Interface) -> dict[str, str]:
    """Return the texts of the program by their paths in the family's folder."""
    same = {f"{FOLDER}/{name}": (HERE / name).read_text() for name in ("CMakeLists.txt", "main.cpp")}
    return {
        **same,
        f"{FOLDER}/preprocess.h": preprocess_header(),
        f"{FOLDER}/model.h": filled((HERE / "model.h.in").read_text(), _values(about)),
    }


def preprocess_header() -> str:
    """Return the header that prepares images, which is the same for all models."""
    limits = {"most_pixels": str(MOST_PIXELS), "most_proportion": str(MOST_PROPORTION)}
    return filled((HERE / "preprocess.h.in").read_text(), limits)


def _values(about: Interface) -> dict[str, str]:
    steps = about.steps
    return {
        "title": about.title,
        "source": about.source,
        "result": about.result,
        "batch": str(about.batch),
        "outputs": str(about.outputs),
        "takes_bytes": _boolean(about.given.type == "uint8"),
        "has_classes": _boolean(about.classes > 0),
        "height": str(steps.input_size[1]),
        "width": str(steps.input_size[2]),
        "crop": repr(float(steps.crop_pct)),
        "squash": _boolean(steps.crop_mode == "squash"),
        "margin_down": _boolean(steps.margin == "down"),
        "filter": steps.interpolation,
        "mean": ", ".join(repr(float(value)) for value in steps.mean),
        "deviation": ", ".join(repr(float(value)) for value in steps.std),
        "far_more": str(FAR_MORE),
    }


def _boolean(value: bool) -> str:
    return "true" if value else "false"
