"""Loads the pruned model beside this file with timm and safetensors alone, copied there as `load.py`.

    from load import load, transform
    model = load()                                  # a timm module, in eval mode
    logits = model(transform()(image)[None])        # of a PIL image

model.json says how timm builds the dense model and how many heads and neurons each block keeps; model.safetensors has
what is left of the weights. timm has no module for merged tokens, and none for the attention of EVA-02 and DINOv3 with
fewer heads: such a model is refused here, and loaded with `snapvit_export.load_model`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


class Constant(nn.Module):
    """In the place of an attention or MLP that was removed: the vector that its block still adds to every token."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.register_buffer("vector", vector, persistent=False)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        return self.vector


def load(folder: Path = HERE) -> nn.Module:
    """Return the pruned model as a timm module, in eval mode."""
    described = json.loads((folder / "model.json").read_text())
    arguments = {**described["kwargs"], "img_size": described["preprocessing"]["input_size"][1:]}
    eps = arguments.pop("norm_eps", None)
    model: Any = timm.create_model(described["architecture"], pretrained=False, **arguments).eval()
    weights = load_file(folder / "model.safetensors")
    if described["plan"] is not None:
        _cut(model, described["plan"], weights)
    for name, tensor in weights.items():
        _put(model, name, tensor)
    if missing := sorted(set(model.state_dict()) - set(weights)):
        raise ValueError(f"{folder}: model.safetensors lacks {missing[0]}")
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
        elif isinstance(part, nn.LayerNorm):
            part.normalized_shape, part.eps = tuple(part.weight.shape), part.eps if eps is None else eps
    return model


def transform(folder: Path = HERE) -> Any:
    """Return what turns a PIL image into the model's input, (3, H, W)."""
    from timm.data import create_transform

    steps = json.loads((folder / "model.json").read_text())["preprocessing"]
    names = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    return create_transform(**{name: steps[name] for name in names})


def _cut(model: Any, plan: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Give every block the heads and neurons that it keeps; a part without any becomes a Constant."""
    if any(plan["merged"]):
        raise ValueError("this model merges tokens, for which timm has no module. Load it with snapvit_export")
    for i, (block, heads, neurons) in enumerate(zip(model.blocks, plan["heads"], plan["neurons"])):
        if heads and heads != block.attn.num_heads:
            if not hasattr(block.attn, "attn_dim"):
                raise ValueError("timm's attention of this model takes all heads or none. Load it with snapvit_export")
            block.attn.num_heads, block.attn.attn_dim = heads, heads * block.attn.head_dim
        for number, part, kept, left in ((1, "attn", heads, "attention_added"), (2, "mlp", neurons, "mlp_added")):
            if not kept:
                vector = weights.pop(f"blocks.{i}.{left}", torch.zeros(model.embed_dim))
                setattr(block, part, Constant(vector))
                setattr(block, f"norm{number}", nn.Identity())
                if hasattr(block, f"ls{number}"):
                    setattr(block, f"ls{number}", nn.Identity())
                if getattr(block, f"gamma_{number}", None) is not None:
                    delattr(block, f"gamma_{number}")
                    block.register_buffer(f"gamma_{number}", torch.ones(model.embed_dim), persistent=False)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor where its name says, whatever shape was there."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if not hasattr(owner, leaf):
        raise ValueError(f"{name} has no place in {type(model).__name__}")
    if leaf in dict(owner.named_buffers(recurse=False)):
        owner.register_buffer(leaf, tensor)
    else:
        setattr(owner, leaf, nn.Parameter(tensor))


if __name__ == "__main__":
    loaded = load()
    print(f"{sum(parameter.numel() for parameter in loaded.parameters())} parameters")
