"""Attention that is one operator, ONNX's own or ONNX Runtime's, and the softmax of attention written out. Light."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..attend import attend, weights
from ..nodes import Array, Misfit, Node
from ..values import Form, Value
from .arithmetic import shifted
from .functions import as_form, shape_of
from .linears import linear
from .scope import Scope


def softmax(scope: Scope, node: Node, x: Any) -> Form:
    form = as_form(node, x)
    if int(node.get("axis", -1 if scope.opset >= 13 else 1)) not in (-1, len(form.shape) - 1):
        raise Misfit(node, "a softmax over the last axis was expected")
    return weights(node, form)


def attention(scope: Scope, node: Node, q: Any, k: Any, v: Any, *rest: Any) -> Form:
    """The operator of ONNX itself: (B, heads, T, h), or heads side by side."""
    if any(each is not None for each in rest) or node.get("is_causal", 0) or node.get("softcap", 0.0):
        raise Misfit(node, "attention to all tokens was expected, without a mask, a cache or a cap")
    counts = [node.get("q_num_heads", 0), *[node.get("kv_num_heads", 0)] * 2]
    parts = [_heads(node, x, n) for x, n in zip((q, k, v), counts)]
    found = _attended(scope, node, parts)
    return found if len(shape_of(q)) == 4 else _side_by_side(found)


def packed_attention(scope: Scope, node: Node, x: Any, weight: Any, bias: Any = None, *rest: Any) -> Form:
    """ONNX Runtime's Attention, with the linear layer of q, k and v in it."""
    if any(each is not None for each in rest) or node.get("unidirectional", 0) or node.get("do_rotary", 0):
        raise Misfit(node, "attention to all tokens was expected, without a mask, a cache or rotation")
    if not isinstance(weight, np.ndarray) or weight.ndim != 2:
        raise Misfit(node, "attention with constant weights was expected")
    sizes = node.get("qkv_hidden_sizes", None) or [weight.shape[1] // 3] * 3
    packed, ends = linear(scope, node, as_form(node, x), weight, bias), np.cumsum(sizes)[:-1]
    parts = packed.cut(lambda a: np.split(a, ends, axis=-1), 3)
    return _side_by_side(_attended(scope, node, [_heads(node, part, int(node.get("num_heads", 0))) for part in parts]))


def multi_head(scope: Scope, node: Node, q: Any, k: Any = None, v: Any = None, bias: Any = None, *rest: Any) -> Form:
    """ONNX Runtime's MultiHeadAttention: q, k and v apart, or packed as (B, T, heads, 3, h)."""
    if any(each is not None for each in rest) or node.get("unidirectional", 0):
        raise Misfit(node, "attention to all tokens was expected, without a mask or a cache")
    if k is None and len(shape_of(q)) == 5:
        parts = as_form(node, q).cut(lambda a: [a[:, :, :, i].reshape(*a.shape[:2], -1) for i in range(3)], 3)
    elif k is not None and v is not None:
        parts = [as_form(node, x) for x in (q, k, v)]
    else:
        raise Misfit(node, "queries, keys and values were expected, apart or packed together")
    if isinstance(bias, np.ndarray):
        ends = np.cumsum([part.shape[-1] for part in parts])[:-1]
        parts = [shifted(scope, node, part, each) for part, each in zip(parts, np.split(bias, ends))]
    return _side_by_side(_attended(scope, node, [_heads(node, part, int(node.get("num_heads", 0))) for part in parts]))


def _heads(node: Node, x: Value, count: int) -> Form | Array:
    """(B, T, heads*h) to (B, heads, T, h); queries may be the same for every image."""
    x = x if isinstance(x, np.ndarray) else as_form(node, x)
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3 or count < 1 or x.shape[2] % count:
        raise Misfit(node, f"{count} heads side by side were expected")

    def move(a: Array) -> Array:
        return a.reshape(*a.shape[:2], count, -1).transpose(0, 2, 1, 3)

    return move(x) if isinstance(x, np.ndarray) else x.moved(move)


def _attended(scope: Scope, node: Node, parts: list[Form | Array]) -> Form:
    """Return the attention of q, k and v, (B, heads, T, h) each, in that layout."""
    q, k, v = parts[0], as_form(node, parts[1]), as_form(node, parts[2])
    lead = q.shape[:2]
    if len(q.shape) != 4 or k.shape[:2] != lead or v.shape[:2] != lead:
        raise Misfit(node, "as many heads of keys and values as of queries were expected")
    count, scale = lead[0] * lead[1], node.get("scale", None) or q.shape[-1] ** -0.5
    queries = q.reshape(count, *q.shape[2:]) if isinstance(q, np.ndarray) else q.reshaped(count, *q.shape[2:])
    keys, values = (x.reshaped(count, *x.shape[2:]) for x in (k, v))
    return attend(node, scope.batch, queries, keys, values, float(scale), lead)


def _side_by_side(form: Form) -> Form:
    """(B, heads, T, h) to (B, T, heads*h)."""
    return form.moved(lambda a: a.transpose(0, 2, 1, 3).reshape(a.shape[0], a.shape[2], -1))
