"""Run a variant in TensorRT on this machine's GPU: its engine is built, or loaded from beside the graph. Light.

`BuildOnly` builds without a GPU: TensorRT-RTX compiles for one that is not there, and times nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import FileFormatError, MissingDependency, SnapvitError, first_line
from ...graph.read import read_graph
from ...storage.atomic import sha256, write_atomically
from ...storage.json import from_json
from ...target import Precision, Target
from ..cuda import Cuda, Graph, NoGPU, require_gpu
from ..fixed_batch import in_batches
from .engine_file import ANY, EngineRecord, read_engine, timing_cache_path, write_engine
from .matmul_dtypes import MatmulDtypes, require_precision
from .network import BuildSettings, TensorRT
from .opset_support import require_parseable

PACKAGES = ("tensorrt", "tensorrt_rtx")  # the first of them that is installed
INSTALL = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
NO_GPU_HELP = (
    "Build without timing (pip install tensorrt-rtx): snapvit export --runtime tensorrt --build-only --sparsity 0.3; "
    "or time on the device itself: docs/jetson.md"
)


def find_package(names: tuple[str, ...] = PACKAGES) -> Any:
    """Return the installed package of TensorRT."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError) as error:
            raise MissingDependency(
                f"{name} is installed and does not load: {first_line(error)}. Its libraries must be where the loader "
                "finds them; on a Jetson use the system's Python, or a venv with --system-site-packages"
            ) from error
    wanted = " or ".join(f"pip install {INSTALL[name]}" for name in names)
    raise MissingDependency(f"TensorRT is not installed. Try: {wanted}; a Jetson has it in the system's Python")


def require_tensorrt() -> tuple[TensorRT, Cuda]:
    """Return TensorRT and the GPU that it needs; the error says what is missing and what can be done without it."""
    try:
        cuda = require_gpu()
    except NoGPU as error:
        raise NoGPU(f"timing in TensorRT needs an NVIDIA GPU: {error}. {NO_GPU_HELP}") from error
    return TensorRT(find_package()), cuda


def version() -> str:
    """Return the version of the TensorRT that runs here, and its GPU; an error if none does."""
    api, cuda = require_tensorrt()
    return f"{api.version} on {cuda.name}"


def build_engine(
    graph: Path, precision: Precision, settings: BuildSettings, api: TensorRT, cuda: Cuda | None
) -> MatmulDtypes:
    """Build the engine of a graph and write it beside, with its record; `cuda` None: for no GPU in particular."""
    require_parseable(graph, _parser_version(api))
    parsed = api.parse(graph)
    dtypes = parsed.matmul_dtypes()
    require_precision(dtypes, precision, str(graph), _wide_parts(graph))
    record = _record(graph, precision, settings, api, cuda, dtypes)
    learns = cuda is not None and record.package == "tensorrt"
    built = parsed.build(settings, _known_timings(record) if learns else None)
    if learns:
        write_atomically(_timings(record), built.timing_cache)
    kernels = built.kernels
    if kernels is None and cuda is not None:
        kernels = api.load(built.engine, str(graph)).kernels()
    write_engine(graph, built.engine, msgspec.structs.replace(record, kernels=kernels))
    return dtypes


