"""Which programs and settings in a family's folder are its own, and which are somebody else's. Light.

Only names that `shipped.applications` of the manifest lists can be ours, and of a folder only the files below: whoever
put something of theirs into it does not lose it. An engine that was built there is ours, and goes with its model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...target import Runtime
from ..layout import APPLICATIONS, LABELS, Application
from ..manifest import Manifest

RUNTIME: Runtime = "tensorrt"  # families with this target have applications
CONFIG = "config.pbtxt"
CPP_FILES = ("CMakeLists.txt", "main.cpp", "model.h", "preprocess.h")
DEEPSTREAM_CONFIG, DEEPSTREAM_MODEL = "config_infer_primary.txt", "model_deepstream"
FILES: dict[Application, tuple[str, ...]] = {
    "run_engine.py": (),
    "tensorrt-cpp": CPP_FILES,
    "triton": (f"*/{CONFIG}", f"*/{LABELS}"),
    "deepstream": (
        *(DEEPSTREAM_CONFIG, LABELS),
        *(f"{DEEPSTREAM_MODEL}{suffix}" for suffix in (".onnx", ".bin", ".engine")),
    ),
}


def own_applications(folder: Path, manifest: Manifest) -> list[Application]:
    """Return the names in a family's folder that a choice has written, and that hold nothing of others."""
    listed = () if manifest.shipped is None else manifest.shipped.applications
    return [name for name in listed if next(_foreign(folder, name), None) is None]


def strangers(folder: Path, manifest: Manifest, runtime: Runtime) -> list[str]:
    """Return what stands in the way of a choice for a runtime: paths in the folder that are somebody's own."""
    listed = () if manifest.shipped is None else manifest.shipped.applications
    found = [path for name in listed for path in _foreign(folder, name)]
    if runtime == RUNTIME:
        found += [name for name in APPLICATIONS if name not in listed and os.path.lexists(folder / name)]
    return found


def remove_applications(folder: Path, manifest: Manifest) -> None:
    """Remove what an earlier choice has written."""
    for name in own_applications(folder, manifest):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _foreign(folder: Path, name: Application) -> Iterator[str]:
    """Yield the paths that are no file of ours under a name that a choice has written."""
    place, patterns = folder / name, FILES[name]
    if not os.path.lexists(place):
        return
    if place.is_symlink() or place.is_dir() != bool(patterns):
        yield name
        return
    for path in sorted(place.rglob("*")):
        inner = path.relative_to(place)
        expected = any(inner.match(pattern) and len(inner.parts) == pattern.count("/") + 1 for pattern in patterns)
        holds_some = path.is_dir() and name == "triton" and len(inner.parts) == 1
        if path.is_symlink() or not (holds_some if path.is_dir() else expected):
            yield f"{name}/{inner.as_posix()}"
