"""Pictures made ready for a model, and the choice of them. Light: numpy.

Sampling is by seed, the same on every machine, and what was used is told by a fingerprint: where from, how many, how
many could not be read, and a hash of the pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .opening import open_source
from .preprocessing import Preprocessing
from .source import Source as Source


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
    everything = open_source(data)
    order = shuffled(everything.count, seed)
    rest = everything.held_out or everything.subset(order[count : count + most_held_out])
    return everything.subset(order[:count]), rest


def prepare(source: Source, preprocessing: Preprocessing, progress: Callable[[], None] = lambda: None) -> Images:
    """Decode, resize and crop every picture of a source once."""
    height, width = preprocessing.input_size[1:]
    pixels = np.empty((source.count, height, width, 3), np.uint8)
    for i in range(source.count):
        pixels[i] = preprocessing.pixels(source.open(i))
        progress()
    labels = None if source.labels is None else np.array(source.labels, np.int64)
    return Images(pixels, labels, preprocessing, source.name, source.classes)


def shuffled(count: int, seed: int) -> list[int]:
    return [int(row) for row in np.random.default_rng(seed).permutation(count)]
