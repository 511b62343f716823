"""The tensors of a `transformers` model under the names that timm has for them, every one accounted for.

Versions and model types name the same part in several ways; one table holds them all, since no name means two parts.
What a module of ours has no place for is left out, and a note says so where it mattered for the output. A name that is
not in the tables keeps its own, and is refused where the module is filled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import FileFormatError
from .transformers_config import Config, Heads

LAYER = re.compile(r"(?:encoder\.|model\.)?layers?\.(\d+)\.(.+)\.(weight|bias|lambda1)")
IN_LAYER = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "norm1": "norm1",
    "norm2": "norm2",
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "self_attn.out_proj": "attn.proj",
    "self_attn.o_proj": "attn.proj",
    "layer_scale1": "ls1",
    "layer_scale2": "ls2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "mlp.weights_in": "mlp.fc1",
    "mlp.weights_out": "mlp.fc2",
    "mlp.gate_proj": "mlp.fc1_g",
    "mlp.up_proj": "mlp.fc1_x",
    "mlp.down_proj": "mlp.fc2",
    **{f"attention.attention.{name}": f"attn.{name[0]}" for name in ("query", "key", "value")},
    **{f"{attention}.{letter}_proj": f"attn.{letter}" for attention in ("attention", "self_attn") for letter in "qkv"},
}
OUTSIDE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.class_embedding": "cls_token",
    "embeddings.distillation_token": "dist_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.position_embedding.weight": "pos_embed",
    "head.probe": "attn_pool.latent",
    "head.attention.in_proj_weight": "attn_pool.qkv.weight",
    "head.attention.in_proj_bias": "attn_pool.qkv.bias",
    **{
        f"{theirs}.{part}": f"{ours}.{part}"
        for theirs, ours in {
            "embeddings.patch_embeddings.projection": "patch_embed.proj",
            "embeddings.patch_embeddings": "patch_embed.proj",
            "embeddings.patch_embedding": "patch_embed.proj",
            "pre_layrnorm": "norm_pre",  # as it is written there
            "layernorm": "norm",
            "norm": "norm",
            "post_layernorm": "norm",
            "classifier": "head",
            "cls_classifier": "head",
            "distillation_classifier": "head_dist",
            "head.attention.out_proj": "attn_pool.proj",
            "head.layernorm": "attn_pool.norm",
            "head.mlp.fc1": "attn_pool.mlp.fc1",
            "head.mlp.fc2": "attn_pool.mlp.fc2",
        }.items()
        for part in ("weight", "bias")
    },
}
PATCHES = re.compile(r"(.*)embeddings\.patch_embeddings?(?:\.projection)?\.weight")
# What is left out, by the beginning of its name, and what a user should know of it.
LEFT_OUT = {
    "embeddings.mask_token": "",
    "embeddings.position_ids": "",
    "rope_embeddings.": "",
    "pooler.": "the pooler (a layer with tanh) is left out: the embedding is the class token after the last norm",
    "decoder.": "the decoder of its pretraining is left out",
    "visual_projection.": "the projection into the space of texts is left out: the embedding is what it would read",
    "text_model.": "the half for texts is left out",
    "text_projection.": "",
    "logit_scale": "",
    "logit_bias": "",
}
TWO_PARTS = (
    "the classifier reads the class token beside the mean of the patches, which no timm model does: it is left out"
)


@dataclass(frozen=True)
class Renamed:
    """Tensors under timm's names, the heads among them, and notes on what was left out."""

    tensors: dict[str, Tensor]
    heads: Heads
    notes: tuple[str, ...]


def rename(config: Config, tensors: Mapping[str, Tensor]) -> Renamed:
    """Return the tensors under timm's names, one by one: nothing is joined or resampled yet."""
    prefix = _prefix(config, tensors)
    named: dict[str, Tensor] = {}
    notes: dict[str, None] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(prefix)
        if (note := _left_out(name)) is not None:
            notes |= {note: None} if note else {}
            continue
        ours = _renamed(name)
        if ours in named:
            raise FileFormatError(f"{config.where}: {name} is there under two names")
        named[ours] = tensor.float()
    heads = _heads(config, named)
    if heads.classes and config.kind.classified is None:
        heads, named = Heads(), {name: value for name, value in named.items() if not name.startswith("head.")}
        notes |= {TWO_PARTS: None}
    return Renamed(named, heads, tuple(notes))


