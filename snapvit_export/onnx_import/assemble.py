"""A recognised graph as Anatomy, Wiring and tensors by canonical name. Light: numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..elastic.format import Wiring
from ..model.anatomy import Anatomy, AttentionPool, Bias, Block
from ..model.tensor_names import stored_shapes
from .ending import Ending
from .nodes import Array, Misfit
from .rotary import Tables, fit
from .sublayers import Tensors, norm_tensors
from .values import Base, Norm, Patches, Residual, Sublayer, Tokens


@dataclass(frozen=True, eq=False)
class Assembled:
    """A model, and the values of the foreign graph that are its residual stream after each block."""

    anatomy: Anatomy
    wiring: Wiring
    tensors: Tensors
    streams: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Embedding:
    """The tokens that go into the first block."""

    patches: Patches
    prefix: Array | None  # (prefix tokens, E)
    positions: Array | None  # (patches, E)
    pre_norm: Norm | None

    @property
    def prefix_tokens(self) -> int:
        return 0 if self.prefix is None else len(self.prefix)


def assemble(ending: Ending, batch: int, image: tuple[int, int], position_rows: int) -> Assembled:
    """Return the model that ends so."""
    start, residuals = _stream(ending.stream)
    embedding = _embedding(start, batch)
    pairs = _blocks(residuals)
    if not pairs:
        raise Misfit(start.node, "at least one block of attention and MLP was expected after the patch embedding")
    norms = _norms(embedding, pairs, ending)
    kind, eps = _one_kind(norms)
    rope = _rope(pairs, embedding, image)
    tensors = _outside(embedding, ending)
    head_dim = next((a.sublayer.facts["head_dim"] for a, _ in pairs if a is not None), 1)
    blocks = []
    for i, pair in enumerate(pairs):
        blocks.append(_block([r.sublayer for r in pair if r is not None], head_dim))
        for part in pair:
            if part is not None:
                tensors |= {f"blocks.{i}.{name}": tensor for name, tensor in _with_scale(part.sublayer).items()}
    if rope is not None:
        tensors |= {"rope.sin": rope.sin, "rope.cos": rope.cos}
        tensors = _in_order(tensors, rope, len(blocks))
    anatomy = _anatomy(embedding, ending, tuple(blocks), image, position_rows, kind, eps, rope)
    for i, block in enumerate(blocks):
        empty = np.zeros(anatomy.embed_dim, np.float32)
        tensors |= {} if block.heads else {f"blocks.{i}.proj.bias": empty}
        tensors |= {} if block.hidden else {f"blocks.{i}.fc2.bias": empty}
    wiring = _wiring(ending, norms, embedding, rope, eps)
    last = [(mlp or attention) for attention, mlp in pairs]
    return Assembled(anatomy, wiring, _named(tensors, anatomy, start), tuple(r.output for r in last if r))


def _stream(last: Base) -> tuple[Base, list[Residual]]:
    """Return where the residual stream begins, and what is added to it, in order."""
    found: list[Residual] = []
    while isinstance(last, Residual):
        found.append(last)
        last = last.stream
    return last, found[::-1]


def _blocks(residuals: list[Residual]) -> list[tuple[Residual | None, Residual | None]]:
    """Return attention and MLP of each block; a block may lack one of them."""
    found: list[tuple[Residual | None, Residual | None]] = []
    for residual in residuals:
        if residual.sublayer.is_attention:
            found.append((residual, None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], residual)
        else:
            found.append((None, residual))
    return found


def _embedding(start: Base, batch: int) -> Embedding:
    pre_norm = start if isinstance(start, Norm) else None
    base = start if pre_norm is None else pre_norm.x
    if isinstance(base, Patches):
        return Embedding(base, None, None, pre_norm)
    if not isinstance(base, Tokens) or not isinstance(base.form.base, Patches):
        raise Misfit(base.node, "the residual stream was expected to begin with the patch embedding")
    patches, term = base.form.base, base.form.terms[0]
    shape = (batch, base.rows // batch, base.width)  # (B, T, E)
    gain = np.broadcast_to(np.float32(1) if term.gain is None else term.gain, base.form.shape).reshape(shape)
    offset = np.broadcast_to(np.float32(0) if base.form.offset is None else base.form.offset, base.form.shape).reshape(
        shape
    )
    index = term.indices(base.form.shape).reshape(shape)
    prefix = shape[1] - patches.rows // batch
    in_order = np.arange(patches.rows * patches.width).reshape(batch, -1, patches.width)
    if prefix < 0 or gain[:, :prefix].any() or (gain[:, prefix:] != 1).any() or (index[:, prefix:] != in_order).any():
        raise Misfit(
            base.node, "tokens of the class and registers were expected first, then all patches in their order"
        )
    if (offset != offset[:1]).any():
        raise Misfit(base.node, "the same positions for every image were expected")
    positions = offset[0, prefix:]
    return Embedding(patches, offset[0, :prefix] if prefix else None, positions if positions.any() else None, pre_norm)


def _block(parts: list[Sublayer], head_dim: int) -> Block:
    facts: dict[str, Any] = {"heads": 0, "head_dim": head_dim, "hidden": 0}
    for part in parts:
        facts |= part.facts
    biases = {name for part in parts for name in part.biases}
    scaled: list[Literal["attn", "mlp"]] = [
        "attn" if part.is_attention else "mlp" for part in parts if part.layer_scale is not None
    ]
    return Block(**facts, biases=tuple(b for b in get_args(Bias) if b in biases), layer_scale=tuple(scaled))


def _with_scale(part: Sublayer) -> Tensors:
    if part.layer_scale is None:
        return part.tensors
    return {**part.tensors, "scale1" if part.is_attention else "scale2": part.layer_scale}


def _norms(embedding: Embedding, pairs: Any, ending: Ending) -> dict[str, Norm]:
    """Return all norms by canonical name, those of the blocks first."""
    found: dict[str, Norm] = {}
    for i, pair in enumerate(pairs):
        for part in pair:
            if part is not None:
                found |= {f"blocks.{i}.{name}": norm for name, norm in part.sublayer.norms.items()}
    outside = (("pre_norm", embedding.pre_norm), ("final_norm", ending.final_norm), ("fc_norm", ending.fc_norm))
    found |= {name: norm for name, norm in outside if norm is not None}
    if ending.pool is not None:
        found["pool.norm"] = ending.pool[1].sublayer.norms["norm2"]
    return found


def _one_kind(norms: dict[str, Norm]) -> tuple[Any, float]:
    """Return the kind of all norms, and the eps of the first block's."""
    first = next((norm for name, norm in norms.items() if name.endswith(("norm1", "norm2"))))
    for norm in norms.values():
        if norm.kind != first.kind:
            raise Misfit(norm.node, f"a {first.kind} norm was expected, like the others")
    return first.kind, first.eps


