"""The nodes and constants of a foreign ONNX file as plain values. Light: onnx, when used.

Nothing here rewrites a graph, so neither onnx-graphsurgeon nor onnx-ir would help: nodes are only read, each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, first_line
from ..graph.read import read_graph

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Node:
    """One operation."""

    op: str
    domain: str  # "" for the operators of ONNX itself
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        made = next((name for name in self.outputs if name), "")
        return f"node '{self.name or made}' ({self.op}, output '{made}')"

    @property
    def inner_reads(self) -> set[str]:
        """The names of all values that its branches read."""
        branches = [value for value in self.attributes.values() if isinstance(value, Branch)]
        return {name for branch in branches for name in branch.reads}

    @property
    def reads(self) -> set[str]:
        """The names of all values that it reads, also inside of branches."""
        return {*self.inputs, *self.inner_reads}

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or what it is when it is left out."""
        return self.attributes.get(name, default)


@dataclass(frozen=True, eq=False)
class Branch:
    """One of the two graphs inside an If."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    outputs: tuple[str, ...]

    @property
    def reads(self) -> set[str]:
        """The names of all values that its nodes and outputs read."""
        inner = {name for node in self.nodes for name in node.reads}
        return inner | set(self.outputs)


class Misfit(Exception):
    """A node that no plain ViT has: which one, and what was expected there."""

    def __init__(self, node: Node, expected: str) -> None:
        super().__init__(f"{node}: {expected}")
        self.node, self.expected = node, expected


@dataclass(frozen=True, eq=False)
class Graph:
    """A foreign file: its nodes in order, and its constants, read when they are asked for."""

    path: Path
    model: Any  # ModelProto
    opset: int
    nodes: tuple[Node, ...]
    _read: dict[str, Array] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """The stored tensors by name, as the file has them."""
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What the graph takes, by name; files of old versions list their constants as well."""
        return {value.name: value for value in self.model.graph.input if value.name not in self.tensors}

    @cached_property
    def outputs(self) -> dict[str, Any]:
        return {value.name: value for value in self.model.graph.output}

    def constant(self, name: str) -> Array:
        """Return a stored tensor; halves become float32."""
        if name not in self._read:
            self._read[name] = as_array(self.tensors[name], self.path)
        return self._read[name]


def read(path: Path) -> Graph:
    """Read a file; functions of its own are written out in place."""
    import onnx.inliner

    model = read_graph(path)
    if model.functions:
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:  # onnx's own exception types share no base
            raise FileFormatError(f"{path}: its functions cannot be written out: {first_line(error)}") from error
    _require_text(model, path)
    versions = {entry.domain: entry.version for entry in model.opset_import}
    opset = versions.get("", versions.get("ai.onnx", 0))
    return Graph(path, model, opset, tuple(_node(proto, path) for proto in model.graph.node))


def _require_text(model: Any, path: Path) -> None:
    """Refuse names that are no text: protobuf gives them as bytes, which nothing would match."""
    named = [*model.graph.initializer, *model.graph.input, *model.graph.output]
    names = [each.name for each in named] + [entry.domain for entry in model.opset_import]
    for node in model.graph.node:
        names += [node.op_type, node.domain, node.name, *node.input, *node.output, *(a.name for a in node.attribute)]
    if any(not isinstance(name, str) for name in names):
        raise FileFormatError(f"{path}: damaged: it has names that are no text")


def as_array(tensor: Any, path: Path) -> Array:
    """Return a tensor as an array, halves as float32."""
    from onnx import numpy_helper

    try:
        array: Array = numpy_helper.to_array(tensor, base_dir=str(path.parent))
    except Exception as error:  # whatever onnx and numpy make of a damaged tensor
        raise FileFormatError(f"{path}: damaged: {tensor.name or 'a constant'}: {first_line(error)}") from error
    return array.astype(np.float32) if is_half(array.dtype) else array


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return True for 16 bits of floating point; numpy itself has no bfloat16."""
    return dtype == np.float16 or dtype.name == "bfloat16"


def _node(proto: Any, path: Path) -> Node:
    from onnx import AttributeProto, helper

    attributes: dict[str, Any] = {}
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.TENSOR:
            attributes[attribute.name] = as_array(attribute.t, path)
            continue
        if attribute.type == AttributeProto.GRAPH:
            attributes[attribute.name] = _branch(attribute.g, path)
            continue
        try:
            value = helper.get_attribute_value(attribute)
        except ValueError as error:
            raise FileFormatError(f"{path}: damaged: node '{proto.name}': {first_line(error)}") from error
        attributes[attribute.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return Node(proto.op_type, domain, proto.name, tuple(proto.input), tuple(proto.output), attributes)


def _branch(graph: Any, path: Path) -> Branch:
    nodes = tuple(_node(proto, path) for proto in graph.node)
    constants = {tensor.name: as_array(tensor, path) for tensor in graph.initializer}
    return Branch(nodes, constants, tuple(output.name for output in graph.output))
