"""TensorRT's libraries for ONNX Runtime's TensorRT provider: loaded before it, and why they are not. Light.

The provider links libnvinfer.so.10 and two more, and the loader looks for them in the system alone. pip's packages of
TensorRT have them in a folder of their own; but a library that is loaded already is found by its name, whoever loaded
it. TensorRT 11 calls them libnvinfer.so.11, so it cannot serve this provider.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import first_line

PACKAGE = "tensorrt_libs"  # the folder of libraries in pip's packages
MAJOR = 10  # of TensorRT, that the provider is linked with
LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")  # each needs those before it


def preload_tensorrt() -> str | None:
    """Load TensorRT 10 from pip's package, for all libraries that come after; returns what stopped it, if it is there.

    Where there is no such package, the system's own may still be found by the loader.
    """
    for folder in _folders():
        for name in LIBRARIES:
            path = folder / f"lib{name}.so.{MAJOR}"
            if path.is_file():
                try:
                    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                except OSError as error:
                    return first_line(error)
    return None


def why_not_tensorrt() -> str | None:
    """Return why pip's TensorRT cannot serve the provider; None if it could, or there is none."""
    found = sorted(int(number) for folder in _folders() for number in _majors(folder))
    if found and MAJOR not in found:
        return (
            f"the installed TensorRT has libnvinfer.so.{found[-1]}, and this provider needs libnvinfer.so.{MAJOR} of "
            f"TensorRT {MAJOR}"
        )
    return preload_tensorrt()


def _folders() -> Iterator[Path]:
    """Yield the folders of pip's package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    yield from map(Path, (spec.submodule_search_locations or []) if spec is not None else [])


def _majors(folder: Path) -> Iterator[str]:
    for path in folder.glob("libnvinfer.so.*"):
        if found := re.fullmatch(r"libnvinfer\.so\.(\d+)", path.name):
            yield found[1]
