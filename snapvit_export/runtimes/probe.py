"""Tries one runtime for real, in a process of its own: imports, libraries, and a graph of one node. Light.

Whatever a broken library does to the process that loads it, the one that asks lives on and can tell: `snapvit doctor`
asks so. What stops a runtime is told in one line, beside the command that cures it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import platform
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import get_args

from ..errors import FileFormatError, SnapvitError, first_line
from ..storage.json import Value, from_json
from ..target import Runtime
from ..visible import say
from .cuda import NoGPU
from .tensorrt.session import PACKAGES

SECONDS = 120  # loading takes some; nothing that works takes so long
ANSWER = "snapvit-probe "  # before the line of JSON: libraries print what they like
TRY = ". Try: "  # in our own errors, before the command
WITHOUT_GPU = "--runtime onnxruntime or openvino, which need none"
# By runtime: the packages that bring it, and how to install it.
NEEDS: dict[Runtime, tuple[tuple[str, ...], str]] = {
    "onnxruntime": (("onnxruntime", "onnxruntime-gpu"), "pip install 'snapvit-export[ort]'"),
    "openvino": (("openvino",), "pip install 'snapvit-export[openvino]'"),
    "tensorrt": (("tensorrt", "tensorrt-rtx"), "pip install 'snapvit-export[rtx]' to build, [trt] or [trt11] to run"),
    "onnxruntime-cuda": (("onnxruntime-gpu",), "pip install 'snapvit-export[ort-gpu]' instead of [ort]"),
    "onnxruntime-tensorrt": (("onnxruntime-gpu",), "pip install 'snapvit-export[ort-trt]' instead of [ort]"),
}
# Where these extras bring nothing (pyproject.toml has the same): on ARM, as of a Jetson.
ON_ARM: dict[Runtime, str] = {
    "tensorrt": "sudo apt install nvidia-jetpack, on a Jetson: docs/jetson.md",
    "onnxruntime-tensorrt": "--runtime tensorrt: no package has this provider for ARM",
}
ON_OLD_ARM = "--runtime tensorrt: no package is made for ARM before Python 3.11"
DISTRIBUTIONS = {"tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"), "tensorrt_rtx": ("tensorrt-rtx",)}


class Probe(Value, frozen=True, kw_only=True):
    """The answer: whether a runtime works, its version or what stops it, and what to do about it."""

    works: bool
    detail: str
    remedy: str = ""


def absent(runtime: Runtime, root: Path = Path("/")) -> Probe | None:
    """Return why a runtime is not there at all; None if one of its packages is."""
    if any(_installed(name) for name in NEEDS[runtime][0]):
        return None
    hidden = _hidden_tensorrt(root) if runtime == "tensorrt" else None
    return hidden or Probe(works=False, detail="not installed", remedy=_how_to_install(runtime))


def _how_to_install(runtime: Runtime) -> str:
    if platform.machine() != "aarch64":
        return NEEDS[runtime][1]
    if runtime == "onnxruntime-cuda" and sys.version_info < (3, 11):
        return ON_OLD_ARM
    return ON_ARM.get(runtime, NEEDS[runtime][1])


def _installed(package: str) -> bool:
    if _version(package):
        return True
    name = package.replace("-", "_")  # packages of a distribution may come without metadata
    return name != "onnxruntime_gpu" and importlib.util.find_spec(name) is not None


def _hidden_tensorrt(root: Path) -> Probe | None:
    """Return how to see the TensorRT of a Jetson's system from a virtual environment; None if that is not the case."""
    if sys.prefix == sys.base_prefix:
        return None
    here = f"python3.{sys.version_info.minor}"
    found = {place.parents[1].name: place.parent for place in root.glob("usr/lib/python3*/dist-packages/tensorrt")}
    place = found.get(here) or found.get("python3") or next(iter(found.values()), None)
    if place is None:
        return None
    same = place.parent.name in (here, "python3")
    whose = "this virtual environment does not see" if same else f"is of another Python than this {here}"
    python, folder = (_base_python(), sys.prefix) if same else ("/usr/bin/python3", "VENV")
    return Probe(
        works=False,
        detail=f"the system's tensorrt is in {place}, which {whose}",
        remedy=f"{python} -m venv --system-site-packages {folder}",
    )


