"""STUBS of libcuda and of TensorRT's Python package, which record what a program does with them. No GPU, no TensorRT.

Memory of the stub is ordinary memory, so that copies really copy; work on a stream is only done when the program waits
for it. The stub of TensorRT answers with ONNX Runtime. Nothing here says anything about a real GPU.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

CONTEXT, STREAM = 0x1000, 0x2000  # handles of the stub
KINDS = {"float32": "FLOAT", "float16": "HALF", "uint8": "UINT8"}


class StubCuda:
    """STUB: the functions of libcuda.so.1 that a program calls, by name; others do not exist."""

    def __init__(self, gpus: int = 1, fails: str = "") -> None:
        self.gpus, self.fails = gpus, fails
        self.calls: list[str] = []
        self.sizes: dict[str, list[int]] = {"gpu": [], "host": []}
        self.live: dict[tuple[str, int], Any] = {}  # what was taken and not given back
        self.queue: list[Callable[[], None]] = []
        self.errors: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not hasattr(type(self), f"_{name}"):
            raise AttributeError(f"the stub has no {name}")

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return 2
            getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _take(self, kind: str, address: int, what: Any = None) -> None:
        self.live[kind, address] = what

    def _give(self, kind: str, address: int) -> None:
        if (kind, address) not in self.live:
            self.errors.append(f"{kind} {address:#x} was given back twice, or never taken")
        self.live.pop((kind, address), None)

    def _cuInit(self, flags: ctypes.c_uint) -> None:
        assert flags.value == 0

    def _cuGetErrorString(self, code: ctypes.c_int, text: Any) -> None:
        text._obj.value = b"out of memory"

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.gpus

    def _cuDeviceGet(self, device: Any, number: ctypes.c_int) -> None:
        device._obj.value = number.value

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> None:
        context._obj.value = CONTEXT
        self._take("context", device.value)

    def _cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> None:
        if any(kind != "context" for kind, _ in self.live):
            self.errors.append("the context went before what was taken in it")
        self._give("context", device.value)

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> None:
        assert context.value == CONTEXT

    def _cuStreamCreate(self, stream: Any, flags: ctypes.c_uint) -> None:
        stream._obj.value = STREAM
        self._take("stream", STREAM)

    def _cuStreamDestroy_v2(self, stream: ctypes.c_void_p) -> None:
        self._give("stream", stream.value or 0)

    def _cuStreamSynchronize(self, stream: ctypes.c_void_p) -> None:
        assert stream.value == STREAM
        for work in self.queue:
            work()
        self.queue.clear()

    def _cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> None:
        address._obj.value = self._buffer("gpu", size.value)

    def _cuMemFree_v2(self, address: ctypes.c_uint64) -> None:
        self._give("gpu", address.value)

    def _cuMemHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: ctypes.c_uint) -> None:
        address._obj.value = self._buffer("host", size.value)

    def _cuMemFreeHost(self, address: ctypes.c_void_p) -> None:
        self._give("host", address.value or 0)

    def _buffer(self, kind: str, size: int) -> int:
        buffer = ctypes.create_string_buffer(size)
        self.sizes[kind].append(size)
        self._take(kind, ctypes.addressof(buffer), buffer)
        return ctypes.addressof(buffer)

    def _cuMemcpyHtoDAsync_v2(
        self, to: ctypes.c_uint64, start: ctypes.c_void_p, size: ctypes.c_size_t, stream: Any
    ) -> None:
        self._copy("gpu", to.value, "host", start.value or 0, size.value, stream)

    def _cuMemcpyDtoHAsync_v2(
        self, to: ctypes.c_void_p, start: ctypes.c_uint64, size: ctypes.c_size_t, stream: Any
    ) -> None:
        self._copy("host", to.value or 0, "gpu", start.value, size.value, stream)

    def _copy(self, kind: str, to: int, from_kind: str, start: int, size: int, stream: ctypes.c_void_p) -> None:
        assert stream.value == STREAM
        for side, address in ((kind, to), (from_kind, start)):
            assert len(self.live[side, address]) == size, "a copy that is not of a whole buffer"
        self.queue.append(lambda: ctypes.memmove(to, start, size) and None)

    def array(self, address: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
        """The contents of a buffer on the stub's GPU."""
        return np.frombuffer(self.live["gpu", address], kind)[: int(np.prod(shape))].reshape(shape)


