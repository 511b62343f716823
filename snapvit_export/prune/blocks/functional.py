"""The blocks of any supported ViT as one function of tensors: no module, no copy, any number of heads and neurons.

`block_weights` reads a timm block into tensors by uniform names, cut to a Plan; `run_blocks` computes with them. The
function holds no width: the same code, traced once, serves every candidate of a search.

Two things are computed less often than the module would. Where the result depends on the class token alone, the last
block computes its query, projection and MLP for that token only. And what the heads of the first block attend to does
not depend on what is cut: it is computed once for all heads, and a candidate takes the columns of those it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelNotUnderstood
from ...model.anatomy import Anatomy, Block
from ...model.plan import Part
from .eva_attention import rotate
from .pruned_block import added_by
from .timm_blocks import PARTS, blocks_of, head_shares, layer_scale_of, neuron_shares

Weights = dict[str, Tensor]
ATTENDING = frozenset({"norm1", "qkv", "q", "kv", "q_norm", "k_norm"})  # what comes before the heads' output
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
}


@dataclass(frozen=True)
class Body:
    """Everything that is the same for all candidates: the settings of the blocks and the rotary embedding, if any."""

    blocks: tuple[Block, ...]
    norm: str
    eps: float
    widths: dict[str, int]  # of the norms over what is never cut
    prefix: int  # tokens before the patches
    needed: int | None  # first tokens that the result depends on; None: all
    rope: Tensor | None  # (patches, 2*head_dim)
    rotate_half: bool


def read_body(model: Any, anatomy: Anatomy, rope: Tensor | None) -> Body:
    """Read the settings of a model whose Anatomy is known."""
    unknown = {block.activation for block in anatomy.blocks} - set(ACTIVATIONS)
    if unknown:
        raise ModelNotUnderstood(f"activation {', '.join(sorted(unknown))} is not supported by the search")
    needed = anatomy.read_tokens if anatomy.reads_token else None
    rotate_half = rotates_half(model)
    prefix = anatomy.prefix
    embed, head = anatomy.embed_dim, anatomy.blocks[0].head_dim
    widths = {"norm1": embed, "norm2": embed, "q_norm": head, "k_norm": head}
    return Body(anatomy.blocks, anatomy.norm, anatomy.norm_eps, widths, prefix, needed, rope, rotate_half)


def embed_tokens(model: Any, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the input of the first block for these images, (B, T, E), and the rotary embedding of all blocks."""
    x = model._pos_embed(model.patch_embed(images))
    x, rope = x if isinstance(x, tuple) else (x, None)
    return model.norm_pre(x), rope


def pooled(model: Any, x: Tensor) -> Tensor:
    """Return the pre-logits embedding, (B, E), from the output of the last block."""
    return model.forward_head(model.norm(x), pre_logits=True)


def all_weights(model: Any, body: Body, keep: Sequence[tuple[Tensor, Tensor]]) -> list[Weights]:
    """Return the tensors of every block, cut to what it keeps; without those that `attend_first` has used already."""
    last = len(keep) - 1
    weights = []
    for i, (block, chosen) in enumerate(zip(blocks_of(model), keep)):
        split = body.needed is not None and i == last
        weights.append(block_weights(block, *chosen, split_query=split) | stand_ins(block, body.widths["norm1"], split))
    weights[0] = {name: value for name, value in weights[0].items() if name.split(".")[0] not in ATTENDING}
    return weights


def block_weights(block: Any, heads: Tensor, neurons: Tensor, split_query: bool) -> Weights:
    """Return copies of the tensors of one block, cut to these heads and neurons; none of a part that was removed."""
    cut = {id(share.tensor): share.taken(heads) for share in head_shares(block.attn)}
    cut |= {id(share.tensor): share.taken(neurons) for share in neuron_shares(block.mlp)}
    weights: Weights = {}
    if block.attn is not None:
        weights |= _norm("norm1", block.norm1) | _attention(block.attn, cut, split_query)
    if block.mlp is not None:
        weights |= _norm("norm2", block.norm2) | _mlp(block.mlp, cut)
    for name, part in zip(("scale1", "scale2"), PARTS):
        if (layer_scale := layer_scale_of(block, part)) is not None:
            weights[name] = layer_scale
    return weights