def _base_python() -> str:
    """Return the Python that this virtual environment was made with."""
    return str(getattr(sys, "_base_executable", sys.executable))


def probe_in_child(runtime: Runtime) -> Probe:
    """Try a runtime in a process of its own."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", runtime]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return _broken(runtime, f"it did not answer within {SECONDS} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    try:
        return from_json(lines[-1].removeprefix(ANSWER), Probe, "the answer") if lines else _ended(runtime, done)
    except FileFormatError as error:
        return _broken(runtime, str(error))


def _ended(runtime: Runtime, done: subprocess.CompletedProcess[str]) -> Probe:
    if done.returncode < 0:
        return _broken(runtime, f"loading it ends the process ({signal.Signals(-done.returncode).name})")
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it gave no reason"]
    return _broken(runtime, f"loading it ends the process: {last[0].strip()[:160]}")


def _broken(runtime: Runtime, detail: str) -> Probe:
    packages = [name for name in NEEDS[runtime][0] if _installed(name)] or list(NEEDS[runtime][0][:1])
    return Probe(works=False, detail=detail, remedy=f"pip install --force-reinstall --no-deps {packages[0]}")


def main() -> None:
    """Try the runtime that the first word names, and print the answer."""
    runtime = next(name for name in get_args(Runtime) if name == sys.argv[1])
    found = probe(runtime)
    say(ANSWER + json.dumps({"works": found.works, "detail": found.detail, "remedy": found.remedy}), sys.stdout)


def probe(runtime: Runtime) -> Probe:
    """Try a runtime in this process, as an export would."""
    from .session import version_of

    loaded = ""
    try:
        if runtime == "tensorrt":
            loaded = "".join(f"{each}; " for each in _imports_of_tensorrt())
        found = version_of(runtime)
        if runtime.startswith("onnxruntime"):
            _run_a_node(runtime)
        return Probe(works=True, detail=found)
    except SnapvitError as error:
        cause = error.__cause__
        if isinstance(cause, NoGPU):
            return Probe(works=False, detail=f"{loaded}it needs an NVIDIA GPU: {cause}", remedy=WITHOUT_GPU)
        detail, _, remedy = " ".join(str(error).split()).partition(TRY)
        return Probe(works=False, detail=detail, remedy=remedy) if remedy else _broken(runtime, detail)
    except Exception as error:  # whatever stops a runtime is its diagnosis
        return _broken(runtime, f"{type(error).__name__}: {first_line(error)}")


def _imports_of_tensorrt() -> list[str]:
    """Import every package of TensorRT that is installed; an error names the first that does not load."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.import_module(name).__version__} loads and builds")
        except (ImportError, OSError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                continue
            extra = "rtx" if name == "tensorrt_rtx" else "trt11" if _version(name).startswith("11.") else "trt"
            raise SnapvitError(
                f"{name} {_version(name)} does not load: {first_line(error)}{TRY}pip install 'snapvit-export[{extra}]'"
            ) from error
    return found


def _version(package: str) -> str:
    """Return the version that is installed of a package, by whichever distribution brings it; empty if none does."""
    for name in DISTRIBUTIONS.get(package.replace("-", "_"), (package,)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def _run_a_node(runtime: Runtime) -> None:
    """Run a graph of one node: a successful import alone does not prove that it works."""
    import numpy as np
    from onnx import TensorProto, helper

    from .ort import OrtSession

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", [value], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with OrtSession(model.SerializeToString(), threads=1, runtime=runtime) as session:
        if session.run(np.ones((1, 1), np.float32))[0, 0] != -1:
            raise SnapvitError("it computes wrong numbers")
