"""Evaluates any number of models by the same metrics on the images of one dataset.

An `Extractor` runs a model: in torch (`prune.models.extractor`), or an exported file in its runtime (`exported_model`).
It runs once over the images; every measure comes from the features and logits of that run. The images of several
models are decoded once and stay in memory; those of one model are streamed, so that their number does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from ..calibration.dataset import ROLES, Dataset
from ..calibration.images import Images, note_unreadable, read_images
from ..calibration.preprocessing import Preprocessing
from ..calibration.source import Source
from ..calibration.streamed import StreamedImages
from ..errors import SnapvitError
from ..family.evaluation import Evaluation, MeasuredValues
from ..family.fidelity import measures as fidelity
from ..progress import Progress, Silent
from ..storage.memory import memory_bytes
from .extraction import FeatureParts, ImageSplit, chunk_of, extract
from .features import Array, Features, MadeBy, is_features
from .head import Columns, columns_for
from .knn import NEIGHBOURS
from .measure_features import measure_features
from .measure_tokens import MaskedSplits, check_splits, measure_tokens, splits_with_masks
from .options import METRICS as METRICS
from .options import OF_FEATURES, OF_TOKENS, Metric
from .options import EvalOptions as EvalOptions
from .options import check_options as check_options
from .options import parse_ignored as parse_ignored
from .options import parse_metrics as parse_metrics

MOST_MEMORY = 0.7  # of the machine's, for decoded images


class ModelUnderTest(Protocol):
    """The properties of a model that must be known before it is run."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def labels(self) -> tuple[str, ...]: ...  # names of the outputs, if known

    @property
    def outputs(self) -> int: ...  # of the head, 0 without one


class Extractor(ModelUnderTest, Protocol):
    """Runs a model: torch, or an exported file in its runtime."""

    @property
    def name(self) -> str: ...

    @property
    def weights_sha256(self) -> str: ...  # of the weights or the file that is run

    @property
    def runtime(self) -> str: ...

    @property
    def batch(self) -> int: ...  # images that are run together

    def features(self, images: Images, progress: Progress) -> tuple[Array, Array | None]:
        """Embeddings (N, E), and logits (N, C) if there is a head."""
        ...

    def tokens(self, images: Images, progress: Progress) -> Array:
        """Patch tokens, (N, h, w, E)."""
        ...


