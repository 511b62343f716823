"""The NVIDIA driver through ctypes: the GPU, its memory, streams, events and graphs. Light.

TensorRT without a driver gives no clean error, and may end the process; so the driver is queried first, here. All calls
go to libcuda itself, which every machine with a GPU has: no CUDA toolkit and no other package is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError

LIBRARY = "libcuda.so.1"
CAPABILITY = (75, 76)  # CUdevice_attribute: major and minor
MULTIPROCESSORS = 16  # CUdevice_attribute
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
SPIN = 1  # CU_CTX_SCHED_SPIN: the CPU polls the GPU while it waits, for the lowest latency


class NoGPU(SnapvitError):
    """There is no NVIDIA GPU that could be used here."""


class Cuda:
    """The driver and the first GPU, with a context that stays until the process ends."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError:
            raise NoGPU(f"no NVIDIA driver is installed here: {LIBRARY} is not found") from None
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise NoGPU("the NVIDIA driver finds no GPU here")
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxSetFlags_v2", self._device, SPIN)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.use()

    def use(self) -> None:
        """Make the GPU current for the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {code}"
            if name in ("cuInit", "cuDeviceGetCount"):
                raise NoGPU(f"the NVIDIA driver cannot be used here: {reason}")
            raise SnapvitError(f"the GPU refused {name}: {reason}")

    @property
    def name(self) -> str:
        """The name of the GPU."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, 256, self._device)
        return text.value.decode()

    @property
    def capability(self) -> str:
        """The compute capability, such as 8.7."""
        return ".".join(str(self._attribute(number)) for number in CAPABILITY)

    @property
    def sm_count(self) -> int:
        """The number of streaming multiprocessors: GPUs of one name differ in it."""
        return self._attribute(MULTIPROCESSORS)

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    @property
    def driver(self) -> str:
        """The newest CUDA version that the driver supports."""
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    @property
    def pci_address(self) -> str:
        """The place of the GPU on the bus, by which other libraries know it: 0000:01:00.0."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, 32, self._device)
        return text.value.decode()

    @property
    def memory_bytes(self) -> int:
        size = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(size), self._device)
        return size.value

    def allocate(self, size: int) -> int:
        """Allocate bytes on the GPU and return their address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> PinnedArray:
        """Allocate an array in page-locked memory, which the GPU copies without a detour."""
        return PinnedArray(self, shape, np.dtype(dtype))

    def stream(self) -> Stream:
        handle = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(handle), 1)  # CU_STREAM_NON_BLOCKING
        return Stream(self, handle)


class PinnedArray:
    """An array of zeros in page-locked memory; it must not be used after `close`."""

    def __init__(self, cuda: Cuda, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        size = max(int(np.prod(shape)) * dtype.itemsize, 1)
        self._cuda, self._address = cuda, ctypes.c_void_p()
        cuda._call("cuMemHostAlloc", ctypes.byref(self._address), ctypes.c_size_t(size), 0)
        if not self._address.value:
            raise SnapvitError(f"the driver gave no page-locked memory of {size} bytes. Close other programs")
        memory = memoryview((ctypes.c_uint8 * size).from_address(self._address.value))
        self.array: npt.NDArray[Any] = np.frombuffer(memory, dtype, count=int(np.prod(shape))).reshape(shape)
        self.array.fill(0)

    def close(self) -> None:
        self._cuda._call("cuMemFreeHost", self._address)


class Stream:
    """A CUDA stream: work in order."""

    def __init__(self, cuda: Cuda, handle: ctypes.c_void_p) -> None:
        self._cuda, self._handle = cuda, handle

    @property
    def address(self) -> int:
        """The handle as TensorRT takes it."""
        return int(self._handle.value or 0)

    def to_gpu(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a whole array; it must stay as it is until the stream has been waited for."""
        size = ctypes.c_size_t(array.nbytes)
        self._cuda._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), _pointer(array), size, self._handle)

    def from_gpu(self, array: npt.NDArray[Any], address: int) -> None:
        size = ctypes.c_size_t(array.nbytes)
        self._cuda._call("cuMemcpyDtoHAsync_v2", _pointer(array), ctypes.c_uint64(address), size, self._handle)

    def wait(self) -> None:
        """Wait until all work of the stream is done."""
        self._cuda._call("cuStreamSynchronize", self._handle)

    def captured(self, work: Callable[[], None]) -> Graph:
        """Capture what `work` puts onto this stream, as one graph that starts with one call."""
        graph, runnable = ctypes.c_void_p(), ctypes.c_void_p()
        self._cuda._call("cuStreamBeginCapture_v2", self._handle, RELAXED)
        try:
            work()
        except BaseException:
            self._cuda.library.cuStreamEndCapture(
                self._handle, ctypes.byref(graph)
            )  # unchecked: the first error counts
            raise
        self._cuda._call("cuStreamEndCapture", self._handle, ctypes.byref(graph))
        self._cuda._call("cuGraphInstantiateWithFlags", ctypes.byref(runnable), graph, ctypes.c_uint64(0))
        self._cuda._call("cuGraphDestroy", graph)
        return Graph(self._cuda, runnable, self._handle)

    def elapsed_ms(self, work: Callable[[], None]) -> float:
        """Return how long the GPU was busy with `work`, by events on this stream.

        It is put onto the stream once before: while the GPU is busy with that, the first event and the work to measure
        arrive, and the way of their launch to the GPU does not count.
        """
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in events:
            self._cuda._call("cuEventCreate", ctypes.byref(event), 0)
        work()
        self._cuda._call("cuEventRecord", events[0], self._handle)
        work()
        self._cuda._call("cuEventRecord", events[1], self._handle)
        self._cuda._call("cuEventSynchronize", events[1])
        took = ctypes.c_float()
        self._cuda._call("cuEventElapsedTime", ctypes.byref(took), *events)
        for event in events:
            self._cuda._call("cuEventDestroy_v2", event)
        return took.value

    def close(self) -> None:
        self._cuda._call("cuStreamDestroy_v2", self._handle)


class Graph:
    """A CUDA graph: captured work."""

    def __init__(self, cuda: Cuda, runnable: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        self._cuda, self._runnable, self._stream = cuda, runnable, stream

    def launch(self) -> None:
        self._cuda._call("cuGraphLaunch", self._runnable, self._stream)

    def close(self) -> None:
        self._cuda._call("cuGraphExecDestroy", self._runnable)


def require_gpu() -> Cuda:
    """Return the GPU of this machine, ready for the calling thread; a clear error if there is none."""
    found = _first_gpu()
    found.use()
    return found


@cache
def _first_gpu() -> Cuda:
    return Cuda()


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous, "the driver copies plain memory"
    return ctypes.c_void_p(np.ascontiguousarray(array).ctypes.data)
