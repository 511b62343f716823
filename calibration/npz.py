"""An `.npz` file: `images`, uint8 (N, H, W, 3) or grey (N, H, W), and if there are any `labels`, whole numbers (N,).

It may also hold whole splits: `train_images` and `train_labels`, the same for `valid` and `test`.

The arrays are held in memory as they are. Nothing pickled is ever loaded.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line
from ..storage.reading import MOST_ARRAYS, check_archive, check_readable
from .decode import as_rgb
from .source import Source, by_number

if TYPE_CHECKING:
    from PIL.Image import Image

SPLITS = ("train", "valid", "test")
Arrays = dict[str, npt.NDArray[Any]]


def npz_source(path: Path) -> Source:
    """Open the images of an `.npz` file."""
    return _source(path, _load(path, ("",)), "")


def npz_splits(path: Path) -> dict[str, Source]:
    """Open the splits of an `.npz` file by name, with the same classes in all; none if it has only `images`."""
    arrays = _load(path, [f"{split}_" for split in SPLITS])
    splits = {split: _source(path, arrays, f"{split}_") for split in SPLITS if f"{split}_images" in arrays}
    most = max((source.classes for source in splits.values()), key=len, default=())  # numbers: the longer has all
    return {split: replace(source, classes=most if source.classes else ()) for split, source in splits.items()}


def _source(path: Path, arrays: Arrays, prefix: str) -> Source:
    pixels = _checked_images(arrays, f"{prefix}images", path)
    labels: list[int] | None = None
    classes: list[str] = []
    if f"{prefix}labels" in arrays:
        labels, classes = _checked_labels(arrays[f"{prefix}labels"], len(pixels), f"{prefix}labels", path)

    def title(i: int) -> str:
        return f"{path} {prefix}image {i}"

    return Source(
        str(path),
        open=lambda i: _image(pixels[i], title(i)),
        count=len(pixels),
        title=title,
        labels=labels,
        classes=classes,
    )


def _image(pixels: npt.NDArray[np.uint8], title: str) -> Image:
    from PIL import Image

    return as_rgb(Image.fromarray(pixels), title)


def _load(path: Path, prefixes: Sequence[str]) -> Arrays:
    advice = "Save it with numpy.savez, of plain arrays"
    if not os.path.isfile(path):
        raise SnapvitError(f"{path}: no such .npz file. Give --data a file that exists")
    check_readable(path, MOST_ARRAYS)
    if not zipfile.is_zipfile(path):
        raise SnapvitError(f"{path}: is not an .npz file, or is damaged. {advice}")
    check_archive(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            wanted = [f"{prefix}{kind}" for prefix in prefixes for kind in ("images", "labels")]
            return {name: file[name] for name in wanted if name in file}
    except Exception as error:  # a damaged archive raises what zip, zlib or numpy like
        raise SnapvitError(f"{path}: cannot be read as an .npz file ({first_line(error)}). {advice}") from error


def _checked_images(arrays: Arrays, name: str, path: Path) -> npt.NDArray[np.uint8]:
    if name not in arrays:
        raise SnapvitError(f"{path}: holds no array called {name}. Save it with numpy.savez(file, {name}=...)")
    images = arrays[name]
    colour, grey = images.ndim == 4 and images.shape[-1] == 3, images.ndim == 3
    if images.dtype != np.uint8 or not (colour or grey) or _is_single_image(images):
        found = f"{name} are {images.dtype} of shape {images.shape}"
        raise SnapvitError(f"{path}: {found}. Save them as uint8 of shape (N, H, W, 3), or (N, H, W) if grey")
    if not images.size:
        raise SnapvitError(f"{path}: holds no pixels: {name} are of shape {images.shape}. Give --data another file")
    return images


def _is_single_image(images: npt.NDArray[np.uint8]) -> bool:
    """Detect a single (H, W, 3), which would pass for many grey images three pixels wide."""
    return images.ndim == 3 and images.shape[-1] == 3


def _checked_labels(labels: npt.NDArray[Any], count: int, name: str, path: Path) -> tuple[list[int], list[str]]:
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        found = f"{name} are {labels.dtype} of shape {labels.shape}"
        raise SnapvitError(f"{path}: {found}. Save them as whole numbers of shape ({count},), one for each image")
    return by_number(labels.tolist(), str(path))
