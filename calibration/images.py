"""Where images come from: a folder, or the bundled digits. Light: Pillow and numpy.

A source is a list of pictures that can be opened by number, with labels where it has them. Sampling is by seed, the
same on every machine, and what was used is told by a fingerprint: the count and a hash of the pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, UsageError
from . import digits
from .preprocessing import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff"})
BUNDLED = "digits"


@dataclass(frozen=True)
class Source:
    """Pictures that open on demand; `labels` are class numbers, `classes` their names."""

    name: str
    open: Callable[[int], Image]
    count: int
    labels: Sequence[int] | None = None
    classes: Sequence[str] = ()

    def subset(self, rows: Sequence[int]) -> Source:
        """The same source with only these pictures, in this order."""
        chosen = [int(row) for row in rows]
        labels = None if self.labels is None else [self.labels[row] for row in chosen]
        return Source(self.name, lambda i: self.open(chosen[i]), len(chosen), labels, self.classes)


@dataclass(frozen=True)
class Images:
    """Pictures resized and cropped for one model, decoded once; normalised batch by batch."""

    pixels: npt.NDArray[np.uint8]  # (N, H, W, 3)
    labels: npt.NDArray[np.int64] | None  # (N,)
    preprocessing: Preprocessing
    source: str
    classes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.pixels)

    def batches(self, size: int) -> Iterator[npt.NDArray[np.float32]]:
        """Model inputs of at most `size` images, in order."""
        for start in range(0, len(self), size):
            yield self.preprocessing.normalise(self.pixels[start : start + size])  # (<=size, 3, H, W)

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """Which pictures these are: where from, how many, and a hash of what the model sees."""
        digest = hashlib.sha256(self.pixels.tobytes()).hexdigest()
        return {"source": self.source, "images": len(self), "sha256": digest}


def calibration_and_held_out(data: str, count: int, seed: int, most_held_out: int) -> tuple[Source, Source]:
    """Split a source by seed: `count` pictures to calibrate on, and others, never the same, to report on."""
    if count < 1:
        raise UsageError(f"{count} calibration images are too few. Give --images 1 or more, such as 256")
    if data == BUNDLED:
        train, held_out = digit_source("train"), digit_source("held-out")
        return train.subset(_shuffled(train.count, seed)[:count]), held_out
    everything = folder_source(Path(data))
    order = _shuffled(everything.count, seed)
    return everything.subset(order[:count]), everything.subset(order[count : count + most_held_out])


def digit_source(split: digits.Split) -> Source:
    pictures, labels = digits.load(split)
    return Source(BUNDLED, pictures.__getitem__, len(pictures), labels, [str(digit) for digit in range(10)])


def folder_source(folder: Path) -> Source:
    """All pictures below a folder. Pictures in one sub-folder per class have that class as their label."""
    if not folder.is_dir():
        raise SnapvitError(f"{folder}: no such image folder. Give --data a folder of images, or leave it out")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise SnapvitError(f"{folder}: holds no images ({', '.join(sorted(SUFFIXES))}). Give --data another folder")
    parents = [path.relative_to(folder).parts[:-1] for path in paths]
    labelled = all(parents)
    classes = sorted({parent[0] for parent in parents}) if labelled else []
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers[parent[0]] for parent in parents] if labelled else None
    return Source(str(folder), lambda i: _open(paths[i]), len(paths), labels, classes)


def prepare(source: Source, preprocessing: Preprocessing, progress: Callable[[], None] = lambda: None) -> Images:
    """Decode, resize and crop every picture of a source once."""
    height, width = preprocessing.input_size[1:]
    pixels = np.empty((source.count, height, width, 3), np.uint8)
    for i in range(source.count):
        pixels[i] = preprocessing.pixels(source.open(i))
        progress()
    labels = None if source.labels is None else np.array(source.labels, np.int64)
    return Images(pixels, labels, preprocessing, source.name, source.classes)


def _open(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SnapvitError(f"{path}: cannot be read as an image ({error}). Mend or remove it") from error


def _shuffled(count: int, seed: int) -> list[int]:
    return [int(row) for row in np.random.default_rng(seed).permutation(count)]