def _rope(pairs: Any, embedding: Embedding, image: tuple[int, int]) -> Tables | None:
    """Return the rotary tables, which all blocks must share."""
    found: Tables | None = None
    for n, (attention, _) in enumerate((a, m) for a, m in pairs if a is not None):
        rotation = attention.sublayer.rotation
        if rotation is None:
            if found is not None:
                raise Misfit(attention.node, "a rotary embedding was expected in every block")
            continue
        here = Tables.of(attention.node, rotation, embedding.prefix_tokens)
        if (found is None) != (n == 0) or (found is not None and not found.same_as(here)):
            raise Misfit(attention.node, "the same rotary embedding in every block was expected")
        found = found or here
    return found


def _in_order(tensors: Tensors, rope: Tables, blocks: int) -> Tensors:
    """Return the features of q and k in the order of the tables, where pairs lie in neither of the two known ways."""
    if rope.order is None:
        return tensors
    found = dict(tensors)
    for i in range(blocks):
        for name in ("q", "k"):
            for part in ("weight", "bias"):
                if (tensor := tensors.get(f"blocks.{i}.{name}.{part}")) is not None:
                    heads = tensor.reshape(-1, len(rope.order), *tensor.shape[1:])
                    found[f"blocks.{i}.{name}.{part}"] = heads[:, rope.order].reshape(tensor.shape)
                if (norm := tensors.get(f"blocks.{i}.{name}_norm.{part}")) is not None:
                    found[f"blocks.{i}.{name}_norm.{part}"] = norm[rope.order]
    return found


