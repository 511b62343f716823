"""The reference of a family: a few real images and the answers to them, for whoever runs a variant elsewhere. Light.

    reference-224x224.rgb   RGB bytes of all images, (images, height, width, 3), resized and cropped: one file a size
    NAME.answers            answers of a variant's own graph in ONNX Runtime, float32 (images, outputs), little-endian
    reference.fp32          the same of the dense model in fp32, where no variant is just that

Bytes, since they are a fourth of the floats that most graphs take; those are computed from them, exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.preprocessing import Preprocessing
from ..storage.atomic import write_atomically
from ..storage.json import Count, Name, Size, Value
from .layout import ANSWERS, reference_images

Pixels = npt.NDArray[np.uint8]  # (images, H, W, 3)
Answers = npt.NDArray[np.float32]  # (images, outputs)


class ReferenceImages(Value, frozen=True, kw_only=True):
    """The images in one size."""

    file: Name
    size_bytes: Count
    sha256: str
    image_size: tuple[Size, Size]  # height and width


class ReferenceAnswers(Value, frozen=True, kw_only=True):
    """The answers of one graph."""

    file: Name
    size_bytes: Count
    sha256: str
    undecided: tuple[Count, ...] = ()  # images by number: rounding decides which of their tokens this graph merges


class Reference(Value, frozen=True, kw_only=True):
    """Images and answers that a runtime elsewhere is compared with."""

    images: Size
    source: str  # of the images
    kind: Literal["scores", "embedding"]
    outputs: Size
    pixels: tuple[ReferenceImages, ...]  # the same images in every size that a variant takes
    dense: ReferenceAnswers  # of the dense model in fp32
    answers: dict[Name, ReferenceAnswers]  # by variant

    def __post_init__(self) -> None:
        for of in self.pixels:
            if of.size_bytes != self.images * of.image_size[0] * of.image_size[1] * 3:
                raise ValueError(f"{of.file} has not the bytes of {self.images} images")
        for answers in (self.dense, *self.answers.values()):
            if answers.size_bytes != 4 * self.images * self.outputs:
                raise ValueError(f"{answers.file} has not the bytes of {self.images} answers")
            if any(number >= self.images for number in answers.undecided):
                raise ValueError(f"{answers.file} names an image that is not there")
        if len({of.image_size for of in self.pixels}) < len(self.pixels):
            raise ValueError("reference images of one size are listed twice")

    @property
    def scores(self) -> bool:
        """True if answers are scores of classes."""
        return self.kind == "scores"

    @property
    def files(self) -> tuple[ReferenceImages | ReferenceAnswers, ...]:
        """All files, each once."""
        listed: list[ReferenceImages | ReferenceAnswers] = [*self.pixels, self.dense, *self.answers.values()]
        return tuple({each.file: each for each in listed}.values())

    def has(self, image: tuple[int, int]) -> bool:
        """Return True if the images are there in this height and width."""
        return any(of.image_size == image for of in self.pixels)

    def pixels_at(self, folder: Path, image: tuple[int, int]) -> Pixels:
        """Return the images in a height and width; in one that is not there, resized from the largest."""
        for of in self.pixels:
            if of.image_size == image:
                return np.fromfile(folder / of.file, np.uint8).reshape(self.images, *image, 3)
        largest = max(self.pixels, key=lambda of: of.size_bytes)
        return _resized(self.pixels_at(folder, largest.image_size), image)

    def answers_of(self, folder: Path, name: str) -> Answers:
        """Return the answers of a variant's own graph."""
        return self._read(folder, self.answers[name])

    def dense_answers(self, folder: Path) -> Answers:
        """Return the answers of the dense model in fp32."""
        return self._read(folder, self.dense)

    def undecided(self, name: str) -> npt.NDArray[np.bool_]:
        """Return for each image True if rounding decides which of its tokens a variant merges."""
        return np.isin(np.arange(self.images), self.answers[name].undecided)

    def _read(self, folder: Path, answers: ReferenceAnswers) -> Answers:
        return np.fromfile(folder / answers.file, "<f4").reshape(self.images, self.outputs).astype(np.float32)

    def with_variant(
        self,
        folder: Path,
        name: str,
        image: tuple[int, int],
        answer: Callable[[Pixels], tuple[Answers, Sequence[int]]],
    ) -> Reference:
        """Write the answers of one more variant, and the images in its size; `answer` gives them."""
        pixels = self.pixels_at(folder, image)
        added = () if self.has(image) else (write_images(folder, pixels),)
        found, undecided = answer(pixels)
        known = {**self.answers, name: write_answers(folder, f"{name}{ANSWERS}", found, undecided)}
        return msgspec.structs.replace(self, pixels=(*self.pixels, *added), answers=known)


def write_images(folder: Path, pixels: Pixels) -> ReferenceImages:
    """Write the images of one size."""
    height, width = pixels.shape[1:3]
    file, data = reference_images((height, width)), np.ascontiguousarray(pixels).tobytes()
    write_atomically(folder / file, data)
    digest = hashlib.sha256(data).hexdigest()
    return ReferenceImages(file=file, size_bytes=len(data), sha256=digest, image_size=(height, width))


def write_answers(folder: Path, file: str, answers: Answers, undecided: Sequence[int] = ()) -> ReferenceAnswers:
    """Write the answers of one graph."""
    data = answers.astype("<f4").tobytes()
    write_atomically(folder / file, data)
    digest = hashlib.sha256(data).hexdigest()
    return ReferenceAnswers(file=file, size_bytes=len(data), sha256=digest, undecided=tuple(undecided))


def as_inputs(pixels: Pixels, preprocessing: Preprocessing, as_bytes: bool) -> npt.NDArray[Any]:
    """Return images as graphs take them: bytes, or normalised."""
    return pixels if as_bytes else preprocessing.normalise(pixels)


def _resized(pixels: Pixels, image: tuple[int, int]) -> Pixels:
    from PIL import Image

    size = (image[1], image[0])
    return np.stack([np.asarray(Image.fromarray(each).resize(size, Image.Resampling.BICUBIC)) for each in pixels])
