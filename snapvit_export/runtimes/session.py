"""Open a file in the runtime of a Target, as a Session. Light: each runtime is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..target import ON_CPU, Runtime, Target
from .device import Accelerator, DeviceCard, board, check_threads, this_device, usable_cores


class Session(Protocol):
    """An open model."""

    def run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Run a batch, (B, 3, H, W) or (B, H, W, 3) bytes, and return the first output (B, features)."""

    def close(self) -> None:
        """Release its memory."""

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Backend:
    """A runtime as this package uses it: the module that has it, how it opens a file, and its version."""

    module: str  # beside this one, imported when it is used
    open: Callable[[Any, Path, Target], Session]
    version: Callable[[Any, Runtime], str]  # an error if the runtime does not really load


def _ort_version(ort: Any, runtime: Runtime) -> str:
    ort.require_provider(runtime)
    return str(ort.version())


ORT = Backend("ort", lambda ort, path, t: ort.OrtSession(path, t.threads, t.runtime, t.batch), _ort_version)
BACKENDS: dict[Runtime, Backend] = {
    "onnxruntime": ORT,
    "onnxruntime-cuda": ORT,
    "onnxruntime-tensorrt": ORT,
    "openvino": Backend(
        "openvino",
        lambda openvino, path, t: openvino.OpenVinoSession(path, t.threads, t.batch),
        lambda o, _: o.version(),
    ),
    "tensorrt": Backend(
        "tensorrt.session",
        lambda session, path, t: session.TensorRTSession(path, t),
        lambda session, _: session.version(),
    ),
}


def open_session(path: Path, target: Target) -> Session:
    """Open a variant's file as the target runs it; what cannot be run there is an error, never something slower."""
    check_threads(target.threads)
    backend = BACKENDS[target.runtime]
    return backend.open(_module(backend), path, target)


def with_cores_here(target: Target) -> Target:
    """Return a target with at most as many threads as this machine has cores: outputs do not depend on their number."""
    return msgspec.structs.replace(target, threads=min(target.threads, usable_cores()))


def version_of(runtime: Runtime) -> str:
    """Return the version of a runtime that really loads; an error if it does not."""
    backend = BACKENDS[runtime]
    return backend.version(_module(backend), runtime)


def _module(backend: Backend) -> Any:
    return import_module(f".{backend.module}", __package__)


def device_for(runtime: Runtime) -> DeviceCard:
    """Return the card of this machine, with the GPU if the runtime uses one; an error if it cannot run here."""
    found = version_of(runtime)
    if runtime in ON_CPU:
        return this_device(found)
    return this_device(found, _gpu_here())


def _gpu_here() -> Accelerator:
    """Describe the GPU of this machine as it is now: what a Jetson's system tells is read as its agent reads it."""
    from . import jetson_agent as agent
    from .cuda import require_gpu

    cuda = require_gpu()
    of_system = agent.software(agent.Version(0, 0, 0))
    versions = {name: told for name, told in of_system.items() if name != "tensorrt" and told != agent.UNKNOWN}
    return Accelerator(
        name=cuda.name,
        software=versions | {"cuda": cuda.driver, "compute capability": cuda.capability},
        power_mode=agent.power_mode(),
        clocks_mhz=agent.clocks(),
        temperatures_c=agent.temperatures(),
        memory_bytes=cuda.memory_bytes,
        board=board(),
        sm_count=cuda.sm_count,
    )
