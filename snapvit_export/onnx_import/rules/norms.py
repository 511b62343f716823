"""LayerNorm and RMSNorm: as an operator, or written out as means, squares and roots. Light: numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..nodes import Misfit, Node
from ..values import (
    Centred,
    Form,
    Norm,
    NormKind,
    Pointwise,
    RowMean,
    RowPower,
    Value,
    arange,
    rows_of,
    same_form,
    uniform,
)
from .functions import as_form
from .scope import Scope, with_rows


def shortest(value: float) -> float:
    """Return the shortest decimal number that is this one in float32: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def layer_norm(scope: Scope, node: Node, x: Value, weight: Any = None, bias: Any = None) -> Form:
    """LayerNormalization, RMSNormalization, SimplifiedLayerNormalization."""
    form = as_form(node, x)
    if int(node.get("axis", -1)) not in (-1, len(form.shape) - 1):
        raise Misfit(node, "a norm over the last axis was expected")
    kind: NormKind = "layer" if node.op == "LayerNormalization" else "rms"
    return normed(scope, node, form, kind, shortest(node.get("epsilon", 1e-5)), weight, bias)


def normed(
    scope: Scope, node: Node, form: Form, kind: NormKind, eps: float, weight: Any = None, bias: Any = None
) -> Form:
    """Return the norm of the last axis: of whole tokens, or of each head."""
    features = form.shape[-1]
    for vector in (weight, bias):
        if vector is not None and (not isinstance(vector, np.ndarray) or vector.size != features):
            raise Misfit(node, f"a norm with one weight for each of {features} features was expected")
    weight, bias = (None if vector is None else vector.reshape(-1) for vector in (weight, bias))
    whole = rows_of(form)
    if whole is None or whole.columns is not None:
        heads = _of_heads(node, form, kind, eps, weight, bias)
        if heads is not None:
            return heads
    rows = scope.rows(node, form)
    if not rows.is_plain:
        raise Misfit(node, "a norm of the tokens themselves was expected")
    base = Norm(node, rows.base.rows, features, rows.base, arange(features)[None], kind, eps, weight, bias)
    return with_rows(base, rows.rows)


def _of_heads(node: Node, form: Form, kind: NormKind, eps: float, weight: Any, bias: Any) -> Form | None:
    """Return the norm of some columns of each row, in one group or several; None if a row is not of one token."""
    term, features = form.term, form.shape[-1]
    if term is None or not form.is_plain:
        return None
    rows, columns = np.divmod(term.indices(form.shape), term.base.width)
    if not (rows == rows[..., :1]).all():
        return None
    groups, group = np.unique(columns.reshape(-1, features), axis=0, return_inverse=True)
    base = Norm(node, term.base.rows, len(groups) * features, term.base, groups, kind, eps, weight, bias)
    places = (rows[..., 0].reshape(-1) * base.width + group.reshape(-1) * features)[:, None] + arange(features)
    return Form.of(base, form.shape, places.reshape(form.shape))


def written_out(scope: Scope, node: Node, a: Any, b: Any) -> Value:
    """Go on with a norm of which one input is a mean of rows, or a power of their mean square."""
    if node.op == "Sub" and isinstance(b, RowMean) and isinstance(a, (Form, Pointwise)):
        form = as_form(node, a)
        if same_form(form, b.form):
            return Form.of(Centred(node, math.prod(form.shape[:-1]), form.shape[-1], form), form.shape)
    if node.op in ("Add", "Mul") and isinstance(a, RowPower):
        a, b = b, a
    if isinstance(a, np.ndarray) and isinstance(b, RowPower):
        one = uniform(a)
        if node.op == "Add" and one is not None and b.exponent == 1:
            return replace(b, eps=b.eps + shortest(one))
        if node.op == "Div" and one == 1:
            return replace(b, exponent=-b.exponent)
    if node.op == "Pow" and isinstance(a, RowPower) and isinstance(b, np.ndarray):
        one = uniform(b)
        if one is not None:
            return replace(a, exponent=a.exponent * one)
    wanted = {"Mul": -0.5, "Div": 0.5}.get(node.op)
    if isinstance(a, Form) and isinstance(b, RowPower) and b.exponent == wanted and same_form(a, b.form):
        if isinstance(a.base, Centred):
            return normed(scope, node, a.base.form, "layer", b.eps)
        return normed(scope, node, a, "rms", b.eps)
    raise Misfit(node, "a LayerNorm or an RMSNorm was expected here")
