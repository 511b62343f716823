"""Families whose choice is for TensorRT, made without a GPU: that target is written into their manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from helpers.families import make_family
from snapvit_export.family.folder import read_family, write_manifest
from snapvit_export.family.manifest import Manifest
from snapvit_export.family.shipped import write_shipped


def for_tensorrt(manifest: Manifest, batch: int = 1) -> Manifest:
    """The same family as if it had been timed in TensorRT."""
    return msgspec.structs.replace(
        manifest, target=msgspec.structs.replace(manifest.target, runtime="tensorrt", batch=batch)
    )


def make_tensorrt_family(folder: Path, batch: int = 1, **asked: Any) -> Path:
    """A family with a choice, its model and its applications; `asked`: fields of the Request."""
    family = make_family(folder, **{"budget": "99%", "levers": ("width",), "flavour": "portable", **asked})
    write_manifest(family, write_shipped(family, for_tensorrt(read_family(family), batch)))
    return family
