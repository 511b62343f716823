"""What follows from the model in the published recipe: more search, and stronger damping where activations are extreme.

The paper searches 500 evaluations on six pairs for DINOv3 and SigLIP 2, whose covariances have extreme entries, and
damps these by a tenth of the largest; all others have 50 evaluations, four pairs and the mean. Light.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model.anatomy import Anatomy
from ..model.published import published
from .planner import PUBLISHED_PAIRS
from .recipe import Settings

PUBLISHED_RECIPE = "snapvit"
FOR_EXTREME: dict[str, Any] = {"evaluations": 500, "pairs": PUBLISHED_PAIRS, "damping": "max:0.1"}


def follow_model(settings: Settings, name: str, architecture: str, anatomy: Anatomy) -> Settings:
    """Return the settings of the published recipe for this model; what was given itself stays, as do other recipes.

    >>> follow_model(make_settings("snapvit"), "vit_base_patch16_siglip_224.v2_webli", "", anatomy).evaluations
    500
    """
    if settings.recipe != PUBLISHED_RECIPE or not is_extreme(name, architecture, anatomy):
        return settings
    return replace(settings, **{option: v for option, v in FOR_EXTREME.items() if option not in settings.given})


def is_extreme(name: str, architecture: str, anatomy: Anatomy) -> bool:
    """Return True of a DINOv3, by its rotary embedding, and of a SigLIP 2, by its name."""
    return anatomy.rope == "dinov3" or any(_is_siglip2(each.lower()) for each in (name, architecture))


def _is_siglip2(name: str) -> bool:
    if "siglip2" in name or ("siglip" in name and ".v2_" in name):
        return True
    known = published(name)
    return known is not None and "siglip" in known.timm
