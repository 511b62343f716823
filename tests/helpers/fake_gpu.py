"""A fake GPU: a libcuda that records its calls and copies within this process, and a TensorRT that computes in ONNX
Runtime. It shows what is asked of both, in which order; it says nothing about a GPU or about TensorRT."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from snapvit_export.graph.read import read_graph
from snapvit_export.runtimes import cuda as cuda_module
from snapvit_export.runtimes.cuda import Cuda
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.runtimes.tensorrt import session as session_module
from snapvit_export.runtimes.tensorrt.matmul_dtypes import MatmulDtypes, Product
from snapvit_export.runtimes.tensorrt.network import BuildSettings, SerialisedEngine

ATTRIBUTES = {75: 8, 76: 7, 16: 8}  # capability 8.7, eight multiprocessors
Answers = np.ndarray[Any, np.dtype[np.float32]]


class FakeLibcuda:
    """Functions of the driver by name. Every call is recorded; memory of the GPU is memory of this process."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory: dict[int, Any] = {}
        self.capturing = False
        self.work: Callable[[], None] = lambda: None  # that was captured last
        self.graphs: dict[int, Callable[[], None]] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return partial(self._called, name)

    def _called(self, name: str, *given: Any) -> int:
        self.calls.append(name)
        getattr(self, f"_{name}", lambda *_: None)(*given)
        return 0

    def _allocate(self, out: Any, size: Any) -> None:
        buffer = (ctypes.c_uint8 * size.value)()
        out._obj.value = ctypes.addressof(buffer)
        self.memory[ctypes.addressof(buffer)] = buffer

    def _cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = 1

    def _cuDeviceGetName(self, text: Any, *_: Any) -> None:
        text.value = b"Orin"

    def _cuDeviceGetAttribute(self, out: Any, number: int, _: Any) -> None:
        out._obj.value = ATTRIBUTES[number]

    def _cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = 12060

    def _cuDeviceTotalMem_v2(self, out: Any, _: Any) -> None:
        out._obj.value = 8 << 30

    def _cuMemAlloc_v2(self, out: Any, size: Any) -> None:
        self._allocate(out, size)

    def _cuMemHostAlloc(self, out: Any, size: Any, _: Any) -> None:
        self._allocate(out, size)

    def _cuMemFree_v2(self, address: Any) -> None:
        del self.memory[address.value]

    def _cuMemFreeHost(self, address: Any) -> None:
        del self.memory[address.value]

    def _cuMemcpyHtoDAsync_v2(self, address: Any, pointer: Any, size: Any, _: Any) -> None:
        ctypes.memmove(address.value, pointer, size.value)

    def _cuMemcpyDtoHAsync_v2(self, pointer: Any, address: Any, size: Any, _: Any) -> None:
        ctypes.memmove(pointer, address.value, size.value)

    def _cuStreamBeginCapture_v2(self, *_: Any) -> None:
        self.capturing = True

    def _cuStreamEndCapture(self, *_: Any) -> None:
        self.capturing = False

    def _cuGraphInstantiateWithFlags(self, out: Any, *_: Any) -> None:
        out._obj.value = len(self.graphs) + 1
        self.graphs[len(self.graphs) + 1] = self.work

    def _cuGraphLaunch(self, runnable: Any, _: Any) -> None:
        self.graphs[runnable.value]()

    def _cuEventElapsedTime(self, out: Any, *_: Any) -> None:
        out._obj.value = 0.5


class FakeTensorRT:
    """What a session asks of `network.TensorRT`; `change` is done to what ONNX Runtime answers, by the graph's name."""

    def __init__(self, library: FakeLibcuda, change: Callable[[str, Answers], Answers]) -> None:
        self.library, self.change = library, change
        self.trt = SimpleNamespace(__name__="tensorrt")
        self.version = "10.3.0"
        self.built: list[tuple[str, BuildSettings]] = []

    def parse(self, path: Path) -> Any:
        products = MatmulDtypes((Product("fake", "fp32"),))
        return SimpleNamespace(matmul_dtypes=lambda: products, build=partial(self._build, path))

    def _build(self, path: Path, settings: BuildSettings, _: bytes | None) -> SerialisedEngine:
        self.built.append((path.stem, settings))
        return SerialisedEngine(str(path).encode(), b"timings")

    def load(self, engine: bytes, _: str) -> FakeEngine:
        return FakeEngine(self, Path(engine.decode()))


class FakeEngine:
    """An engine that is a path: its context runs that graph in ONNX Runtime."""

    def __init__(self, api: FakeTensorRT, path: Path) -> None:
        self.api, self.path, self.session = api, path, OrtSession(path, 1)
        self.output = read_graph(path).graph.output[0].type.tensor_type.shape.dim[1].dim_value
        self.addresses: dict[str, int] = {}
        self.given: tuple[int, ...] = ()

    def context(self) -> FakeEngine:
        return self

    def kernels(self) -> None:
        """None: it has none to tell of."""

    def tensors(self) -> tuple[str, str]:
        return "images", "logits"

    def numpy_type(self, _: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def set_shape(self, _: str, shape: tuple[int, ...]) -> None:
        self.given = tuple(shape)

    def shape(self, _: str) -> tuple[int, ...]:
        return self.given[0], self.output

    def bind(self, addresses: dict[str, int]) -> None:
        self.addresses = dict(addresses)

    def enqueue(self, _: int) -> None:
        if self.api.library.capturing:
            self.api.library.work = self._compute
        else:
            self._compute()

    def _compute(self) -> None:
        images = np.frombuffer(self.api.library.memory[self.addresses["images"]], np.float32).reshape(self.given)
        found = self.api.change(self.path.stem, self.session.run(images)).astype(np.float32)
        ctypes.memmove(self.addresses["logits"], found.ctypes.data, found.nbytes)


@contextmanager
def fake_gpu(change: Callable[[str, Answers], Answers] = lambda _, answers: answers) -> Iterator[FakeTensorRT]:
    """Let TensorRT run here, by fakes of it and of the driver."""
    library = FakeLibcuda()
    api = FakeTensorRT(library, change)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_module.ctypes, "CDLL", lambda _: library)
        cuda = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_module, "_first_gpu", lambda: cuda)
        patch.setattr(session_module, "require_tensorrt", lambda: (api, cuda))
        yield api
