"""Go through a foreign graph once, node by node, and tell of every value what it is made of (`values`). Light.

Each operator has a rule. A value that depends on no image is a constant and is computed (`arrays`), so that shapes,
tables of positions and transposed weights are plain numbers before anything reads them: the graph is seen for one
batch of one image size. The first node that no rule fits is refused by name, with what was expected there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import FileFormatError, first_line
from .arrays import ARITHMETIC, FUNCTIONS, MOVES, axes_of, constant, gelu, gelu_tanh, limited, quick_gelu, sigmoid
from .attend import attend, grouped, products, weighted, weights
from .nodes import Array, Graph, Misfit, Node
from .sublayers import leads_to, read_sublayer
from .values import (
    PROBES,
    Activation,
    Base,
    Centred,
    Form,
    Input,
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
    Tokens,
    Value,
    Weights,
    along_last,
    arange,
    into_parts,
    rows_of,
    same_form,
    uniform,
)

SAME_FUNCTION = 1e-4  # at most, at any probe: gelu and gelu_tanh differ by 4.7e-4, constants in fp16 by 3e-5
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
}
NOT_COMPUTED = (ValueError, IndexError, TypeError, KeyError, AttributeError, ArithmeticError, MemoryError)
MICROSOFT = "com.microsoft"
PREPROCESSING = (
    "the pixels are changed before the patch embedding: preprocessing is expected outside of the file. "
    "Export the model without it"
)


class Interpreter:
    """The values of a graph, for one batch."""

    def __init__(self, graph: Graph, given: str, shape: tuple[int, ...]) -> None:
        """`shape`: of the images that go into the input `given`, (B, C, H, W)."""
        self.graph, self.batch, self.shape = graph, shape[0], shape
        images = Node("Input", "", given, (), (given,), {})
        base = Input(images, self.batch, math.prod(shape[1:]))
        self.values: dict[str, Value] = {given: Form.of(base, shape)}
        self.position_rows = 0  # of what was added to the patches: some of them may be of the prefix
        self.tokens: list[Tokens] = []

    def value(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        if name in self.graph.tensors:
            return self.graph.constant(name)
        raise FileFormatError(f"{self.graph.path}: damaged: nothing computes '{name}' before it is read")

    def run(self, output: str) -> Value:
        """Return what an output is made of."""
        needed, last = self._needed(output)
        for node in needed:
            try:
                with np.errstate(all="ignore"):
                    found = self.step(node)
            except NOT_COMPUTED as error:
                raise Misfit(node, f"its inputs do not fit each other ({first_line(error)})") from error
            results = found if isinstance(found, (tuple, list)) else (found,)
            self.values |= {name: value for name, value in zip(node.outputs, results) if name}
            for name in node.inputs:
                last[name] -= 1
                if not last[name] and name != output:
                    self.values.pop(name, None)
        return self.value(output)

    def _needed(self, output: str) -> tuple[list[Node], Counter[str]]:
        """Return the nodes that an output depends on, in the order of the file, and how often each value is read."""
        wanted, found = {output}, []
        for node in reversed(self.graph.nodes):
            if wanted & set(node.outputs):
                wanted |= set(node.inputs)
                found.append(node)
        return found[::-1], Counter(name for node in found for name in node.inputs)

    def step(self, node: Node) -> Any:
        """Return the value of a node, or the values of its outputs."""
        given = [self.value(name) if name else None for name in node.inputs]
        if all(value is None or isinstance(value, np.ndarray) for value in given):
            known = constant(node, given, self.graph.opset)  # type: ignore[arg-type]
            if known is None:
                raise Misfit(node, "a constant was expected that can be computed here")
            return [np.asarray(each) for each in known] if isinstance(known, list) else np.asarray(known)
        if node.op in MOVES and not node.domain:
            return self._moved(node, *given)
        if node.op in FUNCTIONS and len(given) == 1:
            return self._function(node, given[0])
        rule = _RULES.get((node.domain, node.op))
        if rule is None:
            raise Misfit(
                node, f"{node.op} is no part of a plain ViT. Patches, norms, linear layers and attention were expected"
            )
        return rule(self, node, *given)

    def form(self, node: Node, value: Any) -> Form:
        """Return a value as a form; a function of one number must be a known activation then."""
        if isinstance(value, Form):
            return value
        if isinstance(value, Pointwise):
            return self._activation(node, value)
        raise Misfit(node, "a value of the tokens was expected, not a constant or a part of a norm")

    # Moving elements

    def _moved(self, node: Node, x: Value, *rest: Any) -> Any:
        if any(isinstance(each, (Form, Pointwise, RowMean, RowPower)) for each in rest):
            raise Misfit(node, "a layout that does not depend on the image was expected")
        form = self.form(node, x)
        if node.op == "Split":
            return [form.moved(lambda a, i=i: MOVES["Split"](node, a, *rest)[i]) for i in range(len(node.outputs))]
        return form.moved(lambda a: MOVES[node.op](node, a, *rest))

    def concat(self, node: Node, *parts: Value) -> Form:
        """Join values: a constant is what has gain zero."""
        forms = [part if isinstance(part, np.ndarray) else self.form(node, part) for part in parts]
        bases = {id(form.base): form.base for form in forms if isinstance(form, Form)}
        base, axis = next(iter(bases.values())), int(node.get("axis", 0))
        if len(bases) != 1 or base is None:
            raise Misfit(
                node, "values of one layer were expected to be joined, or tokens that are the same for every image"
            )
        count = max(len(form.terms) for form in forms if isinstance(form, Form))
        shape = np.concatenate([np.broadcast_to(np.zeros((), np.int8), f.shape) for f in forms], axis).shape
        limited(shape, node)
        terms = [self._joined([_part(form, i) for form in forms], forms, base, axis) for i in range(count)]
        offsets = [form if isinstance(form, np.ndarray) else form.offset for form in forms]
        offset = None
        if any(each is not None for each in offsets):
            full = [np.broadcast_to(np.float32(0) if o is None else o, f.shape) for o, f in zip(offsets, forms)]
            offset = np.concatenate(full, axis)
        return Form(shape, tuple(terms), offset)

    def _joined(self, parts: Sequence[Term | None], forms: Sequence[Form | Array], base: Base, axis: int) -> Term:
        index = np.concatenate(
            [np.zeros(f.shape, np.int32) if t is None else t.indices(f.shape) for t, f in zip(parts, forms)], axis
        )
        if all(part is not None and part.gain is None for part in parts):
            return Form.of(base, index.shape, index).terms[0]
        gains = [
            np.broadcast_to(np.float32(0 if t is None else 1) if t is None or t.gain is None else t.gain, f.shape)
            for t, f in zip(parts, forms)
        ]
        return Term(base, index, np.concatenate(gains, axis))

    def where(self, node: Node, condition: Value, a: Value, b: Value) -> Value:
        chosen = condition.reshape(-1) if isinstance(condition, np.ndarray) else np.zeros(0)
        if not chosen.size or (chosen != chosen[0]).any():
            raise Misfit(node, "a choice that is the same for all elements was expected")
        return a if chosen[0] else b

    # Functions of one number

    def _function(self, node: Node, x: Any) -> Value:
        if isinstance(x, RowPower):
            exponents = {"Sqrt": 0.5, "Reciprocal": -1.0}
            if node.op in exponents:
                return replace(x, exponent=x.exponent * exponents[node.op])
        of = self._pointwise(node, x)
        return Pointwise(of.form, FUNCTIONS[node.op](node, of.values))

    def _pointwise(self, node: Node, x: Any) -> Pointwise:
        """Return a value as a function of one number; a form is one times a scale, plus an offset."""
        if isinstance(x, Pointwise):
            return x
        form = self.form(node, x)
        term = form.term
        if term is None:
            return Pointwise(form, PROBES)
        gain, offset = uniform(term.gain), 0.0 if form.offset is None else uniform(form.offset)
        if gain is None or offset is None or (term.gain is None and form.offset is None):
            return Pointwise(form, PROBES)
        return Pointwise(Form(form.shape, (replace(term, gain=None),)), gain * PROBES + offset)

    def _activation(self, node: Node, x: Pointwise) -> Form:
        found = [name for name, f in ACTIVATIONS.items() if np.abs(f(PROBES) - x.values).max() < SAME_FUNCTION]
        if not found:
            raise Misfit(node, f"an activation was expected before this: one of {', '.join(ACTIVATIONS)}")
        term = x.form.term
        if term is None or not x.form.is_plain:
            raise Misfit(node, "an activation of a linear layer was expected before this")
        base = Activation(term.base.node, term.base.rows, term.base.width, term.base, found[0])
        return Form(x.form.shape, (Term(base, term.index),))

    # Arithmetic

    def arithmetic(self, node: Node, a: Any, b: Any) -> Value:
        """Add, Sub, Mul, Div or Pow."""
        if isinstance(a, (RowMean, RowPower)) or isinstance(b, (RowMean, RowPower)):
            return self._in_norm(node, a, b)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            return self._with_constant(node, a, b)
        if isinstance(a, Pointwise) or isinstance(b, Pointwise) or node.op not in ("Add", "Sub"):
            f, g = self._pointwise(node, a), self._pointwise(node, b)
            if same_form(f.form, g.form):
                return Pointwise(f.form, ARITHMETIC[node.op](f.values, g.values))
        x, y = self.form(node, a), self.form(node, b)
        if node.op == "Mul":
            return self._product(node, x, y)
        if node.op == "Add":
            return self.add(node, x, y)
        if node.op == "Sub":
            return self.add(node, x, y.scaled(np.float32(-1) * np.ones((), np.float32)))
        raise Misfit(node, "two values of the tokens were expected to be added, or multiplied in a gated MLP")

    def _with_constant(self, node: Node, a: Any, b: Any) -> Value:
        first = isinstance(a, np.ndarray)
        number, x = (a, b) if first else (b, a)
        one = uniform(number)
        is_function = isinstance(x, Pointwise) or node.op == "Pow" or (node.op == "Div" and first)
        if one is not None and is_function:
            f = self._pointwise(node, x)
            pair = (np.float64(one), f.values) if first else (f.values, np.float64(one))
            return Pointwise(f.form, np.asarray(ARITHMETIC[node.op](*pair)))  # type: ignore[arg-type]
        form = self.form(node, x)
        limited(np.broadcast_shapes(form.shape, number.shape), node)
        if node.op == "Add":
            return self._shifted(node, form, number)
        if node.op == "Sub":
            return (
                self._shifted(node, form.scaled(np.float32(-1) * np.ones((), np.float32)), number)
                if first
                else self._shifted(node, form, -number)
            )
        if node.op == "Mul" or (node.op == "Div" and not first):
            gain = number if node.op == "Mul" else 1 / number.astype(np.float64)
            return self._as_norm_weight(node, form.scaled(gain))
        raise Misfit(node, "a sum with a constant, or a multiple, was expected")

    def _shifted(self, node: Node, form: Form, offset: Array) -> Form:
        """Add a constant; where it is the bias of the layer before, it becomes that."""
        term = form.term
        if term is not None and isinstance(term.base, Patches) and offset.size > term.base.width:
            self.position_rows = max(self.position_rows, offset.size // term.base.width)
        shifted = form.shifted(offset)
        term = shifted.term
        if term is None or term.gain is not None or not isinstance(term.base, (Linear, Patches, Norm)):
            return shifted
        assert shifted.offset is not None
        bias = _by_column(shifted.offset, shifted.shape, term)
        if bias is None:
            return shifted
        base = term.base
        if isinstance(base, Norm):
            each = bias.reshape(len(base.columns), -1)
            if base.bias is not None or not (each == each[0]).all():
                return shifted
            return Form(shifted.shape, (replace(term, base=replace(base, node=node, bias=each[0])),))
        total = bias if base.bias is None else base.bias + bias
        return Form(shifted.shape, (replace(term, base=replace(base, node=node, bias=total)),))

    def _as_norm_weight(self, node: Node, form: Form) -> Form:
        """Where a norm without a weight was multiplied by one, it gets that weight."""
        term = form.term
        if term is None or not isinstance(term.base, Norm) or term.gain is None or form.offset is not None:
            return form
        base, weight = term.base, _by_column(term.gain, form.shape, term)
        if weight is None or base.weight is not None or base.bias is not None:
            return form
        each = weight.reshape(len(base.columns), -1)
        if not (each == each[0]).all():
            return form
        return Form(form.shape, (Term(replace(base, node=node, weight=each[0]), term.index),))

    def _product(self, node: Node, a: Form, b: Form) -> Form:
        x, y = rows_of(a), rows_of(b)
        if x is None or y is None or a.shape != b.shape or not np.array_equal(x.rows, y.rows):
            raise Misfit(node, "the two halves of a gated MLP were expected, of the same tokens")
        if x.gain is not None or x.offset is not None or y.gain is not None or y.offset is not None:
            raise Misfit(node, "the two halves of a gated MLP were expected, without a scale")
        base = Product(node, x.base.rows, a.shape[-1], x, y)
        return _with_rows(base, x.rows)

    def add(self, node: Node, a: Form, b: Form, output: str | None = None) -> Form:
        """Add two values: a rotary embedding, a residual addition, or two classifiers."""
        if a.shape != b.shape:
            raise Misfit(node, f"two values of one shape were expected, not {a.shape} and {b.shape}")
        if a.base is not None and a.base is b.base:
            return _terms_joined(a, b)
        x, y = self.rows(node, a), self.rows(node, b)
        for stream, branch in ((x, y), (y, x)):
            if isinstance(branch.base, Linear) and leads_to(branch.base, stream.base):
                return self._residual(node, stream, branch, output or node.outputs[0])
        if any(not isinstance(rows.base, (Linear, Pooled)) or rows.columns is not None for rows in (x, y)):
            raise Misfit(node, "the residual stream was expected here, and a linear layer that was made from it")
        return Form.of(Sum(node, x.rows.size, a.shape[-1], (x, y)), a.shape)

    def _residual(self, node: Node, stream: Rows, branch: Rows, output: str) -> Form:
        last = branch.base
        assert isinstance(last, Linear)
        if not stream.is_plain or branch.columns is not None or branch.offset is not None:
            raise Misfit(node, "the residual stream was expected to be added to as it is")
        if not np.array_equal(stream.rows, branch.rows):
            raise Misfit(node, "a sub-layer was expected to be added to its own tokens")
        sublayer = read_sublayer(stream.base, last, branch.gain)
        base = Residual(node, stream.base.rows, stream.base.width, stream.base, sublayer, output)
        return _with_rows(base, stream.rows)

    def rows(self, node: Node, form: Form) -> Rows:
        """Return a form as rows of a base; the embedded patches with prefix and positions become the tokens."""
        found = rows_of(form)
        if found is not None and not (isinstance(found.base, Patches) and not found.is_plain):
            return into_parts(found)
        if not isinstance(form.base, Patches) or len(form.terms) != 1:
            raise Misfit(node, "whole tokens were expected here")
        flat = form.reshaped(-1, form.shape[-1])
        for known in self.tokens:
            if same_form(known.form, flat):
                return Rows(known, arange(known.rows).reshape(form.shape[:-1]))
        base = Tokens(node, flat.shape[0], flat.shape[1], flat)
        self.tokens.append(base)
        return Rows(base, arange(base.rows).reshape(form.shape[:-1]))

    # Norms

    def _in_norm(self, node: Node, a: Any, b: Any) -> Value:
        """Go on with a norm that is written out."""
        if node.op == "Sub" and isinstance(a, (Form, Pointwise)) and isinstance(b, RowMean):
            form = self.form(node, a)
            if same_form(form, b.form):
                return Form.of(Centred(node, math.prod(form.shape[:-1]), form.shape[-1], form), form.shape)
        if isinstance(b, RowPower) and isinstance(a, np.ndarray):
            one = uniform(a)
            if node.op == "Add" and one is not None and b.exponent == 1:
                return replace(b, eps=b.eps + shortest(one))
            if node.op == "Div" and one == 1:
                return replace(b, exponent=-b.exponent)
        if isinstance(a, RowPower) and isinstance(b, np.ndarray):
            one = uniform(b)
            if node.op == "Add":
                return self._in_norm(node, b, a)
            if node.op == "Pow" and one is not None:
                return replace(a, exponent=a.exponent * one)
        if isinstance(a, RowPower) and node.op == "Mul":
            a, b = b, a
        wanted = {"Mul": -0.5, "Div": 0.5}.get(node.op)
        if isinstance(a, Form) and isinstance(b, RowPower) and b.exponent == wanted and same_form(a, b.form):
            return self._written_out(node, a, b.eps)
        raise Misfit(node, "a LayerNorm or an RMSNorm was expected here")

    def _written_out(self, node: Node, form: Form, eps: float) -> Form:
        base = form.base
        if isinstance(base, Centred):
            return self.normed(node, base.form, "layer", eps, None, None)
        return self.normed(node, form, "rms", eps, None, None)

    def normed(self, node: Node, form: Form, kind: Any, eps: float, weight: Any, bias: Any) -> Form:
        """Return the norm of the last axis: of whole tokens, or of heads."""
        features = form.shape[-1]
        for vector in (weight, bias):
            if vector is not None and (not isinstance(vector, np.ndarray) or vector.reshape(-1).shape != (features,)):
                raise Misfit(node, f"a norm with one weight for each of {features} features was expected")
        weight, bias = (None if v is None else v.reshape(-1) for v in (weight, bias))
        term = form.term
        index = None if term is None or not form.is_plain else term.indices(form.shape)
        whole = None if index is None else (index // term.base.width)  # type: ignore[union-attr]
        if index is None or whole is None or term is None or not (whole == whole[..., :1]).all():
            rows = self.rows(node, form)
            if not rows.is_plain:
                raise Misfit(node, "a norm of the tokens themselves was expected")
            base = Norm(node, rows.base.rows, features, rows.base, arange(features)[None], kind, eps, weight, bias)
            return _with_rows(base, rows.rows)
        columns = (index % term.base.width).reshape(-1, features)
        found, group = np.unique(columns, axis=0, return_inverse=True)
        base = Norm(node, term.base.rows, len(found) * features, term.base, found, kind, eps, weight, bias)
        places = (whole[..., 0].reshape(-1) * base.width + group.reshape(-1) * features)[:, None] + arange(features)
        return Form.of(base, form.shape, places.reshape(form.shape))

    def layer_norm(self, node: Node, x: Value, weight: Any = None, bias: Any = None) -> Form:
        form, kind = self.form(node, x), "layer" if node.op == "LayerNormalization" else "rms"
        if int(node.get("axis", -1)) not in (-1, len(form.shape) - 1):
            raise Misfit(node, "a norm over the last axis was expected")
        return self.normed(node, form, kind, shortest(node.get("epsilon", 1e-5)), weight, bias)

    def skip_norm(self, node: Node, x: Value, skip: Value, weight: Any, *rest: Any) -> Any:
        """Return the norm of a sum, and after two outputs that nothing reads the sum itself."""
        simple = node.op == "SkipSimplifiedLayerNormalization"
        beta, bias = (None, *rest, None)[:2] if simple else (*rest, None, None)[:2]
        pair = [x, skip]
        if isinstance(bias, np.ndarray):
            branch = next((i for i, v in enumerate(pair) if isinstance(v, Form) and isinstance(v.base, Linear)), 0)
            pair[branch] = self._shifted(node, self.form(node, pair[branch]), bias)
        output = next((name for name in node.outputs[3:4] if name), "")
        if any(isinstance(each, np.ndarray) for each in pair):
            total = self._with_constant(replace(node, op="Add"), *pair)
        else:
            total = self.add(node, self.form(node, pair[0]), self.form(node, pair[1]), output or " ")
        form = self.form(node, total)
        normed = self.normed(
            node, form, "rms" if simple else "layer", shortest(node.get("epsilon", 1e-12)), weight, beta
        )
        return normed, None, None, form

    # Linear layers

    def linear(self, node: Node, x: Form, weight: Array, bias: Array | None = None) -> Form:
        """Return x times a matrix (in, out), plus a bias."""
        if x.shape[-1] != weight.shape[0]:
            raise Misfit(node, f"a linear layer of {x.shape[-1]} inputs was expected, not of {weight.shape[0]}")
        if bias is not None and bias.size != weight.shape[1]:
            raise Misfit(node, f"a bias of {weight.shape[1]} numbers was expected")
        bias = None if bias is None else bias.reshape(-1)
        if isinstance(x.base, Input):
            return self._cut_patches(node, x, weight, bias)
        rows = self.rows(node, x)
        matrix = weight.T  # (out, in)
        if rows.offset is not None:
            bias = matrix @ rows.offset + (0 if bias is None else bias)
        if rows.gain is not None:
            matrix = matrix * rows.gain
        if rows.columns is not None:
            given, matrix = matrix, np.zeros((weight.shape[1], rows.base.width), matrix.dtype)
            matrix[:, rows.columns] = given
        base = Linear(node, rows.base.rows, weight.shape[1], rows.base, matrix, bias)
        return _with_rows(base, rows.rows)

    def matmul(self, node: Node, a: Any, b: Any) -> Form:
        a, b = (v if isinstance(v, np.ndarray) else self.form(node, v) for v in (a, b))
        if isinstance(a, np.ndarray):
            return products(node, a, b)
        if isinstance(b, np.ndarray):
            if b.ndim >= 2 and math.prod(b.shape[:-2]) == 1:
                return self.linear(node, a, b.reshape(b.shape[-2:]))
            if b.ndim < 2 or len(a.shape) < 2:
                raise Misfit(node, "a matrix was expected")
            return grouped(node, self.batch, a, b)
        if isinstance(a.base, Weights):
            return weighted(node, self.batch, a, b)
        return products(node, a, b)

    def fused_matmul(self, node: Node, a: Any, b: Any) -> Form:
        if node.get("transBatchA", 0) or node.get("transBatchB", 0):
            raise Misfit(node, "a product without transposed batches was expected")
        if node.get("transA", 0):
            a = (
                a.swapaxes(-1, -2)
                if isinstance(a, np.ndarray)
                else self.form(node, a).moved(lambda x: x.swapaxes(-1, -2))
            )
        if node.get("transB", 0):
            b = (
                b.swapaxes(-1, -2)
                if isinstance(b, np.ndarray)
                else self.form(node, b).moved(lambda x: x.swapaxes(-1, -2))
            )
        found, alpha = self.matmul(node, a, b), node.get("alpha", 1.0)
        return found if alpha == 1 else found.scaled(np.array(alpha, np.float64))

    def gemm(self, node: Node, a: Any, b: Any, c: Any = None) -> Value:
        if node.get("transA", 0) or not isinstance(b, np.ndarray) or b.ndim != 2:
            raise Misfit(node, "a linear layer with a constant matrix was expected")
        weight = b.T if node.get("transB", 0) else b
        weight = weight if node.get("alpha", 1.0) == 1 else weight * np.float32(node.get("alpha", 1.0))
        beta = np.float32(node.get("beta", 1.0))
        is_bias = isinstance(c, np.ndarray) and c.size == weight.shape[1]
        found: Value = self.linear(
            node, self.form(node, a), weight, (c if beta == 1 else c * beta) if is_bias else None
        )
        if c is not None and not is_bias:
            other = c if beta == 1 else self._with_constant(replace(node, op="Mul"), c, np.array(beta))
            found = self.arithmetic(replace(node, op="Add"), found, other)
        if activation := node.get("activation", ""):
            if activation not in FUNCTIONS:
                raise Misfit(node, f"an activation was expected, not {activation}")
            found = self._function(replace(node, op=activation), found)
        return found

    def conv(self, node: Node, x: Any, weight: Any, bias: Any = None) -> Form:
        form = self.form(node, x)
        if not isinstance(weight, np.ndarray) or (bias is not None and not isinstance(bias, np.ndarray)):
            raise Misfit(node, "a convolution with constant weights was expected")
        kernel = list(weight.shape[2:])
        strides, pads = list(node.get("strides", [1] * len(kernel))), node.get("pads", [0])
        plain = not any(pads) and node.get("auto_pad", "NOTSET") in ("NOTSET", "VALID", "")
        plain = (
            plain
            and node.get("group", 1) == 1
            and set(node.get("dilations", [1])) == {1}
            and not node.get("activation", "")
        )
        if plain and set(kernel) == {1} and set(strides) == {1} and not isinstance(form.base, Input):
            rows = form.moved(lambda a: np.moveaxis(a, 1, -1))
            return self.linear(node, rows, weight.reshape(weight.shape[:2]).T, bias).moved(
                lambda a: np.moveaxis(a, -1, 1)
            )
        if not isinstance(form.base, Input):
            raise Misfit(
                node, "one convolution was expected, the patch embedding: this looks like a convolutional network"
            )
        if not plain or strides != kernel or len(kernel) != 2:
            raise Misfit(
                node, "a patch embedding was expected: a convolution whose stride is its kernel, without padding"
            )
        self._require_pixels(node, form)
        if form.shape != self.shape or form.terms[0].index is not None or weight.shape[1] != form.shape[1]:
            raise Misfit(node, "images of (batch, channels, height, width) were expected in the patch embedding")
        return self._patches(node, weight, bias)

    def _require_pixels(self, node: Node, form: Form) -> None:
        if not form.is_plain:
            raise Misfit(node, PREPROCESSING)

    def _patches(self, node: Node, weight: Array, bias: Array | None) -> Form:
        (b, _, height, width), (e, _, ph, pw) = self.shape, weight.shape
        grid = (height // ph, width // pw)
        if not all(grid):
            raise Misfit(node, f"images of at least one patch of {ph}x{pw} were expected")
        base = Patches(node, b * grid[0] * grid[1], e, weight, None if bias is None else bias.reshape(-1), grid)
        index = arange(base.rows * e).reshape(b, *grid, e).transpose(0, 3, 1, 2)
        return Form.of(base, (b, e, *grid), index)

    def _cut_patches(self, node: Node, x: Form, weight: Array, bias: Array | None) -> Form:
        """Return the patch embedding of pixels that were cut into patches beforehand, and multiplied by a matrix."""
        self._require_pixels(node, x)
        _, c, height, width = self.shape
        expected = Misfit(node, "pixels of patches were expected, in rows, each pixel of a patch once")
        index = x.terms[0].indices(x.shape)
        if len(x.shape) < 2 or x.shape[0] not in (self.batch, index.size // x.shape[-1]):
            raise expected
        pixels = index.reshape(self.batch, -1, x.shape[-1]) - (arange(self.batch) * (c * height * width))[:, None, None]
        channel, y, column = np.unravel_index(pixels[0, 0], (c, height, width))
        ph, pw = int(y.max()) + 1, int(column.max()) + 1
        grid = (height // ph, width // pw)
        if c * ph * pw != x.shape[-1] or grid[0] * grid[1] != pixels.shape[1]:
            raise expected
        corner = (np.arange(grid[0])[:, None] * ph * width + np.arange(grid[1]) * pw).reshape(-1, 1)
        if not (pixels == pixels[0, 0] + corner).all():
            raise expected
        kernel = np.zeros((weight.shape[1], c, ph, pw), weight.dtype)
        kernel[:, channel, y, column] = weight.T
        form = self._patches(node, kernel, bias).moved(lambda a: a.transpose(0, 2, 3, 1))
        return form.reshaped(*x.shape[:-1], weight.shape[1])

    # Attention

    def softmax(self, node: Node, x: Any) -> Form:
        form = self.form(node, x)
        if int(node.get("axis", -1 if self.graph.opset >= 13 else 1)) not in (-1, len(form.shape) - 1):
            raise Misfit(node, "a softmax over the last axis was expected")
        return weights(node, form)

    def heads(self, node: Node, x: Form, count: int) -> Form:
        """(B, T, heads*h) to (B, heads, T, h)."""
        if len(x.shape) == 4:
            return x
        if len(x.shape) != 3 or count < 1 or x.shape[2] % count:
            raise Misfit(node, f"{count} heads side by side were expected")
        return x.reshaped(*x.shape[:2], count, x.shape[2] // count).moved(lambda a: a.transpose(0, 2, 1, 3))

    def attended(self, node: Node, q: Form, k: Form, v: Form, scale: float | None) -> Form:
        """Return the attention of (B, heads, T, h) as (B, T, heads*h)."""
        lead = q.shape[:2]
        if len(q.shape) != 4 or k.shape[:2] != lead or v.shape[:2] != lead:
            raise Misfit(node, "as many heads of keys and values as of queries were expected")
        flat = [x.reshaped(-1, *x.shape[2:]) for x in (q, k, v)]
        factor = q.shape[-1] ** -0.5 if not scale else float(scale)
        return attend(node, self.batch, flat[0], flat[1], flat[2], factor, lead)

    def attention(self, node: Node, q: Any, k: Any, v: Any, *rest: Any) -> Form:
        """The operator of ONNX itself."""
        if any(each is not None for each in rest) or node.get("is_causal", 0) or node.get("softcap", 0.0):
            raise Misfit(node, "attention to all tokens was expected, without a mask, a cache or a cap")
        forms = [self.form(node, x) for x in (q, k, v)]
        counts = [node.get("q_num_heads", 0), *[node.get("kv_num_heads", 0)] * 2]
        found = self.attended(node, *(self.heads(node, x, n) for x, n in zip(forms, counts)), node.get("scale", None))
        return found if len(forms[0].shape) == 4 else _side_by_side(found)

    def packed_attention(self, node: Node, x: Any, weight: Any, bias: Any = None, *rest: Any) -> Form:
        """com.microsoft's operator with the linear layer of q, k and v in it."""
        if any(each is not None for each in rest) or node.get("unidirectional", 0) or node.get("do_rotary", 0):
            raise Misfit(node, "attention to all tokens was expected, without a mask, a cache or rotation")
        if not isinstance(weight, np.ndarray) or weight.ndim != 2:
            raise Misfit(node, "attention with constant weights was expected")
        sizes = node.get("qkv_hidden_sizes", None) or [weight.shape[1] // 3] * 3
        packed = self.linear(node, self.form(node, x), weight, bias)
        ends = np.cumsum(sizes)[:-1]
        parts = [packed.moved(lambda a, i=i: np.split(a, ends, axis=-1)[i]) for i in range(3)]
        heads = int(node.get("num_heads", 0))
        return _side_by_side(
            self.attended(node, *(self.heads(node, part, heads) for part in parts), node.get("scale", None))
        )

    def multi_head(self, node: Node, q: Any, k: Any = None, v: Any = None, bias: Any = None, *rest: Any) -> Form:
        """com.microsoft's MultiHeadAttention: q, k and v apart, or packed as (B, T, heads, 3, h)."""
        if (
            any(each is not None for each in rest)
            or node.get("unidirectional", 0)
            or node.get("mask_filter_value", None)
        ):
            raise Misfit(node, "attention to all tokens was expected, without a mask or a cache")
        query, heads = self.form(node, q), int(node.get("num_heads", 0))
        if k is None and len(query.shape) == 5:
            parts = [query.moved(lambda a, i=i: a[:, :, :, i].reshape(*a.shape[:2], -1)) for i in range(3)]
        elif k is not None and v is not None:
            parts = [query, self.form(node, k), self.form(node, v)]
        else:
            raise Misfit(node, "queries, keys and values were expected, apart or packed together")
        if isinstance(bias, np.ndarray):
            sizes = np.cumsum([part.shape[-1] for part in parts])[:-1]
            parts = [self._shifted(node, part, each) for part, each in zip(parts, np.split(bias, sizes))]
        return _side_by_side(
            self.attended(node, *(self.heads(node, part, heads) for part in parts), node.get("scale", None))
        )

    # Pooling

    def reduced(self, node: Node, x: Any, axes: Any = None) -> Value:
        shape = x.form.shape if isinstance(x, Pointwise) else self.form(node, x).shape
        along = axes_of(node, axes)
        found = sorted(axis % len(shape) for axis in (along if along else range(len(shape))))
        keep = bool(node.get("keepdims", 1))
        if found == [len(shape) - 1] and keep and node.op == "ReduceMean":
            if isinstance(x, Pointwise) and np.allclose(x.values, np.square(PROBES)):
                return RowPower(x.form)
            form = self.form(node, x)
            if rows_of(form) is not None or isinstance(form.base, Patches) or len(shape) == 4:
                return RowMean(form)
        return self._pooled(node, self.form(node, x), found, "max" if node.op == "ReduceMax" else "avg", keep)

    def global_pool(self, node: Node, x: Any) -> Form:
        form = self.form(node, x)
        kind = "max" if node.op == "GlobalMaxPool" else "avg"
        return self._pooled(node, form, list(range(2, len(form.shape))), kind, True)

    def _pooled(self, node: Node, form: Form, axes: list[int], kind: Any, keep: bool) -> Form:
        others = [axis for axis in range(1, len(form.shape)) if axis not in axes]
        if 0 in axes or form.shape[0] != self.batch or len(others) != 1:
            raise Misfit(node, "a mean over the tokens of each image was expected")
        tokens = form.moved(lambda a: np.moveaxis(a, others[0], -1).reshape(self.batch, -1, a.shape[others[0]]))
        rows = self.rows(node, tokens)
        total = rows.base.rows // self.batch
        number = rows.rows % total
        first, count = int(number[0, 0]), number.shape[1]
        all_rows = (arange(self.batch) * total)[:, None] + arange(total)[first:]
        if not rows.is_plain or not np.array_equal(rows.rows, all_rows):
            raise Misfit(node, "pooling of all tokens was expected, or of all but the first ones")
        base = Pooled(node, self.batch, rows.base.width, rows.base, kind, first, count)
        shape = tuple(1 if a in axes else n for a, n in enumerate(form.shape) if keep or a not in axes)
        return Form.of(base, shape)

    # The rest

    def same(self, node: Node, x: Any, *rest: Any) -> Any:
        return x

    def cast(self, node: Node, x: Any, *rest: Any) -> Any:
        """Floating-point types are all alike here."""
        from onnx import TensorProto

        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
        if node.op == "Cast" and node.get("to", 0) not in floats:
            raise Misfit(node, "floating-point values were expected")
        return x

    def shape_of(self, node: Node, x: Any) -> Array:
        sizes = np.array(_shape(x), np.int64)
        if node.op == "Size":
            return np.array(sizes.prod(), np.int64)
        end = node.get("end", None)
        return sizes[int(node.get("start", 0)) : None if end is None else int(end)]

    def no_element(self, node: Node, x: Any) -> Array:
        return np.zeros(_shape(x), bool)

    def negative(self, node: Node, x: Any) -> Value:
        return self._with_constant(replace(node, op="Mul"), x, np.array(-1, np.float32))

    def clip(self, node: Node, x: Any, low: Any = None, high: Any = None) -> Value:
        of = self._pointwise(node, x)
        limits = [None if v is None else uniform(v) for v in (low, high)]
        return Pointwise(of.form, np.clip(of.values, *limits)) if any(v is not None for v in limits) else x

    def biased_gelu(self, node: Node, x: Any, bias: Any = None) -> Value:
        of = x if bias is None else self._with_constant(replace(node, op="Add"), x, bias)
        return self._function(replace(node, op="FastGelu" if node.op == "FastGelu" else "Gelu"), of)

    def split_gelu(self, node: Node, x: Any, bias: Any) -> Value:
        of = self.form(node, self._with_constant(replace(node, op="Add"), x, bias))
        left, right = (of.moved(lambda a, i=i: np.split(a, 2, axis=-1)[i]) for i in range(2))
        return self.arithmetic(replace(node, op="Mul"), left, self._function(replace(node, op="Gelu"), right))

    def bias_add(self, node: Node, x: Any, bias: Any, skip: Any) -> Value:
        return self.arithmetic(replace(node, op="Add"), self._with_constant(replace(node, op="Add"), x, bias), skip)

    def sum_of(self, node: Node, *parts: Any) -> Value:
        found = parts[0]
        for part in parts[1:]:
            found = self.arithmetic(replace(node, op="Add"), found, part)
        return found

    def pad(self, node: Node, x: Any, pads: Any = None, *rest: Any) -> Any:
        if not isinstance(pads, np.ndarray) or pads.any():
            raise Misfit(node, "images and tokens without padding were expected")
        return x


def shortest(value: float) -> float:
    """Return the shortest decimal number that is this one in float32: 1e-6, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _shape(x: Any) -> tuple[int, ...]:
    if isinstance(x, (RowMean, RowPower)):
        return (*x.form.shape[:-1], 1)
    found: tuple[int, ...] = x.form.shape if isinstance(x, Pointwise) else x.shape
    return found


def _part(form: Form | Array, i: int) -> Term | None:
    return form.terms[i] if isinstance(form, Form) and i < len(form.terms) else None


def _terms_joined(a: Form, b: Form) -> Form:
    """Add two forms of one base; elements that both have are added up."""
    terms = list(a.terms)
    for term in b.terms:
        for i, own in enumerate(terms):
            if np.array_equal(own.indices(a.shape), term.indices(a.shape)):
                gains = [np.float32(1) if t.gain is None else t.gain for t in (own, term)]
                terms[i] = replace(own, gain=np.asarray(gains[0] + gains[1]))
                break
        else:
            terms.append(term)
    offsets = [form.offset for form in (a, b) if form.offset is not None]
    return Form(a.shape, tuple(terms), sum(offsets[1:], offsets[0]) if offsets else None)


def _with_rows(base: Base, rows: Array) -> Form:
    """Return whole rows of a base."""
    index = None
    if rows.size != base.rows or not np.array_equal(rows.reshape(-1), arange(base.rows)):
        index = rows[..., None] * base.width + arange(base.width)
    return Form.of(base, (*rows.shape, base.width), index)


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


def _side_by_side(form: Form) -> Form:
    """(B, heads, T, h) to (B, T, heads*h)."""
    return form.moved(lambda a: a.transpose(0, 2, 1, 3).reshape(a.shape[0], a.shape[2], -1))


_RULES: dict[tuple[str, str], Callable[..., Any]] = {
    ("", "Concat"): Interpreter.concat,
    ("", "Where"): Interpreter.where,
    **{("", op): Interpreter.arithmetic for op in ARITHMETIC},
    ("", "Sum"): Interpreter.sum_of,
    ("", "Neg"): Interpreter.negative,
    ("", "Clip"): Interpreter.clip,
    ("", "MatMul"): Interpreter.matmul,
    (MICROSOFT, "FusedMatMul"): Interpreter.fused_matmul,
    ("", "Gemm"): Interpreter.gemm,
    (MICROSOFT, "FusedGemm"): Interpreter.gemm,
    ("", "Conv"): Interpreter.conv,
    (MICROSOFT, "FusedConv"): Interpreter.conv,
    ("", "LayerNormalization"): Interpreter.layer_norm,
    ("", "RMSNormalization"): Interpreter.layer_norm,
    ("", "SimplifiedLayerNormalization"): Interpreter.layer_norm,
    (MICROSOFT, "SkipLayerNormalization"): Interpreter.skip_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): Interpreter.skip_norm,
    ("", "Softmax"): Interpreter.softmax,
    ("", "Attention"): Interpreter.attention,
    (MICROSOFT, "Attention"): Interpreter.packed_attention,
    (MICROSOFT, "MultiHeadAttention"): Interpreter.multi_head,
    (MICROSOFT, "BiasGelu"): Interpreter.biased_gelu,
    (MICROSOFT, "FastGelu"): Interpreter.biased_gelu,
    (MICROSOFT, "BiasSplitGelu"): Interpreter.split_gelu,
    (MICROSOFT, "BiasAdd"): Interpreter.bias_add,
    ("", "ReduceMean"): Interpreter.reduced,
    ("", "ReduceMax"): Interpreter.reduced,
    ("", "GlobalAveragePool"): Interpreter.global_pool,
    ("", "GlobalMaxPool"): Interpreter.global_pool,
    ("", "Identity"): Interpreter.same,
    ("", "Dropout"): Interpreter.same,
    ("", "Cast"): Interpreter.cast,
    ("", "CastLike"): Interpreter.same,
    ("", "Shape"): Interpreter.shape_of,
    ("", "Size"): Interpreter.shape_of,
    ("", "IsNaN"): Interpreter.no_element,
    ("", "IsInf"): Interpreter.no_element,
    ("", "Pad"): Interpreter.pad,
}
