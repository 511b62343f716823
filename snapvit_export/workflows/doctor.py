"""`snapvit doctor`: tries what this machine has installed, and lists what each command lacks. Light."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Literal

from .. import __version__
from ..errors import SnapvitError
from ..runtimes.device import DeviceCard, this_device
from ..storage.json import Value
from ..target import Runtime

PACKAGES = (
    *("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "timm", "scikit-learn"),
    *("openvino", "nncf", "tensorrt", "tensorrt-rtx"),
    *("vl-convert-python", "jinja2"),
    *("starlette", "uvicorn", "prometheus-client"),
)
# By runtime: packages of which it needs one, and how to install it.
OTHER_RUNTIMES: dict[Runtime, tuple[tuple[str, ...], str]] = {
    "openvino": (("openvino",), "pip install 'snapvit-export[openvino]'"),
    "tensorrt": (("tensorrt", "tensorrt-rtx"), "pip install tensorrt-rtx, or see docs/jetson.md"),
    "onnxruntime-cuda": (("onnxruntime-gpu",), "pip install 'snapvit-export[ort-gpu]' instead of [ort]"),
    "onnxruntime-tensorrt": (("onnxruntime-gpu",), "pip install 'snapvit-export[ort-gpu]' instead of [ort]"),
}
# By command: modules that it imports, and the extra that installs them.
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "rank": (("torch", "timm", "sklearn"), "prune"),
    "export": (("torch", "timm", "sklearn", "onnx", "onnxruntime"), "all"),
    "pack": (("torch", "timm", "sklearn"), "prune"),
    "import-scores": (("torch", "timm"), "prune"),
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
    runtime = _onnxruntime()
    return Diagnosis(
        snapvit=__version__,
        python=platform.python_version(),
        device=this_device(runtime.detail),
        packages={name: _installed(name) for name in PACKAGES},
        runtimes=(runtime, *(_other(name, *needs) for name, needs in OTHER_RUNTIMES.items())),
        commands=tuple(_command(name, *needs) for name, needs in COMMANDS.items()),
    )


def _onnxruntime() -> RuntimeState:
    """Run a graph of one node: a successful import alone does not prove that it works."""

    def try_it() -> str:
        import numpy as np
        from onnx import TensorProto, helper

        from ..runtimes.ort import OrtSession, version

        found = version()
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1])
        result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", [value], [result])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        with OrtSession(model.SerializeToString(), threads=1) as session:
            if session.run(np.ones((1, 1), np.float32))[0, 0] != -1:
                raise SnapvitError("it computes wrong numbers")
        return found

    if _installed("onnxruntime") is None and _installed("onnxruntime-gpu") is None:
        return RuntimeState(runtime="onnxruntime", state="absent", detail="pip install 'snapvit-export[ort]'")
    return _attempt("onnxruntime", try_it)


def _other(runtime: Runtime, packages: tuple[str, ...], remedy: str) -> RuntimeState:
    """Ask a runtime for its version as an export would, which shows whether it could run here."""
    from ..runtimes.session import version_of

    if all(_installed(name) is None for name in packages):
        return RuntimeState(runtime=runtime, state="absent", detail=remedy)
    return _attempt(runtime, lambda: version_of(runtime))


def _attempt(name: str, try_it: Callable[[], str]) -> RuntimeState:
    try:
        return RuntimeState(runtime=name, state="works", detail=try_it())
    except Exception as error:  # whatever stops a runtime is its diagnosis
        return RuntimeState(runtime=name, state="broken", detail=" ".join(str(error).split()))


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
