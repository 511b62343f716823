"""From the last block to the output: final norm, pooling and classifier. Light: numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .nodes import Array, Misfit, Node
from .sublayers import KNOWN_SCALE, Tensors
from .values import Attention, Base, Form, Linear, Norm, Pooled, Residual, Rows, Sum, Term, into_parts, rows_of

HALF = 0.5


@dataclass(frozen=True, eq=False)
class Ending:
    """What comes after the last block."""

    stream: Base  # its output
    pooling: Literal["token", "avg", "max", "avgmax", "map"] = "token"
    first: int = 0  # tokens are pooled from this one on
    final_norm: Norm | None = None
    fc_norm: Norm | None = None
    head: Linear | None = None
    distillation_head: Linear | None = None
    two_tokens: bool = False  # the class token and the distillation token
    pool: tuple[int, Residual] | None = None  # heads of attention pooling, and its MLP
    tensors: Tensors = field(default_factory=dict, repr=False)  # of attention pooling


def read_ending(node: Node, output: Form, batch: int) -> Ending:
    """Return what made an output, (B, classes) or (B, E); `node` is the one that gives it."""
    if len(output.shape) != 2 or output.shape[0] != batch:
        shape, name = "x".join(map(str, output.shape[1:])), node.outputs[0]
        raise Misfit(
            node,
            f"one vector for each image was expected as output, not {shape} numbers. Of tokens, say what is read: "
            f"--output {name}:token (the first), :mean (of all) or :patches (the mean of those)",
        )
    if len(output.terms) == 2:
        return _two_tokens(node, output, batch)
    rows = rows_of(output)
    if rows is None or rows.columns is not None:
        raise Misfit(node, "a linear classifier, or one vector for each image, was expected as output")
    rows = into_parts(rows)
    if isinstance(rows.base, Sum) and all(isinstance(part.base, Linear) for part in rows.base.parts):
        return _two_classifiers(node, rows.base, batch)
    if not rows.is_plain:
        raise Misfit(node, "the output was expected as the last layer gives it, without a scale or offset")
    return _one_classifier(node, rows, batch)


def _one_classifier(node: Node, rows: Rows, batch: int) -> Ending:
    head = rows.base if isinstance(rows.base, Linear) and not _is_pool(rows.base) else None
    base = rows.base if head is None else head.x
    outer = base if isinstance(base, Norm) else None
    inside = base if outer is None else outer.x
    if isinstance(inside, Residual) and isinstance(inside.stream, Linear):
        return _attention_pool(inside, head, outer, batch)
    if isinstance(inside, (Pooled, Sum)):
        return _pooled(inside, head, outer)
    _require_token(node, rows, batch, 0)
    inner = inside if outer is not None and isinstance(inside, Norm) else None
    if inner is not None:
        return Ending(inner.x, final_norm=inner, fc_norm=outer, head=head)
    return Ending(inside, final_norm=outer, head=head)


def _is_pool(base: Linear) -> bool:
    return isinstance(base.x, Attention)


def _require_token(node: Node, rows: Rows, batch: int, token: int) -> None:
    total = rows.base.rows // batch
    if not np.array_equal(rows.rows.reshape(-1), np.arange(batch) * total + token):
        raise Misfit(node, f"token {token} of each image was expected, or a mean over tokens")


def _pooled(base: Base, head: Linear | None, outer: Norm | None) -> Ending:
    """Return the ending of a mean, a maximum, or of half the sum of both."""
    kind: Literal["avg", "max", "avgmax"]
    if isinstance(base, Sum):
        first, second = (part.base for part in base.parts)
        halves = [_number(part.gain) for part in base.parts]
        if not (isinstance(first, Pooled) and isinstance(second, Pooled)) or halves != [HALF, HALF]:
            raise Misfit(base.node, "half a mean and half a maximum over tokens was expected")
        if {first.kind, second.kind} != {"avg", "max"} or first.x is not second.x or first.first != second.first:
            raise Misfit(base.node, "a mean and a maximum over the same tokens was expected")
        pooled, kind = first, "avgmax"
    else:
        assert isinstance(base, Pooled)
        pooled, kind = base, base.kind
    final = pooled.x if isinstance(pooled.x, Norm) else None
    stream = pooled.x if final is None else final.x
    return Ending(stream, kind, pooled.first, final_norm=final, fc_norm=outer, head=head)


def _number(gain: Array | None) -> float:
    return 1.0 if gain is None else float(gain[0]) if (gain == gain[0]).all() else float("nan")


def _two_classifiers(node: Node, base: Sum, batch: int) -> Ending:
    """Return the ending of a distilled DeiT: two tokens, two classifiers, the mean of both."""
    both = [(part.base, part, _number(part.gain)) for part in base.parts]
    total = both[0][0].rows // batch
    both.sort(key=lambda each: int(each[1].rows.reshape(-1)[0]) % total)
    layers = []
    for token, (layer, part, gain) in enumerate(both):
        _require_token(node, part, batch, token)
        if not isinstance(layer, Linear) or gain != HALF or part.offset is not None:
            raise Misfit(base.node, "the mean of two classifiers was expected, of the first two tokens")
        layers.append(layer)
    if layers[0].x is not layers[1].x:
        raise Misfit(base.node, "two classifiers of the same tokens were expected")
    norm = layers[0].x if isinstance(layers[0].x, Norm) else None
    stream = layers[0].x if norm is None else norm.x
    return Ending(stream, final_norm=norm, head=layers[0], distillation_head=layers[1], two_tokens=True)


def _two_tokens(node: Node, output: Form, batch: int) -> Ending:
    """Return the ending of a distilled DeiT without classifiers: the mean of its two tokens."""
    base = output.base
    first = sorted(output.terms, key=lambda term: int(term.indices(output.shape).reshape(-1)[0]))
    for token, term in enumerate(first):
        rows = rows_of(Form(output.shape, (Term(term.base, term.index),)))
        if base is None or rows is None or rows.columns is not None or output.offset is not None:
            raise Misfit(node, "the mean of the class token and the distillation token was expected")
        _require_token(node, rows, batch, token)
        if _number(None if term.gain is None else term.gain.reshape(-1)) != HALF:
            raise Misfit(node, "the mean of two tokens was expected")
    assert base is not None
    norm = base if isinstance(base, Norm) else None
    return Ending(base if norm is None else norm.x, final_norm=norm, two_tokens=True)


def _attention_pool(mlp: Residual, head: Linear | None, outer: Norm | None, batch: int) -> Ending:
    """Return the ending of pooling by attention: its query is the same for every image."""
    proj = mlp.stream
    assert isinstance(proj, Linear)
    attention = proj.x
    if not isinstance(attention, Attention) or not isinstance(attention.query, np.ndarray):
        raise Misfit(proj.node, "pooling by one query that attends to all tokens was expected")
    e, heads = proj.width, len(attention.query)
    if attention.rows != batch or attention.width != e or e % heads or mlp.sublayer.layer_scale is not None:
        raise Misfit(attention.node, "pooling by one query was expected, with heads of one width")
    query, keys, source = _pool_keys(attention, e // heads)
    values = attention.value.x
    if not isinstance(values, Linear) or values.x is not source or mlp.sublayer.facts.get("mlp") != "plain":
        raise Misfit(attention.node, "values of the same tokens as the keys were expected, and a plain MLP after them")
    columns = attention.value.columns.reshape(-1)
    tensors: Tensors = {
        "pool.latent": query,
        "pool.q.weight": np.eye(e, dtype=np.float32),
        "pool.q.bias": np.zeros(e, np.float32),
        **keys,
        "pool.v.weight": values.weight[columns] * np.float32(attention.value.scale),
        "pool.v.bias": _or_zeros(values.bias, values.width)[columns] * np.float32(attention.value.scale),
        "pool.proj.weight": proj.weight.T,
        "pool.proj.bias": _or_zeros(proj.bias, e),
    }
    own = mlp.sublayer.tensors
    tensors |= {f"pool.{name.replace('norm2', 'norm')}": tensor for name, tensor in own.items()}
    for name, width in (("fc1", mlp.sublayer.facts["hidden"]), ("fc2", e)):
        tensors[f"pool.{name}.bias"] = _or_zeros(own.get(f"{name}.bias"), width)
    norm = source if isinstance(source, Norm) else None
    return Ending(
        source if norm is None else norm.x,
        "map",
        attention.first,
        final_norm=norm,
        fc_norm=outer,
        head=head,
        pool=(heads, mlp),
        tensors=tensors,
    )


def _pool_keys(attention: Attention, size: int) -> tuple[Array, Tensors, Base]:
    """Return the query, (1, E), the tensors of the keys, and what they are made from.

    A query that was taken to the tokens beforehand becomes the first row of its head's keys.
    """
    assert isinstance(attention.query, np.ndarray)
    heads, e = len(attention.query), attention.width
    ratio = attention.scale * attention.key.scale * size**0.5
    query = attention.query if abs(ratio - 1) <= KNOWN_SCALE else attention.query * np.float32(ratio)
    layer, columns = attention.key.x, attention.key.columns
    if isinstance(layer, Linear) and columns.shape[1] == size:
        flat = columns.reshape(-1)
        tensors = {"pool.k.weight": layer.weight[flat], "pool.k.bias": _or_zeros(layer.bias, layer.width)[flat]}
        return query.reshape(1, e), tensors, layer.x
    if columns.shape[1] != layer.width:
        raise Misfit(attention.node, "keys of a linear layer were expected")
    weight = np.zeros((heads, size, layer.width), np.float32)
    for head in range(heads):
        weight[head, 0, columns[head]] = query[head]
    latent = np.tile(np.eye(1, size, dtype=np.float32), (1, heads))
    return latent, {"pool.k.weight": weight.reshape(e, -1), "pool.k.bias": np.zeros(e, np.float32)}, layer


def _or_zeros(bias: Array | None, width: int) -> Array:
    return np.zeros(width, np.float32) if bias is None else bias
