"""Family folders, exported for real from tiny models and noise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.images import make_image_folder
from helpers.models import TINY, make_model_folder
from helpers.timing import short_timings
from snapvit_export.allocation.recipe import correcting_settings
from snapvit_export.workflows.export import Request, export

MEDIUM = dict(img_size=96, patch_size=8, embed_dim=96, depth=4, num_heads=6, num_classes=5)


def make_family(
    folder: Path,
    recipe: str = "default",
    correct: bool = True,
    kwargs: dict[str, int] = TINY,
    head: float = 1.0,
    **asked: Any,
) -> Path:
    """Make `family` beside the `model` and the `images` that it comes from, all in `folder`; return the family.

    `head`: times the model's classifier. `asked`: fields of the Request, such as `sparsity`.
    """
    make_model_folder(folder / "model", kwargs, head)
    make_image_folder(folder / "images")
    settings = correcting_settings(recipe, correct, images=16)
    made_from = dict(model=str(folder / "model"), data=str(folder / "images"), out=folder / "family")
    with short_timings():
        export(Request(**made_from, settings=settings, **asked))
    return folder / "family"


def make_family_and_elastic(folder: Path) -> Path:
    """`family` and `elastic` of one ranking, beside the `model` and the `images` that they come from.

    Its answers to noise differ enough from image to image for a divergence to say something.
    """
    make_family(folder, kwargs=MEDIUM, head=30.0, sparsity=[0.3, 0.6], reference=True)
    command = ["pack", "--model", folder / "model", "--data", folder / "images", "--images", "16"]
    command += ["--ranking", folder / "family" / "ranking.safetensors", "--out", folder / "elastic"]
    subprocess.run([sys.executable, "-m", "snapvit_export.cli", *map(str, command)], check=True, capture_output=True)
    return folder
