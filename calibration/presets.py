"""Preprocessing that people name: as a known model has it, as a `preprocessor_config.json` says, or by numbers. Light.

An ONNX file does not say how its images were prepared. `presets.json` has what the published checkpoints were trained
with, by the names that timm gives them; `tools/list_presets.py` writes it.
"""

from __future__ import annotations

import difflib
import json
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
from .preprocessing import Preprocessing

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
