"""Write the variants of one model into a folder: one shared weight file, and a small graph for each Plan. Light.

>>> elastic = Elastic.load("elastic")
>>> writer = GraphWriter(Blueprint.of(elastic), Path("family"))
>>> writer.write("s30", plan, elastic.corrected_layers(plan))

    NAME.onnx             the graph, tens of kilobytes that point into these files; a variant's own vectors are in it
    weights.bin           the dense model as `weights.prepare` folds it: every variant reads prefixes of it
    weights-int8-dynamic.bin   the same in another precision, in a family that mixes them
    corrected-HASH.bin    proj and fc2 of a variant that was corrected, or all matrices that were trained
    positions-HASH.bin    positions, rotary tables and prefix of another resolution, or without the first sub-layer

The last two are named by their contents: variants of one width that differ in their tokens alone share one file, and a
file of that name is never changed. Whoever removes variants removes what none of the others reads (`Candidates`).
`single_file` puts everything into the graph instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .. import __version__
from ..calibration.preprocessing import Preprocessing
from ..elastic.folder import Elastic
from ..elastic.format import Wiring
from ..elastic.resolution import at_resolution
from ..errors import GateFailed, SnapvitError, first_line
from ..model.anatomy import Anatomy, Block
from ..model.plan import Plan
from ..storage.atomic import sha256, write_atomically, writing
from ..storage.json import to_json
from ..storage.mapped import STORED, Array, Buffer, DataType, Tensor, write_buffer
from ..target import Precision, SumBits
from .format import INPUT, Flavour, GraphFormat
from .forward import emit_nodes, output_name
from .nodes import Nodes
from .precision import IN_FIRST, INT32, WIDE_SCALE, GraphPrecision, Tensors, int32_biases, stored
from .tensorrt_forward import emit_for_tensorrt
from .weights import (
    ADDED,
    EMBEDDING,
    OF_RESOLUTION,
    into_embedding,
    own_tensors,
    prepare,
    prepare_outside,
    takes_bytes,
    with_fused_qkv,
)

WEIGHTS = "weights.bin"  # of the family's own precision
_SHARED = re.compile(r"weights(-[a-z0-9-]+)?\.bin")
HASH_DIGITS = 12  # in the names of files: enough for far more files than a folder has
PROTOBUF_LIMIT = 2_000_000_000  # bytes: the largest message that protobuf writes, and so the largest single file
IR_VERSIONS = {17: 8, 19: 9, 23: 11}  # of the file, by opset: the one that came with it
HEADS = ("q", "k", "v", "qkv", "proj", "attn_norm")  # parts of a block that are cut with its heads
NEURONS = ("fc1", "gate", "up", "fc2", "mlp_norm")
Arrays = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor in a file beside the graph: the first rows of what lies there."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: DataType = "float32"

    @property
    def size_bytes(self) -> int:
        return STORED[self.dtype].itemsize * int(np.prod(self.shape))


@dataclass(frozen=True)
class Sources:
    """The weights of one variant: placed in files, or inside the graph itself."""

    placed: Mapping[str, PlacedTensor] = field(default_factory=dict)
    inside: Mapping[str, Array] = field(default_factory=dict)


def shared_file(precision: Precision, own: Precision) -> str:
    """Return the name of the weight file that all variants of a precision read; `own`: the family's."""
    return WEIGHTS if precision == own else f"weights-{precision}.bin"


def is_shared(path: Path) -> bool:
    """Return True for a weight file that all variants of a precision read, by its name."""
    return _SHARED.fullmatch(path.name) is not None


def rows_kept(name: str, anatomy: Anatomy, plan: Plan, rows: int) -> int:
    """Return the number of a tensor's rows that a Plan reads."""
    if not name.startswith("blocks."):
        return rows
    _, number, part, kind = name.split(".")
    block: Block = anatomy.blocks[int(number)]
    if part in IN_FIRST and kind != "weight":
        return rows
    if part in HEADS:
        return plan.heads[int(number)] * block.head_dim * (3 if part == "qkv" else 1)
    return plan.neurons[int(number)] if part in NEURONS else rows


