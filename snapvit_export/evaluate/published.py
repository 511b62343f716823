"""Published accuracies of pruned models, to stand beside ours: the results page of the released SnapViT code. Light.

They are k-NN accuracies after pruning with the released scores, uncorrected, of whole test sets. A value is given only
for the same model (by its timm name, its image size and what its head reads), the same pair of ratios, and a data set
of that name and of as many test images. `published.json` holds them and names their source.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import PurePath
from typing import Annotated

import msgspec

from ..calibration.known_sets import ALIASES
from ..family.evaluation import Measure
from ..model.anatomy import Anatomy
from ..storage.json import Ratio, Some, Value, from_json

PUBLISHED = "published.json"
Pair = tuple[Ratio, Ratio]  # of neurons, of heads
DENSE_PAIR: Pair = (0.0, 0.0)


class PublishedRow(Value, frozen=True):
    """Accuracies at one pair of ratios, in the order of the data sets."""

    pair: Pair
    percent: tuple[Annotated[float, msgspec.Meta(ge=0, le=100)], ...]


class PublishedModel(Value, frozen=True):
    """One model of the page, and the timm names of its weights."""

    title: str
    names: tuple[str, ...]
    pooling: str  # what its head reads, as Anatomy has it
    rows: tuple[PublishedRow, ...]


class PublishedResults(Value, frozen=True):
    """The page: data sets with the number of their test images, and models."""

    source: str
    measure: Measure
    image: tuple[int, int]
    sets: dict[str, Some]
    models: tuple[PublishedModel, ...]

    def of(self, name: str, anatomy: Anatomy) -> PublishedModel | None:
        """Return the model of this timm name, if it is there and takes and reads the same."""
        bare = name.removeprefix("timm/")
        found = next((model for model in self.models if bare in model.names), None)
        same = found is not None and (anatomy.image, anatomy.pooling) == (self.image, found.pooling)
        return found if same else None

    def value(self, model: PublishedModel, pair: Pair, data: str, images: int) -> float | None:
        """Return the accuracy as a share; None for another pair, another data set, or another number of images."""
        name = set_name(data)
        row = next((row for row in model.rows if row.pair == pair), None)
        if row is None or self.sets.get(name) != images:
            return None
        return row.percent[list(self.sets).index(name)] / 100


def set_name(data: str) -> str:
    """Return the plain name of what `--data` names: its last part, by the name that the known sets go by.

    >>> set_name("pets"), set_name("/data/cifar10"), set_name("hf:uoft-cs/cifar100")
    ('oxford-pets', 'cifar10', 'cifar100')
    """
    last = PurePath(data).name
    return ALIASES.get(last, last)


@cache
def published_results() -> PublishedResults:
    """Return the published page."""
    text = (resources.files(__package__) / PUBLISHED).read_bytes()
    return from_json(text, PublishedResults, PUBLISHED)