def _outside(embedding: Embedding, ending: Ending) -> Tensors:
    tensors: Tensors = {"patch.weight": embedding.patches.weight, **ending.tensors}
    given = {
        "patch.bias": embedding.patches.bias,
        "prefix": embedding.prefix,
        "positions": embedding.positions,
    }
    tensors |= {name: tensor for name, tensor in given.items() if tensor is not None}
    norms = {"pre_norm": embedding.pre_norm, "final_norm": ending.final_norm, "fc_norm": ending.fc_norm}
    for name, norm in norms.items():
        tensors |= {} if norm is None else norm_tensors(name, norm)
    for name, head in (("head", ending.head), ("distillation_head", ending.distillation_head)):
        if head is not None:
            tensors[f"{name}.weight"] = head.weight
            tensors[f"{name}.bias"] = np.zeros(head.width, np.float32) if head.bias is None else head.bias
    return tensors


def _anatomy(
    embedding: Embedding,
    ending: Ending,
    blocks: tuple[Block, ...],
    image: tuple[int, int],
    position_rows: int,
    kind: Any,
    eps: float,
    rope: Tables | None,
) -> Anatomy:
    patches, prefix = embedding.patches, embedding.prefix_tokens
    e, channels, *patch = patches.weight.shape
    count = patches.grid[0] * patches.grid[1]
    if prefix < 1 + ending.two_tokens and ending.pooling == "token":
        raise Misfit(patches.node, "a class token before the patches was expected, since the output is read from one")
    # Of pooled models the file does not tell a class token from a register. Registers come in fours.
    class_token = prefix > 0 and (ending.pooling == "token" or prefix % 2 == 1)
    rows = position_rows if count <= position_rows <= count + prefix else count
    return Anatomy(
        family="deit-distilled" if ending.two_tokens else "vit" if rope is None else "eva",
        embed_dim=e,
        blocks=blocks,
        image=image,
        patch=(patch[0], patch[1]),
        channels=channels,
        patch_bias=patches.bias is not None,
        class_token=class_token,
        distillation_token=ending.two_tokens,
        registers=prefix - class_token - ending.two_tokens,
        positions=0 if embedding.positions is None else rows,
        rope="none" if rope is None else fit(rope, patches.grid)[0],
        norm=kind,
        norm_eps=eps,
        pre_norm=embedding.pre_norm is not None,
        final_norm=ending.final_norm is not None,
        fc_norm=ending.fc_norm is not None,
        pooling=ending.pooling,
        attention_pool=None
        if ending.pool is None
        else AttentionPool(heads=ending.pool[0], hidden=ending.pool[1].sublayer.facts["hidden"]),
        classes=0 if ending.head is None else ending.head.width,
    )


def _wiring(ending: Ending, norms: dict[str, Norm], embedding: Embedding, rope: Tables | None, eps: float) -> Wiring:
    prefix = embedding.prefix_tokens
    if ending.pooling != "token" and ending.first not in (0, prefix):
        raise Misfit(
            ending.stream.node, f"pooling of all tokens or of the patches was expected, not from token {ending.first}"
        )
    rotary = {} if rope is None else {"rotary": fit(rope, embedding.patches.grid)[1]}
    return Wiring(
        rotate_half=rope is not None and rope.half,
        pool_prefix=ending.pooling != "token" and prefix > 0 and ending.first == 0,
        pool_activation=None if ending.pool is None else ending.pool[1].sublayer.facts["activation"],
        eps={name: norm.eps for name, norm in norms.items() if norm.eps != eps},
        **rotary,
    )


def _named(tensors: Tensors, anatomy: Anatomy, start: Base) -> Tensors:
    """Return the tensors in float32 and in their order; each must have the name and shape that the Anatomy says."""
    shapes = stored_shapes(anatomy)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name in {*shapes, *found} if shapes.get(name) != found.get(name)):
        name = wrong[0]
        raise Misfit(start.node, f"{name} of shape {shapes.get(name)} was expected, found {found.get(name)}")
    return {name: np.ascontiguousarray(tensors[name], np.float32) for name in shapes}