def write_engine(path: Path, graph: Path, **changes: Any) -> Path:
    """Write an engine as the stub reads it: tensors of a graph by name, (mode, type, shape), some of them changed."""
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": "float32", "tensor(uint8)": "uint8"}
    tensors = {}
    for mode, found in (("INPUT", session.get_inputs()), ("OUTPUT", session.get_outputs())):
        for each in found:
            shape = [-1 if isinstance(side, str) or side is None else side for side in each.shape]
            tensors[each.name] = [mode, kinds[each.type], shape]
    described = {"graph": str(graph), "tensors": tensors, "batches": None, **changes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(described))
    return path


def stub_tensorrt(cuda: StubCuda, version: str = "10.3.0") -> ModuleType:
    """STUB: a module in the place of `tensorrt`, with the names of 10.3 to 11 that run an engine and no others."""
    trt = ModuleType("tensorrt")
    modes = SimpleNamespace(INPUT="TensorIOMode.INPUT", OUTPUT="TensorIOMode.OUTPUT")

    class ILogger:
        def __init__(self) -> None:
            self.is_made = True

    class Context:
        def __init__(self, engine: Engine) -> None:
            self.engine, self.addresses = engine, {}
            self.shapes = {name: tuple(shape) for name, (_, _, shape) in engine.tensors.items()}

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            if self.engine.batches is not None and shape[0] not in self.engine.batches:
                return False
            self.shapes = {each: (shape[0], *known[1:]) for each, known in self.shapes.items()}
            return True

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return self.shapes[name]

        def set_tensor_address(self, name: str, address: int) -> bool:
            self.addresses[name] = address
            return True

        def execute_async_v3(self, stream: int) -> bool:
            assert stream == STREAM
            cuda.calls.append("execute_async_v3")
            cuda.queue.append(self.run)
            return True

        def run(self) -> None:
            place = {
                mode: cuda.array(self.addresses[name], self.shapes[name], kind)
                for name, (mode, kind, _) in self.engine.tensors.items()
            }
            session = onnxruntime.InferenceSession(self.engine.graph, providers=["CPUExecutionProvider"])
            (source,) = session.get_inputs()
            place["OUTPUT"][...] = session.run(None, {source.name: place["INPUT"]})[0]

    class Engine:
        def __init__(self, described: dict[str, Any]) -> None:
            self.graph, self.tensors, self.batches = described["graph"], described["tensors"], described["batches"]
            self.num_io_tensors = len(self.tensors)
            cuda._take("engine", id(self))

        def __del__(self) -> None:
            cuda._give("engine", id(self))

        def get_tensor_name(self, number: int) -> str:
            return list(self.tensors)[number]

        def get_tensor_mode(self, name: str) -> str:
            return getattr(modes, self.tensors[name][0])

        def get_tensor_dtype(self, name: str) -> str:
            return f"DataType.{KINDS[self.tensors[name][1]]}"

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return tuple(self.tensors[name][2])

        def create_execution_context(self) -> Context:
            return Context(self)

    class Runtime:
        def __init__(self, log: Any) -> None:
            assert log.is_made, "TensorRT wants ILogger.__init__ to be called"
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            try:
                return Engine(json.loads(data))
            except ValueError:
                self.log.log("Severity.WARNING", "stub: a warning")
                self.log.log("Severity.ERROR", "stub: the engine plan is of\n another version")
                return None

    trt.__version__ = version  # type: ignore[attr-defined]
    for name, what in (("ILogger", ILogger), ("Runtime", Runtime), ("TensorIOMode", modes)):
        setattr(trt, name, what)
    return trt