def stand_ins(block: Any, embed: int, split_query: bool) -> Weights:
    """Return the tensors of one head or neuron that nothing reads, for each removed part; what it adds is the bias.

    With them one function computes all blocks: a traced graph cannot have a width of zero.
    """
    weights: Weights = {}
    if block.attn is None:
        names = {"q": 1, "kv": 2} if split_query else {"qkv": 3}
        rows = {f"{name}.weight": torch.zeros(count * block.head_dim, embed) for name, count in names.items()}
        weights |= {"norm1.weight": torch.ones(embed), **rows, "proj.weight": torch.zeros(embed, block.head_dim)}
        weights["proj.bias"] = _left_by(block, "attention", embed)
    if block.mlp is None:
        weights |= {"norm2.weight": torch.ones(embed), "fc1.weight": torch.zeros(1, embed)}
        weights |= {"fc2.weight": torch.zeros(embed, 1), "fc2.bias": _left_by(block, "mlp", embed)}
    return weights


def _left_by(block: Any, part: Part, embed: int) -> Tensor:
    left = added_by(block, part)
    return torch.zeros(embed) if left is None else left.detach()


def rotates_half(model: Any) -> bool:
    """Return True if rotary pairs lie half a head apart, as the first attention that remains has it."""
    attention = next((block.attn for block in blocks_of(model) if block.attn is not None), None)
    return bool(getattr(attention, "rotate_half", False))


def attend_first(x: Tensor, w: Weights, body: Body) -> Tensor:
    """Return the output of all heads of the first block, before its projection: (B, T, heads*head_dim)."""
    return _attend(x, w, body.blocks[0], body, body.needed if len(body.blocks) == 1 else None)


def run_blocks(x: Tensor, first: Tensor, weights: Sequence[Weights], body: Body) -> Tensor:
    """Run all blocks: (B, T, E) to (B, T or needed, E). `first` is the output of the first block's kept heads."""
    last = len(weights) - 1
    for i, (w, block) in enumerate(zip(weights, body.blocks)):
        needed = body.needed if i == last else None
        x = _block(x, first if i == 0 else _attend(x, w, block, body, needed), w, block, body, needed)
    return x


def _block(x: Tensor, heads: Tensor, w: Weights, block: Block, body: Body, needed: int | None) -> Tensor:
    x = x if needed is None else x[:, :needed]
    heads = _normalise(heads, w, "attn_norm", body) if "attn_norm.weight" in w else heads
    attended = _linear(heads, w, "proj")
    x = x + (attended * w["scale1"] if "scale1" in w else attended)
    y = _hidden(_normalise(x, w, "norm2", body), w, block, body)
    return x + (y * w["scale2"] if "scale2" in w else y)


def _attend(x: Tensor, w: Weights, block: Block, body: Body, needed: int | None) -> Tensor:
    y = _normalise(x, w, "norm1", body)
    size = block.head_dim
    if "qkv.weight" in w:
        q, k, v = _linear(y, w, "qkv").reshape(y.shape[0], y.shape[1], 3, -1, size).permute(2, 0, 3, 1, 4).unbind(0)
    else:
        query = y if needed is None else y[:, :needed]
        q = _linear(query, w, "q").reshape(query.shape[0], query.shape[1], -1, size).transpose(1, 2)
        k, v = _linear(y, w, "kv").reshape(y.shape[0], y.shape[1], 2, -1, size).permute(2, 0, 3, 1, 4).unbind(0)
    if "q_norm.weight" in w:
        q, k = _normalise(q, w, "q_norm", body), _normalise(k, w, "k_norm", body)
    if body.rope is not None:
        k = rotate(k, body.rope, body.prefix, body.rotate_half)
        if needed is None:  # otherwise q has prefix tokens only, which are not rotated
            q = rotate(q, body.rope, body.prefix, body.rotate_half)
    weights = ((q * size**-0.5) @ k.transpose(-2, -1)).softmax(-1)  # (B, heads, T or needed, T)
    z = (weights @ v).transpose(1, 2)
    return z.reshape(z.shape[0], z.shape[1], -1)  # (B, T or needed, heads*head_dim)


