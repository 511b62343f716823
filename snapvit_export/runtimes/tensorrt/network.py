"""TensorRT's API: parse, build, load and run; the only module that calls it. Light: standard library and numpy.

It gets the package, `tensorrt` or `tensorrt_rtx`, as an argument; tests/runtimes/tensorrt_bindings/names.py lists what
is used of it. One path from 10.3 to 11.x: the network is strongly typed, so the ONNX graph sets the precision of an
engine.
Nothing of TensorRT raises: None and False are failures, reported with the first error of its log.

Parsing and building need no GPU with TensorRT-RTX; everything after `load` does, and whoever calls it has asked
`cuda.require_gpu` first, since without a driver TensorRT ends the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import FileFormatError, SnapvitError
from .kernel_plan import KernelPlan
from .matmul_dtypes import MatmulDtypes, Product, kind_of_product
from .plan_reader import SECTION, parse_layers, parse_log

ERRORS = ("INTERNAL_ERROR", "ERROR")  # severities
KEPT_LINES = 200  # of errors; thousands of other lines come with every build
MOST_OF_A_PLAN = 1 << 24  # letters of a kernel plan: that of a ViT-L has half a million
Shape = tuple[int, ...]
DTYPES = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "FP8": "fp8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
}
NUMPY = {"fp32": "float32", "fp16": "float16", "int8": "int8", "int32": "int32", "int64": "int64", "uint8": "uint8"}


@dataclass(frozen=True)
class BuildSettings:
    """Settings that an engine is built with."""

    batch: int = 1  # that it is fastest for; the only one, if the graph fixes it
    most_batch: int | None = None  # None: `batch`
    workspace_bytes: int = 1 << 30
    level: int = 3  # of the builder, 0 to 5: how long it looks for faster kernels


class TensorRT:
    """The package, and the one logger that a process may have.

    >>> import tensorrt_rtx
    >>> engine = TensorRT(tensorrt_rtx).parse(written.graph).build(BuildSettings())
    """

    def __init__(self, trt: Any) -> None:
        self.trt, self.log = trt, _logger(trt)

    @property
    def version(self) -> str:
        """The version of the package, such as 10.3.0."""
        return str(self.trt.__version__)

    @property
    def compiler(self) -> str:
        """The package and its version, as a kernel plan names them: tensorrt_rtx 1.7.1."""
        return f"{self.trt.__name__} {self.version}"

    def parse(self, path: Path) -> ParsedNetwork:
        """Read a graph, with the weights beside it, into a strongly typed network."""
        trt = self.trt
        self.log.errors.clear()
        try:
            builder = trt.Builder(self.log)
        except TypeError as error:  # raised where no builder can be made
            raise SnapvitError(f"TensorRT {self.version} gives no builder: {self.log.cause}") from error
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, self.log)
        if not parser.parse_from_file(str(path)):
            raise SnapvitError(f"{path}: TensorRT {self.version} cannot parse it: {_first_error(parser, self.log)}")
        if network.num_layers == 0:  # an empty file is parsed without an error
            raise SnapvitError(f"{path}: TensorRT {self.version} finds no layers in it")
        return ParsedNetwork(self, path, builder, network, parser)

    def load(self, engine: bytes, where: str) -> LoadedEngine:
        """Make an engine ready to run. Needs a GPU: ask `cuda.require_gpu` before."""
        self.log.errors.clear()
        runtime = self.trt.Runtime(self.log)
        found = runtime.deserialize_cuda_engine(engine)
        if found is None:
            raise SnapvitError(f"{where}: TensorRT {self.version} cannot load it: {self.log.cause}. Build it again")
        return LoadedEngine(self, runtime, found, where)


@dataclass(frozen=True, eq=False)
class ParsedNetwork:
    """A graph that TensorRT has parsed. The builder and the parser must live as long as the network."""

    api: TensorRT
    path: Path
    builder: Any
    network: Any
    parser: Any

    @property
    def inputs(self) -> tuple[str, Shape]:
        """The name of the images and their shape, -1 for any."""
        given = self.network.get_input(0)
        return str(given.name), tuple(given.shape)

    def matmul_dtypes(self) -> MatmulDtypes:
        """Return the data type of every matrix product, to check an engine's nominal precision."""
        trt = self.api.trt
        names = {getattr(trt.DataType, kind): name for kind, name in DTYPES.items()}
        layers = [self.network.get_layer(n) for n in range(self.network.num_layers)]
        made_by = {layer.get_output(n).name: layer for layer in layers for n in range(layer.num_outputs)}

        def origin(tensor: Any, through: Any) -> Any:
            """Return the layer that a value comes from, looking through layers of some types; None: from the images."""
            layer = made_by.get(tensor.name)
            while layer is not None and layer.type in through:
                layer = made_by.get(layer.get_input(0).name)
            return layer

        def type_of(tensor: Any) -> str:
            return names.get(tensor.dtype, str(tensor.dtype))

        def behind(tensor: Any) -> str | None:
            """Return the type that a value was dequantised from; None if it was not."""
            layer = origin(tensor, shapes)
            dequantised = layer is not None and layer.type == trt.LayerType.DEQUANTIZE
            return type_of(layer.get_input(0)) if dequantised else None

        def is_stored(tensor: Any) -> bool:
            layer = origin(tensor, {*shapes, trt.LayerType.DEQUANTIZE, trt.LayerType.CAST})
            return layer is not None and layer.type == trt.LayerType.CONSTANT

        shapes = {trt.LayerType.SHUFFLE}

        found = []
        for layer in layers:
            if layer.type == trt.LayerType.MATRIX_MULTIPLY:
                read = [layer.get_input(n) for n in range(layer.num_inputs)]
                kind = kind_of_product(type_of(read[0]), [behind(tensor) for tensor in read])
                found.append(Product(str(layer.name), kind, any(map(is_stored, read))))
        return MatmulDtypes(tuple(found))

    def build(self, settings: BuildSettings, timing_cache: bytes | None = None) -> SerialisedEngine:
        """Build and serialise.

        `timing_cache` is what an earlier build of the same device and version gave, empty at first; None: use none, as
        TensorRT-RTX, which times nothing while it builds.
        """
        trt, log = self.api.trt, self.api.log
        log.errors.clear()
        config = self.builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
        config.builder_optimization_level = settings.level
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default, and keeps only 10 of the 23 bits of fp32
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if timing_cache is not None:
            known = config.create_timing_cache(timing_cache) or config.create_timing_cache(b"")
            if not config.set_timing_cache(known, False):  # of another device or version: begin anew
                config.set_timing_cache(config.create_timing_cache(b""), False)
        self._add_profile(config, settings)
        with log.keeping_plan() as told:
            plan = self.builder.build_serialized_network(self.network, config)
        if plan is None:
            raise SnapvitError(f"{self.path}: TensorRT {self.api.version} cannot build it: {log.cause}")
        learnt = b"" if timing_cache is None else bytes(config.get_timing_cache().serialize())
        return SerialisedEngine(bytes(plan), learnt, self._kernels(told))

    def _kernels(self, told: list[str]) -> KernelPlan | None:
        """Return the plan that TensorRT-RTX has told while it built; None if it did not, and of TensorRT itself."""
        try:
            return parse_log(told[-1], self.api.compiler) if told else None
        except FileFormatError:  # of a release that tells it in another way
            return None

    def _add_profile(self, config: Any, settings: BuildSettings) -> None:
        name, shape = self.inputs
        if shape[0] not in (-1, settings.batch):
            raise SnapvitError(f"{self.path}: takes exactly {shape[0]} images, not {settings.batch}")
        if shape[0] == -1:
            profile = self.builder.create_optimization_profile()
            least, best, most = ((n, *shape[1:]) for n in (1, settings.batch, settings.most_batch or settings.batch))
            profile.set_shape(name, least, best, most)
            if config.add_optimization_profile(profile) < 0:
                raise SnapvitError(f"{self.path}: TensorRT {self.api.version} refuses batches from 1 to {most[0]}")


