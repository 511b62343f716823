"""Functions of one number: activations in any spelling, told by their values at some points. Light: numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import FUNCTIONS, gelu, gelu_tanh, quick_gelu, sigmoid
from ..nodes import Array, Misfit, Node
from ..values import PROBES, Activation, Form, Pointwise, RowMean, RowPower, Term, Value, uniform
from .scope import Scope

SAME_FUNCTION = 1e-4  # at most, at any probe: gelu and gelu_tanh differ by 4.7e-4, constants in fp16 by 3e-5
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
}


def as_form(node: Node, value: Any) -> Form:
    """Return a value as a form; a function of one number must be a known activation then."""
    if isinstance(value, Form):
        return value
    if isinstance(value, Pointwise):
        return _activation(node, value)
    raise Misfit(node, "a value of the tokens was expected, not a constant or a part of a norm")


def as_function(node: Node, value: Any) -> Pointwise:
    """Return a value as a function of one number; a form is one times a scale, plus an offset."""
    if isinstance(value, Pointwise):
        return value
    form = as_form(node, value)
    term = form.term
    if term is None or (term.gain is None and form.offset is None):
        return Pointwise(form, PROBES)
    gain, offset = uniform(term.gain), 0.0 if form.offset is None else uniform(form.offset)
    if gain is None or offset is None:
        return Pointwise(form, PROBES)
    return Pointwise(Form(form.shape, (replace(term, gain=None),)), gain * PROBES + offset)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of any value."""
    if isinstance(value, (RowMean, RowPower)):
        return (*value.form.shape[:-1], 1)
    found: tuple[int, ...] = value.form.shape if isinstance(value, Pointwise) else value.shape
    return found


def function(scope: Scope, node: Node, x: Any) -> Value:
    """Erf, Tanh, Gelu, ...; a root may be that of a norm."""
    exponents = {"Sqrt": 0.5, "Reciprocal": -1.0}
    if isinstance(x, RowPower) and node.op in exponents:
        return replace(x, exponent=x.exponent * exponents[node.op])
    of = as_function(node, x)
    return Pointwise(of.form, FUNCTIONS[node.op](node, of.values))


def clip(scope: Scope, node: Node, x: Any, low: Any = None, high: Any = None) -> Value:
    of = as_function(node, x)
    least, most = (end if each is None else uniform(each) for each, end in ((low, -np.inf), (high, np.inf)))
    if least is None or most is None:
        raise Misfit(node, "the same limits for all elements were expected")
    return Pointwise(of.form, np.clip(of.values, least, most))


def _activation(node: Node, x: Pointwise) -> Form:
    found = [name for name, f in ACTIVATIONS.items() if np.abs(f(PROBES) - x.values).max() < SAME_FUNCTION]
    if not found:
        raise Misfit(node, f"an activation was expected before this: one of {', '.join(ACTIVATIONS)}")
    term = x.form.term
    if term is None or not x.form.is_plain:
        raise Misfit(node, "an activation of a linear layer was expected before this")
    base = Activation(term.base.node, term.base.rows, term.base.width, term.base, found[0])
    return Form(x.form.shape, (Term(base, term.index),))
