"""An `.npz` file: `images`, uint8 (N, H, W, 3) or grey (N, H, W), and if there are any `labels`, whole numbers (N,).

The arrays are held in memory as they are. Nothing pickled is ever loaded.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, first_line
from .labels import by_number
from .source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

Arrays = dict[str, npt.NDArray[Any]]


def npz_source(path: Path) -> Source:
    """The pictures of an `.npz` file."""
    arrays = _load(path)
    pixels = _checked_images(arrays, path)
    labels, classes = _checked_labels(arrays["labels"], len(pixels), path) if "labels" in arrays else (None, [])
    return Source(
        str(path),
        open=lambda i: _picture(pixels[i]),
        count=len(pixels),
        title=lambda i: f"{path} image {i}",
        labels=labels,
        classes=classes,
    )


def _picture(pixels: npt.NDArray[np.uint8]) -> Image:
    from PIL import Image

    return Image.fromarray(pixels).convert("RGB")


def _load(path: Path) -> Arrays:
    advice = "Save it with numpy.savez, of plain arrays"
    if not os.path.isfile(path):
        raise SnapvitError(f"{path}: no such .npz file. Give --data a file that exists")
    if not zipfile.is_zipfile(path):
        raise SnapvitError(f"{path}: is not an .npz file, or is damaged. {advice}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in ("images", "labels") if name in file}
    except Exception as error:  # a damaged archive raises what zip, zlib or numpy like
        raise SnapvitError(f"{path}: cannot be read as an .npz file ({first_line(error)}). {advice}") from error


def _checked_images(arrays: Arrays, path: Path) -> npt.NDArray[np.uint8]:
    if "images" not in arrays:
        raise SnapvitError(f"{path}: holds no array called images. Save it with numpy.savez(file, images=...)")
    images = arrays["images"]
    colour, grey = images.ndim == 4 and images.shape[-1] == 3, images.ndim == 3
    if images.dtype != np.uint8 or not (colour or grey) or _one_picture(images):
        found = f"images are {images.dtype} of shape {images.shape}"
        raise SnapvitError(f"{path}: {found}. Save them as uint8 of shape (N, H, W, 3), or (N, H, W) if grey")
    if not images.size:
        raise SnapvitError(f"{path}: holds no pixels: images are of shape {images.shape}. Give --data another file")
    return images


def _one_picture(images: npt.NDArray[np.uint8]) -> bool:
    """Whether this is a single (H, W, 3), which would pass for many grey pictures three pixels wide."""
    return images.ndim == 3 and images.shape[-1] == 3


def _checked_labels(labels: npt.NDArray[Any], count: int, path: Path) -> tuple[list[int], list[str]]:
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        found = f"labels are {labels.dtype} of shape {labels.shape}"
        raise SnapvitError(f"{path}: {found}. Save them as whole numbers of shape ({count},), one for each image")
    return by_number(labels.tolist(), str(path))
