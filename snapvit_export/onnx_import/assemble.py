"""A recognised graph as Anatomy, Wiring and tensors by canonical name. Light: numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from msgspec import UNSET, UnsetType

from ..elastic.format import Wiring
from ..model.anatomy import Anatomy, AttentionPool, Bias, Block
from ..model.positions import Rotary
from ..model.tensor_names import stored_shapes
from .embedding import Embedding, read_embedding
from .ending import Ending
from .nodes import Misfit
from .rotary import Tables, fit
from .sublayers import Tensors, norm_tensors
from .values import Base, Norm, NormKind, Residual, Sublayer

Pair = tuple[Residual | None, Residual | None]  # attention and MLP of a block


@dataclass(frozen=True, eq=False)
class Assembled:
    """A model, and the values of the foreign graph that are its residual stream after each block."""

    anatomy: Anatomy
    wiring: Wiring
    tensors: Tensors
    streams: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a model is made of."""

    image: tuple[int, int]
    embedding: Embedding
    pairs: list[Pair]
    ending: Ending
    norms: dict[str, Norm]
    tables: Tables | None  # rotary
    rope: Literal["none", "cat", "dinov3"]
    rotary: Rotary | UnsetType
    position_rows: int  # that the file adds to the tokens

    @property
    def sublayers(self) -> Iterator[tuple[int, Sublayer]]:
        """Every sub-layer with the number of its block."""
        return ((i, part.sublayer) for i, pair in enumerate(self.pairs) for part in pair if part is not None)

    @property
    def first_norm(self) -> Norm:
        of_blocks = ((name, norm) for _, part in self.sublayers for name, norm in part.norms.items())
        return next(norm for name, norm in of_blocks if name in ("norm1", "norm2"))


def assemble(ending: Ending, batch: int, image: tuple[int, int], position_rows: int, is_half: bool) -> Assembled:
    """Return the model that ends so."""
    start, residuals = _stream(ending.stream)
    embedding, pairs = read_embedding(start, batch), _blocks(residuals)
    if not pairs:
        raise Misfit(start.node, "at least one block of attention and MLP was expected after the patch embedding")
    tables = _tables(pairs, embedding)
    rope: Literal["none", "cat", "dinov3"] = "none"
    rotary: Rotary | UnsetType = UNSET
    if tables is not None:
        rope, rotary = fit(tables, embedding.patches.grid, is_half)
    norms = _norms(embedding, pairs, ending)
    parts = _Parts(image, embedding, pairs, ending, norms, tables, rope, rotary, position_rows)
    anatomy = _anatomy(parts)
    tensors = _tensors(parts, anatomy)
    last = [mlp or attention for attention, mlp in pairs]
    return Assembled(anatomy, _wiring(parts), _named(tensors, anatomy, start), tuple(r.output for r in last if r))


def _stream(last: Base) -> tuple[Base, list[Residual]]:
    """Return where the residual stream begins, and what is added to it, in order."""
    found: list[Residual] = []
    while isinstance(last, Residual):
        found.append(last)
        last = last.stream
    return last, found[::-1]


def _blocks(residuals: list[Residual]) -> list[Pair]:
    """Return attention and MLP of each block; a block may lack one of them."""
    found: list[Pair] = []
    for residual in residuals:
        if residual.sublayer.is_attention:
            found.append((residual, None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], residual)
        else:
            found.append((None, residual))
    return found


def _norms(embedding: Embedding, pairs: list[Pair], ending: Ending) -> dict[str, Norm]:
    """Return all norms by canonical name; they must be of one kind."""
    found: dict[str, Norm] = {}
    for i, pair in enumerate(pairs):
        for part in pair:
            found |= {} if part is None else {f"blocks.{i}.{name}": norm for name, norm in part.sublayer.norms.items()}
    first = next(iter(found.values()))
    outside = {"pre_norm": embedding.pre_norm, "final_norm": ending.final_norm, "fc_norm": ending.fc_norm}
    found |= {name: norm for name, norm in outside.items() if norm is not None}
    if ending.pool is not None:
        found["pool.norm"] = ending.pool[1].sublayer.norms["norm2"]
    for norm in found.values():
        if norm.kind != first.kind:
            names: dict[NormKind, str] = {"layer": "LayerNorm", "rms": "RMSNorm"}
            raise Misfit(norm.node, f"a {names[first.kind]} was expected, like the others")
    return found


def _tables(pairs: list[Pair], embedding: Embedding) -> Tables | None:
    """Return the rotary tables, which all blocks must share."""
    attentions = [attention for attention, _ in pairs if attention is not None]
    first: Tables | None = None
    for attention in attentions:
        rotation = attention.sublayer.rotation
        here = None if rotation is None else Tables.of(attention.node, rotation, embedding.prefix_tokens)
        if attention is attentions[0]:
            first = here
        elif (first is None) != (here is None) or not (first is None or here is None or first.same_as(here)):
            raise Misfit(attention.node, "the same rotary embedding in every block was expected")
    return first


