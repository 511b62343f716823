"""The layout of Pascal VOC: `JPEGImages`, `SegmentationClass`, and which pictures in `ImageSets/Segmentation`.

`val.txt` is what the set reports on: its test labels were never given out.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import SnapvitError, first_line
from .source import Source, open_picture

PICTURES, MASKS, LISTS = "JPEGImages", "SegmentationClass", "ImageSets/Segmentation"


def is_voc(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return all((folder / part).is_dir() for part in (PICTURES, MASKS, LISTS))


def voc_splits(folder: Path) -> dict[str, Source]:
    """Pictures with masks: `train`, and `val` as the test split. They have no labels."""
    return {split: _listed(folder, file) for split, file in (("train", "train.txt"), ("test", "val.txt"))}


def _listed(folder: Path, file: str) -> Source:
    path = folder / LISTS / file
    try:
        names = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SnapvitError(f"{path}: cannot be read ({first_line(error)}). Pascal VOC has one there") from error
    if not names:
        raise SnapvitError(f"{path}: names no images. Write one name per line, without .jpg")
    if strange := [name for name in names if "/" in name or "\\" in name or name.startswith(".")]:
        raise SnapvitError(
            f"{path}: '{strange[0]}' is not the bare name of a picture. Write it without folder and .jpg"
        )
    paths = [folder / PICTURES / f"{name}.jpg" for name in names]
    return Source(str(path), lambda i: open_picture(paths[i]), len(paths), lambda i: str(paths[i]))