@dataclass(frozen=True)
class SerialisedEngine:
    """A serialised engine, the timing cache that its build gave, and the kernels that were made, if they were told."""

    engine: bytes
    timing_cache: bytes
    kernels: KernelPlan | None = None


@dataclass(frozen=True, eq=False)
class LoadedEngine:
    """An engine on the GPU of this machine."""

    api: TensorRT
    runtime: Any
    engine: Any
    where: str

    def context(self) -> Context:
        """Make a context, in which one thread runs the engine."""
        found = self.engine.create_execution_context()
        if found is None:
            raise SnapvitError(f"{self.where}: no memory to run it: {self.api.log.cause}")
        return Context(self, found)

    def layers(self) -> Any:
        """Return the layers that the builder made of the graph, from TensorRT's inspector."""
        described = self.engine.create_engine_inspector().get_engine_information(
            self.api.trt.LayerInformationFormat.JSON
        )
        return json.loads(described)

    def kernels(self) -> KernelPlan | None:
        """Return the kernels of the engine; None if it does not tell them."""
        try:
            return parse_layers(self.layers(), self.api.compiler)
        except (FileFormatError, ValueError):  # no JSON
            return None

    def tensors(self) -> tuple[str, str]:
        """Return the names of the input and of the first output."""
        names = [self.engine.get_tensor_name(n) for n in range(self.engine.num_io_tensors)]
        is_input = {name: self.engine.get_tensor_mode(name) == self.api.trt.TensorIOMode.INPUT for name in names}
        return next(n for n in names if is_input[n]), next(n for n in names if not is_input[n])

    def numpy_type(self, name: str) -> np.dtype[Any]:
        """Return the numpy type of a tensor."""
        kinds = {getattr(self.api.trt.DataType, kind): dtype for kind, dtype in DTYPES.items()}
        return np.dtype(NUMPY[kinds[self.engine.get_tensor_dtype(name)]])


