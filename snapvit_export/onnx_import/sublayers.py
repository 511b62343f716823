"""Attention and MLP of a block out of what its stream was given: parts and tensors under canonical names. Light: numpy.

Called when the residual addition is met, so that the first sub-layer that does not fit is the one that is named.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from .nodes import Array, Misfit, Node
from .values import (
    Activation,
    Attention,
    Base,
    Heads,
    Index,
    Linear,
    Norm,
    Patches,
    Product,
    Residual,
    Rotation,
    Rows,
    Sublayer,
    Tokens,
)

KNOWN_SCALE = 1e-6  # relative: a scale so near to 1/sqrt(head width) is that
Tensors = dict[str, Array]


def leads_to(base: Base, goal: Base) -> bool:
    """Return True if a base is made of another one without another stream between."""
    here: Base | None = base
    while here is not None and here is not goal:
        here = _before(here)
    return here is goal


def _before(base: Base) -> Base | None:
    if isinstance(base, (Linear, Norm, Activation)):
        return base.x
    if isinstance(base, Product):
        return base.x.base
    return base.key.x if isinstance(base, Attention) else None


def read_sublayer(stream: Base, last: Linear, layer_scale: Array | None) -> Sublayer:
    """Return the sub-layer whose last linear layer this is, which `stream` goes into through a norm."""
    inner, between = last.x, None
    if isinstance(last.x, Norm) and isinstance(last.x.x, (Attention, Activation, Product)):
        inner, between = last.x.x, _whole(last.x)
    if isinstance(inner, Attention):
        return _attention(stream, last, inner, between, layer_scale)
    if isinstance(inner, (Activation, Product)):
        return _mlp(stream, last, inner, between, layer_scale)
    raise Misfit(
        last.node, "the last linear layer of an attention or of an MLP was expected, before it is added to the stream"
    )


def _whole(norm: Norm) -> Norm:
    """Return a norm over all columns in order, or refuse it."""
    if norm.columns.shape != (1, norm.x.width) or not np.array_equal(norm.columns[0], np.arange(norm.x.width)):
        raise Misfit(norm.node, "a norm over all features of a token was expected")
    return norm


def _norm_before(base: Base, stream: Base) -> Norm:
    """Return the norm that a sub-layer begins with."""
    if isinstance(base, Norm) and base.x is stream:
        return _whole(base)
    expected = "a norm of the residual stream was expected before attention and MLP"
    if isinstance(stream, (Tokens, Patches, Residual)):
        expected += ": blocks that norm afterwards, or not at all, are not a plain ViT's"
    raise Misfit(base.node, expected)


def _begin(norms: dict[str, Norm], name: str, layer: Linear, stream: Base) -> None:
    """Note the norm that a sub-layer begins with; all of its first linear layers must read the same one."""
    norm = _norm_before(layer.x, stream)
    if norms.setdefault(name, norm) is not norm:
        raise Misfit(layer.node, "one norm before all linear layers of attention, or of an MLP, was expected")


def linear(tensors: Tensors, name: str, weight: Array, bias: Array | None) -> bool:
    """Add the tensors of a linear layer; return True if it has a bias."""
    tensors[f"{name}.weight"] = weight
    if bias is not None:
        tensors[f"{name}.bias"] = bias
    return bias is not None


def _attention(
    stream: Base, last: Linear, inner: Attention, between: Norm | None, layer_scale: Array | None
) -> Sublayer:
    if not isinstance(inner.query, Heads):
        raise Misfit(inner.node, "queries of every image's own tokens were expected in a block")
    if inner.first:
        raise Misfit(inner.node, "attention to all tokens was expected, the prefix among them")
    tensors: Tensors = {}
    norms: dict[str, Norm] = {}
    biases = []
    for name, heads in (("q", inner.query), ("k", inner.key), ("v", inner.value)):
        layer, columns = _of_heads(inner.node, name, heads, norms)
        _begin(norms, "norm1", layer, stream)
        flat = columns.reshape(-1)
        bias = None if layer.bias is None else layer.bias[flat]
        if name == "k" and bias is not None and not bias.any():
            bias = None  # EVA has one for q and v alone, and joins them with zeros
        biases += [name] * linear(tensors, name, layer.weight[flat], bias)
    if ("q_norm" in norms) != ("k_norm" in norms):
        raise Misfit(inner.node, "norms of both queries and keys were expected, or of none")
    head_dim, rotation = inner.value.columns.shape[1], _rotation(inner)
    if inner.query.columns.shape != inner.value.columns.shape:
        raise Misfit(inner.node, "queries and values of one width were expected")
    _scale(tensors, inner, norms, head_dim)
    if inner.value.scale != 1:
        tensors |= {name: tensors[name] * inner.value.scale for name in ("v.weight", "v.bias") if name in tensors}
    if between is not None:
        norms["attn_norm"] = between
    biases += ["proj"] * linear(tensors, "proj", last.weight.T, last.bias)
    for name, norm in norms.items():
        tensors |= norm_tensors(name, norm)
    facts = dict(
        heads=len(inner.value.columns), head_dim=head_dim, qk_norm="q_norm" in norms, attn_norm=between is not None
    )
    return Sublayer(facts, tuple(biases), layer_scale, norms, tensors, rotation)


def _of_heads(node: Node, name: str, heads: Heads, norms: dict[str, Norm]) -> tuple[Linear, Index]:
    """Return the linear layer that heads come from and their columns of it; a norm of each head goes to `norms`."""
    base, columns = heads.x, heads.columns
    if isinstance(base, Norm) and isinstance(base.x, Linear) and name != "v":
        norm, features = base, base.columns.shape[1]
        places = columns % features
        if columns.shape[1] != features or not (places == places[0]).all():
            raise Misfit(norm.node, "a norm of each head was expected")
        weight, bias = (None if vector is None else vector[places[0]] for vector in (norm.weight, norm.bias))
        norms[f"{name}_norm"] = replace(norm, weight=weight, bias=bias)
        base, columns = norm.x, norm.columns.reshape(-1)[columns]
    if not isinstance(base, Linear):
        raise Misfit(node, f"{name} of a linear layer was expected, not of {base.node}")
    return base, columns


def _scale(tensors: Tensors, inner: Attention, norms: dict[str, Norm], head_dim: int) -> None:
    """Give the queries what the scale of attention is more than 1 / sqrt(head width)."""
    assert isinstance(inner.query, Heads)
    ratio = inner.scale * inner.query.scale * inner.key.scale * math.sqrt(head_dim)
    if abs(ratio - 1) <= KNOWN_SCALE:
        return
    if "q_norm" not in norms:
        tensors |= {name: tensors[name] * np.float32(ratio) for name in ("q.weight", "q.bias") if name in tensors}
        return
    norm = norms["q_norm"]
    weight = np.ones(head_dim, np.float32) if norm.weight is None else norm.weight
    bias = None if norm.bias is None else norm.bias * np.float32(ratio)
    norms["q_norm"] = replace(norm, weight=weight * np.float32(ratio), bias=bias)


def _rotation(inner: Attention) -> Rotation | None:
    """Return how keys are rotated; queries must be rotated alike, as far as they are there."""
    assert isinstance(inner.query, Heads)
    query, key = inner.query.rotation, inner.key.rotation
    if key is None:
        if query is not None:
            raise Misfit(inner.node, "a rotary embedding of both queries and keys was expected")
        return None
    tokens = inner.asked if query is None else query.tokens  # prefix tokens alone need no rotation
    cos, turned = key.cos[tokens], key.turned[tokens]
    same = (
        np.allclose(cos, 1) and np.allclose(turned, 0)
        if query is None
        else np.array_equal(query.partner, key.partner)
        and np.allclose(query.cos, cos, atol=1e-5)
        and np.allclose(query.turned, turned, atol=1e-5)
    )
    if not same:
        raise Misfit(inner.node, "the same rotary embedding of queries and keys was expected")
    return key


def _mlp(
    stream: Base,
    last: Linear,
    inner: Activation | Product,
    between: Norm | None,
    layer_scale: Array | None,
) -> Sublayer:
    tensors: Tensors = {}
    norms: dict[str, Norm] = {}
    kind, layers = _first_layers(inner)
    biased = []
    for name, layer, columns in layers:
        _begin(norms, "norm2", layer, stream)
        bias = None if layer.bias is None else layer.bias[columns]
        biased.append(linear(tensors, name, layer.weight[columns], bias))
    if any(biased):  # zeros for the one of two layers that alone has none
        for name, *_ in layers:
            tensors.setdefault(f"{name}.bias", np.zeros(len(tensors[f"{name}.weight"]), np.float32))
    biases = ["fc1"] * any(biased) + ["fc2"] * linear(tensors, "fc2", last.weight.T, last.bias)
    if between is not None:
        norms["mlp_norm"] = between
    for name, norm in norms.items():
        tensors |= norm_tensors(name, norm)
    facts = dict(
        hidden=last.weight.shape[1],
        mlp="glu" if isinstance(inner, Product) else "plain",
        activation=kind,
        mlp_norm=between is not None,
    )
    return Sublayer(facts, tuple(biases), layer_scale, norms, tensors)


def _first_layers(inner: Activation | Product) -> tuple[str, list[tuple[str, Linear, Any]]]:
    """Return the activation of an MLP and its linear layers before that, with the columns that are used of each."""
    found: list[tuple[str, Base, Index | None]]
    if isinstance(inner, Product):
        gate, up = _gated(inner)
        assert isinstance(gate.base, Activation)
        kind, found = gate.base.kind, [("gate", gate.base.x, gate.columns), ("up", up.base, up.columns)]
    else:
        kind, found = inner.kind, [("fc1", inner.x, None)]
    layers = []
    for name, layer, columns in found:
        if not isinstance(layer, Linear):
            raise Misfit(inner.node, f"{name} of an MLP was expected before this, a linear layer, not {layer.node}")
        layers.append((name, layer, slice(None) if columns is None else columns))
    return kind, layers


def _gated(inner: Product) -> tuple[Rows, Rows]:
    """Return the factor with an activation, then the one without."""
    pair = (inner.x, inner.other)
    active = [isinstance(rows.base, Activation) for rows in pair]
    if sum(active) != 1:
        raise Misfit(inner.node, "a gated MLP was expected: one factor with an activation, one without")
    return pair if active[0] else pair[::-1]


def norm_tensors(name: str, norm: Norm) -> Tensors:
    """Return weight and bias of a norm, also where the file leaves them out."""
    features = norm.columns.shape[1]
    weight = np.ones(features, np.float32) if norm.weight is None else norm.weight
    if norm.kind == "rms":
        if norm.bias is not None and norm.bias.any():
            raise Misfit(norm.node, "an RMSNorm without a bias was expected")
        return {f"{name}.weight": weight}
    return {
        f"{name}.weight": weight,
        f"{name}.bias": np.zeros(features, np.float32) if norm.bias is None else norm.bias,
    }
