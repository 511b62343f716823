"""Pictures for training: random resized crops and flips that the seed and the number of a sample alone decide.

Sample k of a run is the picture of place k mod N in the order of its epoch, cropped by a generator that is seeded with
(seed, k). So it is the same whoever asks for it and when: one process or four, before a kill or after it.

A picture is decoded once and kept a little larger than the model takes it, as many as fit into memory. The model that
teaches and the one that learns see the same crop, each in its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...calibration.crops import random_box
from ...calibration.images import MOST_UNREADABLE
from ...calibration.preprocessing import Preprocessing
from ...calibration.sampling import shuffled
from ...calibration.source import Source, UnreadableImage, decoded_once
from ...errors import SnapvitError
from ...progress import Progress

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]  # height and width
ROOM = 1.25  # times the model's size that the shorter side is kept at: most crops are smaller than the picture
MOST_DECODED = 4_000_000_000  # bytes of pixels that stay in memory


@dataclass(frozen=True)
class Views:
    """The same crops in the sizes that were asked for, as models take them."""

    inputs: dict[Size, npt.NDArray[np.float32]]  # (B, 3, H, W) each
    labels: npt.NDArray[np.int64] | None  # (B,)


class Pictures:
    """The pictures of a source as samples by number."""

    def __init__(
        self,
        source: Source,
        preprocessing: Preprocessing,
        crop: tuple[float, float],
        seed: int = 0,
        mixup: float = 0.0,
        flip: bool = True,
    ) -> None:
        self.preprocessing, self.crop, self.seed, self.mixup, self.flip = preprocessing, crop, seed, mixup, flip
        shortest = math.ceil(ROOM * max(preprocessing.input_size[1:]))
        self._source = decoded_once(replace(source, open=lambda i: _shrunk(source.open(i), shortest)), MOST_DECODED)
        self._rows = list(range(source.count))
        self.order = lru_cache(maxsize=2)(lambda epoch: shuffled(len(self._rows), seed + epoch))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def has_labels(self) -> bool:
        return self._source.labels is not None

    def decode(self, progress: Progress) -> None:
        """Decode every picture that fits into memory; leave out those that cannot be read, unless they are many."""
        progress.phase("reading images to train on", len(self._rows))
        unreadable: list[str] = []
        readable = []
        for row in self._rows:
            try:
                self._source.open(row)
                readable.append(row)
            except UnreadableImage as error:
                unreadable.append(str(error))
            progress.advance()
        if len(unreadable) > MOST_UNREADABLE * len(self._rows):
            raise SnapvitError(f"{unreadable[0]} ({len(unreadable)} of {len(self._rows)} images unreadable)")
        if unreadable:
            progress.note(f"{len(unreadable)} unreadable images are left out")
        self._rows = readable

    def views(self, numbers: Sequence[int], sizes: Sequence[Size]) -> Views:
        """Return the samples of these numbers in each of these sizes."""
        drawn = [self._sample(number, sizes) for number in numbers]
        pixels = {size: np.stack([sample[size] for sample, _ in drawn]) for size in sizes}  # (B, H, W, 3)
        inputs = {size: self.preprocessing.normalise(found) for size, found in pixels.items()}
        labels = np.array([label for _, label in drawn], np.int64) if self.has_labels else None
        return Views(inputs, labels)

    def _sample(self, number: int, sizes: Sequence[Size]) -> tuple[dict[Size, npt.NDArray[np.uint8]], int]:
        epoch, place = divmod(number, len(self))
        row = self._rows[self.order(epoch)[place]]
        rng = np.random.default_rng([self.seed, number])
        found = self._cropped(row, rng, sizes)
        if self.mixup:
            share = float(rng.beta(self.mixup, self.mixup))
            other = self._cropped(self._rows[int(rng.integers(len(self)))], rng, sizes)
            found = {size: _mixed(found[size], other[size], share) for size in sizes}
        return found, 0 if self._source.labels is None else int(self._source.labels[row])

    def _cropped(self, row: int, rng: np.random.Generator, sizes: Sequence[Size]) -> dict[Size, npt.NDArray[np.uint8]]:
        from PIL.Image import Resampling, Transpose

        image = self._source.open(row)
        box, flips = random_box(image.size, self.crop, rng), bool(rng.random() < 0.5) and self.flip
        kind = Resampling[self.preprocessing.interpolation.upper()]
        found = {}
        for height, width in sizes:
            view = image.resize((width, height), kind, box)
            found[height, width] = np.asarray(view.transpose(Transpose.FLIP_LEFT_RIGHT) if flips else view)
        return found


def _mixed(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], share: float) -> npt.NDArray[np.uint8]:
    return np.asarray(np.rint(share * a.astype(np.float32) + (1 - share) * b), np.uint8)


def _shrunk(image: Image, shortest: int) -> Image:
    """Return a large picture with that shorter side, as it is kept in memory."""
    from PIL.Image import Resampling

    side = min(image.size)
    if side <= shortest:
        return image
    width, height = (max(1, round(length * shortest / side)) for length in image.size)
    return image.resize((width, height), Resampling.BICUBIC, reducing_gap=3.0)


Sampler = Callable[[Sequence[int]], Views]  # from the numbers of samples to their views
