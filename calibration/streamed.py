"""Images that are decoded chunk by chunk, as often as they are wanted, and never held together. Light: numpy.

For sets whose decoded images fit into no memory, such as the 1.28 million that ImageNet's k-NN compares with. Labels,
number and fingerprint are those of `images.prepare`: they leave out what cannot be read, which a first pass tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from .images import Images, Unreadable
from .preprocessing import Preprocessing
from .source import Source, UnreadableImage


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a whole pass over the images tells."""

    labels: npt.NDArray[np.int64] | None  # (N,)
    unreadable: tuple[str, ...]
    count: int
    sha256: str


class StreamedImages:
    """The images of a source for one model, in chunks.

    >>> [len(chunk) for chunk in StreamedImages(open_source("path/to/images"), model.preprocessing).chunks(8)]
    [8, 8, 4]
    """

    def __init__(
        self,
        source: Source,
        preprocessing: Preprocessing,
        on_unreadable: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        self._source, self.preprocessing, self._on_unreadable = source, preprocessing, on_unreadable
        self._seen: _Seen | None = None

    @property
    def is_known(self) -> bool:
        """True once the images were read: their number, labels and fingerprint are known."""
        return self._seen is not None

    @property
    def source(self) -> str:
        return self._source.name

    @property
    def classes(self) -> Sequence[str]:
        return self._source.classes

    @property
    def most(self) -> int:
        """The number of images, those included that cannot be read."""
        return self._source.count

    def chunks(self, size: int) -> Iterator[Images]:
        """Decode the readable images in order, `size` at a time and fewer at the end."""
        digest, labels, count = hashlib.sha256(), [], 0
        unreadable = Unreadable()
        rows = iter(range(self.most))
        while len(chunk := self._chunk(rows, size, unreadable)):
            digest.update(chunk.pixels.data)
            labels.append(chunk.labels)
            count += len(chunk)
            yield chunk
            if len(chunk) < size:
                break
        if self._seen is None:
            unreadable.report(self.most, self._on_unreadable)
        known = None if self._source.labels is None else np.concatenate([np.zeros(0, np.int64), *labels])
        self._see(_Seen(known, unreadable.names, count, digest.hexdigest()))

    def __len__(self) -> int:
        return self._whole().count

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        return self._whole().labels

    @property
    def unreadable(self) -> tuple[str, ...]:
        return self._whole().unreadable

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """The source, the number of images, how many were left out, and a hash of the pixels that the model sees."""
        seen = self._whole()
        counts = {"images": seen.count, "unreadable": len(seen.unreadable)}
        return {"source": self.source, **counts, "sha256": seen.sha256}

    def scan(self, size: int, progress: Callable[[int], None] = lambda count: None) -> None:
        """Make the pass that tells number, labels and fingerprint, unless one was made."""
        if self._seen is None:
            for chunk in self.chunks(size):
                progress(len(chunk))

    def _whole(self) -> _Seen:
        self.scan(1)
        assert self._seen is not None
        return self._seen

    def _see(self, seen: _Seen) -> None:
        if self._seen is not None and self._seen.sha256 != seen.sha256:
            raise SnapvitError(f"{self.source}: its images changed while they were read. Begin again")
        self._seen = seen

    def _chunk(self, rows: Iterator[int], size: int, unreadable: Unreadable) -> Images:
        height, width = self.preprocessing.input_size[1:]
        pixels = np.empty((min(size, self.most), height, width, 3), np.uint8)
        readable: list[int] = []
        for row in rows:
            try:
                pixels[len(readable)] = self.preprocessing.pixels(self._source.open(row))
                readable.append(row)
            except UnreadableImage as error:
                unreadable.add(self._source.title(row), str(error))
            if len(readable) == len(pixels):
                break
        known = self._source.labels
        labels = None if known is None else np.array([known[row] for row in readable], np.int64)
        return Images(pixels[: len(readable)], labels, self.preprocessing, self.source, self.classes)
