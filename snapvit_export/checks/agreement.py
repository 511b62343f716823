"""The gate between another runtime and ONNX Runtime on the CPU, on the very file that is timed. Light.

Always passed before anything is timed: runtimes have given wrong answers fast (DINOv3 in TensorRT 10.3).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from ..runtimes.device import usable_cores
from ..runtimes.ort import OrtSession
from ..runtimes.session import open_session
from ..runtimes.tensorrt.engine_file import mark_agreed
from ..target import Target
from .gates import require_cosine, require_equal

TOLERANCE = 1e-3  # of the largest value in fp32: other orders of summing
LEAST_COSINE = 0.99  # of one file in fewer bits in two runtimes, which is closer than to fp32


def require_same_in_runtime(name: str, path: Path, target: Target, images: npt.NDArray[Any]) -> None:
    """Refuse a file that the target's runtime answers otherwise; OpenVINO's own were compared when they were made."""
    if target.runtime == "onnxruntime" or path.suffix != ".onnx":
        return
    with OrtSession(path, usable_cores()) as session:
        wanted = session.run(images)
    with open_session(path, target) as opened:
        found = opened.run(images)
    what = f"{name}: {target.runtime} and ONNX Runtime"
    if target.precision == "fp32":
        require_equal(what, wanted, found, TOLERANCE)
    else:
        require_cosine(what, wanted, found, LEAST_COSINE)
    mark_agreed(path)
