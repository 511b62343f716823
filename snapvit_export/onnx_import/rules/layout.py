"""Operators that move, join, choose or only rename elements. Light: numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays import MOVES, limited
from ..nodes import Array, Misfit, Node
from ..values import Base, Form, Term, Value, in_order
from .functions import as_form, shape_of
from .scope import Scope


def moved(scope: Scope, node: Node, x: Value, *rest: Any) -> Any:
    """Reshape, Transpose, Slice, Gather, ..."""
    if not all(each is None or isinstance(each, np.ndarray) for each in rest):
        raise Misfit(node, "a layout that does not depend on the image was expected")
    form = as_form(node, x)
    if node.op == "Split":
        return form.cut(lambda a: list(MOVES["Split"](node, a, *rest)), len(node.outputs))
    return form.moved(lambda a: np.asarray(MOVES[node.op](node, a, *rest)))


def concat(scope: Scope, node: Node, *parts: Value) -> Form:
    """Join values of one base; a constant is what has gain zero."""
    forms = [part if isinstance(part, np.ndarray) else as_form(node, part) for part in parts]
    computed = [form for form in forms if isinstance(form, Form)]
    base, axis = computed[0].base, int(node.get("axis", 0))
    if base is None or any(form.base is not base for form in computed):
        raise Misfit(node, "values of one layer were expected to be joined, or tokens that are alike for every image")
    shape = np.concatenate([np.broadcast_to(np.zeros((), np.int8), form.shape) for form in forms], axis).shape
    limited(shape, node)
    count = max(len(form.terms) for form in computed)
    terms = [_joined([_term(form, i) for form in forms], forms, base, axis) for i in range(count)]
    offsets = [form if isinstance(form, np.ndarray) else form.offset for form in forms]
    if all(each is None for each in offsets):
        return Form(shape, tuple(terms))
    full = [np.broadcast_to(np.float32(0) if o is None else o, form.shape) for o, form in zip(offsets, forms)]
    return Form(shape, tuple(terms), np.concatenate(full, axis))


def _term(form: Form | Array, i: int) -> Term | None:
    return form.terms[i] if isinstance(form, Form) and i < len(form.terms) else None


def _joined(parts: Sequence[Term | None], forms: Sequence[Form | Array], base: Base, axis: int) -> Term:
    """Return one term of joined forms; where a form has none, its gain is zero."""
    index = np.concatenate(
        [np.zeros(f.shape, np.int32) if t is None else t.indices(f.shape) for t, f in zip(parts, forms)], axis
    )
    if all(part is not None and part.gain is None for part in parts):
        return Term(base, in_order(index, base))
    gains = [np.float32(0) if t is None else np.float32(1) if t.gain is None else t.gain for t in parts]
    return Term(base, index, np.concatenate([np.broadcast_to(g, f.shape) for g, f in zip(gains, forms)], axis))


def where(scope: Scope, node: Node, condition: Value, a: Value, b: Value) -> Value:
    """A choice that is the same everywhere: exporters guard a softmax against rows without any key."""
    chosen = condition.reshape(-1) if isinstance(condition, np.ndarray) else np.zeros(0)
    if not chosen.size or (chosen != chosen[0]).any():
        raise Misfit(node, "a choice that is the same for all elements was expected")
    return a if chosen[0] else b


def same(scope: Scope, node: Node, x: Any, *rest: Any) -> Any:
    return x


def cast(scope: Scope, node: Node, x: Any) -> Any:
    """Floating-point types are all alike here."""
    from onnx import TensorProto

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    if node.get("to", 0) not in floats:
        raise Misfit(node, "floating-point values were expected")
    return x


def shape(scope: Scope, node: Node, x: Any) -> Array:
    sizes = np.array(shape_of(x), np.int64)
    if node.op == "Size":
        return np.array(sizes.prod(), np.int64)
    end = node.get("end", None)
    return sizes[int(node.get("start", 0)) : None if end is None else int(end)]


def no_element(scope: Scope, node: Node, x: Any) -> Array:
    """IsNaN, IsInf: never, for all that a ViT computes."""
    return np.zeros(shape_of(x), bool)


def pad(scope: Scope, node: Node, x: Any, pads: Any = None, *rest: Any) -> Any:
    if not isinstance(pads, np.ndarray) or pads.any():
        raise Misfit(node, "images and tokens without padding were expected")
    return x
