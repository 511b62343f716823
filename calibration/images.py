"""Images sampled by seed, decoded, and made ready for a model, with a fingerprint of what was used. Light: numpy.

A sample is the same on every machine. The fingerprint records the source, the number of images, how many of them could
not be read, and a hash of the pixels. A variant of another image size sees the same images, read again from the source:
pixels that were resized twice would not be what its users give it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError, UsageError
from ..progress import Progress
from .dataset import is_merged, open_to_calibrate
from .hub import Sample
from .known_sets import merged
from .preprocessing import Preprocessing
from .sampling import equal_parts, mixed, shuffled, without_repeats
from .source import Source as Source
from .source import UnreadableImage, decoded_once

MOST_UNREADABLE = 0.05  # share of the images: a few damaged files are common, more are a mistake
OTHER_SIZES = 8  # of the same images that are kept, beside their own: candidates of a choice go to and fro
VERY_MANY = 1000  # images that a source holds out: beyond that some are enough
SHOWN_UNREADABLE = 5  # names of images; the others are counted


@dataclass(frozen=True)
class Images:
    """Images resized and cropped for one model, decoded once; normalised batch by batch."""

    pixels: npt.NDArray[np.uint8]  # (N, H, W, 3)
    labels: npt.NDArray[np.int64] | None  # (N,)
    preprocessing: Preprocessing
    source: str
    classes: Sequence[str] = ()
    unreadable: tuple[str, ...] = ()  # names of the images that were left out
    again: Callable[[Preprocessing], Images] | None = field(default=None, compare=False, repr=False)  # reads them so

    def __len__(self) -> int:
        return len(self.pixels)

    def batches(self, size: int) -> Iterator[npt.NDArray[np.float32]]:
        """Model inputs of at most `size` images, in order."""
        for start in range(0, len(self), size):
            yield self.preprocessing.normalise(self.pixels[start : start + size])  # (<=size, 3, H, W)

    def inputs(self, size: int, as_bytes: bool) -> Iterator[npt.NDArray[Any]]:
        """Inputs of a graph: bytes, (<=size, H, W, 3), or the normalised pixels that `batches` gives."""
        if not as_bytes:
            return self.batches(size)
        return (self.pixels[start : start + size] for start in range(0, len(self), size))

    def first(self, count: int) -> Images:
        """The first `count` images, or all if there are fewer."""
        return self.only(slice(count))

    def only(self, rows: slice | Sequence[int]) -> Images:
        """These images alone."""
        labels = None if self.labels is None else self.labels[rows]
        whole = self.again
        again = None if whole is None else lambda preprocessing: whole(preprocessing).only(rows)
        return replace(self, pixels=self.pixels[rows], labels=labels, unreadable=(), again=again)

    def at(self, image: tuple[int, int]) -> Images:
        """The same images in another height and width, read again from their source.

        >>> images.at(model.anatomy.image) is images
        True
        """
        if image == self.preprocessing.input_size[1:]:
            return self
        if self.again is None:
            raise SnapvitError(f"{self.source}: given as pixels, which have one size. Give images to read again")
        return self.again(self.preprocessing.at(image))

    @cached_property
    def fingerprint(self) -> dict[str, str | int]:
        """The source, the number of images, how many were left out, and a hash of the pixels that the model sees."""
        digest = hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()
        counts = {"images": len(self), "unreadable": len(self.unreadable)}
        return {"source": self.source, **counts, "sha256": digest}


def calibration_and_held_out(
    data: str | Sequence[str],
    count: int,
    seed: int,
    most_held_out: int,
    least_held_out: int = 0,
    opens: Callable[[str], Source] | None = None,
) -> tuple[Source, Source]:
    """Split one source or several by seed: `count` images to calibrate on, and others, never the same, to report on.

    Several sources give equal parts, and no labels. `least_held_out`: so many are held out, but at most a quarter of
    all, even if that leaves fewer to calibrate on. `opens` a source by its name, if not to calibrate on it.
    """
    if count < 1:
        raise UsageError(f"{count} calibration images are too few. Give --images 1 or more, such as 256")
    names = _named([data] if isinstance(data, str) else data)
    sources = _opened(names, opens or _to_calibrate(count, most_held_out, len(names), seed))
    if not any(source.held_out for source in sources):
        total = sum(source.count for source in sources)
        count = max(1, min(count, total - min(least_held_out, total // 4)))
    parts = equal_parts(count, [source.count for source in sources])
    chosen, rests = zip(*(_split(source, part, seed) for source, part in zip(sources, parts)))
    if len(sources) == 1 and sources[0].held_out:
        return chosen[0], _at_most(sources[0].held_out, most_held_out, seed)
    parts = equal_parts(most_held_out, [rest.count for rest in rests])
    return mixed(chosen, seed), mixed([rest.subset(range(part)) for rest, part in zip(rests, parts)], seed)


def _named(data: Sequence[str]) -> list[str]:
    """Return the names of all sources: `merged` stands for several."""
    if not data:
        raise UsageError("there are no images to calibrate on. Give --data FOLDER")
    names = [name for text in data for name in (merged(text) if is_merged(text) else (text,))]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--data {twice[0]} is given twice. Give each source once")
    return names


def _to_calibrate(count: int, most_held_out: int, sources: int, seed: int) -> Callable[[str], Source]:
    """Return what opens one of several sources; of a very large one no more than its part of the images."""
    sample, held_out = (Sample(-(-images // sources), seed) for images in (count, most_held_out))
    return partial(open_to_calibrate, sample=sample, held_out=held_out)


def _opened(names: Sequence[str], opens: Callable[[str], Source]) -> list[Source]:
    sources = [opens(name) for name in names]
    return sources if len(sources) == 1 else list(without_repeats(sources))


def _at_most(source: Source, most: int, seed: int) -> Source:
    """Return all images, so that figures can be compared, or some by seed where they are very many."""
    return source if source.count <= max(most, VERY_MANY) else source.subset(shuffled(source.count, seed)[:most])


def _split(source: Source, part: int, seed: int) -> tuple[Source, Source]:
    """Return `part` images to calibrate on, and those to report on: set aside by the source, or all the others."""
    order = shuffled(source.count, seed)
    if source.held_out is None:
        return source.subset(order[:part]), source.subset(order[part:])
    others = source.held_out  # by seed: they may have their classes in order
    return source.subset(order[:part]), others.subset(shuffled(others.count, seed))


def prepare(
    source: Source,
    preprocessing: Preprocessing,
    progress: Callable[[], None] = lambda: None,
    on_unreadable: Callable[[Sequence[str]], None] = lambda names: None,
) -> Images:
    """Decode, resize and crop every image of a source once.

    Images that cannot be read are left out and their names go to `on_unreadable`, unless they are too many.
    """
    height, width = preprocessing.input_size[1:]
    pixels = np.empty((source.count, height, width, 3), np.uint8)
    readable: list[int] = []
    unreadable: dict[str, str] = {}  # name → what is wrong
    for i in range(source.count):
        try:
            pixels[len(readable)] = preprocessing.pixels(source.open(i))
            readable.append(i)
        except UnreadableImage as error:
            unreadable[source.title(i)] = str(error)
        progress()
    if unreadable:
        on_unreadable(tuple(unreadable))
        _refuse_many(list(unreadable.values()), source.count)
    labels = None if source.labels is None else np.array([source.labels[i] for i in readable], np.int64)
    again = lru_cache(maxsize=OTHER_SIZES)(partial(prepare, source))
    pixels = pixels[: len(readable)]
    return Images(pixels, labels, preprocessing, source.name, source.classes, tuple(unreadable), again)


def _refuse_many(unreadable: Sequence[str], count: int) -> None:
    if len(unreadable) <= MOST_UNREADABLE * count:
        return
    share = f"{len(unreadable)} of {count} images unreadable; up to {MOST_UNREADABLE:.0%} would be left out"
    raise SnapvitError(f"{unreadable[0]} ({share})")


def read_images(
    split: Sequence[Source], preprocessing: Preprocessing, progress: Progress, in_many_sizes: bool = False
) -> list[Images]:
    """Decode the images of each source once; `in_many_sizes`: they will be asked for in other sizes too."""
    progress.phase("reading images", sum(part.count for part in split))
    left_out = partial(_note_unreadable, progress)
    parts = [decoded_once(part) for part in split] if in_many_sizes else split
    return [prepare(part, preprocessing, progress.advance, left_out) for part in parts]


def in_two_parts(source: Source, most: tuple[int, int], least: int) -> tuple[Source, Source]:
    """Split held-out images for a race of candidates and for the report of the best; both all of them if they are few.

    Every third image is raced on: sources may have their classes in order. `most` of each; `least` of both together.
    """
    rows = range(source.count)
    if len(rows) < least:
        return source, source
    race = [row for row in rows if row % 3 == 0]
    report = [row for row in rows if row % 3]
    return tuple(source.subset(evenly(part, limit)) for part, limit in zip((race, report), most))  # type: ignore[return-value]


def evenly(rows: Sequence[int], most: int) -> list[int]:
    """Return at most so many of them, evenly spread: sources may have their classes in order."""
    return [rows[i * len(rows) // most] for i in range(most)] if len(rows) > most else list(rows)


def _note_unreadable(progress: Progress, names: Sequence[str]) -> None:
    shown = ", ".join(names[:SHOWN_UNREADABLE])
    more = f" and {len(names) - SHOWN_UNREADABLE} more" if len(names) > SHOWN_UNREADABLE else ""
    progress.note(f"unreadable images: {shown}{more}")
