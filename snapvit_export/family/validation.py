"""The contents of `validation.json`: images for people to look at, with predictions and with merged patches. Light."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..storage.json import Count, Name, NotNegative, Some, Value, read_json, write_json
from ..target import Runtime
from .evaluation import Fraction
from .layout import VALIDATION

MOST_SHOWN = 10_000  # a page with more no browser opens, and nobody looks at
Picture = Annotated[str, msgspec.Meta(max_length=10**7)]  # PNG, base64; the page leaves out what is neither


class Prediction(Value, frozen=True, kw_only=True):
    """The class that a variant predicts for an image."""

    label: str
    probability: Fraction


class Sample(Value, frozen=True, kw_only=True):
    """One image and the predictions of all variants."""

    title: str
    picture: Picture
    label: str | None  # its true class, if known
    predictions: dict[Name, Prediction]  # by variant; none for a model without a head


class MergeStep(Value, frozen=True, kw_only=True):
    """What an image is to a variant after a block that merges tokens."""

    block: Count
    tokens: Count  # after the block, with those that stand for no patch
    picture: Picture  # every group of patches in its mean colour


class MergedImage(Value, frozen=True, kw_only=True):
    """One image, and how its patches are merged from block to block."""

    title: str
    picture: Picture
    steps: Annotated[tuple[MergeStep, ...], msgspec.Meta(max_length=MOST_SHOWN)]


class MergedPatches(Value, frozen=True, kw_only=True):
    """Some images as a variant merges their patches; without images, the reason why they could not be drawn."""

    variant: Name
    images: Annotated[tuple[MergedImage, ...], msgspec.Meta(max_length=MOST_SHOWN)] = ()
    missing: str | None = None


class Validation(Value, frozen=True, kw_only=True):
    """The images and the runtime that a family was evaluated with, and some of the images to look at."""

    format_version: Literal[1] = 1
    source: str
    images: Some
    sha256: str  # of the pixels that the models saw
    runtime: Runtime
    seconds: NotNegative
    samples: Annotated[tuple[Sample, ...], msgspec.Meta(max_length=MOST_SHOWN)] = ()
    merged: Annotated[
        tuple[MergedPatches, ...], msgspec.Meta(max_length=MOST_SHOWN)
    ] = ()  # of at most two variants that merge tokens

    def save(self, folder: Path) -> None:
        """Write it into a family folder."""
        write_json(folder / VALIDATION, self)

    @staticmethod
    def load(folder: Path) -> Validation | None:
        """Read it from a family folder; None if that was never validated."""
        path = folder / VALIDATION
        return read_json(path, Validation) if path.is_file() else None