@dataclass(frozen=True, eq=False)
class Context:
    """Addresses that are set once, and runs on a stream."""

    engine: LoadedEngine
    context: Any

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        """Set the shape of an input, and so the number of images."""
        if not self.context.set_input_shape(name, tuple(shape)):
            raise SnapvitError(f"{self.engine.where}: was not built for {shape[0]} images. Build it for that batch")

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor, once that of the input is set."""
        return tuple(self.context.get_tensor_shape(name))

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Set the addresses of the tensors on the GPU."""
        for name, address in addresses.items():
            if not self.context.set_tensor_address(name, address):
                raise SnapvitError(f"{self.engine.where}: refuses an address for {name}")

    def enqueue(self, stream: int) -> None:
        """Begin one run; it has ended when the stream has."""
        if not self.context.execute_async_v3(stream):
            raise SnapvitError(f"{self.engine.where}: did not run: {self.engine.api.log.cause}")


@cache
def _logger(trt: Any) -> Any:
    """Return the one logger of the process that TensorRT allows: it keeps errors instead of printing them."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.plan: list[str] | None = None  # kept while a build wants it

        def log(self, severity: Any, text: str) -> None:
            if str(severity).rpartition(".")[2] in ERRORS and len(self.errors) < KEPT_LINES:
                self.errors.append(" ".join(text.split())[:300])

            elif self.plan is not None and text.startswith(SECTION) and len(text) <= MOST_OF_A_PLAN:
                self.plan[:] = [text]

        @contextmanager
        def keeping_plan(self) -> Iterator[list[str]]:
            """Within the block, keep the last kernel plan that is told."""
            told: list[str] = []
            self.plan = told
            try:
                yield told
            finally:
                self.plan = None

        @property
        def cause(self) -> str:
            """The first error: those after it are its consequences."""
            return self.errors[0] if self.errors else "it gave no reason"

    return Log()


def _first_error(parser: Any, log: Any) -> str:
    """Return the reason why a graph was not parsed, with the node."""
    if not parser.num_errors:
        return str(log.cause)
    error = parser.get_error(0)
    node = f"node {error.node_name()} ({error.node_operator()}): " if error.node_name() else ""
    code = str(error.code()).rpartition(".")[2]
    also = f"; {log.errors[0]}" if log.errors else ""  # a file that is missing is named only there
    return f"{node}{code}, {' '.join(str(error.desc()).split())[:200]}{also}"
