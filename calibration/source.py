"""The interface of all image sources: images that open by number, with class labels where these are known. Light.

Labels become class numbers here: names in alphabetical order, numbers as they are. Pillow is imported only when an
image is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import SnapvitError
from .decode import UnreadableImage as UnreadableImage

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_DECODED = 400_000_000  # bytes of pixels that stay in memory, of one source
MOST_CLASSES = 100_000  # a larger number is an identity or a mistake, not a class


@dataclass(frozen=True)
class Source:
    """Images that open on demand; `labels` are class numbers, `classes` their names."""

    name: str
    open: Callable[[int], Image]  # raises UnreadableImage
    count: int
    title: Callable[[int], str]  # names one image, and no other
    labels: Sequence[int] | None = None
    classes: Sequence[str] = ()
    held_out: Source | None = None  # set aside by the source itself, for reporting only
    mask: Callable[[int], Image] | None = None  # of an image, as stored; None: a file beside the image's, if any

    def subset(self, rows: Sequence[int]) -> Source:
        """The same source with only these images, in this order."""
        chosen = [int(row) for row in rows]
        labels = None if self.labels is None else [self.labels[row] for row in chosen]
        mask = self.mask
        return Source(
            self.name,
            open=lambda i: self.open(chosen[i]),
            count=len(chosen),
            title=lambda i: self.title(chosen[i]),
            labels=labels,
            classes=self.classes,
            held_out=self.held_out,
            mask=None if mask is None else lambda i: mask(chosen[i]),
        )


def decoded_once(source: Source, most_bytes: int = MOST_DECODED) -> Source:
    """The same source, whose images stay in memory once they are decoded, as many as fit: for many sizes of them."""
    kept: dict[int, Image] = {}
    used = 0

    def open_kept(i: int) -> Image:
        nonlocal used
        if i in kept:
            return kept[i]
        image = source.open(i)
        size = 3 * image.width * image.height
        if used + size <= most_bytes:
            kept[i], used = image, used + size
        return image

    return replace(source, open=open_kept)


def joined(name: str, sources: Sequence[Source]) -> Source:
    """All images of sources that number the same classes alike, one source after the other."""
    first = sources[0]
    if any(list(source.classes) != list(first.classes) for source in sources):
        raise SnapvitError(f"{name}: its parts number their classes differently. Give --data a folder of it")
    images = [(source, i) for source in sources for i in range(source.count)]
    unlabelled = any(source.labels is None for source in sources)
    return Source(
        name,
        open=lambda i: images[i][0].open(images[i][1]),
        count=len(images),
        title=lambda i: images[i][0].title(images[i][1]),
        labels=None if unlabelled else [label for source in sources for label in source.labels or ()],
        classes=first.classes,
    )


def by_name(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Number the classes in alphabetical order, as training sets in folders do: (labels, classes)."""
    classes = sorted(set(names))
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[name] for name in names], classes


def by_number(numbers: Sequence[int], where: str) -> tuple[list[int], list[str]]:
    """Take the labels as the class numbers they are: (labels, classes)."""
    smallest, largest = min(numbers), max(numbers)
    if smallest < 0 or largest >= MOST_CLASSES:
        wrong = smallest if smallest < 0 else largest
        raise SnapvitError(f"{where}: label {wrong} is not a class number. Labels count from 0 to {MOST_CLASSES - 1}")
    return [int(number) for number in numbers], [str(number) for number in range(largest + 1)]