def shared_sources(buffer: Buffer, anatomy: Anatomy, plan: Plan) -> dict[str, PlacedTensor]:
    """Return the prefixes of the shared weight file that a Plan reads."""
    return {
        tensor.name: PlacedTensor(
            buffer.file,
            tensor.offset,
            (rows_kept(tensor.name, anatomy, plan, tensor.shape[0]), *tensor.shape[1:]),
            tensor.dtype,
        )
        for tensor in buffer.tensors
    }


def write_own(folder: Path, own: Tensors) -> Sources:
    """Write a variant's own matrices to files that are named by their contents; all else stays in the graph."""
    matrices = {name: tensor for name, tensor in own.items() if tensor.ndim > 1}
    inside = {name: tensor for name, tensor in own.items() if tensor.ndim <= 1}
    placed: dict[str, PlacedTensor] = {}
    for title, in_blocks in (("corrected", True), ("positions", False)):
        some = {name: tensor for name, tensor in matrices.items() if name.startswith("blocks.") == in_blocks}
        if some:
            buffer = _write_by_contents(folder, title, some)
            placed |= {tensor.name: _placed(buffer, tensor) for tensor in buffer.tensors}
    return Sources(placed, inside)


def _write_by_contents(folder: Path, title: str, tensors: Tensors) -> Buffer:
    """Write a buffer named by a title and its hash, unless it is there already."""
    begun = folder / f".{title}.bin"
    try:
        buffer = write_buffer(begun, tensors.items())
        digest = sha256(begun)
        path = folder / f"{title}-{digest[:HASH_DIGITS]}.bin"
        if not path.is_file() or sha256(path) != digest:
            with writing(path):
                begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)
    return msgspec.structs.replace(buffer, file=path.name)


def _placed(buffer: Buffer, tensor: Tensor) -> PlacedTensor:
    return PlacedTensor(buffer.file, tensor.offset, tensor.shape, tensor.dtype)


def make_model(
    nodes: Nodes, anatomy: Anatomy, format: GraphFormat, sources: Sources, metadata: Mapping[str, str]
) -> Any:
    """Return the ModelProto of a graph with its weights where `sources` places them."""
    from onnx import TensorProto, helper

    height, width = anatomy.image
    batch = format.batch or "batch"
    if format.takes_bytes:
        given = helper.make_tensor_value_info(INPUT, TensorProto.UINT8, [batch, height, width, anatomy.channels])
    else:
        given = helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, [batch, anatomy.channels, height, width])
    name = output_name(anatomy, format)
    size = anatomy.classes if name == "logits" else anatomy.embed_dim
    result = helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size])
    initialisers = [_initialiser(weight, sources) for weight in nodes.weights]
    graph = helper.make_graph(
        nodes.nodes, "vit", [given], [result], initializer=[*nodes.constants.values(), *initialisers]
    )
    opset = format.opset
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSIONS[opset], producer_name="snapvit"
    )
    helper.set_model_props(model, dict(metadata))
    return model


