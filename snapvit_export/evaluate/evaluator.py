"""Evaluates any number of models by the same metrics on the images of one dataset, which are read once.

An `Extractor` runs a model: in torch (`prune.models.extractor`), or an exported file in its runtime (`exported_model`).
It runs once over the images; every measure comes from the features and logits of that run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec
import numpy as np

from ..calibration.dataset import ROLES, Dataset
from ..calibration.images import Images, read_images
from ..calibration.masks import UNKNOWN, check_masks, numbered, prepare_masks
from ..calibration.preprocessing import Preprocessing
from ..errors import SnapvitError, UsageError, needs
from ..family.evaluation import Evaluation, MeasuredValues, share
from ..family.fidelity import measures as fidelity
from ..progress import Progress, Silent
from . import linear, segmentation
from .features import Array, Features, MadeBy, Split, is_features
from .head import Columns, columns_for, head_right
from .knn import NEIGHBOURS, neighbours_right
from .linear import linear_right

Metric = Literal["head", "knn", "linear", "segment"]
METRICS: tuple[Metric, ...] = get_args(Metric)
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

    def features(self, images: Images, progress: Progress) -> tuple[Array, Array | None]:
        """Embeddings (N, E), and logits (N, C) if there is a head."""
        ...

    def tokens(self, images: Images, progress: Progress) -> Array:
        """Patch tokens, (N, h, w, E)."""
        ...


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation: the metrics, and what they need."""

    by: Sequence[Metric] | None = None  # None: head if the classes match, and knn if there are training images
    classes: Path | None = None  # names of the head's outputs
    features: Path | None = None  # file to keep them in, and to reuse them from if weights and images are the same
    images: int | None = None  # of each split at most
    seed: int = 0
    ignore: Sequence[int] = (UNKNOWN,)  # values in masks that count for no class


def check_options(options: EvalOptions) -> None:
    """Refuse settings that would change nothing."""
    if options.classes is not None and options.by is not None and "head" not in options.by:
        raise UsageError("--classes names the outputs of the head, which is not evaluated. Add head to --by")
    if options.features is not None and options.by == ("segment",):
        raise UsageError("--features keeps embeddings, and --by segment needs none. Leave --features out")