def _anatomy(parts: _Parts) -> Anatomy:
    embedding, ending = parts.embedding, parts.ending
    patches, prefix = embedding.patches, embedding.prefix_tokens
    e, channels, *patch = patches.weight.shape
    count = patches.grid[0] * patches.grid[1]
    if prefix < 1 + ending.two_tokens and ending.pooling == "token":
        raise Misfit(patches.node, "a class token before the patches was expected, since the output is read from one")
    # A file does not tell a class token that is not read from a register. Registers come in twos and fours.
    class_token = prefix > 0 and (ending.pooling == "token" or prefix % 2 == 1)
    rows = parts.position_rows if count <= parts.position_rows <= count + prefix else count
    return Anatomy(
        family="deit-distilled" if ending.two_tokens else "vit" if parts.rope == "none" else "eva",
        embed_dim=e,
        blocks=_of_blocks(parts),
        image=parts.image,
        patch=(patch[0], patch[1]),
        channels=channels,
        patch_bias=patches.bias is not None,
        class_token=class_token,
        distillation_token=ending.two_tokens,
        registers=prefix - class_token - ending.two_tokens,
        positions=0 if embedding.positions is None else rows,
        rope=parts.rope,
        norm=parts.first_norm.kind,
        norm_eps=parts.first_norm.eps,
        pre_norm=embedding.pre_norm is not None,
        final_norm=ending.final_norm is not None,
        fc_norm=ending.fc_norm is not None,
        pooling=ending.pooling,
        attention_pool=None
        if ending.pool is None
        else AttentionPool(heads=ending.pool[0], hidden=ending.pool[1].sublayer.facts["hidden"]),
        classes=0 if ending.head is None else ending.head.width,
    )


def _of_blocks(parts: _Parts) -> tuple[Block, ...]:
    head_dim = next((part.facts["head_dim"] for _, part in parts.sublayers if part.is_attention), 1)
    return tuple(_block([r.sublayer for r in pair if r is not None], head_dim) for pair in parts.pairs)


def _block(parts: list[Sublayer], head_dim: int) -> Block:
    facts: dict[str, Any] = {"heads": 0, "head_dim": head_dim, "hidden": 0}
    for part in parts:
        facts |= part.facts
    biases = {name for part in parts for name in part.biases}
    scaled: list[Literal["attn", "mlp"]] = [
        "attn" if part.is_attention else "mlp" for part in parts if part.layer_scale is not None
    ]
    return Block(**facts, biases=tuple(b for b in get_args(Bias) if b in biases), layer_scale=tuple(scaled))


def _wiring(parts: _Parts) -> Wiring:
    ending, prefix = parts.ending, parts.embedding.prefix_tokens
    pools = ending.pooling != "token"
    if pools and ending.first not in (0, prefix):
        expected = f"pooling of all tokens or of the patches was expected, not from token {ending.first} on"
        raise Misfit(ending.stream.node, expected)
    usual = parts.first_norm.eps
    return Wiring(
        rotate_half=parts.tables is not None and parts.tables.half,
        pool_prefix=pools and prefix > 0 and ending.first == 0,
        pool_activation=None if ending.pool is None else ending.pool[1].sublayer.facts["activation"],
        eps={name: norm.eps for name, norm in parts.norms.items() if norm.eps != usual},
        rotary=parts.rotary,
    )


def _tensors(parts: _Parts, anatomy: Anatomy) -> Tensors:
    """Return all tensors by canonical name."""
    tensors = _outside(parts.embedding, parts.ending)
    for i, part in parts.sublayers:
        tensors |= {f"blocks.{i}.{name}": tensor for name, tensor in part.tensors.items()}
        if part.layer_scale is not None:
            tensors[f"blocks.{i}.{'scale1' if part.is_attention else 'scale2'}"] = part.layer_scale
    for i, block in enumerate(anatomy.blocks):  # a sub-layer that is missing adds nothing
        for layer, count in (("proj", block.heads), ("fc2", block.hidden)):
            tensors |= {} if count else {f"blocks.{i}.{layer}.bias": np.zeros(anatomy.embed_dim, np.float32)}
    if parts.tables is not None:
        tensors |= {"rope.sin": parts.tables.sin, "rope.cos": parts.tables.cos}
        tensors = _in_order(tensors, parts.tables, len(anatomy.blocks))
    return tensors


def _outside(embedding: Embedding, ending: Ending) -> Tensors:
    """Return the tensors outside of the blocks."""
    tensors: Tensors = {"patch.weight": embedding.patches.weight, **ending.tensors}
    given = {"patch.bias": embedding.patches.bias, "prefix": embedding.prefix, "positions": embedding.positions}
    tensors |= {name: tensor for name, tensor in given.items() if tensor is not None}
    norms = {"pre_norm": embedding.pre_norm, "final_norm": ending.final_norm, "fc_norm": ending.fc_norm}
    for name, norm in norms.items():
        tensors |= {} if norm is None else norm_tensors(name, norm)
    for name, head in (("head", ending.head), ("distillation_head", ending.distillation_head)):
        if head is not None:
            tensors[f"{name}.weight"] = head.weight
            tensors[f"{name}.bias"] = np.zeros(head.width, np.float32) if head.bias is None else head.bias
    return tensors


def _in_order(tensors: Tensors, tables: Tables, blocks: int) -> Tensors:
    """Return the features of q and k in the order of the tables, where pairs lie in neither of the two known ways."""
    if tables.order is None:
        return tensors
    found, order = dict(tensors), tables.order
    for name in (f"blocks.{i}.{part}" for i in range(blocks) for part in ("q", "k")):
        for kind in ("weight", "bias"):
            if (tensor := tensors.get(f"{name}.{kind}")) is not None:
                heads = tensor.reshape(-1, len(order), *tensor.shape[1:])
                found[f"{name}.{kind}"] = heads[:, order].reshape(tensor.shape)
            if (norm := tensors.get(f"{name}_norm.{kind}")) is not None:
                found[f"{name}_norm.{kind}"] = norm[order]
    return found


def _named(tensors: Tensors, anatomy: Anatomy, start: Base) -> Tensors:
    """Return the tensors in float32 and in their order; each must have the name and shape that the Anatomy says."""
    shapes = stored_shapes(anatomy)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name)):
        name = wrong[0]
        raise Misfit(start.node, f"{name} of shape {shapes.get(name)} was expected, found {found.get(name)}")
    return {name: np.ascontiguousarray(tensors[name], np.float32) for name in shapes}
