"""Attention of EVA-02 and DINOv3 with any number of heads.

timm's EvaAttention reshapes its output to the embedding width, so it cannot hold a pruned block. This one has the
same parameters under the same names, reshapes to what the heads really give, and rotates without a reshape to a
traced shape, which would fix the batch size of an exported graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.models.eva import EvaAttention
from torch import Tensor, nn


class ElasticEvaAttention(nn.Module):
    """Takes over the (already sliced) members of an EvaAttention."""

    qkv: nn.Linear | None  # or three projections, as EVA-02 has them
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_bias: Tensor
    k_bias: Tensor
    v_bias: Tensor
    q_norm: nn.Module
    k_norm: nn.Module
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module
    fused_attn: bool
    scale: float
    num_heads: int
    head_dim: int
    num_prefix_tokens: int
    rotate_half: bool

    def __init__(self, dense: EvaAttention) -> None:
        super().__init__()
        self.__dict__.update(dense.__dict__)  # parameters, buffers, submodules and settings, under their names

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if is_causal:
            raise ValueError("an image model attends to all tokens: a causal mask is not supported")
        q, k, v = self.project(x)  # each (B, heads, T, head_dim)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = (rotate(part, rope, self.num_prefix_tokens, self.rotate_half).type_as(v) for part in (q, k))
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        else:
            logits = q * self.scale @ k.transpose(-2, -1)
            x = (logits if attn_mask is None else logits + attn_mask).softmax(-1) @ v
        x = x.transpose(1, 2).flatten(2)  # (B, T, heads*head_dim)
        return self.proj_drop(self.proj(self.norm(x)))

    def project(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values before norms and rotation, (B, heads, T, head_dim) each."""
        if self.qkv is not None:
            bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
            parts = F.linear(x, self.qkv.weight, bias).chunk(3, dim=-1)
        else:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts]


def rotate(x: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    """Rotate the features of all tokens but the first `prefix` ones: (B, heads, T, head_dim)."""
    patches = x[:, :, prefix:]
    sin, cos = rope.chunk(2, dim=-1)  # (patches, head_dim) each; or (B, 1, patches, head_dim)
    return torch.cat((x[:, :, :prefix], patches * cos + _quarter_turn(patches, half) * sin), dim=2)


def _quarter_turn(x: Tensor, half: bool) -> Tensor:
    """Each pair of features (a, b) becomes (-b, a); pairs are neighbours, or lie half the width apart."""
    if half:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
