"""Linear layers and the patch embedding: Gemm, MatMul and Conv. Light: numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import FUNCTIONS
from ..attend import grouped, products, weighted
from ..nodes import Array, Misfit, Node
from ..values import Form, Input, Linear, Patches, Value, Weights, arange
from .arithmetic import arithmetic, with_constant
from .functions import as_form, function
from .scope import Scope, with_rows

PREPROCESSING = (
    "the pixels are changed before the patch embedding: preprocessing is expected outside of the file. "
    "Export the model without it"
)


def linear(scope: Scope, node: Node, x: Form, weight: Array, bias: Array | None = None) -> Form:
    """Return x times a matrix (in, out), plus a bias."""
    if x.shape[-1] != weight.shape[0]:
        raise Misfit(node, f"a linear layer of {x.shape[-1]} inputs was expected, not of {weight.shape[0]}")
    if bias is not None and bias.size != weight.shape[1]:
        raise Misfit(node, f"a bias of {weight.shape[1]} numbers was expected")
    bias = None if bias is None else bias.reshape(-1)
    if isinstance(x.base, Input):
        return _cut_patches(scope, node, x, weight, bias)
    rows, matrix = scope.rows(node, x), weight.T  # (out, in)
    if rows.offset is not None:
        bias = matrix @ rows.offset + (0 if bias is None else bias)
    if rows.gain is not None:
        matrix = matrix * rows.gain
    if rows.columns is not None:
        some, matrix = matrix, np.zeros((weight.shape[1], rows.base.width), matrix.dtype)
        matrix[:, rows.columns] = some
    return with_rows(Linear(node, rows.base.rows, weight.shape[1], rows.base, matrix, bias), rows.rows)


def matmul(scope: Scope, node: Node, a: Any, b: Any) -> Form:
    """A linear layer, or one of the two products of attention."""
    a, b = (each if isinstance(each, np.ndarray) else as_form(node, each) for each in (a, b))
    if isinstance(a, np.ndarray):
        return products(node, a, b)
    if not isinstance(b, np.ndarray):
        return weighted(node, scope.batch, a, b) if isinstance(a.base, Weights) else products(node, a, b)
    if b.ndim < 2 or len(a.shape) < 2:
        raise Misfit(node, "a matrix was expected")
    if math.prod(b.shape[:-2]) == 1 and not (b.ndim > 2 and len(a.shape) > 3):  # heads may be one alone
        return linear(scope, node, a, b.reshape(b.shape[-2:]))
    return grouped(node, scope.batch, a, b)


def fused_matmul(scope: Scope, node: Node, a: Any, b: Any) -> Form:
    """ONNX Runtime's product with transposes and a scale in it."""
    if node.get("transBatchA", 0) or node.get("transBatchB", 0):
        raise Misfit(node, "a product without transposed batches was expected")
    a = _transposed(node, a) if node.get("transA", 0) else a
    b = _transposed(node, b) if node.get("transB", 0) else b
    found, alpha = matmul(scope, node, a, b), node.get("alpha", 1.0)
    return found if alpha == 1 else found.scaled(np.array(alpha, np.float64))


def _transposed(node: Node, x: Any) -> Form | Array:
    if isinstance(x, np.ndarray):
        return x.swapaxes(-1, -2)
    return as_form(node, x).moved(lambda a: a.swapaxes(-1, -2))


def gemm(scope: Scope, node: Node, a: Any, b: Any, c: Any = None) -> Value:
    """Gemm, and FusedGemm with an activation; what is added may be the residual stream."""
    if node.get("transA", 0) or not isinstance(b, np.ndarray) or b.ndim != 2:
        raise Misfit(node, "a linear layer with a constant matrix was expected")
    alpha, beta = np.float32(node.get("alpha", 1.0)), np.array(node.get("beta", 1.0), np.float32)
    weight = b.T if node.get("transB", 0) else b
    weight = weight if alpha == 1 else weight * alpha
    if c is not None and beta != 1:
        c = c * beta if isinstance(c, np.ndarray) else with_constant(scope, replace(node, op="Mul"), c, beta)
    is_bias = isinstance(c, np.ndarray) and c.size == weight.shape[1]
    found: Value = linear(scope, node, as_form(node, a), weight, c if is_bias else None)
    if c is not None and not is_bias:
        found = arithmetic(scope, replace(node, op="Add"), found, c)
    activation = node.get("activation", "")
    if activation and activation not in FUNCTIONS:
        raise Misfit(node, f"an activation was expected, not {activation}")
    return function(scope, replace(node, op=activation), found) if activation else found


