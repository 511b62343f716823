"""Masking: the dense model with the structures that a Plan cuts set to zero, the reference that slicing must equal.

A head is masked at the input of proj, a neuron at the input of fc2. Where an inner norm comes before that point, it
is evaluated over the kept features only, which is what the sliced model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...model.plan import Plan
from ...model.ranking import Ranking
from ..blocks.timm_blocks import PARTS, blocks_of, output_of
from .slicing import kept


@contextmanager
def masked(model: nn.Module, ranking: Ranking, plan: Plan) -> Iterator[nn.Module]:
    """Within the block, `model` computes what the sliced model computes; afterwards it is itself again."""
    hooks = []
    try:
        for i, block in enumerate(blocks_of(model)):
            heads, neurons = kept(ranking, plan, i)
            unit = getattr(block.attn, "head_dim", 1)
            columns = (heads[:, None] * unit + torch.arange(unit)).flatten()  # (kept*head_dim,)
            for inner, part, keep in ((block.attn, PARTS[0], columns), (block.mlp, PARTS[1], neurons)):
                norm, linear = getattr(inner, "norm", None), output_of(block, part)
                if linear is None:  # removed from the model already
                    continue
                if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
                    hooks.append(norm.register_forward_hook(_norm_over(keep)))
                hooks.append(linear.register_forward_pre_hook(_mask_all_but(keep, linear.in_features)))
        yield model
    finally:
        for hook in hooks:
            hook.remove()


def _mask_all_but(keep: Tensor, width: int) -> Any:
    mask = torch.zeros(width).index_fill(0, keep, 1.0)

    def hook(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] * mask.to(inputs[0]),)

    return hook


def _norm_over(keep: Tensor) -> Any:
    """Return a hook that replaces a norm's output by the norm over the kept features; the others become zero."""

    def hook(norm: Any, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        x = inputs[0][..., keep]  # (..., kept)
        centred = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
        x = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps) * norm.weight[keep]
        if getattr(norm, "bias", None) is not None:
            x = x + norm.bias[keep]
        return torch.zeros_like(inputs[0]).index_copy(-1, keep, x)

    return hook
