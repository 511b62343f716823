"""The models of the SnapViT paper: by their names in timm and in the released code. Light.

The released code calls the distilled DeiT-B/16 `deit-vit-b-16`, takes SigLIP 2 from open_clip at 224 (B/16) and 256
(giantopt), and DINOv3 from its authors at 224, where timm's configuration says 256. It names no DINOv3 S/16 and L/16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedModel:
    """One model of the paper."""

    timm: str
    released: str | None = None  # what the released code calls it; None: it has no name for it
    pool: str | None = None  # None: as timm builds the model
    image_size: int | None = None


PUBLISHED = (
    PublishedModel("vit_small_patch16_224.augreg_in21k_ft_in1k", "augreg-vit-s-16-in21k-ft-in1k"),
    PublishedModel("vit_base_patch16_224.augreg_in21k_ft_in1k", "augreg-vit-b-16-in21k-ft-in1k"),
    PublishedModel("vit_large_patch16_224.augreg_in21k_ft_in1k", "augreg-vit-l-16-in21k-ft-in1k"),
    PublishedModel("deit_base_distilled_patch16_224.fb_in1k", "deit-vit-b-16"),
    PublishedModel("deit3_small_patch16_224.fb_in22k_ft_in1k", "deit-3-vit-s-16"),
    PublishedModel("deit3_base_patch16_224.fb_in22k_ft_in1k", "deit-3-vit-b-16"),
    PublishedModel("deit3_large_patch16_224.fb_in22k_ft_in1k", "deit-3-vit-l-16"),
    PublishedModel("deit3_huge_patch14_224.fb_in22k_ft_in1k", "deit-3-vit-h-14"),
    PublishedModel("vit_small_patch16_224.dino", "dino_vits16"),
    PublishedModel("vit_base_patch16_224.dino", "dino_vitb16"),
    PublishedModel("vit_small_patch16_dinov3.lvd1689m", None, "token", 224),
    PublishedModel("vit_base_patch16_dinov3.lvd1689m", "dinov3_vitb16", "token", 224),
    PublishedModel("vit_large_patch16_dinov3.lvd1689m", None, "token", 224),
    PublishedModel("vit_huge_plus_patch16_dinov3.lvd1689m", "dinov3_vith16plus", "token", 224),
    PublishedModel("vit_base_patch16_siglip_224.v2_webli", "siglip2-vit-b16"),
    PublishedModel("vit_giantopt_patch16_siglip_256.v2_webli", "siglip2-vit-g16"),
)
# Tags whose weights timm takes where a name has none.
_DEFAULT_TAGS = {
    "deit_base_distilled_patch16_224": "fb_in1k",
    "vit_small_patch16_dinov3": "lvd1689m",
    "vit_base_patch16_dinov3": "lvd1689m",
    "vit_large_patch16_dinov3": "lvd1689m",
    "vit_huge_plus_patch16_dinov3": "lvd1689m",
    "vit_base_patch16_siglip_224": "v2_webli",
    "vit_giantopt_patch16_siglip_256": "v2_webli",
}
RELEASED_NAMES = tuple(model.released for model in PUBLISHED if model.released is not None)


def published(name: str) -> PublishedModel | None:
    """Return the model of the paper that timm, or the released code, calls so; None if there is none.

    >>> published("vit_base_patch16_224.dino").released
    'dino_vitb16'
    """
    whole = f"{name}.{_DEFAULT_TAGS[name]}" if name in _DEFAULT_TAGS else name
    return next((model for model in PUBLISHED if whole in (model.timm, model.released)), None)
