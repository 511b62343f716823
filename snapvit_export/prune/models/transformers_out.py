"""A pruned model as `transformers` saves one, where its config can say what the model is.

It can for a plain ViT whose blocks all keep the same number of heads and of neurons: then it is a `vit` with another
`intermediate_size` and, from version 5.10 on, another number of heads of the same `head_dim`. For all else there is a
reason why not.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration.preprocessing import Preprocessing
from ...calibration.preprocessor_config import INTERPOLATIONS
from ...model.anatomy import Anatomy
from ...storage.atomic import write_atomically
from ...storage.json import to_json
from ..blocks.timm_blocks import blocks_of

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
IN_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def reason_against(anatomy: Anatomy) -> str | None:
    """Return why a config of `transformers` cannot describe a model; None if it can."""
    first = anatomy.blocks[0]
    if any(anatomy.merges):
        return "its tokens are merged"
    for what, counts in (("heads", anatomy.heads), ("neurons", anatomy.neurons)):
        if not all(counts):
            part = "attention" if what == "heads" else "MLP"
            return f"block {counts.index(0)} has no {part}"
        if len(set(counts)) > 1:
            return f"its blocks keep different numbers of {what}, {min(counts)} to {max(counts)}"
    plain = anatomy.family == "vit" and anatomy.class_token and not (anatomy.registers or anatomy.pre_norm)
    tokens = anatomy.positions == anatomy.patches + 1 and anatomy.rope == "none" and anatomy.pooling == "token"
    norms = anatomy.norm == "layer" and anatomy.final_norm and not anatomy.fc_norm
    inner = first.qk_norm or first.attn_norm or first.mlp_norm or first.layer_scale or first.mlp != "plain"
    if not (plain and tokens and norms) or inner or first.activation not in ACTIVATIONS:
        return "only plain ViTs (a class token, learnt positions, no LayerScale) are written for it"
    return None


def write_transformers(
    folder: Path, module: nn.Module, anatomy: Anatomy, preprocessing: Preprocessing, labels: tuple[str, ...]
) -> None:
    """Write `config.json`, `model.safetensors` and `preprocessor_config.json` of a model that has no reason against."""
    from safetensors.torch import save

    assert reason_against(anatomy) is None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(_tensors(module, anatomy), {"format": "pt"}))
    write_atomically(folder / "config.json", to_json(_config(anatomy, labels)))
    write_atomically(folder / "preprocessor_config.json", to_json(_preprocessor(preprocessing)))


def _config(anatomy: Anatomy, labels: tuple[str, ...]) -> dict[str, Any]:
    first = anatomy.blocks[0]
    config: dict[str, Any] = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if anatomy.classes else "ViTModel"],
        "hidden_size": anatomy.embed_dim,
        "num_hidden_layers": len(anatomy.blocks),
        "num_attention_heads": first.heads,
        "intermediate_size": first.hidden,
        "hidden_act": ACTIVATIONS[first.activation],
        "layer_norm_eps": anatomy.norm_eps,
        "image_size": _side_or_sides(anatomy.image),
        "patch_size": _side_or_sides(anatomy.patch),
        "num_channels": anatomy.channels,
        "qkv_bias": "q" in first.biases,
    }
    if first.heads * first.head_dim != anatomy.embed_dim:
        config["head_dim"] = first.head_dim
    if anatomy.classes:
        names = labels or [f"LABEL_{i}" for i in range(anatomy.classes)]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    return config


def _side_or_sides(sides: tuple[int, int]) -> int | list[int]:
    return sides[0] if sides[0] == sides[1] else list(sides)


def _tensors(module: Any, anatomy: Anatomy) -> dict[str, Tensor]:
    """Return the tensors under the names that all versions of `transformers` read."""
    outer = "vit." if anatomy.classes else ""
    found = {
        f"{outer}embeddings.cls_token": module.cls_token,
        f"{outer}embeddings.position_embeddings": module.pos_embed,
        **_linear(f"{outer}embeddings.patch_embeddings.projection", module.patch_embed.proj),
        **_linear(f"{outer}layernorm", module.norm),
    }
    for i, block in enumerate(blocks_of(module)):
        layer = f"{outer}encoder.layer.{i}."
        for ours, theirs in IN_BLOCK.items():
            found |= _linear(f"{layer}{theirs}", block.get_submodule(ours))
        for part in ("weight", "bias"):
            if (joined := getattr(block.attn.qkv, part)) is not None:
                names = (f"{layer}attention.attention.{name}.{part}" for name in ("query", "key", "value"))
                found |= dict(zip(names, joined.chunk(3)))
    if anatomy.classes:
        found |= _linear("classifier", module.head)
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def _linear(name: str, layer: Any) -> dict[str, Tensor]:
    """Return weight and bias of a layer; `transformers` has a bias everywhere, if only of zeros."""
    bias = torch.zeros(len(layer.weight)) if layer.bias is None else layer.bias
    return {f"{name}.weight": layer.weight, f"{name}.bias": bias}


def _preprocessor(steps: Preprocessing) -> dict[str, Any]:
    height, width = steps.input_size[1:]
    resized = [math.floor(side / steps.crop_pct) for side in (height, width)]
    squash = steps.crop_mode == "squash"
    return {
        "image_processor_type": "DeiTImageProcessor" if squash else "BitImageProcessor",
        "do_resize": True,
        "size": {"height": resized[0], "width": resized[1]} if squash else {"shortest_edge": min(resized)},
        "resample": INTERPOLATIONS.index(steps.interpolation),
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(steps.mean),
        "image_std": list(steps.std),
    }
