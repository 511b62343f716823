"""Attention out of its matrix products: which columns are which head's, and how they are rotated. Light: numpy.

`products`, a softmax and `attend` are how most exporters write it; operators that do all of it at once end here too.
The groups of a batched product are heads of images in any order; the indices tell which.

Queries may be the same for every image: attention pooling. And where few tokens are read, keys and values may never
be made: (q W_k) x and W_v (a x) are the same products in another order (`graph.forward`). Both are read as the plain
attention that they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .nodes import Array, Misfit, Node
from .values import (
    Attention,
    Base,
    Form,
    Grouped,
    Heads,
    Index,
    Linear,
    Products,
    Rotation,
    Term,
    Weights,
    arange,
    uniform,
)

SAME_ANGLE = 5e-3  # cos^2 + sin^2 - 1 of tables that were rounded to 16 bits
EXACT = 1e-4  # a scale so near to one is one: tables keep their bits


@dataclass(frozen=True, eq=False)
class View:
    """Queries, keys or values of all groups: of which rows, and which columns of them."""

    base: Base
    rows: Index  # (groups, tokens)
    columns: Index  # (groups, tokens, features); or one for all tokens of a group, (groups, 1, features)
    scale: float = 1.0
    rotation: Rotation | None = None


def products(node: Node, queries: Form | Array, keys: Form) -> Form:
    """Return queries (..., M, K) times keys (..., K, N)."""
    keys = keys.moved(lambda x: x.swapaxes(-1, -2))
    if queries.shape[-1] != keys.shape[-1] or len(queries.shape) < 2 or len(keys.shape) < 2:
        raise Misfit(node, f"queries {queries.shape} and keys {keys.shape} do not fit each other")
    lead = np.broadcast_shapes(queries.shape[:-2], keys.shape[:-2])
    m, n, features = queries.shape[-2], keys.shape[-2], queries.shape[-1]
    groups = math.prod(lead)
    keys = keys.broadcast((*lead, 1, 1)).reshaped(groups, n, features)
    if isinstance(queries, Form):
        queries = queries.broadcast((*lead, 1, 1)).reshaped(groups, m, features)
    else:
        queries = np.broadcast_to(queries, (*lead, m, features)).reshape(groups, m, features)
    return Form.of(Products(node, groups * m, n, queries, keys), (*lead, m, n))


def weights(node: Node, logits: Form) -> Form:
    """Return the softmax of products of queries and keys."""
    term = logits.term
    if term is None or not isinstance(term.base, Products):
        raise Misfit(
            node,
            "a Softmax was expected inside of attention alone. If the model ends with it, name the value that it "
            f"reads: --output {node.inputs[0]}",
        )
    scale = uniform(term.gain)
    if term.index is not None or scale is None or (logits.offset is not None and np.any(logits.offset)):
        raise Misfit(
            node,
            "attention weights were expected from products of queries and keys alone, without a mask or relative "
            "positions",
        )
    return Form.of(Weights(node, term.base.rows, term.base.width, term.base, scale), logits.shape)


def weighted(node: Node, batch: int, attention: Form, values: Form) -> Form:
    """Return attention weights (..., M, N) times values (..., N, D)."""
    term = attention.term
    assert term is not None
    assert isinstance(term.base, Weights)
    found = term.base
    if term.index is not None or term.gain is not None or attention.offset is not None:
        raise Misfit(node, "attention weights that nothing has changed were expected")
    lead, n = attention.shape[:-2], attention.shape[-1]
    groups = math.prod(lead)
    values = values.broadcast((*lead, 1, 1)).reshaped(groups, n, values.shape[-1])
    given = found.products
    if len(given.keys.shape) != 3 or given.keys.shape[0] != groups:
        raise Misfit(node, "as many groups of values as of keys were expected")
    return attend(node, batch, given.queries, given.keys, values, found.scale, lead)


def attend(
    node: Node, batch: int, queries: Form | Array, keys: Form, values: Form, scale: float, lead: tuple[int, ...]
) -> Form:
    """Return the attention of queries (groups, M, K) to keys (groups, N, K) and values (groups, N, D)."""
    key, value = _one_head_each(node, _view(node, batch, keys)), _one_head_each(node, _view(node, batch, values))
    if value.rotation is not None:
        raise Misfit(node, "values that are not rotated were expected")
    first, image = _tokens(node, batch, key, value)
    (groups, m), d = queries.shape[:2], values.shape[-1]
    asked = (
        _own_queries(node, queries, _view(node, batch, queries), key, value, image, batch)
        if isinstance(queries, Form)
        else _constant_queries(node, queries, key, value, image, batch)
    )
    count, width = len(asked.keys), len(asked.keys) * d
    if groups % batch or len(np.unique(asked.rows * count + asked.head)) != groups * m:
        raise Misfit(node, "each head of each token once was expected")
    made = Attention(
        node,
        asked.count,
        width,
        query=asked.query,
        key=Heads(key.base, asked.keys, key.scale, key.rotation),
        value=Heads(value.base, asked.values, value.scale),
        scale=scale,
        asked=np.unique(asked.rows % (key.base.rows // batch)),
        first=first,
        tokens=key.rows.shape[1],
    )
    index = (asked.rows * width + asked.head * d)[..., None] + arange(d)  # (groups, M, D)
    return Form.of(_keys_from_queries(made), (*lead, m, d), index.reshape(*lead, m, d))


@dataclass(frozen=True, eq=False)
class _Asked:
    """The queries of an attention, and which head each of them is of."""

    query: Heads | Array
    rows: Index  # (groups, M): the row of the result
    count: int  # of such rows
    head: Index  # (groups, M)
    keys: Index  # (heads, features): columns
    values: Index


def _own_queries(node: Node, queries: Form, view: View, key: View, value: View, image: Index, batch: int) -> _Asked:
    """Queries of the image's own tokens. A head is told by its columns of queries, keys and values."""
    groups, m, features = queries.shape
    if not np.array_equal(view.rows // (view.base.rows // batch), np.broadcast_to(image[:, None], (groups, m))):
        raise Misfit(node, "attention within each image was expected")
    units = np.concatenate([_per_unit(each.columns, view.columns.shape[1]) for each in (view, key, value)], axis=1)
    found, which = np.unique(units, axis=0, return_inverse=True)
    of_queries, keys, values = np.split(found, [features, 2 * features], axis=1)
    head = np.broadcast_to(which.reshape(groups, -1), (groups, m))
    query = Heads(view.base, of_queries, view.scale, view.rotation)
    return _Asked(query, view.rows, view.base.rows, head, keys, values)


def _constant_queries(node: Node, queries: Array, key: View, value: View, image: Index, batch: int) -> _Asked:
    """Queries that are the same for every image: the result has a row for each image. Heads may share their keys."""
    groups, m, features = queries.shape
    number = np.broadcast_to(np.arange(m), (groups, m)).reshape(-1, 1)
    units = np.concatenate([number, *(_per_unit(each.columns, m) for each in (key, value))], axis=1)
    found, first, which = np.unique(units, axis=0, return_index=True, return_inverse=True)
    flat, which = queries.reshape(groups * m, -1), which.reshape(-1)
    if not np.array_equal(flat, flat[first][which]):
        raise Misfit(node, "the same queries for every image were expected")
    _, keys, values = np.split(found, [1, 1 + features], axis=1)
    rows = np.broadcast_to(image[:, None], (groups, m))
    return _Asked(flat[first], rows, batch, which.reshape(groups, m), keys, values)


def grouped(node: Node, batch: int, x: Form, weight: Array) -> Form:
    """Return (..., M, K) times a matrix of its own for each group, (..., K, N)."""
    lead = np.broadcast_shapes(x.shape[:-2], weight.shape[:-2])
    groups, m, (k, n) = math.prod(lead), x.shape[-2], weight.shape[-2:]
    matrices = weight.reshape(-1, k, n)
    which = np.broadcast_to(np.arange(len(matrices)).reshape(weight.shape[:-2]), lead).reshape(-1)
    view = _one_head_each(node, _view(node, batch, x.broadcast((*lead, 1, 1)).reshaped(groups, m, k)))
    if view.rotation is not None or view.scale != 1:
        raise Misfit(node, "a value that is neither scaled nor rotated was expected here")
    keys = np.concatenate([view.columns[:, 0], which[:, None]], axis=1)
    found, head = np.unique(keys, axis=0, return_inverse=True)
    columns, own = found[:, :-1], matrices[found[:, -1]]
    base = _values_from_sums(view.base, columns, own) or Grouped(
        node, view.base.rows, len(found) * n, view.base, columns, own
    )
    index = (view.rows * (len(found) * n) + head.reshape(-1, 1) * n)[..., None] + arange(n)
    return Form.of(base, (*lead, m, n), index.reshape(*lead, m, n))


def _keys_from_queries(made: Attention) -> Attention:
    """Queries that were taken to the tokens: give the matrix between them back to the keys."""
    query = made.query
    if not isinstance(query, Heads) or not isinstance(query.x, Grouped):
        return made
    given, (count, k, e) = query.x, query.x.weight.shape
    group = query.columns[:, 0] // e
    plain = np.array_equal(query.columns, group[:, None] * e + np.arange(e)) and made.key.rotation is None
    if not plain or len(group) != count or e != made.key.columns.shape[1]:
        return made
    matrices = np.zeros((count, k, made.key.x.width), given.weight.dtype)
    for head in range(len(group)):
        matrices[head][:, made.key.columns[head]] = given.weight[group[head]]
    keys = Linear(given.node, made.key.x.rows, count * k, made.key.x, matrices.reshape(count * k, -1), None)
    columns = np.arange(count * k).reshape(count, k)
    query = replace(query, x=given.x, columns=given.columns[group])
    return replace(made, query=query, key=replace(made.key, x=keys, columns=columns))


def _values_from_sums(base: Base, columns: Index, matrices: Array) -> Base | None:
    """Weighted sums of tokens, taken to the features of each head: attention whose values those are."""
    if not isinstance(base, Attention):
        return None
    count, d = base.value.columns.shape
    if len(columns) != count or not np.array_equal(columns, np.arange(count * d).reshape(count, d)):
        return None
    n, x = matrices.shape[2], base.value.x
    weight = np.zeros((count, n, x.width), matrices.dtype)
    for head in range(count):
        weight[head][:, base.value.columns[head]] = matrices[head].T
    values = Linear(base.node, x.rows, count * n, x, weight.reshape(count * n, -1), None)
    made = Heads(values, np.arange(count * n).reshape(count, n), base.value.scale)
    return replace(base, width=count * n, value=made)


def _per_unit(columns: Index, units: int) -> Index:
    """(groups, 1 or M, features) to (groups * units, features)."""
    groups, _, features = columns.shape
    return np.broadcast_to(columns, (groups, units, features)).reshape(groups * units, features)


def _tokens(node: Node, batch: int, key: View, value: View) -> tuple[int, Index]:
    """Return the first token that is attended to, and the image of each group."""
    total = key.base.rows // batch
    if key.base.rows != value.base.rows or not np.array_equal(key.rows, value.rows):
        raise Misfit(node, "keys and values of the same tokens were expected")
    image, tokens = key.rows // total, key.rows % total
    first = int(tokens[0, 0])
    if not (image == image[:, :1]).all():
        raise Misfit(node, "attention within each image was expected")
    if not (tokens == np.arange(first, total)[: tokens.shape[1]]).all() or first + tokens.shape[1] != total:
        raise Misfit(
            node,
            f"attention to all {total} tokens was expected, not to {tokens.shape[1]} of them: "
            "windows, as Swin has them, are not a plain ViT's",
        )
    return first, image[:, 0]


def _one_head_each(node: Node, view: View) -> View:
    if view.columns.shape[1] == 1:
        return view
    raise Misfit(node, "the same columns for all tokens of a head were expected")


def _view(node: Node, batch: int, form: Form) -> View:
    """Return the rows and columns that a form (groups, tokens, features) is made of."""
    base = form.base
    if base is None or form.offset is not None or len(form.terms) > 2:
        raise Misfit(node, "queries, keys and values of linear layers were expected, rotated at most")
    if len(form.terms) == 2:
        return _rotated(node, batch, form)
    index, scale = form.terms[0].indices(form.shape), uniform(form.terms[0].gain)
    if scale is None:
        raise Misfit(node, "one scale for all queries and keys was expected")
    return View(base, *_rows_and_columns(node, index, base.width), scale)


def _rows_and_columns(node: Node, index: Index, width: int) -> tuple[Index, Index]:
    rows, columns = index // width, index % width
    if not (rows == rows[..., :1]).all():
        raise Misfit(node, "features of one token in each row were expected")
    varies = not (columns == columns[:, :1]).all()
    return rows[..., 0], columns if varies else columns[:, :1]


def _rotated(node: Node, batch: int, form: Form) -> View:
    """Return a form of two terms as features and their rotary partners."""
    for own, other in (form.terms, form.terms[::-1]):
        found = _as_rotation(batch, form.shape, own, other)
        if found is not None:
            return found
    raise Misfit(node, "a rotary embedding was expected: each feature and its partner, times a cosine and a sine")


def _as_rotation(batch: int, shape: tuple[int, ...], own: Term, other: Term) -> View | None:
    """Return the view if `own` has the features themselves and `other` their partners."""
    base = own.base
    cos, sin = (_full(term.gain, shape) for term in (own, other))
    index = own.indices(shape)
    rows, columns = index // base.width, index % base.width
    if not ((rows == rows[..., :1]).all() and (columns == columns[:, :1]).all()):
        return None
    columns = columns[:, 0]  # (groups, features)
    turned = sin != 0
    token, feature = turned.any((0, 2)), turned.any((0, 1))
    if not token.any() or not feature.all():
        return None
    partner = _partners(other.indices(shape), sin, rows, columns, base.width)
    if partner is None:
        return None
    size = np.sqrt(np.square(cos.astype(np.float64)) + np.square(sin.astype(np.float64)))
    scale = float(np.median(size))
    scale = 1.0 if abs(scale - 1) < EXACT else scale
    off = (size - scale, cos - cos[..., partner], sin + sin[..., partner])  # none, for a rotation
    if max(np.abs(each).max() for each in off) > SAME_ANGLE * scale:
        return None
    if not ((cos == cos[:1]).all() and (sin == sin[:1]).all()):  # of every head and image
        return None
    tokens = rows[0, :, 0] % (base.rows // batch)
    tables = (cos[0], sin[0]) if scale == 1 else (cos[0] / scale, sin[0] / scale)
    return View(base, rows[..., 0], columns[:, None], scale, Rotation(partner, *tables, tokens))


def _full(gain: Array | None, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.ones((), np.float32) if gain is None else gain, shape)


def _partners(index: Index, sin: Array, rows: Index, columns: Index, width: int) -> Index | None:
    """Return which feature of its head each one is turned with, or None if that is not the same everywhere."""
    features, turned = index.shape[-1], sin != 0
    if not ((index // width == rows) | ~turned).all():
        return None
    partner = np.zeros(features, np.int64)
    for k in range(features):
        g, t = np.nonzero(turned[..., k])
        column = index[g, t, k] % width
        place = np.argmax(columns[g[0]] == column[0])
        if not (columns[g, place] == column).all():
            return None
        partner[k] = place
    is_pairs = np.array_equal(partner[partner], np.arange(features)) and not (partner == np.arange(features)).any()
    return partner if is_pairs else None