def parse_metrics(text: str | None) -> tuple[Metric, ...] | None:
    """Read `knn,linear`; None for the default."""
    if text is None:
        return None
    wanted = [part.strip() for part in text.split(",")]
    if unknown := [part for part in wanted if part not in METRICS]:
        raise UsageError(f"--by '{unknown[0]}' is not a metric. Known: {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in wanted)


def parse_ignored(text: str) -> tuple[int, ...]:
    """Read `255,3`: values in masks."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= UNKNOWN for part in parts):
        raise UsageError(f"--ignore '{text}' is not understood. Write values of masks, 0 to {UNKNOWN}, like 255,3")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Evaluator:
    """The images of a dataset and the metrics to evaluate by, for any number of models."""

    data: Dataset
    images: dict[str, Images]  # by split
    columns: Columns | None  # the head's outputs that stand for the data's classes
    metrics: tuple[Metric, ...]  # empty: only fidelity to another model is measured
    options: EvalOptions

    @staticmethod
    def prepare(
        model: ModelUnderTest, data: Dataset, options: EvalOptions, progress: Progress, label_free: bool = False
    ) -> Evaluator:
        """Read the images for models like this one; `label_free`: accept data that allows no metric at all."""
        data = data.at_most(options.images, options.seed)
        columns = _columns(model, data, options, progress)
        metrics = tuple(options.by) if options.by is not None else _default_metrics(data, columns, progress)
        if not metrics and not label_free:
            raise SnapvitError(_nothing(data))
        data = data.whole() if set(metrics) <= {"head"} else data
        _check_data(data, metrics)
        return Evaluator(data, _read(data, metrics, model.preprocessing, progress), columns, metrics, options)

    def at(self, image: tuple[int, int]) -> Evaluator:
        """Return the same evaluation of models that take images of another height and width, read again for them."""
        sized = self.test.preprocessing.at(image)
        if sized == self.test.preprocessing:
            return self
        _check_memory(self.data.name, sum(map(len, self.images.values())), self.test.preprocessing, sized, sized)
        return replace(self, images={name: part.at(image) for name, part in self.images.items()})

    @property
    def test(self) -> Images:
        """The images that are evaluated."""
        return self.images["test"]

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
        if set(self.metrics) != {"segment"}:
            found |= self.measures(self.features(extractor, progress), progress)
        if "segment" in self.metrics:
            found |= self._segments(extractor, progress)
        return self.evaluation(found)

    def evaluation(self, found: MeasuredValues) -> Evaluation:
        """Make an Evaluation of the measured values, with the number and the source of the images."""
        return Evaluation.of(found, len(self.test), self.test.source)

    def features(self, extractor: Extractor, progress: Progress) -> Features:
        """Return the features and logits of all images: of a new run, or those that were kept."""
        images, options = self.images, self.options
        made_by = MadeBy(
            model=extractor.name,
            weights_sha256=extractor.weights_sha256,
            runtime=extractor.runtime,
            preprocessing=extractor.preprocessing,
            images={name: part.fingerprint for name, part in images.items()},
            classes=tuple(images["test"].classes),
        )
        if options.features is not None and is_features(options.features):
            kept = Features.load(options.features)
            if _is_same_input(kept, made_by, images):
                progress.note(f"features are reused from {options.features}")
                return kept
            progress.note(f"{options.features} is of other weights or images and will be replaced")
        progress.phase(f"running {extractor.name}", sum(map(len, images.values())))
        splits = {name: _split(extractor, part, name == "test", progress) for name, part in images.items()}
        features = Features(made_by, splits["test"], splits.get("train"), splits.get("valid"))
        if options.features is not None:
            features.save(options.features)
        return features

    def measures(self, features: Features, progress: Progress) -> MeasuredValues:
        """Measure everything that follows from features and logits."""
        found: MeasuredValues = {}
        test, metrics = features.test, self.metrics
        if not metrics:
            return found
        assert test.targets is not None
        if "head" in metrics:
            assert self.columns is not None
            assert test.logits is not None
            first, five = head_right(test.logits, test.targets, self.columns)
            found["top1"] = share(first)
            if five is not None:
                found["top5"] = share(five)
        if "knn" in metrics:
            progress.phase("finding nearest neighbours")
            bank = features.merge_train_valid().train
            assert bank is not None
            assert bank.targets is not None
            found["knn"] = share(neighbours_right(bank.features, bank.targets, test.features, test.targets))
        if "linear" in metrics:
            progress.phase("training a linear probe", linear.EPOCHS)
            found["linear"] = share(linear_right(features, self.options.seed, progress.advance))
        return found

    def _segments(self, extractor: Extractor, progress: Progress) -> MeasuredValues:
        data, images, options = self.data, self.images, self.options
        parts = {"train": data.train, "test": data.test}
        progress.phase("reading masks", sum(len(images[name]) for name in parts))
        raw = {
            name: prepare_masks(source, extractor.preprocessing, images[name].unreadable, progress.advance)
            for name, source in parts.items()
            if source is not None
        }
        masks, values = numbered(raw, options.ignore)
        progress.phase("taking patch tokens", sum(len(images[name]) for name in parts))
        train, test = (extractor.tokens(images[name], progress) for name in parts)
        progress.phase("training a segmenter", segmentation.EPOCHS)
        tally = segmentation.segment(
            train, masks["train"], test, masks["test"], len(values), options.seed, progress.advance
        )
        return {"miou": (tally.miou(), tally.standard_error(options.seed))}


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
    elif find_spec("sklearn") is None:
        progress.note("k-NN is left out: it needs scikit-learn, which is not installed")
    else:
        metrics.append("knn")
    return tuple(metrics)


def _nothing(data: Dataset) -> str:
    why = "has no labels" if data.test.labels is None else "has other classes than the head, and few training images"
    return f"{data.name}: {why}, so nothing can be evaluated. Give --classes FILE, --by, or other --data"


def _check_data(data: Dataset, metrics: Sequence[Metric]) -> None:
    """Refuse metrics that the data does not allow, before any image is read."""
    if data.test.labels is None and (unlabelled := [metric for metric in metrics if metric != "segment"]):
        raise SnapvitError(f"{data.name}: has no labels, which --by {unlabelled[0]} needs. Give --data a labelled set")
    if data.train is None and (untrained := [metric for metric in metrics if metric != "head"]):
        raise SnapvitError(f"{data.name}: has no training images, which --by {untrained[0]} needs. Give --data more")
    if metrics and metrics != ("segment",) and len(data.test.classes) < 2:
        raise SnapvitError(f"{data.name}: all images are of one class, so accuracy would say nothing. Give --data more")
    if "knn" in metrics:
        trained_on = sum(source.count for source in (data.train, data.valid) if source is not None)
        if trained_on < NEIGHBOURS:
            raise SnapvitError(
                f"{data.name}: {trained_on} training images, and k-NN needs {NEIGHBOURS}. Give --data more"
            )
        with needs("k-nearest neighbours", extra="prune"):
            import sklearn  # noqa: F401
    if "segment" in metrics:
        for source in (data.train, data.test):
            assert source is not None
            check_masks(source)


def splits_for(metrics: Sequence[Metric] | None) -> tuple[str, ...]:
    """Return the splits that these metrics need; all, if they are still to be decided."""
    wanted = {"head": ("test",), "segment": ("train", "test")}
    if metrics is None:
        return ROLES
    needed = {"test"} | {name for metric in metrics for name in wanted.get(metric, ROLES)}
    return tuple(name for name in ROLES if name in needed)


def _read(
    data: Dataset, metrics: Sequence[Metric], preprocessing: Preprocessing, progress: Progress
) -> dict[str, Images]:
    """Read the images of the splits that these metrics need."""
    names = splits_for(metrics)
    splits = {name: source for name, source in data.splits.items() if name in names}
    _check_memory(data.name, sum(source.count for source in splits.values()), preprocessing)
    return dict(zip(splits, read_images(list(splits.values()), preprocessing, progress)))


def _check_memory(name: str, images: int, *sizes: Preprocessing) -> None:
    """Refuse more decoded images than fit into memory: in one size; or in their own, the last and the next one."""
    wanted = images * sum(math.prod(size.input_size) for size in sizes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if wanted > MOST_MEMORY * memory:
        raise SnapvitError(
            f"{name}: {images} decoded images take {wanted / 1e9:.0f} GB, this machine has {memory / 1e9:.0f} GB. "
            "Give --images N, of each split at most"
        )


def _is_same_input(kept: Features, made_by: MadeBy, images: dict[str, Images]) -> bool:
    """Return True if features are of these weights, images and labels; further splits do no harm."""
    there = {name: found for name, found in kept.made_by.images.items() if name in images}
    if msgspec.structs.replace(kept.made_by, images=there) != made_by or not set(images) <= set(kept.splits):
        return False
    return all(_same(kept.splits[name].targets, part.labels) for name, part in images.items())


def _same(targets: np.ndarray | None, labels: np.ndarray | None) -> bool:
    if targets is None or labels is None:
        return targets is labels
    return np.array_equal(targets, labels)


def _split(extractor: Extractor, images: Images, with_logits: bool, progress: Progress) -> Split:
    features, logits = extractor.features(images, progress)
    if not np.isfinite(features).all():
        raise SnapvitError(f"{extractor.name}: gives features that are not finite numbers. Check its weights")
    return Split(features, images.labels, logits if with_logits else None)
