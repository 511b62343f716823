"""Family folders, exported for real from tiny models and noise."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from helpers.images import make_image_folder
from helpers.models import make_model_folder
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.workflows.export import Request, export

MEDIUM = dict(img_size=96, patch_size=8, embed_dim=96, depth=4, num_heads=6, num_classes=5)


def make_family_and_elastic(folder: Path) -> Path:
    """`family` and `elastic` of one ranking, beside the `model` and the `images` that they come from."""
    make_model_folder(folder / "model", MEDIUM)
    make_image_folder(folder / "images")
    request = Request(
        model=str(folder / "model"),
        data=str(folder / "images"),
        out=folder / "family",
        settings=make_settings("default", images=16),
    )
    export(replace(request, sparsity=[0.3, 0.6]))
    command = ["pack", "--model", folder / "model", "--data", folder / "images", "--images", "16"]
    command += ["--ranking", folder / "family" / "ranking.safetensors", "--out", folder / "elastic"]
    subprocess.run([sys.executable, "-m", "snapvit_export.cli", *map(str, command)], check=True, capture_output=True)
    return folder
