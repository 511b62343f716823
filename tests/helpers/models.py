"""Tiny models of every family, with weights that matter everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import timm
import torch

from snapvit_export.calibration.images import Images
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.models.load import Model, ModelDescription, save_model
from snapvit_export.prune.models.read_anatomy import read_anatomy

TINY = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=5)
FAMILIES = {
    "AugReg": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "DeiT": "deit_tiny_patch16_224",
    "DeiT distilled": "deit_tiny_distilled_patch16_224",
    "DeiT-III": "deit3_small_patch16_224",
    "DINO": "vit_small_patch16_224.dino",
    "DINOv2": "vit_small_patch14_dinov2",
    "DINOv2 registers": "vit_small_patch14_reg4_dinov2",
    "DINOv2 SwiGLU": "vit_giant_patch14_dinov2",
    "MAE": "vit_base_patch16_224.mae",
    "CLIP": "vit_base_patch32_clip_224",
    "SigLIP": "vit_base_patch16_siglip_224",
    "SigLIP 2": "vit_base_patch16_siglip_224.v2_webli",
    "EVA-02": "eva02_tiny_patch14_224",
    "EVA-02 with inner norm": "eva02_base_patch14_224",
    "DINOv3": "vit_small_patch16_dinov3",
    "DINOv3 SwiGLU": "vit_small_plus_patch16_dinov3",
}
UNUSUAL = [  # parts that the families combine in other ways: arguments of `small`
    ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    ("vit_tiny_patch16_224", {"global_pool": "avg", "pool_include_prefix": True, "reg_tokens": 1}),
    ("vit_tiny_patch16_224", {"global_pool": "max", "reg_tokens": 2}),
    ("vit_tiny_patch16_224", {"global_pool": "avgmax", "class_token": False}),
    ("vit_tiny_patch16_224", {"qk_norm": True, "no_embed_class": True, "reg_tokens": 3}),
    ("vit_tiny_patch16_224", {"global_pool": "map", "pool_include_prefix": True}),
    ("vit_tiny_patch16_224", {"pos_embed": "none", "scale_attn_norm": True}),
    ("vit_tiny_patch16_224", {"qkv_bias": False, "init_values": 0.5}),
    ("vit_small_patch16_dinov3", {"global_pool": "token"}),
    ("vit_small_patch16_dinov3", {"global_pool": "map", "attn_pool_num_heads": 4}),
    ("vit_medium_patch16_rope_reg1_gap_256", {}),
    ("vit_medium_patch16_rope_reg1_gap_256", {"global_pool": "token", "num_reg_tokens": 0, "class_token": True}),
    ("eva_giant_patch14_224", {"global_pool": "avg"}),  # EVA without rotary embeddings
]
EVERY_KIND = [(name, {}) for name in FAMILIES.values()] + UNUSUAL
SOME_MODELS = [  # where trying all families would take too long
    "deit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "vit_base_patch16_siglip_224",
    "eva02_tiny_patch14_224",
]


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> torch.nn.Module:
    """Weights large enough that every part of the network matters; timm's own init leaves some at zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(0, scale, generator=generator)
    return module.eval()


def description(**changes: object) -> ModelDescription:
    """What `model.json` says of the plain tiny ViT."""
    settings = dict(
        name="tiny",
        architecture="vit_tiny_patch16_224",
        kwargs=TINY,
        preprocessing=Preprocessing(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0),
    )
    return ModelDescription(**{**settings, **changes})  # type: ignore[arg-type]


def make_model(kwargs: dict[str, int] = TINY) -> Model:
    """A plain ViT of that shape with random weights."""
    module = randomise(timm.create_model("vit_tiny_patch16_224", **kwargs))
    preprocessing = Preprocessing(
        input_size=(3, kwargs["img_size"], kwargs["img_size"]), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0
    )
    described = description(kwargs=kwargs, preprocessing=preprocessing)
    return Model(module, read_anatomy(module, "tiny"), described)


def make_model_folder(folder: Path, kwargs: dict[str, int] = TINY, head: float = 1.0) -> Path:
    """The same, saved as a model folder; `head`: times the classifier about its mean, so that its answers differ."""
    model = make_model(kwargs)
    if head != 1:
        classifier, pixels = model.module.head, (16, 3, kwargs["img_size"], kwargs["img_size"])
        classifier.weight.data *= head
        with torch.no_grad():
            answers = model.module(2 * torch.rand(pixels, generator=torch.Generator().manual_seed(0)) - 1)
        classifier.bias.data -= answers.mean(0)
    save_model(model.module, model.description, folder)
    return folder


def small(name: str, **extra) -> tuple[torch.nn.Module, dict]:
    """The family's own architecture at a size that tests can afford."""
    kwargs = dict(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=7, **extra)
    return randomise(timm.create_model(name, **kwargs)), kwargs


def as_model(module: torch.nn.Module, name: str, kwargs: dict) -> Model:
    """A module with its anatomy and a description."""
    anatomy = read_anatomy(module, name)
    size = (3, *anatomy.image)
    preprocessing = Preprocessing(input_size=size, mean=(0.5,) * 3, std=(0.5,) * 3)
    described = ModelDescription(name=name, architecture=name, kwargs=kwargs, preprocessing=preprocessing)
    return Model(module, anatomy, described)


def model_of(name: str, **extra) -> Model:
    """A small model of that family, described so that it can be saved."""
    module, kwargs = small(name, **extra)
    return as_model(module, name, kwargs)


def deep(name: str) -> Model:
    """A small model of that family whose output biases matter."""
    module, _ = small(name)
    generator = torch.Generator().manual_seed(3)
    for block in blocks_of(module):
        for linear in (block.attn.proj, block.mlp.fc2):
            if linear.bias is not None:
                linear.bias.data = torch.randn(linear.bias.shape, generator=generator)
    return as_model(module, name, {})


@torch.no_grad()
def features(module: torch.nn.Module, images: Images) -> np.ndarray:
    """What goes into the classifier, for all images at once: (N, C)."""
    inputs = torch.from_numpy(next(images.batches(len(images))))
    return module.forward_head(module.forward_features(inputs), pre_logits=True).numpy()