def _hidden(y: Tensor, w: Weights, block: Block, body: Body) -> Tensor:
    act = ACTIVATIONS[block.activation]
    h = act(_linear(y, w, "gate")) * _linear(y, w, "up") if "gate.weight" in w else act(_linear(y, w, "fc1"))
    return _linear(_normalise(h, w, "mlp_norm", body) if "mlp_norm.weight" in w else h, w, "fc2")


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _normalise(x: Tensor, w: Weights, name: str, body: Body) -> Tensor:
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    width = body.widths.get(name)  # a plain number: a traced graph needs the width of its LayerNorms
    if body.norm == "layer" and width is not None:
        return F.layer_norm(x, (width,), weight, bias, body.eps)
    if body.norm == "layer":  # it runs over what is cut, so its width is not fixed
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + body.eps) * weight
    return x if bias is None else x + bias


def _norm(name: str, norm: Any) -> Weights:
    found = {f"{name}.{part}": getattr(norm, part, None) for part in ("weight", "bias")}
    return {key: value.detach() for key, value in found.items() if isinstance(value, Tensor)}


def _attention(attn: Any, cut: dict[int, Tensor], split_query: bool) -> Weights:
    weights = _named("proj", attn.proj, cut)
    for name, norm in (("q_norm", attn.q_norm), ("k_norm", attn.k_norm)):
        weights |= _norm(name, norm)
    if not isinstance(attn.norm, nn.Identity):
        weights |= {f"attn_norm.{part}": cut[id(tensor)] for part, tensor in attn.norm.named_parameters()}
    for part, rows in (("weight", _qkv(attn, "weight", cut)), ("bias", _qkv(attn, "bias", cut))):
        if rows is None:
            continue
        if split_query:
            weights[f"q.{part}"], weights[f"kv.{part}"] = rows[0].contiguous(), torch.cat(rows[1:])
        else:
            weights[f"qkv.{part}"] = torch.cat(rows)
    return weights


def _qkv(attn: Any, part: str, cut: dict[int, Tensor]) -> list[Tensor] | None:
    """Return the kept rows of q, k and v, however the module stores them; a missing bias beside others is zero."""
    if getattr(attn, "qkv", None) is not None:
        tensor = getattr(attn.qkv, part)
        if tensor is not None:
            return list(cut[id(tensor)].chunk(3))
        names = [getattr(attn, f"{letter}_bias", None) for letter in "qkv"]
    else:
        names = [getattr(getattr(attn, f"{letter}_proj"), part) for letter in "qkv"]
    present = [cut[id(tensor)] if tensor is not None else None for tensor in names]
    known = next((tensor for tensor in present if tensor is not None), None)
    return None if known is None else [torch.zeros_like(known) if t is None else t for t in present]


def _mlp(mlp: Any, cut: dict[int, Tensor]) -> Weights:
    weights = _named("fc2", mlp.fc2, cut)
    if not isinstance(mlp.norm, nn.Identity):
        weights |= {f"mlp_norm.{part}": cut[id(tensor)] for part, tensor in mlp.norm.named_parameters()}
    if hasattr(mlp, "fc1_g"):
        return weights | _named("gate", mlp.fc1_g, cut) | _named("up", mlp.fc1_x, cut)
    first = _named("fc1", mlp.fc1, cut)
    if mlp.fc1.out_features == mlp.fc2.in_features:
        return weights | first
    packed = {part: tensor.chunk(2) for part, tensor in first.items()}  # gate and up in one matrix
    gate = {part.replace("fc1", "gate"): pair[0].contiguous() for part, pair in packed.items()}
    return weights | gate | {part.replace("fc1", "up"): pair[1].contiguous() for part, pair in packed.items()}


def _named(name: str, linear: nn.Linear, cut: dict[int, Tensor]) -> Weights:
    tensors = {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    return {key: cut.get(id(value), value.detach()) for key, value in tensors.items() if value is not None}
