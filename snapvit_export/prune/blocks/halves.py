"""The two halves of a block, one after the other: what is between them belongs to neither.

Attention and MLP of a block can be looked at, fitted and removed apart from each other. A half that was removed gives
the stream back as it was, but for a vector that stands in its place until a layer before it takes that over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...model.plan import Part as Part

PARTS: tuple[Part, Part] = ("attention", "mlp")
Half = Callable[[Any, Tensor, dict[str, Any]], Tensor]


def attention_half(block: Any, x: Tensor, extra: dict[str, Any]) -> Tensor:
    """The stream after the attention of a block; `extra` is how its attention is called beside the tokens."""
    if block.attn is None:
        return x if block.attention_added is None else x + block.attention_added
    return x + block.drop_path1(_scaled(block, 1, block.attn(block.norm1(x), **extra)))


def mlp_half(block: Any, x: Tensor, extra: dict[str, Any]) -> Tensor:
    """The stream after the MLP of a block, from that after its attention."""
    if block.mlp is None:
        return x if block.mlp_added is None else x + block.mlp_added
    return x + block.drop_path2(_scaled(block, 2, block.mlp(block.norm2(x))))


HALVES: dict[Part, Half] = {"attention": attention_half, "mlp": mlp_half}


def output_of(block: Any, part: Part) -> nn.Linear | None:
    """The last layer of a part, proj or fc2; None if the part was removed."""
    if part == "attention":
        return None if block.attn is None else block.attn.proj
    return None if block.mlp is None else block.mlp.fc2


def gain_of(block: Any, part: Part) -> Tensor | None:
    """LayerScale behind a part, (E,): a module in most families, a bare parameter in EVA's, or nothing."""
    number = PARTS.index(part) + 1
    scale = getattr(block, f"gamma_{number}", None)
    scale = getattr(block, f"ls{number}", None) if scale is None else scale
    scale = getattr(scale, "gamma", scale)
    return scale.detach() if isinstance(scale, Tensor) else None


def _scaled(block: Any, number: int, y: Tensor) -> Tensor:
    gamma = getattr(block, f"gamma_{number}", None)
    if gamma is not None:
        return gamma * y
    scale = getattr(block, f"ls{number}", None)
    return y if scale is None else scale(y)
