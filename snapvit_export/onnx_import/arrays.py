"""ONNX operators on numpy arrays: those that only move elements, and those that compute constants. Light: numpy.

The moving ones serve twice. On a constant they give the constant's new layout; on an array of indices they tell where
each element of a computed value comes from, however many reshapes, transposes, slices and gathers lie between
(`values`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from .nodes import Array, Misfit, Node, is_half

MOST = 1 << 26  # elements that a shape in the file may ask for: a damaged one must not fill the memory
Moved = Array | list[Array]  # of one output, or of several


def axes_of(node: Node, given: Array | None) -> list[int] | None:
    """Return the axes of an operator, which older files have as an attribute and newer ones as an input."""
    axes = node.get("axes", None) if given is None else given
    return None if axes is None else [int(axis) for axis in np.atleast_1d(axes)]


def limited(shape: Sequence[int], node: Node) -> tuple[int, ...]:
    """Return a shape, unless an array of it would fill the memory."""
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes) or math.prod(sizes) > MOST:
        raise Misfit(node, f"a value of shape {sizes} is not one of a ViT")
    return sizes


def _reshape(node: Node, x: Array, shape: Array) -> Array:
    sizes = [int(size) for size in shape.reshape(-1)]
    if not node.get("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _transpose(node: Node, x: Array) -> Array:
    return x.transpose(node.get("perm", None))


def _flatten(node: Node, x: Array) -> Array:
    axis = int(node.get("axis", 1))
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _squeeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    found = axes_of(node, axes)
    return x.squeeze(None if found is None else tuple(found))


def _unsqueeze(node: Node, x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, tuple(axes_of(node, axes) or ()))


def _slice(
    node: Node, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    along = range(len(starts)) if axes is None else axes.tolist()
    by = [1] * len(starts) if steps is None else steps.tolist()
    cut = [slice(None)] * x.ndim
    for axis, start, end, step in zip(along, starts.tolist(), ends.tolist(), by):
        cut[axis] = slice(start, end, step)
    return x[tuple(cut)]


def _split(node: Node, x: Array, sizes: Array | None = None) -> Moved:
    axis, given = int(node.get("axis", 0)), node.get("split", None) if sizes is None else sizes
    if given is not None:
        return np.split(x, np.cumsum(given)[:-1], axis)
    count = len(node.outputs)
    each = -(-x.shape[axis] // count)  # all alike but the last
    return np.split(x, [each * i for i in range(1, count)], axis)


def _gather(node: Node, x: Array, indices: Array) -> Array:
    axis = int(node.get("axis", 0))
    limited([x.size // max(x.shape[axis], 1), indices.size], node)
    return np.take(x, indices, axis)


def _expand(node: Node, x: Array, shape: Array) -> Array:
    sizes = limited([int(size) for size in shape.reshape(-1)], node)
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, sizes))


def _tile(node: Node, x: Array, repeats: Array) -> Array:
    limited([size * int(count) for size, count in zip(x.shape, repeats)], node)
    return np.tile(x, [int(count) for count in repeats])


def _space_to_depth(node: Node, x: Array) -> Array:
    b, c, h, w = x.shape
    step = int(node.get("blocksize", 1))
    blocks = x.reshape(b, c, h // step, step, w // step, step)
    return blocks.transpose(0, 3, 5, 1, 2, 4).reshape(b, c * step * step, h // step, w // step)


def _gather_elements(node: Node, x: Array, indices: Array) -> Array:
    return np.take_along_axis(x, indices, int(node.get("axis", 0)))


# Operators that only move elements of their first input; all others are constants. Concat takes several.
MOVES: dict[str, Callable[..., Moved]] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Split": _split,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Expand": _expand,
    "Tile": _tile,
    "SpaceToDepth": _space_to_depth,
}


def erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def quick_gelu(x: Array, alpha: float = 1.702) -> Array:
    return x * sigmoid(alpha * x)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu(node: Node, x: Array) -> Array:
    return gelu_tanh(x) if node.get("approximate", "none") == "tanh" else gelu(x)


def _elu(node: Node, x: Array) -> Array:
    return np.where(x > 0, x, node.get("alpha", 1.0) * np.expm1(x))


def _leaky(node: Node, x: Array) -> Array:
    return np.where(x > 0, x, node.get("alpha", 0.01) * x)


def _hard_sigmoid(node: Node, x: Array) -> Array:
    return np.clip(node.get("alpha", 0.2) * x + node.get("beta", 0.5), 0, 1)


# Functions of one number, also as nodes of other domains: they are told apart by their values.
FUNCTIONS: dict[str, Callable[[Node, Array], Array]] = {
    "Erf": lambda _, x: erf(x),
    "Tanh": lambda _, x: np.tanh(x),
    "Sigmoid": lambda _, x: sigmoid(x),
    "Relu": lambda _, x: np.maximum(x, 0),
    "Exp": lambda _, x: np.exp(x),
    "Log": lambda _, x: np.log(x),
    "Abs": lambda _, x: np.abs(x),
    "Sqrt": lambda _, x: np.sqrt(x),
    "Reciprocal": lambda _, x: 1 / x,
    "Softplus": lambda _, x: np.log1p(np.exp(x)),
    "HardSwish": lambda _, x: x * np.clip(x / 6 + 0.5, 0, 1),
    "HardSigmoid": _hard_sigmoid,
    "Elu": _elu,
    "LeakyRelu": _leaky,
    "Gelu": _gelu,
    "FastGelu": lambda _, x: gelu_tanh(x),
    "QuickGelu": lambda node, x: quick_gelu(x, node.get("alpha", 1.702)),
    "Swish": lambda node, x: quick_gelu(x, node.get("alpha", 1.0)),
    "Mish": lambda _, x: x * np.tanh(np.log1p(np.exp(x))),
}


def divide(a: Array, b: Array) -> Array:
    """Divide as ONNX does: integers towards zero."""
    if np.issubdtype(np.result_type(a, b), np.integer):
        return np.trunc(np.divide(a, b)).astype(np.result_type(a, b))
    return np.divide(a, b)


ARITHMETIC: dict[str, Callable[[Array, Array], Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": divide,
    "Pow": lambda a, b: np.power(a, b).astype(a.dtype),
}
_COMPARED: dict[str, Callable[..., Array]] = {
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Min": np.minimum,
    "Max": np.maximum,
}
_SINGLE: dict[str, Callable[[Array], Array]] = {
    "Neg": np.negative,
    "Not": np.logical_not,
    "Sin": np.sin,
    "Cos": np.cos,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Sign": np.sign,
    "IsNaN": np.isnan,
    "IsInf": np.isinf,
    "Identity": lambda x: x,
    "Dropout": lambda x: x,
}
_REDUCED: dict[str, Callable[..., Array]] = {
    "ReduceMean": np.mean,
    "ReduceSum": np.sum,
    "ReduceProd": np.prod,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
}
ELSEWHERE = ("Resize", "CumSum", "ScatterND", "GatherND", "Trilu", "LayerNormalization", "Softmax")


def constant(node: Node, inputs: Sequence[Array | None], opset: int) -> Moved | None:
    """Return what a node makes of constants alone; None for an operator that is not known here."""
    first = inputs[0] if inputs else None
    if node.op in MOVES:
        return MOVES[node.op](node, *inputs)
    if node.op in ARITHMETIC and len(inputs) == 2:
        _limit_broadcast(node, inputs)
        return ARITHMETIC[node.op](*inputs)  # type: ignore[arg-type]
    if node.op in _COMPARED and len(inputs) == 2:
        _limit_broadcast(node, inputs)
        return np.asarray(_COMPARED[node.op](*inputs))
    if node.op in FUNCTIONS and first is not None:
        return FUNCTIONS[node.op](node, first).astype(first.dtype)
    if node.op in _SINGLE and first is not None:
        return np.asarray(_SINGLE[node.op](first))
    if node.op in _REDUCED and first is not None:
        axes = axes_of(node, inputs[1] if len(inputs) > 1 else None)
        kept = bool(node.get("keepdims", 1))
        return np.asarray(_REDUCED[node.op](first, axis=None if axes is None else tuple(axes), keepdims=kept))
    if node.op in _OTHERS:
        return _OTHERS[node.op](node, *inputs)
    return _elsewhere(node, inputs, opset) if node.op in ELSEWHERE else None


def _limit_broadcast(node: Node, inputs: Sequence[Array | None]) -> None:
    limited(np.broadcast_shapes(*(np.shape(x) for x in inputs)), node)  # type: ignore[arg-type]


def as_type(array: Array, to: int) -> Array:
    """Cast a constant; halves stay float32, which only makes them more exact."""
    from onnx import helper

    wanted = helper.tensor_dtype_to_np_dtype(to)
    return array.astype(np.float32 if is_half(wanted) else wanted)


def _cast(node: Node, x: Array, like: Array | None = None) -> Array:
    return x.astype(like.dtype) if like is not None else as_type(x, int(node.get("to", 1)))


def _filled(node: Node, shape: Array) -> Array:
    value = node.get("value", np.zeros(1, np.float32))
    return np.full(limited(shape.reshape(-1).tolist(), node), value.reshape(-1)[0])


def _range(node: Node, start: Array, limit: Array, step: Array) -> Array:
    first, last, by = (each.reshape(-1)[0] for each in (start, limit, step))
    limited([max(0, math.ceil((last - first) / by))], node)
    return np.arange(first, last, by, dtype=start.dtype)


def _concat(node: Node, *parts: Array) -> Array:
    return np.concatenate(parts, int(node.get("axis", 0)))


def _where(node: Node, condition: Array, a: Array, b: Array) -> Array:
    limited(np.broadcast_shapes(condition.shape, a.shape, b.shape), node)
    return np.where(condition, a, b)


def _clip(node: Node, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    return x if low is None and high is None else np.clip(x, low, high)


def _gemm(node: Node, a: Array, b: Array, c: Array | None = None) -> Array:
    a = a.T if node.get("transA", 0) else a
    product = node.get("alpha", 1.0) * (a @ (b.T if node.get("transB", 0) else b))
    return product if c is None else product + node.get("beta", 1.0) * c


def _pad(node: Node, x: Array, pads: Array, *rest: Array | None) -> Array:
    if np.any(pads) or node.get("mode", "constant") != "constant":
        raise Misfit(node, "a constant that is padded is not expected in a ViT")
    return x


def _matmul(node: Node, a: Array, b: Array) -> Array:
    return a @ b


def shape_of(node: Node, x: Array) -> Array:
    """Return the shape of an array, or of anything else that has one."""
    end = node.get("end", None)
    return np.array(x.shape, np.int64)[int(node.get("start", 0)) : None if end is None else int(end)]


def _value(node: Node) -> Array:
    for kind, dtype in (("value_int", np.int64), ("value_float", np.float32)):
        if kind in node.attributes:
            return np.array(node.attributes[kind], dtype)
    for kind, dtype in (("value_ints", np.int64), ("value_floats", np.float32)):
        if kind in node.attributes:
            return np.array(node.attributes[kind], dtype)
    if "value" not in node.attributes:
        raise Misfit(node, "a constant of numbers was expected")
    value: Array = node.attributes["value"]
    return value


_OTHERS: dict[str, Callable[..., Array]] = {
    "Constant": _value,
    "Cast": _cast,
    "CastLike": _cast,
    "ConstantOfShape": _filled,
    "Range": _range,
    "Concat": _concat,
    "Where": _where,
    "Mod": lambda node, a, b: np.fmod(a, b) if node.get("fmod", 0) else np.mod(a, b),
    "Clip": _clip,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Pad": _pad,
    "Shape": shape_of,
    "Size": lambda node, x: np.array(x.size, np.int64),
}


def _elsewhere(node: Node, inputs: Sequence[Array | None], opset: int) -> Array:
    """Let ONNX Runtime compute a constant whose operator is too intricate to be written again here."""
    from onnx import helper, numpy_helper

    from ..runtimes.ort import OrtSession

    if node.op == "Resize" and len(inputs) > 3 and inputs[3] is not None:
        limited(inputs[3].tolist(), node)
    elif node.op == "Resize" and len(inputs) > 2 and inputs[2] is not None and inputs[0] is not None:
        limited([math.ceil(size * by) for size, by in zip(inputs[0].shape, inputs[2].tolist())], node)
    names = ["" if x is None else f"in{i}" for i, x in enumerate(inputs)]
    made = helper.make_node(node.op, names, ["out"], domain=node.domain, **node.attributes)
    known = [numpy_helper.from_array(np.asarray(x, order="C"), name) for x, name in zip(inputs, names) if x is not None]
    # A graph needs an input to be run: a number that nothing reads but one node.
    unused = helper.make_tensor_value_info("unused", 1, [1])
    nodes = [made, helper.make_node("Identity", ["unused"], ["same"])]
    outputs = [helper.make_empty_tensor_value_info("out"), helper.make_empty_tensor_value_info("same")]
    graph = helper.make_graph(nodes, "constant", [unused], outputs, initializer=known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with OrtSession(model.SerializeToString(), 1) as session:
        found: Array = session.run_all(np.zeros(1, np.float32))["out"]
        return found
