"""Measures by patch tokens against masks: a trained segmenter, and in-context segmentation. Light: numpy.

Images are read and run chunk by chunk; only what a measure learns from stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..calibration.dataset import Dataset
from ..calibration.images import Images
from ..calibration.masks import Masks, check_masks, has_mask, numbered, numbers_of, prepare_masks
from ..calibration.preprocessing import Preprocessing
from ..calibration.sampling import spread
from ..calibration.source import Source
from ..family.evaluation import MeasuredValues
from ..progress import Progress, Silent
from . import segmentation
from .extraction import ImageSplit, chunk_of
from .features import Array
from .in_context import fill_bank, shares_in_context
from .linear import Layer
from .options import OF_TOKENS, EvalOptions, Metric
from .paper_segmentation import BATCH, fit_as_published
from .segmentation import Tally, require_masks, scores_of, tally, together

VALID_SHARE = 0.1  # of the training images, where no validation images have masks


class TokenModel(Protocol):
    """Runs a model over images: the part of an `evaluator.Extractor` that is needed here."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def batch(self) -> int: ...  # images that are run together

    def tokens(self, images: Images, progress: Progress) -> Array: ...


def splits_with_masks(data: Dataset, metrics: Sequence[Metric], options: EvalOptions) -> dict[str, Source]:
    """Return the splits whose masks these metrics read; validation images only where all of them have one."""
    if not set(metrics) & set(OF_TOKENS):
        return {}
    splits = {name: source for name, source in data.splits.items() if name != "valid"}
    valid = data.valid if "segment" in metrics and options.segmenter == "paper" else None
    if valid is not None and all(has_mask(valid, i) for i in range(valid.count)):
        splits["valid"] = valid
    return splits


def check_splits(splits: Mapping[str, Source]) -> None:
    """Refuse images without masks."""
    for source in splits.values():
        check_masks(source)


@dataclass(frozen=True, eq=False)
class MaskedSplits:
    """Images with their masks, by split."""

    sources: Mapping[str, Source]
    images: Mapping[str, ImageSplit]
    masks: Mapping[str, Masks]  # classes 0, 1, ... or UNKNOWN
    values: tuple[int, ...]  # of the classes, in the files

    @staticmethod
    def read(
        sources: Mapping[str, Source],
        images: Mapping[str, ImageSplit],
        preprocessing: Preprocessing,
        ignore: Sequence[int],
        progress: Progress,
    ) -> MaskedSplits:
        """Read the masks of the images that could be read."""
        progress.phase("reading masks", sum(source.count for source in sources.values()))
        raw = {
            name: prepare_masks(source, preprocessing, images[name].unreadable, progress.advance)
            for name, source in sources.items()
        }
        masks, values = numbered(raw, ignore)
        for name in sources:
            require_masks(len(images[name]), masks[name])
        return MaskedSplits(sources, images, masks, values)

    def chunks(self, model: TokenModel, split: str, progress: Progress) -> Iterator[tuple[Array, Masks]]:
        """Run the model over a split: tokens and masks of some images at a time."""
        start = 0
        for chunk in self.images[split].chunks(chunk_of(model.batch)):
            yield model.tokens(chunk, progress), self.masks[split][start : start + len(chunk)]
            start += len(chunk)

    def readable(self, split: str) -> Source:
        """The images of a split that could be read."""
        source, left_out = self.sources[split], set(self.images[split].unreadable)
        return source.subset([i for i in range(source.count) if source.title(i) not in left_out])


def measure_tokens(
    model: TokenModel, parts: MaskedSplits, metrics: Sequence[Metric], options: EvalOptions, progress: Progress
) -> MeasuredValues:
    """Measure a model by those of the metrics that read patch tokens."""
    found: MeasuredValues = {}
    if "segment" in metrics:
        fit = _fit_quickly if options.segmenter == "quick" else _fit_as_published
        layer = fit(model, parts, options, progress)
        counted = _tallied(model, parts, lambda tokens: scores_of(layer, tokens), progress)
        found["miou"] = (counted.miou(), counted.standard_error(options.seed))
    if "in-context" in metrics:
        counted = _in_context(model, parts, options, progress)
        found["in_context"] = (counted.miou(), counted.standard_error(options.seed))
    return found


def _fit_quickly(model: TokenModel, parts: MaskedSplits, options: EvalOptions, progress: Progress) -> Layer:
    progress.phase("taking patch tokens", len(parts.images["train"]))
    tokens = np.concatenate([found for found, _ in parts.chunks(model, "train", progress)])
    progress.phase("training a segmenter", segmentation.EPOCHS)
    classes = len(parts.values)
    return segmentation.fit_segmenter(tokens, parts.masks["train"], classes, options.seed, progress.advance)


def _fit_as_published(model: TokenModel, parts: MaskedSplits, options: EvalOptions, progress: Progress) -> Layer:
    train = parts.readable("train")
    if "valid" in parts.sources:
        progress.phase("taking patch tokens of validation images", len(parts.images["valid"]))
        found = list(parts.chunks(model, "valid", progress))
    else:
        train, found = _set_aside(model, parts, options.seed, progress)
    tokens, masks = (np.concatenate(part) for part in zip(*found))
    steps = segmentation.EPOCHS * -(-train.count // BATCH)
    progress.phase("training a segmenter on crops", steps)
    return fit_as_published(
        lambda images: model.tokens(images, Silent()),
        train,
        numbers_of(parts.values),
        model.preprocessing,
        tokens,
        masks,
        options.seed,
        progress.advance,
    )


def _set_aside(
    model: TokenModel, parts: MaskedSplits, seed: int, progress: Progress
) -> tuple[Source, list[tuple[Array, Masks]]]:
    """Set a tenth of the training images aside for validation, by seed; return the others, and its tokens and masks."""
    train = parts.readable("train")
    order = spread(train.labels, train.count, seed)
    cut = min(train.count - 1, round((1 - VALID_SHARE) * train.count))
    chosen = set(order[cut:])
    progress.phase("taking patch tokens of validation images", len(chosen))
    found, start = [], 0
    for chunk in parts.images["train"].chunks(chunk_of(model.batch)):
        rows = [row for row in range(len(chunk)) if start + row in chosen]
        if rows:
            masks = parts.masks["train"][[start + row for row in rows]]
            found.append((model.tokens(chunk.only(rows), progress), masks))
        start += len(chunk)
    return train.subset(order[:cut]), found


def _in_context(model: TokenModel, parts: MaskedSplits, options: EvalOptions, progress: Progress) -> Tally:
    images = len(parts.images["train"])
    progress.phase("filling the bank of patches", images)
    chunks = parts.chunks(model, "train", progress)
    bank = fill_bank(chunks, len(parts.values), images, options.bank_patches, options.seed)
    progress.note(f"in-context: {len(bank)} patches of {images} images to compare with")
    return _tallied(model, parts, lambda tokens: shares_in_context(bank, tokens), progress)


def _tallied(
    model: TokenModel, parts: MaskedSplits, score: Callable[[Array], Iterator[Array]], progress: Progress
) -> Tally:
    """Tally the test images by scores of their patches."""
    progress.phase("segmenting", len(parts.images["test"]))
    classes = len(parts.values)
    return together(tally(score(tokens), masks, classes) for tokens, masks in parts.chunks(model, "test", progress))