def conv(scope: Scope, node: Node, x: Any, weight: Any, bias: Any = None, *rest: Any) -> Form:
    """The patch embedding, or a linear layer that is written as a convolution of single pixels."""
    form = as_form(node, x)
    if not isinstance(weight, np.ndarray) or not (bias is None or isinstance(bias, np.ndarray)) or rest:
        raise Misfit(node, "a convolution with constant weights was expected")
    kernel = list(weight.shape[2:])
    strides = list(node.get("strides", [1] * len(kernel)))
    if not isinstance(form.base, Input):
        if _is_plain(node) and set(kernel) == {1} and set(strides) == {1}:
            rows, matrix = form.moved(lambda a: np.moveaxis(a, 1, -1)), weight.reshape(weight.shape[:2]).T
            return linear(scope, node, rows, matrix, bias).moved(lambda a: np.moveaxis(a, -1, 1))
        raise Misfit(node, "no other convolution than the patch embedding was expected")
    if not _is_plain(node) or strides != kernel or len(kernel) != 2:
        raise Misfit(node, "a patch embedding was expected: a convolution whose stride is its kernel, without padding")
    if not form.is_plain:
        raise Misfit(node, PREPROCESSING)
    if form.shape != scope.shape or form.terms[0].index is not None or weight.shape[1] != form.shape[1]:
        raise Misfit(node, "images of (batch, channels, height, width) were expected in the patch embedding")
    return _patches(scope, node, weight, bias)


def _is_plain(node: Node) -> bool:
    """Return True for a convolution without padding, dilation, groups or an activation."""
    unpadded = not any(node.get("pads", [0])) and node.get("auto_pad", "NOTSET") in ("NOTSET", "VALID", "")
    single = node.get("group", 1) == 1 and set(node.get("dilations", [1])) == {1}
    return unpadded and single and not node.get("activation", "")


def _patches(scope: Scope, node: Node, weight: Array, bias: Array | None) -> Form:
    """Return the patch embedding as (B, E, rows, columns)."""
    (b, _, height, width), (e, _, ph, pw) = scope.shape, weight.shape
    grid = (height // ph, width // pw)
    if not all(grid):
        raise Misfit(node, f"images of at least one patch of {ph}x{pw} were expected")
    scope.patches = grid[0] * grid[1]
    base = Patches(node, b * grid[0] * grid[1], e, weight, None if bias is None else bias.reshape(-1), grid)
    index = arange(base.rows * e).reshape(b, *grid, e).transpose(0, 3, 1, 2)
    return Form.of(base, (b, e, *grid), index)


def _cut_patches(scope: Scope, node: Node, x: Form, weight: Array, bias: Array | None) -> Form:
    """Return the patch embedding of pixels that were cut into patches beforehand: their indices tell the kernel."""
    if not x.is_plain:
        raise Misfit(node, PREPROCESSING)
    b, c, height, width = scope.shape
    expected = Misfit(node, "pixels of patches were expected, in rows, each pixel of a patch once")
    index = x.terms[0].indices(x.shape)
    if len(x.shape) < 2 or (index.size // x.shape[-1]) % b:
        raise expected
    pixels = index.reshape(b, -1, x.shape[-1]) - (arange(b) * (c * height * width))[:, None, None]
    channel, row, column = np.unravel_index(pixels[0, 0], (c, height, width))
    ph, pw = int(row.max()) + 1, int(column.max()) + 1
    grid = (height // ph, width // pw)
    if c * ph * pw != x.shape[-1] or grid[0] * grid[1] != pixels.shape[1]:
        raise expected
    corners = np.arange(grid[0])[:, None] * ph * width + np.arange(grid[1]) * pw
    if not (pixels == pixels[0, 0] + corners.reshape(-1, 1)).all():
        raise expected
    kernel = np.zeros((weight.shape[1], c, ph, pw), weight.dtype)
    kernel[:, channel, row, column] = weight.T
    form = _patches(scope, node, kernel, bias).moved(lambda a: a.transpose(0, 2, 3, 1))
    return form.reshaped(*x.shape[:-1], weight.shape[1])
