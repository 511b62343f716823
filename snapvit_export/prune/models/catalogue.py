"""The supported families of models with their sizes: of timm by name, and some that `transformers` has on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

from ...model.anatomy import Anatomy
from ...model.published import published
from ...storage.json import Value
from .timm_modules import anatomy_without_weights
from .transformers_config import Heads, read_config, timm_arguments

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
    "DeiT-III": (
        "deit3_small_patch16_224",
        "deit3_base_patch16_224",
        "deit3_large_patch16_224",
        "deit3_small_patch16_224.fb_in22k_ft_in1k",
        "deit3_base_patch16_224.fb_in22k_ft_in1k",
        "deit3_large_patch16_224.fb_in22k_ft_in1k",
        "deit3_huge_patch14_224.fb_in22k_ft_in1k",
    ),
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
    "SigLIP": (  # whose names alone mean the weights of SigLIP 2
        "vit_base_patch16_siglip_224.webli",
        "vit_base_patch16_siglip_256.webli",
        "vit_so400m_patch14_siglip_224.webli",
    ),
    "SigLIP 2": (
        "vit_base_patch16_siglip_224.v2_webli",
        "vit_base_patch32_siglip_256.v2_webli",
        "vit_giantopt_patch16_siglip_256.v2_webli",
    ),
    "EVA-02": ("eva02_tiny_patch14_224", "eva02_small_patch14_224", "eva02_base_patch14_224"),
    "DINOv3": (
        "vit_small_patch16_dinov3",
        "vit_small_plus_patch16_dinov3",
        "vit_base_patch16_dinov3",
        "vit_large_patch16_dinov3",
        "vit_huge_plus_patch16_dinov3",
    ),
}
# Names on the hub by model type, with what their config.json says that is not usual; a number: outputs of a classifier.
_TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
_HUGE = {"hidden_size": 1280, "num_attention_heads": 16, "intermediate_size": 5120, "num_hidden_layers": 32}
TRANSFORMERS: dict[str, tuple[tuple[str, dict[str, Any], Heads], ...]] = {
    "vit": (
        ("facebook/deit-tiny-patch16-224", _TINY, Heads(1000)),
        ("google/vit-base-patch16-224", {}, Heads(1000)),
    ),
    "deit": (("facebook/deit-tiny-distilled-patch16-224", _TINY, Heads(1000, with_teacher=True)),),
    "dinov2": (
        ("facebook/dinov2-small", {"hidden_size": 384, "num_attention_heads": 6}, Heads()),
        ("facebook/dinov2-base", {}, Heads()),
    ),
    "dinov2_with_registers": (("facebook/dinov2-with-registers-base", {"patch_size": 14}, Heads()),),
    "dinov3_vit": (("facebook/dinov3-vits16-pretrain-lvd1689m", {"num_register_tokens": 4}, Heads()),),
    "siglip": (
        ("google/siglip-base-patch16-224", {}, Heads()),
        ("google/siglip2-base-patch16-224", {}, Heads()),
    ),
    "siglip2": (("google/siglip2-base-patch16-naflex", {}, Heads()),),
    "clip": (
        ("openai/clip-vit-base-patch32", {}, Heads()),
        ("openai/clip-vit-large-patch14", {**_LARGE, "patch_size": 14}, Heads()),
    ),
    "vit_mae": (("facebook/vit-mae-base", {}, Heads()),),
    "vit_msn": (("facebook/vit-msn-base", {}, Heads()),),
    "ijepa": (("facebook/ijepa_vith14_1k", {**_HUGE, "patch_size": 14}, Heads()),),
}


class CatalogueEntry(Value, frozen=True, kw_only=True):
    """One model and its size, computed from its Anatomy."""

    source: Literal["timm", "transformers"] = "timm"
    family: str
    name: str
    params: int
    flops: int
    blocks: int
    heads: int
    input_size: tuple[int, int]
    paper: str | None = None  # the options with which the SnapViT paper has it, perhaps none; None: it has not


def catalogue(pattern: str = "*") -> Iterator[CatalogueEntry]:
    """Yield the models whose name or family contains or matches `pattern`, without allocating their weights.

    The models of the SnapViT paper are a family of their own besides: `paper`.
    """
    for family, names in FAMILIES.items():
        for name in names:
            of_paper = ("paper",) if published(name) is not None else ()
            if any(_matches(text, pattern) for text in (family, name, *of_paper)):
                yield _entry("timm", family, name, anatomy_without_weights(name, {}))
    for family, models in TRANSFORMERS.items():
        for name, changes, heads in models:
            if any(_matches(text, pattern) for text in ("transformers", family, name)):
                config = read_config({"model_type": family, **changes, "vision_config": changes}, name)
                yield _entry(
                    "transformers", family, name, anatomy_without_weights(*timm_arguments(config, heads, config.image))
                )


def _entry(source: Literal["timm", "transformers"], family: str, name: str, anatomy: Anatomy) -> CatalogueEntry:
    return CatalogueEntry(
        source=source,
        family=family,
        name=name,
        params=anatomy.params(),
        flops=anatomy.flops(),
        blocks=len(anatomy.blocks),
        heads=anatomy.blocks[0].heads,
        input_size=anatomy.image,
        paper=_paper_options(name),
    )


def _paper_options(name: str) -> str | None:
    """Return the options with which the paper has a model; None of one that it has not."""
    found = published(name)
    if found is None:
        return None
    given = {"--pool": found.pool, "--image-size": found.image_size}
    return " ".join(f"{option} {value}" for option, value in given.items() if value is not None)


def _matches(text: str, pattern: str) -> bool:
    text, pattern = text.lower(), pattern.lower()
    return pattern in text or fnmatchcase(text, pattern)