def _initialiser(name: str, sources: Sources) -> Any:
    from onnx import TensorProto, helper

    if name in sources.inside:
        return _tensor(name, sources.inside[name])
    if name not in sources.placed:
        raise SnapvitError(f"the graph reads {name}, which the weights do not have")
    placed = sources.placed[name]
    is_fp8 = placed.dtype == "float8"
    kind = TensorProto.FLOAT8E4M3FN if is_fp8 else helper.np_dtype_to_tensor_dtype(STORED[placed.dtype])
    tensor = TensorProto(name=name, data_type=kind, dims=placed.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", placed.file), ("offset", placed.offset), ("length", placed.size_bytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _tensor(name: str, array: Array) -> Any:
    """Return a tensor that the graph itself holds; bytes are those of float8 (`float8`)."""
    from onnx import TensorProto, helper, numpy_helper

    if array.dtype == STORED["float8"]:
        return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, array.shape, array.tobytes(), raw=True)
    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model in rank order, from which the graph of any Plan is made: in memory or mapped from an Elastic folder."""

    model: str
    anatomy: Anatomy
    wiring: Wiring
    preprocessing: Preprocessing
    labels: tuple[str, ...]
    dense: Arrays  # by canonical name, `model.tensor_names`

    @staticmethod
    def of(elastic: Elastic) -> Blueprint:
        d = elastic.description
        return Blueprint(d.model, d.anatomy, d.wiring, d.preprocessing, d.labels, elastic.dense)


@dataclass(frozen=True)
class WrittenGraph:
    """The files of one variant."""

    graph: Path
    weights: tuple[Path, ...]  # that it points into: the shared one, and those of its own matrices if it has any
    read_bytes: int  # of them
    layer_inputs: Mapping[str, str]  # the value that each linear layer reads, by its name in the graph

    @property
    def size_bytes(self) -> int:
        """Bytes that a device needs that has only this variant."""
        return self.graph.stat().st_size + self.read_bytes

    def remove(self) -> None:
        """Remove the graph and its own matrices, where no other graph reads them."""
        for path in (self.graph, *(path for path in self.weights if not is_shared(path))):
            path.unlink(missing_ok=True)


class GraphWriter:
    """Writes graphs of one model in one precision; `folder` gets the weight file with the first of them."""

    def __init__(
        self,
        blueprint: Blueprint,
        folder: Path | str,
        takes_bytes: bool = False,
        precision: Precision = "fp32",
        sum_bits: SumBits = 16,
        shared: str = WEIGHTS,
        flavour: Flavour = "portable",
    ) -> None:
        """`takes_bytes`: graphs take images as (B, H, W, C) bytes, and their weights do the normalising.

        `sum_bits`: 32 to add to a family whose int8 weights are not exact on every CPU (`precision`). `shared`: the
        name of the weight file that all of these graphs read (`shared_file`). `flavour`: of the graphs; portable ones
        and those for ONNX Runtime read the same weights, those for TensorRT others.
        """
        self.shared_name, self.for_tensorrt = shared, flavour == "tensorrt"
        self.blueprint, self.folder, self.takes_bytes = blueprint, Path(folder), takes_bytes
        self.precision = precision
        self.int8_sum_bits: SumBits | None = sum_bits if precision.startswith("int8") else None
        self.anatomy, self.wiring = blueprint.anatomy, blueprint.wiring

    @property
    def shared(self) -> Tensors:
        """The tensors that all variants read, as they are stored."""
        return self._made[0]

    @cached_property
    def _made(self) -> tuple[Tensors, Tensors]:
        """The tensors that all variants read, as they are stored; and, in float32, those of the embedding."""
        made = self._as_taken(prepare(self.blueprint.dense, self.anatomy, self.wiring))
        as_read = with_fused_qkv(made, self.anatomy) if self.for_tensorrt else made
        return self._stored(as_read), {name: made[name] for name in EMBEDDING if name in made}

    def _as_taken(self, tensors: Tensors) -> Tensors:
        """Return the tensors for images as the graphs take them."""
        return takes_bytes(tensors, self.blueprint.preprocessing) if self.takes_bytes else tensors

    def _outside(self, plan: Plan, corrected: Arrays) -> Tensors:
        """Return the tensors outside the blocks, in float32, that differ from the shared ones.

        Those are positions and rotary tables of a Plan whose images are of another resolution, and what was trained.
        """
        dense = self.blueprint.dense
        moved = at_resolution(dense, self.anatomy, self.wiring, plan)
        trained = {name: tensor for name, tensor in corrected.items() if not name.startswith("blocks.")}
        if not moved and not trained:
            return {}
        made = self._as_taken(prepare_outside({**dense, **moved, **trained}, self.anatomy, self.wiring))
        if not trained:
            return {name: made[name] for name in OF_RESOLUTION if name in made}
        shared = self._as_taken(prepare_outside(dense, self.anatomy, self.wiring))
        return {name: tensor for name, tensor in made.items() if not np.array_equal(tensor, shared[name])}

    def _stored(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> Tensors:
        return stored(tensors, self.precision, self.int8_sum_bits or 16, self._half_around)

    @property
    def _half_around(self) -> bool:
        """True if what is not int8 is stored in float16."""
        return self.for_tensorrt and self.precision == "int8-static"

    @cached_property
    def buffer(self) -> Buffer:
        """The index of `weights.bin`, which is written now."""
        arrays = (
            (name, tensor) for name, tensor in self.shared.items() if tensor.ndim
        )  # single numbers: in the graphs
        return write_buffer(self.folder / self.shared_name, arrays)

    def write(
        self,
        name: str,
        plan: Plan,
        corrected: Arrays | None = None,
        *,
        format: GraphFormat = GraphFormat(),
        precision: GraphPrecision = GraphPrecision(),
        metadata: Mapping[str, str] | None = None,
    ) -> WrittenGraph:
        """Write NAME.onnx, and what it has of its own: the `corrected` tensors, or positions of its resolution.

        Those are proj and fc2 of a corrected variant, and any tensors of one that was trained, by canonical name.
        """
        plan.check_fits(self.anatomy)
        if format.takes_bytes and not self.takes_bytes:
            raise ValueError("the weights of this writer do not normalise bytes")
        format = replace(format, takes_bytes=self.takes_bytes)  # of all graphs: the shared weights do the normalising
        if (format.flavour == "tensorrt") != self.for_tensorrt:
            raise ValueError(f"the weights of this writer are not those of the flavour {format.flavour}")
        if precision.half_around != self._half_around:
            raise ValueError("a graph for TensorRT has float16 around int8-static, and no other graph has")
        if precision.precision != self.precision:
            raise ValueError(f"a writer of {self.precision} cannot write {precision.precision}")
        own = own_tensors(self.blueprint.dense, self.anatomy, plan, corrected or {}, self.wiring, self.for_tensorrt)
        moved = self._outside(plan, corrected or {})
        if ADDED in own:
            own = into_embedding(own, self._made[1] | moved, self.anatomy)
        own = self._stored(moved | own)
        own |= self._int32_biases(plan, own, format, precision) | self._wide_scales(plan, own, precision)
        path = self.folder / f"{name}.onnx"
        if format.single_file:
            sources = Sources(inside=self._inside(plan, own))
        else:
            mine = write_own(self.folder, own)
            numbers = {name: tensor for name, tensor in self.shared.items() if not tensor.ndim}
            placed_here = {**shared_sources(self.buffer, self.anatomy, plan), **mine.placed}
            sources = Sources(placed_here, {**numbers, **mine.inside})
        nodes = self._nodes(plan, sources, format, precision)
        placed = [sources.placed[weight] for weight in nodes.weights if weight not in sources.inside]
        files = sorted({each.file for each in placed}, reverse=True)
        hashes = {file: self._hash(self.folder / file) for file in files}
        described = {**self._described(name, plan, precision), **(metadata or {})}
        described["snapvit.weights"] = to_json(hashes).decode()
        write_atomically(path, self._serialised(nodes, plan, sources, format, described))
        weights, read = tuple(self.folder / file for file in files), sum(each.size_bytes for each in placed)
        return WrittenGraph(path, weights, read, nodes.layer_inputs)

    def _hash(self, path: Path) -> str:
        """Return the hash that the graph names for a weight file; the shared file is hashed once."""
        return self.weights_sha256 if path.name == self.shared_name else sha256(path)

    @cached_property
    def weights_sha256(self) -> str:
        """SHA-256 of the shared weight file."""
        return sha256(self.folder / self.buffer.file)

    def _int32_biases(self, plan: Plan, own: Tensors, format: GraphFormat, precision: GraphPrecision) -> Tensors:
        if precision.precision != "int8-static" or format.flavour != "ort":
            return {}
        return int32_biases(self._inside(plan, own), precision)

    def _wide_scales(self, plan: Plan, own: Tensors, precision: GraphPrecision) -> Tensors:
        """Return the scales of quantised layers in float32, for those in parts that stay so."""
        if not self.for_tensorrt or not precision.wide:
            return {}
        found = self._inside(plan, own)
        return {f"{layer}{WIDE_SCALE}": found[f"{layer}.scale"].astype(np.float32) for layer in precision.ranges}

    def _inside(self, plan: Plan, own: Tensors) -> Tensors:
        def prefix(name: str, tensor: Array) -> Array:
            return tensor[: rows_kept(name, self.anatomy, plan, len(tensor))] if tensor.ndim else tensor

        return {name: prefix(name, tensor) for name, tensor in self.shared.items()} | own

    def _nodes(self, plan: Plan, sources: Sources, format: GraphFormat, precision: GraphPrecision) -> Nodes:
        blocks = range(len(self.anatomy.blocks))
        layers = [f"blocks.{i}.{layer}" for i in blocks for layer in ("proj", "fc2", "qkv")]
        biased = {layer: f"{layer}.bias" in sources.inside or f"{layer}.bias" in sources.placed for layer in layers}
        biased |= {name: True for name in sources.inside if name == ADDED or name.endswith(INT32)}
        emit = emit_for_tensorrt if self.for_tensorrt else emit_nodes
        return emit(self.anatomy.with_counts(plan), self.wiring, biased, format, precision)

    def _serialised(
        self, nodes: Nodes, plan: Plan, sources: Sources, format: GraphFormat, metadata: Mapping[str, str]
    ) -> bytes:
        inside = sum(tensor.nbytes for name, tensor in sources.inside.items() if name in nodes.weights)
        if inside > PROTOBUF_LIMIT:
            raise SnapvitError(
                f"{inside / 1e9:.1f} GB of weights are more than one ONNX file holds. Leave --single-file out"
            )
        model = make_model(nodes, self.anatomy.with_counts(plan), format, sources, metadata)
        _check(model)
        data: bytes = model.SerializeToString()
        return data

    def _described(self, name: str, plan: Plan, precision: GraphPrecision) -> dict[str, str]:
        preprocessing = self.blueprint.preprocessing.at(self.anatomy.image_of(plan))
        kept_wide = {"snapvit.float32_parts": to_json(sorted(precision.wide)).decode()} if precision.wide else {}
        exact_in = {"snapvit.int8_sum_bits": str(self.int8_sum_bits)} if self.int8_sum_bits else {}
        return {
            "snapvit.version": __version__,
            "snapvit.precision": precision.precision,
            "snapvit.input": "uint8 NHWC, not normalised" if self.takes_bytes else "float32 NCHW, normalised",
            **kept_wide,
            **exact_in,
            "snapvit.model": self.blueprint.model,
            "snapvit.variant": name,
            "snapvit.preprocessing": to_json(preprocessing).decode(),
            "snapvit.labels": to_json(self.blueprint.labels).decode(),
            "snapvit.plan": to_json(plan).decode(),
            "snapvit.tokens": to_json(self.anatomy.tokens_after(plan)).decode(),
        }


def _check(model: Any) -> None:
    """Refuse a graph with an operator whose inputs are of types or shapes that it does not take."""
    import onnx

    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:  # onnx's own exception types share no base
        raise GateFailed(f"the emitted graph is not a valid one: {first_line(error)}") from error
