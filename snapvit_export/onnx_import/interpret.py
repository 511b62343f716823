"""Go through a foreign graph once, node by node, and tell of every value what it is made of (`values`). Light.

Each operator has a rule. A value that depends on no image is a constant and is computed (`arrays`), so that shapes,
tables of positions and transposed weights are plain numbers before anything reads them: the graph is seen for one
batch of one image size. The first node that no rule fits is refused by name, with what was expected there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from ..errors import FileFormatError, first_line
from .arrays import ARITHMETIC, FUNCTIONS, MOVES, constant
from .nodes import Branch, Graph, Misfit, Node
from .rules import arithmetic, attention, functions, fused, layout, linears, norms, pooling
from .rules.linears import PREPROCESSING
from .rules.scope import Scope
from .values import Form, Input, Linear, Value

NOT_COMPUTED = (ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, MemoryError)
MICROSOFT = "com.microsoft"
RULES: dict[tuple[str, str], Callable[..., Any]] = {
    **{("", op): layout.moved for op in MOVES},
    ("", "Concat"): layout.concat,
    ("", "Where"): layout.where,
    ("", "Identity"): layout.same,
    ("", "Dropout"): layout.same,
    ("", "Cast"): layout.cast,
    ("", "CastLike"): layout.same,
    ("", "Shape"): layout.shape,
    ("", "Size"): layout.shape,
    ("", "IsNaN"): layout.no_element,
    ("", "IsInf"): layout.no_element,
    ("", "Pad"): layout.pad,
    **{(domain, op): functions.function for op in FUNCTIONS for domain in ("", MICROSOFT)},
    ("", "Clip"): functions.clip,
    **{("", op): arithmetic.arithmetic for op in ARITHMETIC},
    ("", "Sum"): arithmetic.sum_of,
    ("", "Neg"): arithmetic.negative,
    ("", "LayerNormalization"): norms.layer_norm,
    ("", "RMSNormalization"): norms.layer_norm,
    ("", "SimplifiedLayerNormalization"): norms.layer_norm,
    ("", "MatMul"): linears.matmul,
    ("", "Gemm"): linears.gemm,
    ("", "Conv"): linears.conv,
    (MICROSOFT, "FusedMatMul"): linears.fused_matmul,
    (MICROSOFT, "FusedGemm"): linears.gemm,
    (MICROSOFT, "FusedConv"): linears.conv,
    ("", "Softmax"): attention.softmax,
    ("", "Attention"): attention.attention,
    (MICROSOFT, "Attention"): attention.packed_attention,
    (MICROSOFT, "MultiHeadAttention"): attention.multi_head,
    ("", "ReduceMean"): pooling.reduced,
    ("", "ReduceMax"): pooling.reduced,
    ("", "GlobalAveragePool"): pooling.global_pool,
    ("", "GlobalMaxPool"): pooling.global_pool,
    (MICROSOFT, "SkipLayerNormalization"): fused.skip_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): fused.skip_norm,
    (MICROSOFT, "BiasGelu"): fused.biased_gelu,
    (MICROSOFT, "FastGelu"): fused.biased_gelu,
    (MICROSOFT, "BiasSplitGelu"): fused.split_gelu,
    (MICROSOFT, "BiasAdd"): fused.bias_add,
}


class Interpreter:
    """The values of a graph, for one batch."""

    def __init__(self, graph: Graph, given: str, shape: tuple[int, int, int, int]) -> None:
        """`shape`: of the images that go into the input `given`, (B, C, H, W)."""
        self.graph, self.scope = graph, Scope(shape, graph.opset)
        images = Input(Node("Input", "", given, (), (given,), {}), shape[0], math.prod(shape[1:]))
        self.values: dict[str, Any] = {given: Form.of(images, shape)}

    def value(self, name: str) -> Value:
        """Return a value that is computed already, or stored."""
        if name in self.values:
            found: Value = self.values[name]
            return found
        if name in self.graph.tensors:
            return self.graph.constant(name)
        raise FileFormatError(f"{self.graph.path}: damaged: nothing computes '{name}', which a node reads")

    def run(self, output: str) -> Value:
        """Return what an output is made of. A value is forgotten when the last node has read it."""
        nodes = self._needed(output)
        left = Counter(name for node in nodes for name in (*node.inputs, *node.inner_reads)) + Counter([output])
        for node in nodes:
            try:
                with np.errstate(all="ignore"):
                    self._step(node)
            except NOT_COMPUTED as error:
                raise Misfit(node, f"its inputs do not fit each other ({first_line(error)})") from error
            for name in node.inputs:
                left[name] -= 1
                if not left[name]:
                    self.values.pop(name, None)
        return self.value(output)

    def _step(self, node: Node) -> None:
        found = self._computed(node)
        results = found if isinstance(found, (tuple, list)) else (found,)
        self.values |= {name: value for name, value in zip(node.outputs, results) if name}

    def _computed(self, node: Node) -> Any:
        """Return the value of a node, or the values of its outputs."""
        given = [self.value(name) if name else None for name in node.inputs]
        if node.op == "If":
            return self._branch(node, given[0])
        if all(value is None or isinstance(value, np.ndarray) for value in given):
            known = constant(node, given, self.graph.opset)  # type: ignore[arg-type]
            if known is None:
                raise Misfit(node, "a constant was expected that can be computed here")
            return [np.asarray(each) for each in known] if isinstance(known, list) else np.asarray(known)
        rule = RULES.get((node.domain, node.op))
        if rule is None:
            raise Misfit(node, _unknown(node, given))
        return rule(self.scope, node, *given)

    def _branch(self, node: Node, condition: Any) -> list[Any]:
        """Go through one of two branches: exporters write conditions on shapes, which are constants here."""
        if not isinstance(condition, np.ndarray) or condition.size != 1:
            raise Misfit(node, "a condition that does not depend on the image was expected")
        branch = node.get("then_branch" if condition.reshape(-1)[0] else "else_branch", None)
        if not isinstance(branch, Branch):
            raise Misfit(node, "a branch was expected")
        self.values |= branch.constants
        for inner in branch.nodes:
            self._step(inner)
        return [self.value(name) for name in branch.outputs]

    def _needed(self, output: str) -> list[Node]:
        """Return the nodes that an output depends on, each after those before it.

        Files should have their nodes in such an order already; converters to fp16 do not care.
        """
        nodes = self.graph.nodes
        made_by = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
        before = [{made_by[name] for name in node.reads if name in made_by} for node in nodes]
        wanted: set[int] = set()
        open_ends = [made_by[output]] if output in made_by else []
        while open_ends:
            i = open_ends.pop()
            if i not in wanted:
                wanted.add(i)
                open_ends += before[i]
        order = _in_order({i: before[i] for i in wanted})
        if len(order) < len(wanted):
            node = nodes[min(wanted - set(order))]
            raise FileFormatError(f"{self.graph.path}: damaged: {node} depends on its own output")
        return [nodes[i] for i in order]


def _unknown(node: Node, given: list[Any]) -> str:
    """Return what was expected in the place of an operator without a rule."""
    form = next((value for value in given if isinstance(value, Form)), None)
    if form is not None and isinstance(form.base, Input):
        return PREPROCESSING
    if form is not None and isinstance(form.base, Linear) and len(form.shape) == 2:
        return f"the model's output was expected before this. If that is what it reads: --output {node.inputs[0]}"
    return "no part of a plain ViT. Patches, norms, linear layers and attention were expected"


def _in_order(before: dict[int, set[int]]) -> list[int]:
    """Return numbers so that each comes after those before it, otherwise by size; those in a circle are left out."""
    waiting = {i: len(needed) for i, needed in before.items()}
    after: dict[int, list[int]] = {i: [] for i in before}
    for i, needed in before.items():
        for other in needed:
            after[other].append(i)
    ready = [i for i, count in waiting.items() if not count]
    heapify(ready)
    found = []
    while ready:
        found.append(heappop(ready))
        for other in after[found[-1]]:
            waiting[other] -= 1
            if not waiting[other]:
                heappush(ready, other)
    return found
