"""Operators into which ONNX Runtime fuses several: norms of sums, activations with a bias. Light: numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..nodes import Node
from ..values import Form, Linear, Value
from .arithmetic import add, arithmetic, shifted, with_constant
from .functions import as_form, function
from .norms import normed, shortest
from .scope import Scope


def skip_norm(scope: Scope, node: Node, x: Value, skip: Value, weight: Any, *rest: Any) -> tuple[Any, ...]:
    """SkipLayerNormalization: the norm of a sum, and after two outputs that nothing reads the sum itself."""
    simple = node.op == "SkipSimplifiedLayerNormalization"
    beta, bias = (None, *rest, None)[:2] if simple else (*rest, None, None)[:2]
    pair = [x, skip]
    if isinstance(bias, np.ndarray):  # of the linear layer before
        layer = next((i for i, each in enumerate(pair) if isinstance(each, Form) and isinstance(each.base, Linear)), 0)
        pair[layer] = shifted(scope, node, as_form(node, pair[layer]), bias)
    if any(isinstance(each, np.ndarray) for each in pair):
        total = as_form(node, with_constant(scope, replace(node, op="Add"), *pair))
    else:
        output = next(iter(node.outputs[3:4]), "")
        total = add(scope, node, as_form(node, pair[0]), as_form(node, pair[1]), output)
    eps = shortest(node.get("epsilon", 1e-12))
    return normed(scope, node, total, "rms" if simple else "layer", eps, weight, beta), None, None, total


def biased_gelu(scope: Scope, node: Node, x: Any, bias: Any = None) -> Value:
    """BiasGelu and FastGelu."""
    of = x if bias is None else with_constant(scope, replace(node, op="Add"), x, bias)
    return function(scope, replace(node, op="FastGelu" if node.op == "FastGelu" else "Gelu"), of)


def split_gelu(scope: Scope, node: Node, x: Any, bias: Any) -> Value:
    """BiasSplitGelu: one half times the Gelu of the other."""
    of = as_form(node, with_constant(scope, replace(node, op="Add"), x, bias))
    left, right = of.cut(lambda a: np.split(a, 2, axis=-1), 2)
    return arithmetic(scope, replace(node, op="Mul"), left, function(scope, replace(node, op="Gelu"), right))


def bias_add(scope: Scope, node: Node, x: Any, bias: Any, skip: Any) -> Value:
    """BiasAdd: a linear layer's bias, and the residual stream."""
    return arithmetic(scope, replace(node, op="Add"), with_constant(scope, replace(node, op="Add"), x, bias), skip)
