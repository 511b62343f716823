"""An ONNX file whose weights lie elsewhere: tens of kilobytes that point into a weight file many variants share. Light.

    weights.bin    what `prepare` makes of the dense model: every variant reads prefixes of it
    NAME.bin       a variant's own matrices: corrected proj and fc2, or positions
    NAME.onnx      the graph; biases that are its own are in it

`single_file` puts everything into the graph instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SnapvitError
from ..model.anatomy import Anatomy, Block
from ..model.plan import Plan
from ..storage.mapped import Array, Buffer, Tensor, write_buffer
from .forward import INPUT, OPSETS, Options, output_name
from .nodes import Nodes
from .precision import IN_FIRST, Tensors

PROTOBUF_LIMIT = 2_000_000_000  # bytes: the largest message that protobuf writes, and so the largest single file
IR_VERSIONS = {17: 8, 23: 11}  # of the file, by opset: the one that came with it
HEADS = ("q", "k", "v", "proj", "attn_norm")  # parts of a block that are cut with its heads; others with its neurons
NEURONS = ("fc1", "gate", "up", "fc2", "mlp_norm")


@dataclass(frozen=True)
class Placed:
    """A tensor in a file beside the graph: the first rows of what lies there."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape))


@dataclass(frozen=True)
class Sources:
    """Where the weights of one variant are: in files, or in the graph itself."""

    placed: Mapping[str, Placed] = field(default_factory=dict)
    inside: Mapping[str, Array] = field(default_factory=dict)


def rows_kept(name: str, anatomy: Anatomy, plan: Plan, rows: int) -> int:
    """How many of a tensor's rows a Plan reads."""
    if not name.startswith("blocks."):
        return rows
    _, number, part, kind = name.split(".")
    block: Block = anatomy.blocks[int(number)]
    if part in IN_FIRST and kind != "weight":
        return rows
    if part in HEADS:
        return plan.heads[int(number)] * block.head_dim
    return plan.neurons[int(number)] if part in NEURONS else rows


def shared_sources(buffer: Buffer, anatomy: Anatomy, plan: Plan) -> dict[str, Placed]:
    """The prefixes of the shared weight file that a Plan reads."""
    return {
        tensor.name: Placed(
            buffer.file,
            tensor.offset,
            (rows_kept(tensor.name, anatomy, plan, tensor.shape[0]), *tensor.shape[1:]),
            tensor.dtype,
        )
        for tensor in buffer.tensors
    }


def write_own(path: Path, own: Tensors) -> Sources:
    """Write a variant's own matrices to a file of their own; vectors stay in the graph."""
    matrices = {name: tensor for name, tensor in own.items() if tensor.ndim > 1}
    inside = {name: tensor for name, tensor in own.items() if tensor.ndim == 1}
    if not matrices:
        path.unlink(missing_ok=True)  # of an earlier variant of that name
        return Sources(inside=inside)
    buffer = write_buffer(path, matrices.items())
    return Sources({tensor.name: _placed(buffer, tensor) for tensor in buffer.tensors}, inside)


def _placed(buffer: Buffer, tensor: Tensor) -> Placed:
    return Placed(buffer.file, tensor.offset, tensor.shape, tensor.dtype)


def make_model(nodes: Nodes, anatomy: Anatomy, options: Options, sources: Sources, metadata: Mapping[str, str]) -> Any:
    """The ModelProto of a graph with its weights where `sources` says."""
    from onnx import TensorProto, helper

    height, width = anatomy.image
    batch = options.batch or "batch"
    if options.takes_bytes:
        given = helper.make_tensor_value_info(INPUT, TensorProto.UINT8, [batch, height, width, anatomy.channels])
    else:
        given = helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, [batch, anatomy.channels, height, width])
    name = output_name(anatomy, options)
    size = anatomy.classes if name == "logits" else anatomy.embed_dim
    result = helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size])
    initialisers = [_initialiser(weight, sources) for weight in nodes.weights]
    graph = helper.make_graph(
        nodes.nodes, "vit", [given], [result], initializer=[*nodes.constants.values(), *initialisers]
    )
    opset = OPSETS[options.flavour]
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSIONS[opset], producer_name="snapvit"
    )
    helper.set_model_props(model, dict(metadata))
    return model


def _initialiser(name: str, sources: Sources) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    if name in sources.inside:
        return numpy_helper.from_array(np.ascontiguousarray(sources.inside[name]), name)
    if name not in sources.placed:
        raise SnapvitError(f"the graph reads {name}, which the weights do not have")
    placed = sources.placed[name]
    tensor = TensorProto(
        name=name, data_type=helper.np_dtype_to_tensor_dtype(np.dtype(placed.dtype)), dims=placed.shape
    )
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", placed.file), ("offset", placed.offset), ("length", placed.size_bytes)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
