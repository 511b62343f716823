"""Preprocessing from the `preprocessor_config.json` of a `transformers` model, without `transformers`. Light.

Its image processors resize (to a square, or by the shortest edge), crop the centre, rescale and normalise, in that
order; all of that a `Preprocessing` can express. What it cannot is refused by the name of the key. Resized pixels
are rounded to bytes here, also where a processor resizes numbers that it rescaled before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import FileFormatError, SnapvitError
from ..storage.json import read_json
from .preprocessing import Preprocessing, crop_share

FILES = ("preprocessor_config.json", "processor_config.json")  # the second holds several, one of them for images
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by their numbers in Pillow
SUFFIXES = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")
UNDERSTOOD = frozenset({"resize", "center_crop", "rescale", "normalize", "convert_rgb"})  # of the keys `do_*`
HALF, CLIP, IMAGENET = (
    {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
)
CROPPED = {"do_center_crop": True, "crop_size": 224}
# What a processor does where its file says nothing. `short`: a bare number is the shortest edge, not a square.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": 224, "resample": 2, **HALF},
    "DeiT": {"size": 256, "resample": 3, **CROPPED, **HALF},
    "CLIP": {"size": 224, "resample": 3, "short": True, **CROPPED, **CLIP},
    "Bit": {"size": 224, "resample": 3, "short": True, **CROPPED, **CLIP},
    "Siglip": {"size": {"height": 224, "width": 224}, "resample": 3, "short": True, **HALF},
    "Siglip2": {"resample": 2, **HALF},
    "DINOv3ViT": {"size": 224, "resample": 2, **IMAGENET},
}


def read_preprocessor(path: Path, image: tuple[int, int] | None = None) -> Preprocessing:
    """Read the Preprocessing that the file, or a folder with one, describes.

    `image`: height and width that the model takes, for processors that keep an image's own proportions.
    """
    if path.is_dir():
        found = [path / name for name in FILES if (path / name).is_file()]
        if not found:
            raise SnapvitError(
                f"{path}: has no {FILES[0]}, so nothing tells how images become its input. Copy that file from the "
                f"model that it was made from"
            )
        path = found[0]
    config = read_json(path, dict[str, Any])
    return preprocessing_in(config.get("image_processor", config), str(path), image)


def preprocessing_in(config: Mapping[str, Any], where: str, image: tuple[int, int] | None = None) -> Preprocessing:
    """Return the Preprocessing of a decoded file; `where` begins the errors."""
    kind = _kind(config, where)
    known = {"do_resize": True, "do_rescale": True, "do_normalize": True, **DEFAULTS.get(kind, {}), **_given(config)}
    for key, value in known.items():
        if key.startswith("do_") and value and key.removeprefix("do_") not in UNDERSTOOD:
            raise FileFormatError(f"{where}: {key} is a step that is not supported here")
    if not known["do_resize"]:
        raise FileFormatError(f"{where}: do_resize is off, but images of all sizes come in here. Set it")
    for key in ("crop_pct", "use_square_size", "rescale_offset"):
        if known.get(key):
            raise FileFormatError(f"{where}: {key} is not supported here. Give size and crop_size instead")
    height, width, placed = _placed(known, kind, where, image)
    mean, std = _normal(known, where)
    values = {
        "input_size": (3, height, width),
        "interpolation": _interpolation(known, where),
        "margin": "down",
        **placed,
    }
    try:
        return msgspec.convert({**values, "mean": mean, "std": std}, Preprocessing, strict=False)
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{where}: {error}") from error


def _kind(config: Mapping[str, Any], where: str) -> str:
    if not isinstance(config, Mapping):
        raise FileFormatError(f"{where}: holds no description of an image processor")
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None and key != "short"}


def _placed(
    known: Mapping[str, Any], kind: str, where: str, image: tuple[int, int] | None
) -> tuple[int, int, dict[str, Any]]:
    """Return height and width of the input, and how an image is placed in it."""
    if "size" not in known and kind == "Siglip2" and image is not None:  # it keeps proportions: no fixed size can
        return *image, {"crop_mode": "squash", "crop_pct": 1.0}
    if "size" not in known:
        raise FileFormatError(f"{where}: names no size")
    size = known["size"]
    if isinstance(size, int) and kind not in DEFAULTS:
        raise FileFormatError(
            f"{where}: size is a bare number, which {kind or 'a processor without a name'} does not "
            f"explain. Write it as height and width, or as shortest_edge"
        )
    short = size if isinstance(size, int) and known.get("short") else _shortest(size)
    crops = known.get("do_center_crop", False)
    if short is None:
        resized = _sides(size, "size", where)
        cropped = _sides(known.get("crop_size"), "crop_size", where) if crops else resized
        return *cropped, {"crop_mode": "squash", "crop_pct": _crop_pct(cropped, resized, where)}
    if not crops:
        raise FileFormatError(
            f"{where}: size is a shortest edge and nothing is cropped, so images keep their "
            f"proportions; a graph needs one size. Set do_center_crop and crop_size"
        )
    cropped = _sides(known.get("crop_size"), "crop_size", where)
    if cropped[0] != cropped[1]:
        raise FileFormatError(f"{where}: a shortest edge and a crop that is not square do not go together here")
    return *cropped, {"crop_mode": "center", "crop_pct": _crop_pct(cropped, (short, short), where)}


def _shortest(size: Any) -> int | None:
    if not isinstance(size, Mapping) or "shortest_edge" not in size:
        return None
    return None if size.get("longest_edge") else size["shortest_edge"]


def _sides(size: Any, key: str, where: str) -> tuple[int, int]:
    """Return height and width."""
    found = (size, size) if isinstance(size, int) else size
    if isinstance(found, Mapping):
        found = (found.get("height"), found.get("width"))
    if not isinstance(found, (tuple, list)) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise FileFormatError(f"{where}: {key} {size} is not a height and a width")
    return found[0], found[1]


def _crop_pct(cropped: tuple[int, int], resized: tuple[int, int], where: str) -> float:
    """Return the fraction of the resized sides that is kept, such that dividing by it gives exactly those sides."""
    if any(type(side) is not int or side < kept for side, kept in zip(resized, cropped)):
        raise FileFormatError(
            f"{where}: crops {cropped[0]}x{cropped[1]} pixels of {resized[0]}x{resized[1]}: the rest "
            f"would be padded, which is not supported"
        )
    fraction = crop_share(cropped, resized)
    if fraction is None:
        raise FileFormatError(f"{where}: crops height and width by different fractions, which is not supported")
    return fraction


def _interpolation(known: Mapping[str, Any], where: str) -> str:
    number = known.get("resample", 2)
    if type(number) is not int or not 0 <= number < len(INTERPOLATIONS):
        raise FileFormatError(f"{where}: resample {number} is not a number of Pillow, 0 to {len(INTERPOLATIONS) - 1}")
    return INTERPOLATIONS[number]


def _normal(known: Mapping[str, Any], where: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation for pixels in 0..1, whatever range the processor normalises in.

    (p r - mean) / std of a byte p and a factor r is (p/255 - mean / 255r) / (std / 255r).
    """
    factor = known.get("rescale_factor", 1 / 255) if known["do_rescale"] else 1
    mean = _three(known.get("image_mean"), "image_mean", where) if known["do_normalize"] else (0.0,) * 3
    std = _three(known.get("image_std"), "image_std", where) if known["do_normalize"] else (1.0,) * 3
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise FileFormatError(f"{where}: rescale_factor {factor} is not a number above 0")
    scale = 255.0 * factor
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale  # 0.00392156862745098 is meant as 1/255
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _three(values: Any, key: str, where: str) -> tuple[float, float, float]:
    found = [values] * 3 if type(values) in (int, float) else values
    if (
        not isinstance(found, (list, tuple))
        or len(found) != 3
        or not all(type(value) in (int, float) for value in found)
    ):
        raise FileFormatError(f"{where}: {key} {values} is not three numbers, one for each channel")
    return float(found[0]), float(found[1]), float(found[2])