class TensorRTSession:
    """An open engine: addresses set once, copies, one CUDA graph, one wait.

    >>> with TensorRTSession(written.graph, target) as session: logits = session.run(batch)
    """

    def __init__(self, path: Path, target: Target, settings: BuildSettings | None = None) -> None:
        self._where = str(path)
        self._memory: dict[str, int] = {}  # addresses by tensor
        self._graph: Graph | None = None
        self._api, self._cuda = require_tensorrt()
        self._settings = settings or BuildSettings(batch=target.batch)
        engine = self._engine(path, target.precision)
        self._engine_object = self._api.load(engine, str(path))
        self._context = self._engine_object.context()
        self._batch = self._settings.batch
        self._stream = self._cuda.stream()
        try:
            self._prepare(path)
        except BaseException:
            self.close()
            raise

    def _engine(self, path: Path, precision: Precision) -> bytes:
        """Return the engine beside the graph, or a new one."""
        empty = MatmulDtypes(())
        wanted = _record(path, precision, self._settings, self._api, self._cuda, empty)
        try:
            return read_engine(path, wanted)
        except FileFormatError:
            build_engine(path, precision, self._settings, self._api, self._cuda)
            return read_engine(path, wanted)

    def _prepare(self, path: Path) -> None:
        """Allocate memory on both sides, bind its addresses, and capture the graph of one run."""
        self._names = self._engine_object.tensors()
        source, result = self._names
        dims = [d.dim_value for d in read_graph(path).graph.input[0].type.tensor_type.shape.dim[1:]]
        self._context.set_shape(source, (self._batch, *dims))
        self._input: npt.NDArray[Any] = np.zeros((self._batch, *dims), self._engine_object.numpy_type(source))
        self._output = np.zeros(self._context.shape(result), self._engine_object.numpy_type(result))
        for name, size in ((source, self._input.nbytes), (result, self._output.nbytes)):
            self._memory[name] = self._cuda.allocate(size)
        self._context.bind(self._memory)
        self._context.enqueue(self._stream.address)  # the first run allocates, which a capture must not
        self._stream.wait()
        self._graph = self._stream.captured(lambda: self._context.enqueue(self._stream.address))

    def run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Run a batch and return the first output; copies to and from the GPU are part of it."""
        return in_batches(self._run, images, self._batch)

    def _run(self, images: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        source, result = self._names
        if images.shape != self._input.shape or images.dtype != self._input.dtype:
            has, wants = f"{images.shape} {images.dtype}", f"{self._input.shape} {self._input.dtype}"
            raise SnapvitError(f"{self._where}: takes images of {wants}, not of {has}")
        np.copyto(self._input, images)
        self._stream.to_gpu(self._memory[source], self._input)
        self._launch()
        self._stream.from_gpu(self._output, self._memory[result])
        self._stream.wait()
        return self._output.astype(np.float32)  # a copy: the next run writes there

    def gpu_ms(self) -> float:
        """Return the milliseconds that the GPU alone needs for one run."""
        return self._stream.elapsed_ms(self._launch)

    def _launch(self) -> None:
        assert self._graph is not None, "the session is closed"
        self._graph.launch()

    def layers(self) -> Any:
        """Return the layers that the builder made of the graph."""
        return self._engine_object.layers()

    def close(self) -> None:
        """Release its memory."""
        if self._graph is not None:
            self._graph.close()
        for address in self._memory.values():
            self._cuda.free(address)
        self._graph, self._memory = None, {}
        self._stream.close()

    def __enter__(self) -> TensorRTSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class BuildOnly:
    """Engines for a GPU that is not here: parsed, counted and built, never run and never timed."""

    api: TensorRT

    @staticmethod
    def here() -> BuildOnly:
        """Make it with TensorRT-RTX, which builds without a GPU."""
        try:
            return BuildOnly(TensorRT(find_package(("tensorrt_rtx",))))
        except MissingDependency as error:
            raise MissingDependency(
                "building without a GPU needs TensorRT-RTX. Try: pip install tensorrt-rtx"
            ) from error

    @property
    def version(self) -> str:
        """The version as the manifest of a family that was only built has it."""
        return f"{self.api.trt.__name__} {self.api.version}, built without a GPU"

    def build(self, graph: Path, target: Target) -> MatmulDtypes:
        """Write the engine of a graph and its record."""
        return build_engine(graph, target.precision, BuildSettings(batch=target.batch), self.api, None)


def _record(
    graph: Path, precision: Precision, settings: BuildSettings, api: TensorRT, cuda: Cuda | None, dtypes: MatmulDtypes
) -> EngineRecord:
    return EngineRecord(
        onnx_sha256=sha256(graph),
        package=str(api.trt.__name__),
        version=api.version,
        device=ANY if cuda is None else cuda.name,
        capability=ANY if cuda is None else cuda.capability,
        driver="none" if cuda is None else cuda.driver,
        precision=precision,
        batch=settings.batch,
        most_batch=settings.most_batch or settings.batch,
        workspace_bytes=settings.workspace_bytes,
        level=settings.level,
        products=dtypes.counts,
    )


def _timings(record: EngineRecord) -> Path:
    version = f"{record.package} {record.version}"
    return timing_cache_path(f"{record.device} {record.capability}", version, record.precision)


def _known_timings(record: EngineRecord) -> bytes:
    path = _timings(record)
    return path.read_bytes() if path.is_file() else b""


def _wide_parts(graph: Path) -> tuple[str, ...]:
    """Return the parts of an fp16 graph that stay in float32, from its metadata."""
    metadata = {entry.key: entry.value for entry in read_graph(graph).metadata_props}
    try:
        return from_json(metadata.get("snapvit.float32_parts", "[]"), tuple[str, ...], str(graph))
    except FileFormatError as error:
        raise SnapvitError(f"{graph}: its metadata on parts in float32 is damaged. Export it again") from error


def _parser_version(api: TensorRT) -> str:
    """Return the version of the parser: TensorRT-RTX has its own versions, and the parser of TensorRT 11."""
    return "11.0" if api.trt.__name__ == "tensorrt_rtx" else api.version