@dataclass(frozen=True)
class Evaluator:
    """The images of a dataset and the metrics to evaluate by, for any number of models."""

    data: Dataset
    images: Mapping[str, ImageSplit]  # by split
    columns: Columns | None  # the head's outputs that stand for the data's classes
    metrics: tuple[Metric, ...]  # empty: only fidelity to another model is measured
    options: EvalOptions
    on_features: Callable[[Features], None] = lambda features: None  # gets those that `evaluate` has measured

    @staticmethod
    def prepare(
        model: ModelUnderTest,
        data: Dataset,
        options: EvalOptions,
        progress: Progress,
        label_free: bool = False,
        streamed: bool = True,
    ) -> Evaluator:
        """Read the images for models like this one; `label_free`: accept data that allows no metric at all.

        `streamed`: decode them chunk by chunk, again for every model, and hold none.
        """
        data = data.at_most(options.images, options.seed)
        columns = _columns(model, data, options, progress)
        metrics = tuple(options.by) if options.by is not None else _default_metrics(data, columns, progress)
        if not metrics and not label_free:
            raise SnapvitError(_nothing(data))
        data = data.whole() if set(metrics) <= {"head"} else data
        _check_data(data, metrics)
        check_splits(splits_with_masks(data, metrics, options))
        sources = _wanted(data, metrics, options)
        read = _stream if streamed else partial(_read, data.name)
        return Evaluator(data, read(sources, model.preprocessing, progress), columns, metrics, options)

    def at(self, image: tuple[int, int]) -> Evaluator:
        """Return the same evaluation of models that take images of another height and width, read again for them."""
        sized = self.test.preprocessing.at(image)
        if sized == self.test.preprocessing:
            return self
        _check_memory(self.data.name, sum(map(len, self.images.values())), self.test.preprocessing, sized, sized)
        return replace(self, images={name: part.at(image) for name, part in self._held.items()})

    @property
    def test(self) -> Images:
        """The images that are evaluated, which are in memory."""
        return self._held["test"]

    @property
    def _held(self) -> dict[str, Images]:
        held = {name: part for name, part in self.images.items() if isinstance(part, Images)}
        if len(held) < len(self.images):
            raise ValueError("streamed images are not in memory. Prepare an evaluation that is not streamed")
        return held

    @property
    def titles(self) -> list[str]:
        """The titles of the evaluated images."""
        source, left_out = self.data.test, set(self.test.unreadable)
        titles = [title for i in range(source.count) if (title := source.title(i)) not in left_out]
        return [
            title.removeprefix(f"{source.name}/") for title in titles
        ]  # reports are shared, so titles do not show the local folder

    def evaluate(self, extractor: Extractor, progress: Progress | None = None) -> Evaluation:
        """Run a model once and measure it by all metrics."""
        progress = progress or Silent()
        found: MeasuredValues = {}
        if set(self.metrics) & set(OF_FEATURES):
            features = self.features(extractor, progress)
            self.on_features(features)
            found |= self.measures(features, progress)
        if set(self.metrics) & set(OF_TOKENS):
            sources = splits_with_masks(self.data, self.metrics, self.options)
            self._scan(extractor, progress)
            parts = MaskedSplits.read(sources, self.images, extractor.preprocessing, self.options.ignore, progress)
            found |= measure_tokens(extractor, parts, self.metrics, self.options, progress)
        return self.evaluation(found)

    def evaluation(self, found: MeasuredValues) -> Evaluation:
        """Make an Evaluation of the measured values, with the number and the source of the images."""
        test = self.images["test"]
        return Evaluation.of(found, len(test), test.source)

    def features(self, extractor: Extractor, progress: Progress) -> Features:
        """Return the features and logits of all images: of a new run, or those that were kept."""
        images, goal = self.images, self.options.features
        made_by = MadeBy(
            model=extractor.name,
            weights_sha256=extractor.weights_sha256,
            runtime=extractor.runtime,
            preprocessing=extractor.preprocessing,
            images={},
            classes=tuple(images["test"].classes),
        )
        if goal is not None and is_features(goal):
            kept = Features.load(goal)
            if self._is_same_input(kept, made_by, extractor, progress):
                progress.note(f"features are reused from {goal}")
                return kept
            progress.note(f"{goal} is of other weights or images and will be replaced")
        progress.phase(f"running {extractor.name}", sum(part.most for part in images.values()))
        parts = {name: FeatureParts(goal, made_by, name) for name in images}
        splits = {
            name: extract(extractor, part, parts[name], name == "test", progress) for name, part in images.items()
        }
        made_by = msgspec.structs.replace(made_by, images={name: part.fingerprint for name, part in images.items()})
        features = Features(made_by, splits["test"], splits.get("train"), splits.get("valid"))
        if goal is not None:
            features.save(goal)
            for each in parts.values():
                each.remove()
        return features

    def measures(self, features: Features, progress: Progress) -> MeasuredValues:
        """Measure everything that follows from features and logits."""
        return measure_features(features, self.metrics, self.columns, self.options, progress)

    def _is_same_input(self, kept: Features, made_by: MadeBy, extractor: Extractor, progress: Progress) -> bool:
        """Return True if features are of these weights, images and labels; further splits do no harm."""
        images = self.images
        assert kept.made_by is not None, "it was read from a file of ours"
        there = {name: found for name, found in kept.made_by.images.items() if name in images}
        if msgspec.structs.replace(kept.made_by, images={}) != made_by or not set(images) <= set(kept.splits):
            return False
        if self._scan(extractor, progress) != there:
            return False
        return all(_same(kept.splits[name].targets, part.labels) for name, part in images.items())

    def _scan(self, extractor: Extractor, progress: Progress) -> dict[str, dict[str, str | int]]:
        """Read streamed images that were not read yet, by their chunks; return the fingerprints of all."""
        new = [part for part in self.images.values() if isinstance(part, StreamedImages) and not part.is_known]
        if new:
            progress.phase("reading images", sum(part.most for part in new))
        for part in new:
            part.scan(chunk_of(extractor.batch), progress.advance)
        return {name: part.fingerprint for name, part in self.images.items()}


def fidelity_to(features: Features, dense: Features) -> MeasuredValues:
    """Measure the fidelity of a model to the dense one, by its logits or, without a head, its embedding."""
    ours, theirs = features.test, dense.test
    if ours.logits is None or theirs.logits is None:
        return fidelity(ours.features, theirs.features, classifies=False)
    return fidelity(ours.logits, theirs.logits)