def _prefix(config: Config, tensors: Mapping[str, Tensor]) -> str:
    """Return what stands before the names of the ViT: the name that a larger model gives it."""
    found = sorted({match[1] for name in tensors if (match := PATCHES.fullmatch(name))})
    if len(found) != 1:
        many = f"several ViTs ({', '.join(found[:3])})" if found else "no patch embedding"
        raise FileFormatError(f"{config.where}: the weights have {many}, as no {config.model_type} has")
    return found[0]


def _left_out(name: str) -> str | None:
    return next((note for start, note in LEFT_OUT.items() if name.startswith(start)), None)


def _renamed(name: str) -> str:
    match = LAYER.fullmatch(name)
    if match is None or match[2] not in IN_LAYER:
        return OUTSIDE.get(name, name)
    part = "gamma" if match[3] == "lambda1" else match[3]
    return f"blocks.{match[1]}.{IN_LAYER[match[2]]}.{part}"


def _heads(config: Config, named: Mapping[str, Tensor]) -> Heads:
    head = named.get("head.weight")
    if head is None:
        return Heads()
    width = config.whole("hidden_size") * (1 if config.kind.classified else 2)
    if head.ndim != 2 or head.shape[1] != width:
        shape = tuple(head.shape)
        raise FileFormatError(
            f"{config.where}: the classifier has shape {shape}, one of this type reads {width} numbers"
        )
    return Heads(int(head.shape[0]), "head_dist.weight" in named)


def timm_state(config: Config, renamed: Renamed, image: tuple[int, int]) -> dict[str, Tensor]:
    """Return the state dict of the timm module for images of this height and width."""
    state = dict(renamed.tensors)
    _check_layers(config, state)
    rotary = config.model_type == "dinov3_vit"
    for i in range(config.whole("num_hidden_layers")):
        _join(state, f"blocks.{i}.", config, rotary)
    _split_pool(state, keep=config.kind.embedding == "map" and not renamed.heads.classes)
    if config.kind.pre_norm and renamed.heads.classes:  # the classifier of a CLIP reads tokens without the last norm
        state.pop("norm.weight", None), state.pop("norm.bias", None)
    if "cls_token" in state:
        state["cls_token"] = state["cls_token"].reshape(1, 1, -1)
    if "patch_embed.proj.weight" in state:
        state["patch_embed.proj.weight"] = _as_convolution(config, state["patch_embed.proj.weight"])
    if config.registers == 0 and state.get("reg_token", torch.zeros(1)).numel() == 0:
        state.pop("reg_token", None)
    if "dist_token" in state and not renamed.heads.with_teacher:
        state["reg_token"] = state.pop("dist_token")
    if "pos_embed" in state:
        _place(state, config, image)
    return state


def _check_layers(config: Config, state: Mapping[str, Tensor]) -> None:
    found = {int(name.split(".")[1]) for name in state if name.startswith("blocks.")}
    wanted = config.whole("num_hidden_layers")
    if found != set(range(wanted)):
        raise FileFormatError(
            f"{config.where}: num_hidden_layers is {wanted}, but the weights are of {len(found)} layers"
        )


def _join(state: dict[str, Tensor], block: str, config: Config, rotary: bool) -> None:
    """Join the queries, keys and values of a block, and give it the biases of zeros that timm always has."""
    for part in ("weight", "bias"):
        found = {letter: state.pop(f"{block}attn.{letter}.{part}", None) for letter in "qkv"}
        given = [tensor for tensor in found.values() if tensor is not None]
        if not given:
            continue
        if part == "bias" and rotary:
            state |= {f"{block}attn.{c}_bias": _or_zeros(found[c], given[0]) for c in "qv"}
            continue
        if missing := [letter for letter, tensor in found.items() if tensor is None]:
            raise FileFormatError(
                f"{config.where}: {block[:-1]} has no {part} of {missing[0]}, but of others of q, k, v"
            )
        state[f"{block}attn.qkv.{part}"] = torch.cat(given)
    if rotary:
        _as_eva(state, block, config)
    elif config.gated:  # newer files have the two halves apart
        for part in ("weight", "bias"):
            halves = [state.pop(f"{block}mlp.{name}.{part}", None) for name in ("fc1_g", "fc1_x")]
            if halves[0] is not None and halves[1] is not None:
                state[f"{block}mlp.fc1.{part}"] = torch.cat((halves[0], halves[1]))


