"""Token merging in torch: blocks whose attention is followed by a merge, and the groups of patches that tokens become.

In a block that merges r tokens, between its attention and its MLP:

    order     the patch tokens as they lie are split alternately: A has the even places, B the odd ones. Prefix tokens
              (class, distillation, registers) are never merged and stay in front.
    match     the keys of the attention, all heads side by side, scaled to length 1. Each token of A has a best partner
              in B: the largest cosine, the first of equals.
    merge     the r tokens of A with the best partners join them: x_b = sum of s x / sum of s over the group, where s
              counts the patches that a token stands for.
    new order the prefix; the rest of A, from the largest cosine to the smallest (the first of equals first); then B.

Keys are taken as the attention compares them: normed and rotated where the model does that; without their bias where
neither is done, since a bias that all keys share has no effect on attention (`graph.weights.drops_key_bias`).

Later attentions add log s to the logits of a key, so that a token counts as often as the patches it stands for would
("proportional attention"); pooling weighs tokens by s likewise. A merged token keeps the rotation of its partner in B.

The method is bipartite soft matching: Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...checks.merging import Matches
from .eva_attention import ElasticEvaAttention, rotate
from .pruned_block import PrunedBlock
from .timm_blocks import PARTS, attention_branch, blocks_of, mlp_branch


@dataclass
class Match:
    """Which tokens a block merges, for a batch; places are counted among the patch tokens."""

    cosines: Tensor  # (B, |A|, |B|)
    order: Tensor  # (B, |A|): A from its best to its worst match
    best: Tensor  # (B, |A|): the partner in B of each token of A


def match(metric: Tensor) -> Match:
    """Match the tokens in even places with those in odd ones: (B, patch tokens, d), of length 1 each."""
    cosines = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)
    largest, best = cosines.max(-1)  # the first of equals
    return Match(cosines, largest.sort(dim=-1, descending=True, stable=True).indices, best)


@dataclass
class Groups:
    """The groups of patches that tokens stand for during one pass; blocks change it as they merge."""

    prefix: int
    sizes: Tensor | None = None  # (B, T): patches that each token stands for; None: one each
    places: Tensor | None = None  # (B, patches): the token that each patch went into; None: its own
    rope: Tensor | None = None  # (patches, 2h), or (B, 1, patch tokens, 2h) after a merge
    matches: dict[int, Match] = field(default_factory=dict)  # by block, where they are kept
    keeps_matches: bool = False
    proportional: bool = True  # False: later attentions and pooling ignore the sizes

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of an attention: the rotations of the tokens as they lie, and the logarithm of sizes."""
        found = {name: value for name, value in given.items() if name not in ("rope", "attn_mask", "groups")}
        if given.get("rope") is not None:
            found["rope"] = given["rope"] if self.rope is None else self.rope
        if self.bias is not None:
            found["attn_mask"] = self.bias
        return found

    @property
    def bias(self) -> Tensor | None:
        """What is added to the logits of every key, (B, 1, 1, T)."""
        return None if self.sizes is None or not self.proportional else self.sizes.log()[:, None, None]

    def merge(self, x: Tensor, block: Any, y: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Merge as many tokens of (B, T, E) as the block does; its attention read `y` with these arguments."""
        count = getattr(block, "merged", 0)
        if not count:
            return x
        found = match(keys(block.attn, y, arguments)[:, self.prefix :])
        if self.keeps_matches:
            self.matches[block.number] = found
        sizes = x.new_ones(x.shape[:2]) if self.sizes is None else self.sizes
        goes, stays = found.order[:, :count], found.order[:, count:]  # (B, r), (B, |A| - r)
        into = found.best.gather(1, goes)  # (B, r): places in B
        odd = torch.arange(found.cosines.shape[2], device=x.device).expand(len(x), -1)
        front = torch.arange(self.prefix, device=x.device).expand(len(x), -1)
        kept = torch.cat([front, self.prefix + 2 * stays, self.prefix + 2 * odd + 1], dim=1)  # (B, T - r)
        gone, into = self.prefix + 2 * goes, self.prefix + stays.shape[1] + into  # (B, r): old places, new places
        whole = x * sizes[..., None]
        sums = _rows(whole, kept).scatter_add(1, _wide(into, x.shape[2]), _rows(whole, gone))
        self.sizes = sizes.gather(1, kept).scatter_add(1, into, sizes.gather(1, gone))
        self._follow(kept, gone, into, arguments.get("rope"))
        return sums / self.sizes[..., None]

    def _follow(self, kept: Tensor, gone: Tensor, into: Tensor, rope: Tensor | None) -> None:
        """Note where each patch went, and take the rotations of the tokens along."""
        count, tokens = kept.shape[1], kept.shape[1] + gone.shape[1]
        now = torch.empty(len(kept), tokens, dtype=torch.long, device=kept.device)  # the new place of each token
        now.scatter_(1, kept, torch.arange(count, device=kept.device).expand(len(kept), -1)).scatter_(1, gone, into)
        before = torch.arange(self.prefix, tokens, device=kept.device).expand(len(kept), -1)
        self.places = now.gather(1, before if self.places is None else self.places)
        if rope is not None:
            table = rope.expand(len(kept), 1, -1, -1)  # (B, 1, patch tokens, 2h)
            rows = (kept[:, self.prefix :] - self.prefix)[:, None, :, None]
            self.rope = table.gather(2, rows.expand(-1, -1, -1, table.shape[-1]))

    def average(self, tokens: Tensor) -> Tensor:
        """Return the means over the groups of unmerged tokens: (B, prefix + patches, E) to (B, T, E)."""
        if self.places is None or self.sizes is None:
            return tokens
        front, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        empty = tokens.new_zeros(len(tokens), self.sizes.shape[1] - self.prefix, tokens.shape[2])
        sums = torch.cat([front, empty], dim=1).scatter_add(1, _wide(self.places, tokens.shape[2]), patches)
        return sums / self.sizes[..., None]

    def spread(self, tokens: Tensor) -> Tensor:
        """Give every patch the token that it went into: (B, T, E) to (B, prefix + patches, E)."""
        if self.places is None:
            return tokens
        return torch.cat([tokens[:, : self.prefix], _rows(tokens, self.places)], dim=1)


def _wide(places: Tensor, width: int) -> Tensor:
    return places[..., None].expand(-1, -1, width)


def _rows(x: Tensor, places: Tensor) -> Tensor:
    """(B, T, E) and (B, n) to (B, n, E)."""
    return x.gather(1, _wide(places, x.shape[2]))


class Holder:
    """The Groups of the pass that is running: shared by the blocks and the pooling of one module."""

    def __init__(self, prefix: int) -> None:
        self.prefix = prefix
        self.keeps_matches, self.proportional = False, True
        self.groups = self.begin()

    def begin(self) -> Groups:
        """Start a pass with one group per patch."""
        self.groups = Groups(self.prefix, keeps_matches=self.keeps_matches, proportional=self.proportional)
        return self.groups


class MergingBlock(PrunedBlock):
    """A block of a model that merges tokens, in this block or in another one; some of its parts may be removed.

    timm calls the blocks one after the other with the stream alone, so the groups of that pass are in the `holder`
    that all blocks share; whoever runs blocks by themselves gives `groups`.
    """

    def __init__(self, block: Any, head_dim: int, number: int, merged: int, holder: Holder) -> None:
        super().__init__(block, head_dim)
        for part in PARTS:
            setattr(self, f"{part}_added", getattr(block, f"{part}_added", None))
        self.number, self.merged, self.holder = number, merged, holder

    def forward(self, x: Tensor, **extra: Any) -> Tensor:
        if extra.get("groups") is None:
            extra["groups"] = self.holder.begin() if self.number == 0 else self.holder.groups
        return mlp_branch(self, attention_branch(self, x, extra), extra)


def keys(attention: Any, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the keys of an attention by which tokens are matched: (B, T, E) to (B, T, heads*h), of length 1 each."""
    if isinstance(attention, ElasticEvaAttention):
        k = attention.project(x)[1]  # (B, heads, T, h)
    else:
        plain = isinstance(attention.k_norm, nn.Identity) or attention.qkv.bias is None
        bias = None if plain else attention.qkv.bias.chunk(3)[1]
        k = F.linear(x, attention.qkv.weight.chunk(3)[1], bias)
        k = k.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    k = attention.k_norm(k)
    if arguments.get("rope") is not None:
        k = rotate(k, arguments["rope"], attention.num_prefix_tokens, attention.rotate_half)
    return F.normalize(k.transpose(1, 2).flatten(2), dim=-1)


class WeightedPooling:
    """In the place of a module's `pool`: tokens count as often as the patches that they stand for."""

    def __init__(self, model: Any, holder: Holder, with_prefix: bool) -> None:
        self.model, self.holder, self.with_prefix = model, holder, with_prefix

    def __call__(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        kind, groups, attention_pool = pool_type or self.model.global_pool, self.holder.groups, self.model.attn_pool
        if kind == "token" and attention_pool is None:
            return x[:, 0]
        skipped = 0 if self.with_prefix else groups.prefix
        x, sizes, bias = x[:, skipped:], groups.sizes, groups.bias
        if attention_pool is not None:
            return attention_pool(x, attn_mask=None if bias is None else bias[..., skipped:])
        if sizes is None or not groups.proportional:
            sizes = x.new_ones(x.shape[:2])
        else:
            sizes = sizes[:, skipped:]
        mean = (x * sizes[..., None]).sum(1) / sizes.sum(1, keepdim=True)
        largest = x.amax(1)
        return {"avg": mean, "max": largest, "avgmax": 0.5 * (mean + largest)}[kind]


def holder_of(module: nn.Module) -> Holder | None:
    """Return what the blocks of a merging module share; None for a module that merges nothing."""
    return getattr(blocks_of(module)[0], "holder", None)


def outputs_and_matches(module: nn.Module, images: Tensor) -> tuple[npt.NDArray[np.float32], dict[int, Matches]]:
    """Return the outputs of a module, and the decisions of each block that merges tokens, for gates."""
    holder = holder_of(module)
    with torch.no_grad():
        if holder is None:
            return module(images).numpy(), {}
        before, holder.keeps_matches = holder.keeps_matches, True
        try:
            outputs = module(images).numpy()
        finally:
            holder.keeps_matches = before
    found = holder.groups.matches
    return outputs, {i: Matches(m.cosines.numpy(), m.order.numpy(), m.best.numpy()) for i, m in found.items()}
