"""Nodes of an ONNX graph, one call each: `forward` writes its forward pass with them. Light: onnx, when used.

Every value gets the name of the part it belongs to, so that a graph opened in a viewer, or a gate that fails, names
the block. Weights are only named here; where they lie is decided when the file is written.

Graphs are made from nothing here, a node a call, so `onnx.helper` is enough: onnx-graphsurgeon and onnx/ir-py pay where
graphs of others are rewritten, which nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..target import Precision
from .precision import FLOAT, HALF


class Nodes:
    """Collects nodes and small constants, in the order of the computation.

    >>> y = nodes.add("Gemm", x, nodes.weight("head.weight"), transB=1)
    """

    def __init__(self, opset: int, weights_type: int = FLOAT) -> None:
        """`weights_type`: the ONNX type that floating-point weights are stored in."""
        self.opset, self.weights_type = opset, weights_type
        self.float_type = FLOAT  # of the part that is being written
        self.nodes: list[Any] = []  # NodeProto
        self.constants: dict[str, Any] = {}  # TensorProto by name: shapes and numbers, a few bytes each
        self.weights: list[str] = []  # names of the tensors that the graph reads, in the order of their first use
        self._scope: list[str] = []
        self.layer_inputs: dict[str, str] = {}  # the value that each linear layer reads
        self._count: dict[str, int] = {}
        self._once: dict[str, list[str]] = {}

    @contextmanager
    def floats(self, kind: int) -> Iterator[None]:
        """Within the block, weights and numbers are of this floating-point type."""
        before, self.float_type = self.float_type, kind
        yield
        self.float_type = before

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

    def cast(self, x: str, before: int, after: int) -> str:
        """Cast a value to another floating-point type; return it as it is if that is the same."""
        return x if before == after else self.add("Cast", x, to=after)

    def add_many(
        self, op: str, *inputs: str, count: int, names: Sequence[str | None] | None = None, **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs; those that `names` has a name for are called so."""
        from onnx import helper

        outputs = [name or self._named(op) for name in names or [None] * count]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=outputs[0], **attributes))
        return outputs

    def once(self, x: str, make: Callable[[], list[str]]) -> list[str]:
        """Make something of a value once for all of its readers."""
        if x not in self._once:
            self._once[x] = make()
        return self._once[x]

    def split(self, x: str, axis: int, parts: int = 0, sizes: Sequence[int] = ()) -> list[str]:
        """Cut a value into equal parts, or into parts of these sizes."""
        if sizes:
            return self.add_many("Split", x, self.ints(sizes), count=len(sizes), axis=axis)
        count: dict[str, Any] = {"num_outputs": parts} if self.opset >= 18 else {}
        return self.add_many("Split", x, count=parts, axis=axis, **count)

    def mean(self, x: str, axis: int, keep: bool = False, op: str = "ReduceMean") -> str:
        """Reduce one axis; since opset 18 axes are an input, and of a sum since 13."""
        if self.opset >= (13 if op == "ReduceSum" else 18):
            return self.add(op, x, self.ints([axis]), keepdims=int(keep))
        return self.add(op, x, axes=[axis], keepdims=int(keep))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", x, self.ints(shape))

    def weight(self, name: str) -> str:
        """Return a tensor of the model, by its name in the weight file, cast to the type of the current part."""
        stored = self.raw(name)
        if self.float_type == self.weights_type:
            return stored
        return self.once(name, lambda: [self.add("Cast", name, to=self.float_type, name=f"{name}.wide")])[0]

    def raw(self, name: str) -> str:
        """Return a tensor of the model as it is stored: quantised weights."""
        if name not in self.weights:
            self.weights.append(name)
        return name

    def ints(self, values: Sequence[int]) -> str:
        """Return a constant of integers, for a shape or axes."""
        return self._constant("ints." + "_".join(map(str, values)), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Return a constant of one number."""
        kind, end = (np.float16, ".half") if self.float_type == HALF else (np.float32, "")
        return self._constant(f"number.{value!r}{end}", np.array(value, kind))

    def array(self, name: str, value: npt.ArrayLike) -> str:
        """Return a small constant of its own type."""
        return self._constant(name, np.asarray(value))

    def zero_point(self, precision: Precision) -> str:
        """Return the zero of int8 or fp8, which tells QuantizeLinear its type."""
        from onnx import TensorProto, helper

        name, kind = f"zero.{precision}", TensorProto.FLOAT8E4M3FN if precision == "fp8" else TensorProto.INT8
        self.constants.setdefault(name, helper.make_tensor(name, kind, [], bytes(1), raw=True))
        return name

    def _constant(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def _named(self, op: str) -> str:
        stem = ".".join([*self._scope, op.lower()])
        number = self._count[stem] = self._count.get(stem, 0) + 1
        return stem if number == 1 else f"{stem}_{number}"
