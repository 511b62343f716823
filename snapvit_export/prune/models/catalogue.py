"""The supported families of models, with the sizes that timm has of each."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from ...storage.json import Value

FAMILIES: dict[str, tuple[str, ...]] = {
    "AugReg": (
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "vit_small_patch16_224.augreg_in21k_ft_in1k",
        "vit_base_patch16_224.augreg_in21k_ft_in1k",
        "vit_large_patch16_224.augreg_in21k_ft_in1k",
    ),
    "DeiT": ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
    "DeiT distilled": (
        "deit_tiny_distilled_patch16_224",
        "deit_small_distilled_patch16_224",
        "deit_base_distilled_patch16_224",
    ),
    "DeiT-III": ("deit3_small_patch16_224", "deit3_base_patch16_224", "deit3_large_patch16_224"),
    "DINO": ("vit_small_patch16_224.dino", "vit_base_patch16_224.dino"),
    "DINOv2": (
        "vit_small_patch14_dinov2",
        "vit_base_patch14_dinov2",
        "vit_large_patch14_dinov2",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch14_reg4_dinov2",
        "vit_large_patch14_reg4_dinov2",
    ),
    "MAE": ("vit_base_patch16_224.mae", "vit_large_patch16_224.mae"),
    "CLIP": ("vit_base_patch32_clip_224", "vit_base_patch16_clip_224", "vit_large_patch14_clip_224"),
    "SigLIP": ("vit_base_patch16_siglip_224", "vit_base_patch16_siglip_256", "vit_so400m_patch14_siglip_224"),
    "SigLIP 2": ("vit_base_patch16_siglip_224.v2_webli", "vit_base_patch32_siglip_256.v2_webli"),
    "EVA-02": ("eva02_tiny_patch14_224", "eva02_small_patch14_224", "eva02_base_patch14_224"),
    "DINOv3": (
        "vit_small_patch16_dinov3",
        "vit_small_plus_patch16_dinov3",
        "vit_base_patch16_dinov3",
        "vit_large_patch16_dinov3",
    ),
}


class CatalogueEntry(Value, frozen=True, kw_only=True):
    """One model and its size, computed from its Anatomy."""

    family: str
    name: str
    params: int
    flops: int
    blocks: int
    heads: int
    input_size: tuple[int, int]


def catalogue(pattern: str = "*") -> Iterator[CatalogueEntry]:
    """Yield the models whose name or family contains or matches `pattern`, without allocating their weights."""
    import timm
    import torch

    from .read_anatomy import read_anatomy

    for family, names in FAMILIES.items():
        for name in names:
            if not any(_matches(text, pattern) for text in (family, name)):
                continue
            with torch.device("meta"):
                anatomy = read_anatomy(timm.create_model(name), name)
            yield CatalogueEntry(
                family=family,
                name=name,
                params=anatomy.params(),
                flops=anatomy.flops(),
                blocks=len(anatomy.blocks),
                heads=anatomy.blocks[0].heads,
                input_size=anatomy.image,
            )


def _matches(text: str, pattern: str) -> bool:
    text, pattern = text.lower(), pattern.lower()
    return pattern in text or fnmatchcase(text, pattern)
