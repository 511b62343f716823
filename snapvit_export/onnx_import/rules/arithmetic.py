"""Add, Sub, Mul, Div and Pow: biases, scales, residual additions, gates, and parts of norms and activations.

Light: numpy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import ARITHMETIC, limited
from ..nodes import Array, Misfit, Node
from ..sublayers import leads_to, read_sublayer
from ..values import (
    Form,
    Linear,
    Norm,
    Patches,
    Pointwise,
    Pooled,
    Product,
    Residual,
    RowMean,
    RowPower,
    Rows,
    Sum,
    Term,
    Value,
    along_last,
    rows_of,
    same_form,
    uniform,
)
from .functions import as_form, as_function
from .norms import written_out
from .scope import Scope, with_rows

MINUS = np.array(-1, np.float32)


def arithmetic(scope: Scope, node: Node, a: Any, b: Any) -> Value:
    """One of the five operators, of any two values."""
    if isinstance(a, (RowMean, RowPower)) or isinstance(b, (RowMean, RowPower)):
        return written_out(scope, node, a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return with_constant(scope, node, a, b)
    if isinstance(a, Pointwise) or isinstance(b, Pointwise) or node.op not in ("Add", "Sub"):
        f, g = as_function(node, a), as_function(node, b)
        if same_form(f.form, g.form):
            return Pointwise(f.form, ARITHMETIC[node.op](f.values, g.values))
    x, y = as_form(node, a), as_form(node, b)
    if node.op == "Mul":
        return _product(node, x, y)
    if node.op in ("Add", "Sub"):
        return add(scope, node, x, y if node.op == "Add" else y.scaled(MINUS))
    raise Misfit(node, "two values of the tokens were expected to be added, or multiplied in a gated MLP")


def sum_of(scope: Scope, node: Node, *parts: Any) -> Value:
    found = parts[0]
    for part in parts[1:]:
        found = arithmetic(scope, replace(node, op="Add"), found, part)
    return found


def negative(scope: Scope, node: Node, x: Any) -> Value:
    return with_constant(scope, replace(node, op="Mul"), x, MINUS)


def with_constant(scope: Scope, node: Node, a: Any, b: Any) -> Value:
    """One of the five operators, of a constant and another value."""
    first = isinstance(a, np.ndarray)
    number, x = (a, b) if first else (b, a)
    one = uniform(number)
    is_function = isinstance(x, Pointwise) or node.op == "Pow" or (node.op == "Div" and first)
    if one is not None and is_function:
        f = as_function(node, x)
        known = np.full_like(f.values, one)
        return Pointwise(f.form, ARITHMETIC[node.op](*((known, f.values) if first else (f.values, known))))
    form = as_form(node, x)
    wanted = np.broadcast_shapes(form.shape, number.shape)
    if wanted != form.shape:
        limited(wanted, node)
    if node.op == "Add":
        return shifted(scope, node, form, number)
    if node.op == "Sub":
        return shifted(scope, node, form.scaled(MINUS), number) if first else shifted(scope, node, form, -number)
    if node.op == "Mul":
        return _with_norm_weight(node, form.scaled(number))
    if node.op == "Div" and not first:
        return _with_norm_weight(node, form.scaled(1 / number.astype(np.float64)))
    raise Misfit(node, "a sum with a constant, or a multiple, was expected")


def shifted(scope: Scope, node: Node, form: Form, offset: Array) -> Form:
    """Add a constant; where it is the bias of the layer before, it becomes that."""
    if isinstance(form.base, Patches) and offset.size > form.base.width:
        scope.position_rows = max(scope.position_rows, offset.size // form.base.width)
    found = form.shifted(offset)
    term = found.term
    if term is None or term.gain is not None or found.offset is None:
        return found
    bias = _by_column(found.offset, found.shape, term)
    base = term.base
    if bias is not None and isinstance(base, (Linear, Patches)):
        total = bias if base.bias is None else base.bias + bias
        return Form(found.shape, (replace(term, base=replace(base, node=node, bias=total)),))
    if bias is not None and isinstance(base, Norm) and base.bias is None:
        each = bias.reshape(len(base.columns), -1)
        if (each == each[0]).all():
            return Form(found.shape, (replace(term, base=replace(base, node=node, bias=each[0])),))
    return found


def _with_norm_weight(node: Node, form: Form) -> Form:
    """Where a norm without a weight was multiplied by one, it gets that weight."""
    term, base = form.term, form.base
    if term is None or term.gain is None or form.offset is not None or not isinstance(base, Norm):
        return form
    weight = _by_column(term.gain, form.shape, term)
    if weight is None or base.weight is not None or base.bias is not None:
        return form
    each = weight.reshape(len(base.columns), -1)
    if not (each == each[0]).all():
        return form
    return Form(form.shape, (Term(replace(base, node=node, weight=each[0]), term.index),))


def _by_column(array: Array, shape: tuple[int, ...], term: Term) -> Array | None:
    """Return an array that depends on the column of the base alone as a vector of them; None if it does not."""
    width = term.base.width
    if array.size == 1:
        return None
    if term.index is None and shape[-1] == width:
        return along_last(array, shape)
    columns, flat = (term.indices(shape) % width).reshape(-1), np.broadcast_to(array, shape).reshape(-1)
    found = np.zeros(width, array.dtype)
    found[columns] = flat
    return found if np.array_equal(found[columns], flat) else None


def _product(node: Node, a: Form, b: Form) -> Form:
    """Return the two halves of a gated MLP times each other."""
    x, y = rows_of(a), rows_of(b)
    if x is None or y is None or a.shape != b.shape or not np.array_equal(x.rows, y.rows):
        raise Misfit(node, "the two halves of a gated MLP were expected, of the same tokens")
    if any(each is not None for each in (x.gain, x.offset, y.gain, y.offset)):
        raise Misfit(node, "the two halves of a gated MLP were expected, without a scale")
    return with_rows(Product(node, x.base.rows, a.shape[-1], x, y), x.rows)


def add(scope: Scope, node: Node, a: Form, b: Form, output: str | None = None) -> Form:
    """Add two values: a rotary embedding, a residual addition, or two classifiers; `output`: the name of the sum."""
    if a.shape != b.shape:
        raise Misfit(node, f"two values of one shape were expected, not {a.shape} and {b.shape}")
    if a.base is not None and a.base is b.base:
        return _terms_joined(a, b)
    x, y = scope.rows(node, a), scope.rows(node, b)
    for stream, branch in ((x, y), (y, x)):
        if isinstance(branch.base, Linear) and leads_to(branch.base, stream.base):
            return _residual(node, stream, branch, node.outputs[0] if output is None else output)
    if any(not isinstance(rows.base, (Linear, Pooled)) or rows.columns is not None for rows in (x, y)):
        raise Misfit(node, "the residual stream was expected here, and a linear layer that was made from it")
    return Form.of(Sum(node, x.rows.size, a.shape[-1], (x, y)), a.shape)


def _residual(node: Node, stream: Rows, branch: Rows, output: str) -> Form:
    last = branch.base
    assert isinstance(last, Linear)
    if not stream.is_plain or branch.columns is not None or branch.offset is not None:
        raise Misfit(node, "the residual stream was expected to be added to as it is")
    if not np.array_equal(stream.rows, branch.rows):
        raise Misfit(node, "a sub-layer was expected to be added to its own tokens")
    sublayer = read_sublayer(stream.base, last, branch.gain)
    base = Residual(node, stream.base.rows, stream.base.width, stream.base, sublayer, output)
    return with_rows(base, stream.rows)


def _terms_joined(a: Form, b: Form) -> Form:
    """Add two forms of one base; gains of the same elements are added up."""
    terms = list(a.terms)
    for term in b.terms:
        index = term.indices(a.shape)
        same = next((i for i, own in enumerate(terms) if np.array_equal(own.indices(a.shape), index)), None)
        if same is None:
            terms.append(term)
        else:
            gains = [np.float32(1) if each.gain is None else each.gain for each in (terms[same], term)]
            terms[same] = replace(terms[same], gain=np.asarray(gains[0] + gains[1]))
    offsets = [form.offset for form in (a, b) if form.offset is not None]
    return Form(a.shape, tuple(terms), sum(offsets[1:], offsets[0]) if offsets else None)
