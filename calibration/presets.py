"""Preprocessing that people name: as a known model has it, as a `preprocessor_config.json` says, or by numbers. Light.

An ONNX file does not say how its images were prepared. `presets.json` has what the published checkpoints were trained
with, by the names that timm gives them; `tools/list_presets.py` writes it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import UsageError
from ..storage.json import Value, from_json
from .preprocessing import Preprocessing, crop_share
from .preprocessor_config import read_preprocessor

PRESETS = "presets.json"
_RESIZE = re.compile(r"(?P<size>\d{1,5})(?::(?P<how>[a-z]+))?|(?P<squash>squash)(?::(?P<by>[a-z]+))?")


class Preset(Value, frozen=True, kw_only=True):
    """How one kind of checkpoint prepares its images, but for their size."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"]
    crop_pct: float
    crop_mode: Literal["center", "squash"]
    models: tuple[str, ...]  # whose preprocessing it is


@dataclass(frozen=True)
class Asked:
    """What a user says of the preprocessing of a file."""

    preprocessing: str | None = None  # name of a model, or a preprocessor_config.json
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    resize: str | None = None  # 256, 256:bilinear, squash or squash:bilinear


def preprocessing_for(file: str, image: tuple[int, int], asked: Asked) -> Preprocessing:
    """Return the preprocessing that a user names for a file that takes images of this height and width."""
    numbers = {"--mean": asked.mean, "--std": asked.std, "--resize": asked.resize}
    given = [option for option, value in numbers.items() if value is not None]
    if asked.preprocessing is not None and given:
        raise UsageError(f"--preprocessing says what {given[0]} would. Give one of them")
    if asked.preprocessing is not None:
        return _named(asked.preprocessing, image)
    if len(given) < len(numbers):
        raise UsageError(
            f"{file}: an ONNX file does not say how its images are prepared. Give --preprocessing with the name of the "
            "model that it was made from (vit_base_patch16_224) or a preprocessor_config.json, or all of --mean, --std "
            "and --resize"
        )
    mean, std = _three(asked.mean, "--mean"), _three(asked.std, "--std")
    return _checked(mean=mean, std=std, image=image, **_resize(str(asked.resize), image))


def _named(name: str, image: tuple[int, int]) -> Preprocessing:
    if name.endswith(".json"):
        return read_preprocessor(Path(name), image)
    preset = by_model().get(name) or by_model().get(name.partition(".")[0])
    if preset is None:
        near = difflib.get_close_matches(name, by_model(), n=2)
        hint = f"Did you mean {' or '.join(near)}?" if near else "Give --mean, --std and --resize instead"
        raise UsageError(f"--preprocessing '{name}': neither a file that ends in .json nor a known model. {hint}")
    described = msgspec.structs.asdict(preset)
    del described["models"]
    return Preprocessing(input_size=(3, *image), **described)


@cache
def by_model() -> dict[str, Preset]:
    """Return the preset of every known model; of an architecture it is that of its first checkpoint."""
    text = (resources.files(__package__) / PRESETS).read_bytes()
    found: dict[str, Preset] = {}
    for preset in from_json(text, tuple[Preset, ...], PRESETS):
        for model in preset.models:
            found[model] = preset
    return found


def distinct_normalisations() -> dict[str, Preset]:
    """Return one preset for each mean and deviation that is in use, by the name of a model that has it."""
    found: dict[tuple[object, object], tuple[str, Preset]] = {}
    for model, preset in by_model().items():
        found.setdefault((preset.mean, preset.std), (model, preset))
    return dict(found.values())


def _three(values: Sequence[float] | None, option: str) -> tuple[float, float, float]:
    numbers = tuple(values or ())
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3:
        raise UsageError(f"{option} needs one number, or one for each of red, green and blue: 0.485,0.456,0.406")
    return numbers


def _resize(text: str, image: tuple[int, int]) -> dict[str, Any]:
    """Read `256`, the pixels of the shorter side before the crop, or `squash`; and after a colon the interpolation."""
    match = _RESIZE.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"--resize '{text}' is not understood. Write it like 256, 256:bilinear or squash:bicubic")
    interpolation = match["how"] or match["by"] or "bicubic"
    if match["squash"]:
        return {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": interpolation}
    side = int(match["size"])
    if side < min(image):
        raise UsageError(f"--resize {side} is smaller than the images of {min(image)} that the model takes. Give more")
    share = crop_share((min(image),) * 2, (side, side))
    return {"crop_pct": share, "crop_mode": "center", "interpolation": interpolation}


def _checked(image: tuple[int, int], **described: Any) -> Preprocessing:
    try:
        return msgspec.convert({"input_size": (3, *image), **described}, Preprocessing)
    except msgspec.ValidationError as error:
        raise UsageError(f"--mean, --std and --resize give no preprocessing: {error}") from error
