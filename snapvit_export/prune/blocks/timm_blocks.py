"""The one adapter for timm blocks: the tensors that heads and neurons own, and a block's two residual branches.

Slicing, masking, scoring and correction all read a block through this file.

A structure (a head or a neuron) owns rows or columns of several tensors. `Share` names one such tensor: along `axis` it
holds `sections` equal parts (q, k and v of a fused qkv; gate and up of a packed SwiGLU), each with `unit` consecutive
entries per structure (head_dim for a head, 1 for a neuron).

A block is two residual branches, one after the other: the attention and the MLP, each with its norm, LayerScale and
drop-path. `BRANCHES` runs one of them alone, so that they can be measured, corrected and removed separately. A removed
branch returns the stream unchanged, plus the vector that is added in its place until an earlier layer takes that over
(`pruned_block.fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn

from ...model.plan import Part

PARTS: tuple[Part, Part] = ("attention", "mlp")
Branch = Callable[[Any, Tensor, dict[str, Any]], Tensor]  # block, stream, keyword arguments of its attention


@dataclass(frozen=True)
class Share:
    """One parameter or buffer along whose `axis` the structures of a block have entries of their own."""

    module: nn.Module
    name: str
    axis: int
    unit: int
    sections: int = 1

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.name)

    def indices(self, keep: Tensor) -> Tensor:
        """Return the positions along `axis` of the structures in `keep`, section by section."""
        part = self.tensor.shape[self.axis] // self.sections
        rows = (keep[:, None] * self.unit + torch.arange(self.unit)).flatten()  # (kept*unit,)
        return (rows + part * torch.arange(self.sections)[:, None]).flatten()  # (sections*kept*unit,)

    def taken(self, keep: Tensor) -> Tensor:
        """Return a copy of only those entries: a view would keep the dense storage alive."""
        return self.tensor.detach().index_select(self.axis, self.indices(keep)).contiguous()


class HoldsModule(Protocol):
    """The loaded `Model`, as far as blocks are concerned."""

    @property
    def module(self) -> nn.Module: ...


def as_module(model: HoldsModule | nn.Module) -> nn.Module:
    """Return the module of a loaded model, or a timm module as it is; `load.as_model` goes the other way."""
    return model if isinstance(model, nn.Module) else model.module


def blocks_of(model: nn.Module) -> list[Any]:
    """Return the transformer blocks, first to last."""
    return list(model.blocks)  # type: ignore[arg-type]


def block_outputs(model: nn.Module, images: Tensor) -> dict[int, npt.NDArray[np.float32]]:
    """Return the output of every block for these images, (B, T, E) by block number."""
    found: dict[int, npt.NDArray[np.float32]] = {}

    def keep(i: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            found[i] = output.detach().cpu().float().numpy()

        return hook

    hooks = [block.register_forward_hook(keep(i)) for i, block in enumerate(blocks_of(model))]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def head_shares(attn: Any) -> Iterator[Share]:
    """Yield every tensor that heads own: rows of q, k, v and their biases, an inner norm, columns of proj."""
    if attn is None:
        return
    unit = attn.head_dim
    if getattr(attn, "qkv", None) is not None:
        yield Share(attn.qkv, "weight", 0, unit, sections=3)
        if attn.qkv.bias is not None:
            yield Share(attn.qkv, "bias", 0, unit, sections=3)
    else:
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj):
            yield from _rows(projection, unit)
    for name in ("q_bias", "k_bias", "v_bias"):  # EVA keeps them apart from a fused qkv; k_bias is a buffer of zeros
        if getattr(attn, name, None) is not None:
            yield Share(attn, name, 0, unit)
    yield from _rows(attn.norm, unit)
    yield head_columns(attn)


def neuron_shares(mlp: Any) -> Iterator[Share]:
    """Yield every tensor that neurons own: rows of fc1 (twice for a gated MLP), an inner norm, columns of fc2."""
    if mlp is None:
        return
    for linear, sections in inputs_of(mlp):
        yield from _rows(linear, 1, sections)
    yield from _rows(mlp.norm, 1)
    yield neuron_columns(mlp)


def inputs_of(mlp: Any) -> list[tuple[nn.Linear, int]]:
    """Return the linear layers before fc2, each with its number of rows per neuron; the gate comes first."""
    if isinstance(mlp, SwiGLU):
        return [(mlp.fc1_g, 1), (mlp.fc1_x, 1)]
    if isinstance(mlp, GluMlp):
        return [(mlp.fc1, 2)]
    if isinstance(mlp, Mlp):
        return [(mlp.fc1, 1)]
    raise TypeError(f"{type(mlp).__name__} is not an MLP that read_anatomy accepts")


def scored_neuron_weight(mlp: Any) -> Share:
    """Return the rows whose gradient scores a neuron: fc1, or the gate of a gated MLP."""
    linear, sections = inputs_of(mlp)[0]
    return Share(linear, "weight", 0, 1, sections)


def scored_head_weight(attn: Any) -> Share:
    """Return the tensor whose last section is the value rows, whose gradient scores a head."""
    if getattr(attn, "qkv", None) is not None:
        return Share(attn.qkv, "weight", 0, attn.head_dim, sections=3)
    return Share(attn.v_proj, "weight", 0, attn.head_dim)


def head_columns(attn: Any) -> Share:
    """Return the columns of proj that read a head: where its output leaves the attention."""
    return Share(attn.proj, "weight", 1, attn.head_dim)


def neuron_columns(mlp: Any) -> Share:
    """Return the columns of fc2, one of which reads each neuron."""
    return Share(mlp.fc2, "weight", 1, 1)


def give_bias(linear: nn.Linear) -> None:
    """Add a bias of zeros where there is none: a corrected layer needs one."""
    if linear.bias is None:
        linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features), linear.weight.requires_grad)


def _rows(module: nn.Module, unit: int, sections: int = 1) -> Iterator[Share]:
    for name in ("weight", "bias"):
        if isinstance(getattr(module, name, None), Tensor):
            yield Share(module, name, 0, unit, sections)


def attention_branch(block: Any, x: Tensor, extra: dict[str, Any]) -> Tensor:
    """Return the stream after the attention of a block; `extra` are the other arguments of its attention.

    `groups` among them: the groups of merged tokens so far, which a merge at the end of this branch changes.
    """
    if block.attn is None:
        return x if block.attention_added is None else x + block.attention_added
    groups = extra.get("groups")
    if groups is None:
        return x + block.drop_path1(_scaled(block, 1, block.attn(block.norm1(x), **extra)))
    y, arguments = block.norm1(x), groups.arguments(extra)
    attended = x + block.drop_path1(_scaled(block, 1, block.attn(y, **arguments)))
    return groups.merge(attended, block, y, arguments)


def mlp_branch(block: Any, x: Tensor, extra: dict[str, Any]) -> Tensor:
    """Return the stream after the MLP of a block, from the stream after its attention."""
    if block.mlp is None:
        return x if block.mlp_added is None else x + block.mlp_added
    return x + block.drop_path2(_scaled(block, 2, block.mlp(block.norm2(x))))


BRANCHES: dict[Part, Branch] = {"attention": attention_branch, "mlp": mlp_branch}


def branch_of(part: Part, block: Any) -> Callable[..., Tensor]:
    """Return one residual branch of a block as a function that is called as the block is."""
    return lambda x, **extra: BRANCHES[part](block, x, extra)


def whole_block(block: Any) -> Callable[..., Tensor]:
    """Return both branches of a block, one after the other, also of tokens that are merged on the way."""
    return lambda x, **extra: mlp_branch(block, attention_branch(block, x, extra), extra)


def output_of(block: Any, part: Part) -> nn.Linear | None:
    """Return the last layer of a part, proj or fc2; None if the part was removed."""
    if part == "attention":
        return None if block.attn is None else block.attn.proj
    return None if block.mlp is None else block.mlp.fc2


def layer_scale_of(block: Any, part: Part) -> Tensor | None:
    """Return the LayerScale after a part, (E,): a module in most families, a bare parameter in EVA's, or nothing."""
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