def _as_eva(state: dict[str, Tensor], block: str, config: Config) -> None:
    for number in (1, 2):
        if (scale := state.pop(f"{block}ls{number}.gamma", None)) is not None:
            state[f"{block}gamma_{number}"] = scale
    if not config.gated:
        for part in ("weight", "bias"):
            if (tensor := state.pop(f"{block}mlp.fc1_x.{part}", None)) is not None:
                state[f"{block}mlp.fc1.{part}"] = tensor
    absent = {"attn.proj": "proj_bias", "mlp.fc1": "mlp_bias", "mlp.fc1_g": "mlp_bias", "mlp.fc1_x": "mlp_bias"}
    for name, key in {**absent, "mlp.fc2": "mlp_bias"}.items():
        weight = state.get(f"{block}{name}.weight")
        if weight is not None and config.values.get(key) is False:
            state.setdefault(f"{block}{name}.bias", weight.new_zeros(len(weight)))


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _split_pool(state: dict[str, Tensor], keep: bool) -> None:
    """Split the attention pooling as timm has it; leave it out where a classifier reads the patches instead."""
    for part in ("weight", "bias"):
        if (joined := state.pop(f"attn_pool.qkv.{part}", None)) is not None:
            width = len(joined) // 3
            state[f"attn_pool.q.{part}"], state[f"attn_pool.kv.{part}"] = joined[:width], joined[width:]
    if not keep:
        for name in [name for name in state if name.startswith("attn_pool.")]:
            del state[name]


def _as_convolution(config: Config, weight: Tensor) -> Tensor:
    """Return the patch embedding as a convolution: SigLIP 2 has a matrix on (row, column, channel) of a patch."""
    if weight.ndim != 2:
        return weight
    patch = config.sides("patch_size")
    if weight.shape[1] != 3 * patch[0] * patch[1]:
        raise FileFormatError(f"{config.where}: the patch embedding reads {weight.shape[1]} numbers, not 3 x {patch}")
    return weight.reshape(-1, *patch, 3).permute(0, 3, 1, 2).contiguous()


def _place(state: dict[str, Tensor], config: Config, image: tuple[int, int]) -> None:
    """Bring the positions to the grid of the images, and to the tokens that timm adds them to."""
    kind, patch = config.kind, config.sides("patch_size")
    positions = state["pos_embed"].reshape(1, -1, config.whole("hidden_size"))
    rows = config.grid[0] * config.grid[1] + kind.prefix
    if positions.shape[1] != rows:
        raise FileFormatError(f"{config.where}: has {positions.shape[1]} positions, its image_size needs {rows}")
    prefix, patches = positions[:, : kind.prefix], positions[:, kind.prefix :]
    wanted = (image[0] // patch[0], image[1] // patch[1])
    if wanted != config.grid:
        patches = _resampled(config, patches, wanted)
    if config.registers and "cls_token" in state:  # then timm adds no position to tokens in front
        state["cls_token"] = state["cls_token"] + prefix
        prefix = prefix[:, :0]
    state["pos_embed"] = torch.cat((prefix, patches), dim=1)


def _resampled(config: Config, patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resample the positions of the patches as `transformers` does for images of another size."""
    square = patches.reshape(1, *config.grid, -1).permute(0, 3, 1, 2)  # (1, E, rows, columns)
    smooth = config.model_type == "dinov2_with_registers"
    found = F.interpolate(square, size=grid, mode="bicubic", align_corners=False, antialias=smooth)
    return found.permute(0, 2, 3, 1).reshape(1, grid[0] * grid[1], -1)
