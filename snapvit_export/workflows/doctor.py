"""`snapvit doctor`: tries what this machine has installed, and lists what each command lacks. Light."""

from __future__ import annotations

import importlib
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Literal

from .. import __version__
from ..runtimes.device import DeviceCard, this_device
from ..runtimes.probe import NEEDS, absent, probe_in_child
from ..storage.json import Value
from ..target import Runtime

PACKAGES = (
    *("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "timm", "scikit-learn"),
    *("openvino", "nncf", "tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-rtx"),
    *("vl-convert-python", "jinja2"),
    *("starlette", "uvicorn", "prometheus-client"),
)
# By command: modules that it imports, and the extra that installs them.
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "rank": (("torch", "timm", "sklearn"), "prune"),
    "export": (("torch", "timm", "sklearn", "onnx", "onnxruntime"), "all"),
    "pack": (("torch", "timm", "sklearn"), "prune"),
    "import-scores": (("torch", "timm"), "prune"),
    "export-scores": (("torch", "timm"), "prune"),
    "models": (("torch", "timm"), "prune"),
    "profile": (("onnx", "onnxruntime"), "ort"),
    "choose": (("onnx", "onnxruntime"), "ort"),
    "validate": (("onnx", "onnxruntime"), "ort"),
    "evaluate": (("torch", "timm", "sklearn"), "prune"),
    "compare": (("torch", "timm", "sklearn", "vl_convert", "jinja2"), "all"),
    "report": (("onnx", "vl_convert", "jinja2"), "report"),
    "run": (("onnx", "onnxruntime"), "ort"),
    "serve": (("onnx", "onnxruntime", "starlette", "uvicorn", "prometheus_client"), "serve"),
}


class CommandState(Value, frozen=True, kw_only=True):
    command: str
    works: bool
    missing: tuple[str, ...]
    remedy: str


class RuntimeState(Value, frozen=True, kw_only=True):
    runtime: str
    state: Literal["works", "absent", "broken"]
    detail: str
    remedy: str = ""  # the command that cures it


class Diagnosis(Value, frozen=True, kw_only=True):
    """The result of `snapvit doctor`."""

    snapvit: str
    python: str
    device: DeviceCard
    packages: dict[str, str | None]
    runtimes: tuple[RuntimeState, ...]
    commands: tuple[CommandState, ...]


def diagnose() -> Diagnosis:
    """Examine the machine, its packages, runtimes and commands."""
    with ThreadPoolExecutor() as pool:  # each is a process that mostly loads
        runtimes = tuple(pool.map(_runtime, NEEDS))
    return Diagnosis(
        snapvit=__version__,
        python=platform.python_version(),
        device=this_device(runtimes[0].detail),
        packages={name: _installed(name) for name in PACKAGES},
        runtimes=runtimes,
        commands=tuple(_command(name, *needs) for name, needs in COMMANDS.items()),
    )


def _runtime(runtime: Runtime) -> RuntimeState:
    """Try a runtime as an export would, in a process of its own."""
    missing = absent(runtime)
    if missing is not None:
        return RuntimeState(runtime=runtime, state="absent", detail=missing.detail, remedy=missing.remedy)
    found = probe_in_child(runtime)
    state: Literal["works", "broken"] = "works" if found.works else "broken"
    return RuntimeState(runtime=runtime, state=state, detail=found.detail, remedy=found.remedy)


def _command(name: str, modules: tuple[str, ...], extra: str) -> CommandState:
    missing = tuple(module for module in modules if not _imports(module))
    remedy = f"pip install 'snapvit-export[{extra}]'" if missing else ""
    return CommandState(command=name, works=not missing, missing=missing, remedy=remedy)


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # a broken installation raises whatever it likes
        return False
    return True


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
