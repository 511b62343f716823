"""Means and maxima: over tokens, which is pooling, or over features, which begins a norm. Light: numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import axes_of
from ..nodes import Misfit, Node
from ..values import PROBES, Form, Patches, Pointwise, Pooled, Pooling, RowMean, RowPower, Value, arange, rows_of
from .functions import as_form, shape_of
from .scope import Scope


def reduced(scope: Scope, node: Node, x: Any, axes: Any = None) -> Value:
    """ReduceMean or ReduceMax."""
    shape, given, keep = shape_of(x), axes_of(node, axes), bool(node.get("keepdims", 1))
    along = sorted(axis % len(shape) for axis in given or range(len(shape)))
    if along == [len(shape) - 1] and keep and node.op == "ReduceMean":
        if isinstance(x, Pointwise) and np.allclose(x.values, np.square(PROBES)):
            return RowPower(x.form)
        form = as_form(node, x)
        if len(shape) == 4 or isinstance(form.base, Patches) or rows_of(form) is not None:
            return RowMean(form)
    return _pooled(scope, node, as_form(node, x), along, "max" if node.op == "ReduceMax" else "avg", keep)


def global_pool(scope: Scope, node: Node, x: Any) -> Form:
    """GlobalAveragePool or GlobalMaxPool: over all axes but the first two."""
    form = as_form(node, x)
    kind: Pooling = "max" if node.op == "GlobalMaxPool" else "avg"
    return _pooled(scope, node, form, list(range(2, len(form.shape))), kind, True)


def _pooled(scope: Scope, node: Node, form: Form, axes: list[int], kind: Pooling, keep: bool) -> Form:
    batch, others = scope.batch, [axis for axis in range(1, len(form.shape)) if axis not in axes]
    if 0 in axes or form.shape[0] != batch or len(others) != 1:
        raise Misfit(node, "a mean over the tokens of each image was expected")
    tokens = form.moved(lambda a: np.moveaxis(a, others[0], -1).reshape(batch, -1, a.shape[others[0]]))
    shape = tuple(1 if a in axes else n for a, n in enumerate(form.shape) if keep or a not in axes)
    if kind == "avg" and tokens.shape[1] == 2 and tokens.is_plain and scope.patches > 2:
        return _mean_of_two(tokens).reshaped(*shape)
    rows = scope.rows(node, tokens)
    total = rows.base.rows // batch
    first = int(rows.rows[0, 0]) % total
    wanted = (arange(batch) * total)[:, None] + arange(total)[first:]
    if not rows.is_plain or not np.array_equal(rows.rows, wanted):
        raise Misfit(node, "pooling of all tokens was expected, or of all but the first ones")
    base = Pooled(node, batch, rows.base.width, rows.base, kind, first, total - first)
    return Form.of(base, shape)


def _mean_of_two(tokens: Form) -> Form:
    """Return half the sum of two tokens: those of the class and of the distillation."""
    halves = [half.scaled(np.array(0.5, np.float32)) for half in tokens.cut(lambda a: [a[:, 0], a[:, 1]], 2)]
    return Form(halves[0].shape, (*halves[0].terms, *halves[1].terms))
