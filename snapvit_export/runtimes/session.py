"""Open a file in the runtime of a Target, as a Session. Light: each runtime is imported when it is used."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..target import ON_CPU, Runtime, Target
from .device import Accelerator, DeviceCard, this_device


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


def open_session(path: Path, target: Target) -> Session:
    """Open a variant's file as the target runs it; what cannot be run there is an error, never something slower."""
    if target.runtime == "openvino":
        from .openvino import OpenVinoSession

        return OpenVinoSession(path, target.threads, target.batch)
    if target.runtime == "tensorrt":
        from .tensorrt.session import TensorRTSession

        return TensorRTSession(path, target)
    from .ort import OrtSession

    return OrtSession(path, target.threads, target.runtime, target.batch)


def version_of(runtime: Runtime) -> str:
    """Return the version of a runtime that really loads; an error if it does not."""
    if runtime == "openvino":
        from . import openvino

        return openvino.version()
    if runtime == "tensorrt":
        from .tensorrt import session as tensorrt_session

        return tensorrt_session.version()
    from . import ort

    ort.require_provider(runtime)
    return ort.version()


def device_for(runtime: Runtime) -> DeviceCard:
    """Return the card of this machine, with the GPU if the runtime uses one; an error if it cannot run here."""
    found = version_of(runtime)
    if runtime in ON_CPU:
        return this_device(found)
    from .cuda import require_gpu

    cuda = require_gpu()
    gpu = Accelerator(
        name=cuda.name,
        software={"cuda": cuda.driver, "compute capability": cuda.capability},
        power_mode="unknown",
        clocks_mhz={},
        temperatures_c={},
        memory_bytes=cuda.memory_bytes,
    )
    return this_device(found, gpu)
