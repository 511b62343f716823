"""ONNX Runtime, on the CPU or through its CUDA and TensorRT providers on an NVIDIA GPU.

The package for GPUs lists providers that do not load, and then runs on the CPU instead without a warning, even for a
provider that does not exist. So the driver is queried first, falling back is off, for the whole graph and for every
node, and an open session must name the provider that was asked for.

On a GPU a graph is opened for one batch: then no sizes are left to compute, which ONNX Runtime does on the CPU, and the
whole run is one CUDA graph between an input and outputs at fixed addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line, needs
from ..storage.atomic import cache_folder, writing
from ..target import Runtime
from .cuda import NoGPU, require_gpu
from .device import board
from .fixed_batch import in_batches
from .ort_tensorrt import preload_tensorrt, why_not_tensorrt

# Otherwise it moves the quantisation of float8 past operators that do not take it, and refuses what it has made.
KEEPS_FLOAT8 = ("session.disable_quant_qdq", "1")
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
PROVIDERS: dict[Runtime, str] = {"onnxruntime": CPU, "onnxruntime-cuda": CUDA, "onnxruntime-tensorrt": TENSORRT}
LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
SETTINGS: dict[str, dict[str, str]] = {
    CPU: {},
    CUDA: {
        "cudnn_conv_algo_search": "EXHAUSTIVE",  # there is one convolution, searched once
        "do_copy_in_default_stream": "1",  # on a stream of their own copies race with the kernels
        "use_tf32": "0",  # fp32 is fp32: TF32 keeps 10 of its 23 bits, and is on by itself
        "enable_cuda_graph": "1",  # a small ViT is hundreds of short kernels: starting them takes longer than they do
    },
    TENSORRT: {
        "trt_fp16_enable": "0",  # with both off the network is strongly typed: the graph sets the precision
        "trt_int8_enable": "0",
        "trt_cuda_graph_enable": "1",  # as for CUDA
        "trt_engine_cache_enable": "1",  # building takes seconds to minutes
        "trt_timing_cache_enable": "1",  # kernel timings of one engine serve the next
    },
}
REMEDIES = {
    CUDA: "Try: pip install 'snapvit-export[ort-gpu]'",
    TENSORRT: "Try: pip install 'snapvit-export[ort-trt]'",
}
EXTRAS: dict[Runtime, str] = {
    "onnxruntime": "ort",
    "onnxruntime-cuda": "ort-gpu",
    "onnxruntime-tensorrt": "ort-trt",
}
BATCH = "batch"  # the name of that size in graphs
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
Outputs = list[npt.NDArray[Any]]


def version() -> str:
    """Return the version of ONNX Runtime that loads; an error if none does, or if two packages share a folder."""
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) == 2:
        raise SnapvitError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files. "
            "Try: pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'snapvit-export[ort]'"
        )
    with needs("running ONNX files", extra="ort"):
        import onnxruntime
    return str(onnxruntime.__version__)


def require_provider(runtime: Runtime) -> str:
    """Return the provider of a runtime; an error if this machine lacks its package, a driver or a GPU."""
    found, provider = version(), PROVIDERS[runtime]
    import onnxruntime as ort

    if provider not in ort.get_available_providers():
        raise SnapvitError(
            f"{runtime} needs {provider}, which the installed onnxruntime {found} does not have. "
            f"Try: pip uninstall -y onnxruntime && pip install 'snapvit-export[{EXTRAS[runtime]}]'"
        )
    if provider == TENSORRT:
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # its own switch for TF32; read when CUDA starts
    if provider != CPU:
        try:
            require_gpu()
        except NoGPU as error:
            raise SnapvitError(f"{runtime} needs an NVIDIA GPU: {error}. Use --runtime onnxruntime here") from error
    return provider


class OrtSession:
    """An open model.

    >>> with OrtSession(written.graph, threads=1) as session: logits = session.run(batch)
    """

    def __init__(
        self,
        path: Path | bytes,
        threads: int,
        runtime: Runtime = "onnxruntime",
        batch: int = 1,
        weights: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        """`batch`: the one that a graph that takes any is opened for on a GPU; the CPU takes any.

        `weights`: the tensors that the graph at this path has in other files, to be shared with other sessions. It is
        a little slower then: packed copies would be faster, and belong to one session alone.
        """
        provider = require_provider(runtime)
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors only: warnings about the machine are not ours to print
        source, self._where = (path, "graph") if isinstance(path, bytes) else (str(path), str(path))
        self._shared = [] if weights is None else _share(options, weights)
        if provider == CPU:
            self._session: Any = self._open(source, options, CPU, SETTINGS[CPU])
            self._call: Any = self._plain
        else:
            options.log_severity_level = 4  # what it logs as an error it raises as well
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            options.add_free_dimension_override_by_name(BATCH, batch)
            with _quiet(ort):
                if provider == TENSORRT:
                    preload_tensorrt()
                made_by = _made_by() if provider == TENSORRT else ""
                self._session = self._open(source, options, provider, _settings(provider, path, batch, made_by))
            self._require_known_shapes()
            self._call = BoundSession(self._session, "cuda")
        given = self._session.get_inputs()[0]
        self._input = given.name
        self._batch = given.shape[0] if isinstance(given.shape[0], int) else None  # None: any

    def _open(self, source: str | bytes, options: Any, provider: str, settings: dict[str, str]) -> Any:
        import onnxruntime as ort

        def opened() -> Any:
            return ort.InferenceSession(source, options, providers=[(provider, settings)], enable_fallback=0)

        try:
            try:
                session = opened()
            except Exception as error:
                if "float8" not in str(error):
                    raise
                options.add_session_config_entry(*KEEPS_FLOAT8)
                session = opened()
        except Exception as error:  # onnxruntime's own exception types share no base of their own
            raise SnapvitError(f"{self._where}: {_why_not_open(provider, error)}") from error
        wanted = [CPU] if provider == CPU else [provider, CPU]  # it adds the CPU itself; `disable_cpu_ep_fallback`
        if session.get_providers() != wanted:
            raise SnapvitError(f"{self._where}: asked for {provider}, ONNX Runtime runs {session.get_providers()}")
        return session

    def _require_known_shapes(self) -> None:
        for value in (*self._session.get_inputs(), *self._session.get_outputs()):
            if not all(isinstance(size, int) for size in value.shape):
                raise SnapvitError(f"{self._where}: {value.name} is {value.shape}, but only its batch may be open here")

    def run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Run a batch, (B, 3, H, W) or (B, H, W, 3) bytes, and return the first output (B, features).

        A graph with a fixed batch runs as often as it must.
        """
        return in_batches(lambda batch: self._run(batch)[0], images, self._batch)

    def run_all(self, images: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Run a batch and return every output by name."""
        return dict(zip((output.name for output in self._session.get_outputs()), self._run(images)))

    def _run(self, images: npt.NDArray[Any]) -> Outputs:
        try:
            found: Outputs = self._call(images)
            return found
        except Exception as error:  # onnxruntime's own exception types share no base of their own
            raise SnapvitError(f"{self._where}: ONNX Runtime cannot run it: {first_line(error)}") from error

    def _plain(self, images: npt.NDArray[Any]) -> Outputs:
        found: Outputs = self._session.run(None, {self._input: images})
        return found

    def close(self) -> None:
        """Release its memory."""
        self._call = self._session = None
        self._shared = []

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BoundSession:
    """A session of known shapes, bound to an input and outputs at fixed addresses in a device's memory.

    They stay for as long as the session is open, as a CUDA graph needs it. Images are copied there and results back
    explicitly: otherwise ONNX Runtime does it, into new memory every time.
    """

    def __init__(self, session: Any, device: str) -> None:
        given = session.get_inputs()[0]
        self._session, self._shape, self._type = session, tuple(given.shape), np.dtype(TYPES[given.type])
        self._input = _on_device(given, device)
        self._outputs = [_on_device(output, device) for output in session.get_outputs()]
        self._binding = session.io_binding()
        self._binding.bind_ortvalue_input(given.name, self._input)
        for output, value in zip(session.get_outputs(), self._outputs):
            self._binding.bind_ortvalue_output(output.name, value)

    def __call__(self, images: npt.NDArray[Any]) -> Outputs:
        if images.shape != self._shape or images.dtype != self._type:  # a copy would check neither
            raise ValueError(f"it takes {self._shape} {self._type}, not {images.shape} {images.dtype}")
        self._input.update_inplace(np.ascontiguousarray(images))
        self._binding.synchronize_inputs()
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()
        return [np.array(value.numpy()) for value in self._outputs]  # of memory on the CPU it gives a view


def _share(options: Any, weights: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """Let a session take as little memory of its own as it can; return what must live as long as it does.

    Its tensors are where they are. Nothing is packed. Activations come from an arena of the whole process, and the one
    convolution stays as it is, for which ONNX Runtime would copy the weights into another layout.
    """
    import onnxruntime as ort

    values = [ort.OrtValue.ortvalue_from_numpy(tensor) for tensor in weights.values()]  # on the CPU without a copy
    for name, value in zip(weights, values):
        options.add_initializer(name, value)  # `add_external_initializers` copies them (1.31)
    _make_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return [values, dict(weights)]


@cache
def _make_arena() -> None:
    """Make the arena of this process, which sessions use that ask for it."""
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with contextlib.suppress(Exception):  # where somebody else in this process has made one, that is used
        ort.create_and_register_allocator(place, None)


def _on_device(value: Any, device: str) -> Any:
    import onnxruntime as ort

    return ort.OrtValue.ortvalue_from_shape_and_type(value.shape, TYPES[value.type], device, 0)


def _made_by() -> str:
    """Return the version, GPU and driver that an engine is valid for, which ONNX Runtime does not check."""
    gpu = require_gpu()
    return f"{version()} {gpu.name} {gpu.capability} {gpu.driver} {board()} {gpu.sm_count}"


def _settings(provider: str, path: Path | bytes, batch: int, made_by: str) -> dict[str, str]:
    """Return the settings of a provider; with TensorRT also where its caches are.

    It names an engine after the file and its nodes, and confuses those of models where these are alike. So there is a
    folder for every content of a graph, which names the hashes of its weights, and every `made_by`. Timings of kernels
    it names after the compute capability alone, which boards of unlike GPUs share.
    """
    if provider != TENSORRT:
        return SETTINGS[provider]
    folder = cache_folder("onnxruntime-tensorrt")
    content = path if isinstance(path, bytes) else path.read_bytes()
    digest = hashlib.sha256(content + made_by.encode()).hexdigest()[:16]
    engines = folder / f"{digest}-{batch}"
    timings = folder / f"timings-{hashlib.sha256(made_by.encode()).hexdigest()[:16]}"
    for place in (engines, timings):
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
    return SETTINGS[provider] | {"trt_engine_cache_path": str(engines), "trt_timing_cache_path": str(timings)}


@contextlib.contextmanager
def _quiet(ort: Any) -> Iterator[None]:
    """Load CUDA from pip's packages, if it is there, and keep stdout and stderr silent while a session opens."""
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()
    ort.set_default_logger_severity(4)
    try:
        yield
    finally:
        ort.set_default_logger_severity(2)  # its default


def _why_not_open(provider: str, error: Exception) -> str:
    if provider == CPU:
        return f"ONNX Runtime cannot open it: {first_line(error)}"
    if missing := _why_not_loaded(provider):
        missing = (why_not_tensorrt() if provider == TENSORRT else None) or missing
        return f"{provider} does not load: {missing}. {REMEDIES[provider]}"
    if "fallback to CPU EP has been explicitly disabled" in str(error):
        flavour = "tensorrt" if provider == TENSORRT else "portable"
        return f"{provider} would leave parts of it to the CPU. Export it with --flavour {flavour}"
    return f"ONNX Runtime cannot open it with {provider}: {first_line(error)}"


def _why_not_loaded(provider: str) -> str | None:
    """Return the loader's error for a provider's library, which ONNX Runtime only logs; None if it loads.

    Call it only after ONNX Runtime has tried: these libraries look for their host when they are loaded.
    """
    import onnxruntime as ort

    try:
        ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / LIBRARIES[provider]))
    except OSError as error:
        return first_line(error)
    return None


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
