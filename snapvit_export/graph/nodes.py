"""Nodes of an ONNX graph, one call each: what `emit` writes its forward pass with. Light: onnx, when it is used.

Every value gets the name of the part it belongs to, so that a graph opened in a viewer, or a gate that fails, says
which block it speaks of. Weights are only named here; where they lie is decided when the file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class Nodes:
    """Collects nodes and small constants, in the order of the computation.

    >>> y = nodes.add("Gemm", x, nodes.weight("head.weight"), transB=1)
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[Any] = []  # NodeProto
        self.constants: dict[str, Any] = {}  # TensorProto by name: shapes and numbers, a few bytes each
        self.weights: list[str] = []  # names of the tensors that the graph reads, in the order of their first use
        self._scope: list[str] = []
        self._count: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within the block, values are named after this part of the model."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def add(self, op: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the name of that output."""
        from onnx import helper

        output = name or self._named(op)
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def split(self, x: str, axis: int, parts: int) -> list[str]:
        """Cut a value into equal parts."""
        from onnx import helper

        outputs = [self._named("Split") for _ in range(parts)]
        count: dict[str, Any] = {"num_outputs": parts} if self.opset >= 18 else {}
        self.nodes.append(helper.make_node("Split", [x], outputs, name=outputs[0], axis=axis, **count))
        return outputs

    def mean(self, x: str, axis: int, keep: bool = False, op: str = "ReduceMean") -> str:
        """Reduce one axis; since opset 18 axes are an input."""
        if self.opset >= 18:
            return self.add(op, x, self.ints([axis]), keepdims=int(keep))
        return self.add(op, x, axes=[axis], keepdims=int(keep))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", x, self.ints(shape))

    def weight(self, name: str) -> str:
        """A tensor of the model, by its name in the weight file."""
        if name not in self.weights:
            self.weights.append(name)
        return name

    def ints(self, values: Sequence[int]) -> str:
        """Whole numbers, as a shape or axes need them."""
        return self._constant("ints." + "_".join(map(str, values)), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """One number."""
        return self._constant(f"number.{value!r}", np.array(value, np.float32))

    def _constant(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def _named(self, op: str) -> str:
        stem = ".".join([*self._scope, op.lower()])
        number = self._count[stem] = self._count.get(stem, 0) + 1
        return stem if number == 1 else f"{stem}_{number}"
