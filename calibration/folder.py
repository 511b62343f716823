"""A folder of images, flat or with one sub-folder per class.

A `.png` beside a `.jpg` of the same name is its mask (`masks`), not an image of its own. The sub-folders of Shaders21k
and DiffusionDB are no classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from ..errors import SnapvitError
from .decode import open_image
from .source import Source, by_name

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"})
PHOTOS = frozenset({".jpg", ".jpeg"})
SHADERS = re.compile(r"shaders(1k|21k)(_\w+)?", re.IGNORECASE)  # the folder that its archive is unpacked into
PART = re.compile(r"part-\d{6}")  # of DiffusionDB


def folder_source(folder: Path) -> Source:
    """All images below a folder. Images in one sub-folder per class have that class as their label."""
    if not os.path.isdir(folder):
        raise SnapvitError(f"{folder}: no such image folder. Name a folder of images that is there")
    found = {path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()}
    masks = {path.with_suffix(".png") for path in found if path.suffix.lower() in PHOTOS}
    # Parts are sorted, not paths: those sort otherwise on Windows.
    parts = sorted(path.relative_to(folder).parts for path in found - masks)
    if not parts:
        raise SnapvitError(f"{folder}: holds no images ({', '.join(sorted(SUFFIXES))}). Give --data another folder")
    paths = [folder.joinpath(*names) for names in parts]
    nested = all(len(names) > 1 for names in parts) and _are_classes(folder, {names[0] for names in parts})
    labels, classes = by_name([names[0] for names in parts]) if nested else (None, [])
    return Source(
        str(folder),
        open=lambda i: open_image(paths[i]),
        count=len(paths),
        title=lambda i: str(paths[i]),
        labels=labels,
        classes=classes,
    )


def _are_classes(folder: Path, names: Collection[str]) -> bool:
    """Return False for sets whose sub-folders only keep each of them small."""
    above = folder.absolute()
    if any(SHADERS.fullmatch(part) for part in (above.name, above.parent.name)):  # the set, or its `train`
        return False
    return not all(PART.fullmatch(name) for name in names)
