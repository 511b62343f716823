"""A block without its attention, its MLP or both: a removed part leaves neither weights nor norm nor LayerScale.

Parts that remain keep timm's names, so that weights are saved and loaded under them. What a removed part would add to
every token (its bias, or its mean) is a vector of the block, `attention_added` or `mlp_added`. `fold` adds it to the
bias of the last layer before it that can hold it, and then it costs nothing at run time; where no layer comes before,
the vector stays. It is a buffer, since training must not change what only replaces a mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...model.plan import Part
from .timm_blocks import PARTS, attention_branch, blocks_of, layer_scale_of, mlp_branch, output_of

MEMBERS: dict[Part, tuple[str, ...]] = {
    "attention": ("norm1", "attn", "ls1", "gamma_1", "drop_path1"),
    "mlp": ("norm2", "mlp", "ls2", "gamma_2", "drop_path2"),
}
LEAST_LAYER_SCALE = 1e-4  # of its largest entry: dividing a vector by less would lose digits


class PrunedBlock(nn.Module):
    """Takes over the members of a timm block of which some are None already.

    >>> block.mlp = None
    >>> pruned = PrunedBlock(block, head_dim=64)
    """

    attention_added: Tensor | None
    mlp_added: Tensor | None

    def __init__(self, block: Any, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim  # the Anatomy needs it also where the attention is removed
        for part in PARTS:
            for name in MEMBERS[part]:
                if hasattr(block, name):
                    setattr(self, name, getattr(block, name))
            self.register_buffer(f"{part}_added", None)

    def forward(self, x: Tensor, **extra: Any) -> Tensor:
        return mlp_branch(self, attention_branch(self, x, extra), extra)

    def add(self, part: Part, vector: Tensor) -> None:
        """Let a removed part add this vector to every token, besides what it adds already."""
        before = getattr(self, f"{part}_added")
        setattr(self, f"{part}_added", vector.detach().clone() if before is None else before + vector)


def removed_parts(block: Any) -> tuple[Part, ...]:
    """Return the parts that a block lacks."""
    return tuple(part for part in PARTS if output_of(block, part) is None)


def added_by(block: Any, part: Part) -> Tensor | None:
    """Return the vector that a removed part still adds, (E,); None if there is none or it was folded."""
    return getattr(block, f"{part}_added")


@torch.no_grad()
def fold(module: nn.Module) -> None:
    """Move what removed parts add into the bias of the last layer before them. Changes `module`, not its output.

    A layer can hold the vector if it has a bias, and if its LayerScale, by which the vector is divided, is nowhere
    nearly 0.
    """
    holder: tuple[nn.Linear, Tensor | None] | None = None
    for block in blocks_of(module):
        for part in PARTS:
            linear = output_of(block, part)
            if linear is not None:
                holder = (linear, layer_scale_of(block, part))
            elif holder is not None and (vector := added_by(block, part)) is not None and _can_hold(*holder):
                linear, layer_scale = holder
                assert linear.bias is not None
                linear.bias.add_(vector if layer_scale is None else (vector.double() / layer_scale.double()).to(vector))
                setattr(block, f"{part}_added", None)


def _can_hold(linear: nn.Linear, layer_scale: Tensor | None) -> bool:
    if linear.bias is None:
        return False
    return layer_scale is None or bool(layer_scale.abs().min() >= LEAST_LAYER_SCALE * layer_scale.abs().max() > 0)