def _columns(model: ModelUnderTest, data: Dataset, options: EvalOptions, progress: Progress) -> Columns | None:
    """Match the data's classes with the head's outputs; None if the head is not a metric, or cannot be by default."""
    asked = options.by is not None and "head" in options.by
    if data.test.labels is None or not (asked or options.by is None):
        return None
    try:
        return columns_for(data.test.classes, model.outputs, model.labels, options.classes)
    except SnapvitError as error:
        if asked or options.classes is not None:
            raise
        progress.note(f"the head is not evaluated: {error}")
        return None


def _default_metrics(data: Dataset, columns: Columns | None, progress: Progress) -> tuple[Metric, ...]:
    if data.test.labels is not None and len(data.test.classes) < 2:
        progress.note(f"{data.name}: all images are of one class, so accuracy would say nothing")
        return ()
    metrics: list[Metric] = [] if columns is None else ["head"]
    if metrics and data.unsplit is not None:
        return tuple(metrics)  # evaluated on all images; k-NN would need most of them for training
    if data.train is None or data.train.labels is None:
        return tuple(metrics)
    if data.train.count < NEIGHBOURS:
        progress.note(f"{data.name}: {data.train.count} training images are too few for k-NN")
    else:
        metrics.append("knn")
    return tuple(metrics)


def _nothing(data: Dataset) -> str:
    why = "has no labels" if data.test.labels is None else "has other classes than the head, and few training images"
    return f"{data.name}: {why}, so nothing can be evaluated. Give --classes FILE, --by, or other --data"


def _check_data(data: Dataset, metrics: Sequence[Metric]) -> None:
    """Refuse metrics that the data does not allow, before any image is read."""
    if data.test.labels is None and (unlabelled := [metric for metric in metrics if metric in OF_FEATURES]):
        raise SnapvitError(f"{data.name}: has no labels, which --by {unlabelled[0]} needs. Give --data a labelled set")
    if data.train is None and (untrained := [metric for metric in metrics if metric != "head"]):
        raise SnapvitError(f"{data.name}: has no training images, which --by {untrained[0]} needs. Give --data more")
    if set(metrics) & set(OF_FEATURES) and len(data.test.classes) < 2:
        raise SnapvitError(f"{data.name}: all images are of one class, so accuracy would say nothing. Give --data more")
    if "knn" in metrics:
        trained_on = sum(source.count for source in (data.train, data.valid) if source is not None)
        if trained_on < NEIGHBOURS:
            raise SnapvitError(
                f"{data.name}: {trained_on} training images, and k-NN needs {NEIGHBOURS}. Give --data more"
            )


def _wanted(data: Dataset, metrics: Sequence[Metric], options: EvalOptions) -> dict[str, Source]:
    """Return the splits whose images these metrics need."""
    names = {"test"}
    if metrics and set(metrics) & {"knn", "linear"}:
        names |= {"train", "valid"}
    names |= set(splits_with_masks(data, metrics, options))
    return {name: source for name, source in data.splits.items() if name in names}


def splits_for(metrics: Sequence[Metric] | None) -> tuple[str, ...]:
    """Return the splits that these metrics need; all, if they are still to be decided."""
    wanted = {"head": ("test",), "in-context": ("train", "test")}
    if metrics is None:
        return ROLES
    needed = {"test"} | {name for metric in metrics for name in wanted.get(metric, ROLES)}
    return tuple(name for name in ROLES if name in needed)


def _read(
    name: str, sources: Mapping[str, Source], preprocessing: Preprocessing, progress: Progress
) -> dict[str, ImageSplit]:
    """Read images into memory."""
    _check_memory(name, sum(source.count for source in sources.values()), preprocessing)
    return dict(zip(sources, read_images(list(sources.values()), preprocessing, progress)))


def _stream(sources: Mapping[str, Source], preprocessing: Preprocessing, progress: Progress) -> dict[str, ImageSplit]:
    left_out = partial(note_unreadable, progress)
    return {name: StreamedImages(source, preprocessing, left_out) for name, source in sources.items()}


def _check_memory(name: str, images: int, *sizes: Preprocessing) -> None:
    """Refuse more decoded images than fit into memory: in one size; or in their own, the last and the next one."""
    wanted = images * sum(math.prod(size.input_size) for size in sizes)
    if wanted > MOST_MEMORY * _memory():
        raise SnapvitError(
            f"{name}: {images} decoded images take {wanted / 1e9:.0f} GB, this machine has {_memory() / 1e9:.0f} GB. "
            "Give --images N, of each split at most"
        )


def _memory() -> float:
    return memory_bytes() or math.inf


def _same(targets: np.ndarray | None, labels: np.ndarray | None) -> bool:
    if targets is None or labels is None:
        return targets is labels
    return np.array_equal(targets, labels)
