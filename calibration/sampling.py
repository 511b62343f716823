"""Sampling of images by seed: the same on every machine, and from several sources in equal parts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from .source import Source


def shuffled(count: int, seed: int) -> list[int]:
    """0..count-1 in an order that only the seed decides; a test pins it, as numpy does not promise to keep it."""
    return [int(row) for row in np.random.default_rng(seed).permutation(count)]


def spread(labels: Sequence[int] | None, count: int, seed: int) -> list[int]:
    """0..count-1 in an order by seed; every prefix of it has the classes in their proportions.

    >>> order = spread(labels, len(labels), seed=0)      # order[:cut] and order[cut:] are a stratified split
    """
    order = np.array(shuffled(count, seed), np.int64)
    if labels is None:
        return order.tolist()
    own = np.asarray(labels)[order]
    places = np.empty(count)
    for label in np.unique(own):
        members = np.flatnonzero(own == label)
        places[members] = (np.arange(len(members)) + 0.5) / len(members)  # where in the order each belongs, 0..1
    return [int(row) for row in order[np.argsort(places, kind="stable")]]


def equal_parts(total: int, sizes: Sequence[int]) -> list[int]:
    """Numbers to take of each: equal, give or take one; a small source gives all it has, the others make up for it."""
    parts = [0] * len(sizes)
    remaining = total
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for place, i in enumerate(smallest_first):
        parts[i] = min(sizes[i], remaining // (len(sizes) - place))
        remaining -= parts[i]
    return parts


def mixed(sources: Sequence[Source], seed: int) -> Source:
    """All images of several sources in one order by seed, so that every batch has some of each; without labels."""
    if len(sources) == 1:
        return sources[0]
    images = [(source, i) for source in sources for i in range(source.count)]
    order = shuffled(len(images), seed)

    def pick(i: int) -> tuple[Source, int]:
        return images[order[i]]

    return Source(
        " + ".join(source.name for source in sources if source.count),
        open=lambda i: pick(i)[0].open(pick(i)[1]),
        count=len(images),
        title=lambda i: pick(i)[0].title(pick(i)[1]),
    )


def without_repeats(sources: Sequence[Source]) -> Iterator[Source]:
    """The sources, each without the images that one before it has: a list may name files of a folder beside it."""
    seen: set[str] = set()
    for source in sources:
        names = [os.path.abspath(source.title(i)) for i in range(source.count)]
        yield source.subset([i for i, name in enumerate(names) if name not in seen])
        seen.update(names)


def places_of(source: Source) -> set[str]:
    """Return where its images lie, links followed: the same image of another folder or list has the same place."""
    return {_place(source, i) for i in range(source.count)}


def without_images(source: Source, places: Collection[str]) -> Source:
    """The source without the images that lie there."""
    return source.subset([i for i in range(source.count) if _place(source, i) not in places])


def _place(source: Source, i: int) -> str:
    return os.path.realpath(source.title(i))
