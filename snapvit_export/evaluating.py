"""How good a model is on a data set: its images read once, its features taken once, judged in several ways.

What runs the model is an `Extractor`; that of torch is `prune/features.py`, and any other runtime needs only these few
names. Importing this is light; torch is loaded when a model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec
import numpy as np

from .calibration.data_set import DataSet, open_data_set
from .calibration.digits import BUNDLED as BUNDLED_IMAGES
from .calibration.images import Images
from .calibration.masks import UNKNOWN, check_masks, numbered, prepare_masks
from .calibration.preprocessing import Preprocessing
from .errors import SnapvitError, UsageError, needs
from .evaluate import linear, segmentation
from .evaluate.evaluation import Evaluation, Found, share
from .evaluate.features import Array, Features, MadeBy, Split
from .evaluate.head import Columns, columns_for, head_right
from .evaluate.linear import linear_right
from .evaluate.neighbours import NEIGHBOURS, neighbours_right
from .pipeline import BUNDLED_MODEL, read_images
from .plan import check_fraction, check_sparsity
from .progress import Progress, Silent
from .ranking import Ranking

Way = Literal["head", "knn", "linear", "segment"]
WAYS: tuple[Way, ...] = get_args(Way)


class Extractor(Protocol):
    """What runs a model: torch, or an exported file in its runtime."""

    @property
    def name(self) -> str: ...

    @property
    def weights_sha256(self) -> str: ...  # of what is run

    @property
    def runtime(self) -> str: ...

    @property
    def preprocessing(self) -> Preprocessing: ...

    @property
    def labels(self) -> tuple[str, ...]: ...  # names of the outputs, if known

    @property
    def outputs(self) -> int: ...  # of the head, 0 without one

    def features(self, images: Images, progress: Progress) -> tuple[Array, Array | None]:
        """Embeddings (N, E), and logits (N, C) if there is a head."""
        ...

    def tokens(self, images: Images, progress: Progress) -> Array:
        """Patch tokens, (N, h, w, E)."""
        ...


@dataclass(frozen=True)
class Judging:
    """On what, and in which ways, a model is judged."""

    by: Sequence[Way] | None = None  # None: head if the classes suit, and knn if there are training images
    classes: Path | None = None  # names of the head's outputs
    features: Path | None = None  # kept there, and taken from there if they are of the same weights and images
    images: int | None = None  # of each split at most
    seed: int = 0
    ignore: Sequence[int] = (UNKNOWN,)  # values in masks that count for no class


@dataclass(frozen=True)
class EvaluateRequest:
    """Which model to judge, cut or not, and how.

    >>> evaluate_model(EvaluateRequest(judging=Judging(by=["knn"])))
    """

    model: str = BUNDLED_MODEL
    checkpoint: Path | None = None
    data: str | None = None  # None: the bundled digits, for the bundled model
    ranking: Path | None = None  # cut by it, to one of:
    sparsity: float | None = None
    flops: float | None = None
    judging: Judging = field(default_factory=Judging)


def parse_ways(text: str | None) -> tuple[Way, ...] | None:
    """Read `knn,linear`; None for the default."""
    if text is None:
        return None
    wanted = [part.strip() for part in text.split(",")]
    if unknown := [part for part in wanted if part not in WAYS]:
        raise UsageError(f"--by '{unknown[0]}' is not a way to judge. Known: {', '.join(WAYS)}")
    return tuple(way for way in WAYS if way in wanted)


def parse_ignored(text: str) -> tuple[int, ...]:
    """Read `255,3`: values in masks."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= UNKNOWN for part in parts):
        raise UsageError(f"--ignore '{text}' is not understood. Write values of masks, 0 to {UNKNOWN}, like 255,3")
    return tuple(int(part) for part in parts)


def evaluate_model(request: EvaluateRequest, progress: Progress | None = None) -> Evaluation:
    """Load a model, cut it if asked to, and judge it."""
    progress = progress or Silent()
    ranking = _check(request)
    with needs("evaluating a model", extra="prune"):
        import torch  # noqa: F401
    progress.phase("finding images")
    data = open_data_set(_data(request), request.judging.seed)
    extractor = _in_torch(request, ranking, progress)
    return judge(extractor, data, request.judging, progress)


def judge(extractor: Extractor, data: DataSet, how: Judging, progress: Progress | None = None) -> Evaluation:
    """Read the images, run the model on them once, and measure what was asked for."""
    progress = progress or Silent()
    data = data.at_most(how.images, how.seed)
    columns = _columns(extractor, data, how)
    ways = how.by or _usual(data, columns)
    _check_data(data, ways)
    images = _read(data, ways, extractor.preprocessing, progress)
    found: Found = {}
    if set(ways) != {"segment"}:
        found |= _by_features(_features(extractor, images, how, progress), columns, ways, how.seed, progress)
    if "segment" in ways:
        found |= _by_segments(extractor, data, images, how, progress)
    return Evaluation.of(found, len(images["test"]), images["test"].source)


def _check(request: EvaluateRequest) -> Ranking | None:
    """Refuse what can be refused before any work; return the ranking that was given, if one was."""
    how = request.judging
    if how.classes is not None and how.by is not None and "head" not in how.by:
        raise UsageError("--classes names the outputs of the head, which is not asked. Add head to --by")
    if how.features is not None and how.by == ("segment",):
        raise UsageError("--features keeps embeddings, and --by segment needs none. Leave --features out")
    sizes = [size for size in (request.sparsity, request.flops) if size is not None]
    if request.ranking is None and sizes:
        raise UsageError("--sparsity and --flops cut along a ranking. Give --ranking FILE, made by snapvit rank")
    if request.ranking is not None and len(sizes) != 1:
        raise UsageError(
            "--ranking tells in which order to cut, not how far. Give either --sparsity 0.3 or --flops 0.6"
        )
    if request.sparsity is not None:
        check_sparsity(request.sparsity)
    if request.flops is not None:
        check_fraction("FLOPs", request.flops)
    return None if request.ranking is None else Ranking.load(request.ranking)


def _data(request: EvaluateRequest) -> str:
    if request.data is None and request.model != BUNDLED_MODEL:
        raise UsageError(f"{request.model} needs images to be judged on. Give --data FOLDER")
    return BUNDLED_IMAGES if request.data is None else request.data


def _in_torch(request: EvaluateRequest, ranking: Ranking | None, progress: Progress) -> Extractor:
    from .plan import Planner
    from .prune.checks import check_same_weights
    from .prune.features import TorchExtractor
    from .prune.load import Model, load_model
    from .prune.slicing import shrink
    from .prune.understand import read_anatomy

    progress.phase(f"loading {request.model}")
    model = load_model(request.model, request.checkpoint)
    if ranking is None:
        return TorchExtractor(model)
    check_same_weights(ranking, model, f"{request.ranking}: ")
    planner = Planner(ranking, model.anatomy, ranking.protection)
    plan = planner.flops(request.flops) if request.flops is not None else planner.sparsity(request.sparsity or 0.0)
    small = shrink(model.module, ranking, plan)
    return TorchExtractor(Model(small, read_anatomy(small, model.name), model.description))


def _columns(extractor: Extractor, data: DataSet, how: Judging) -> Columns | None:
    """The head's outputs that stand for the data's classes; None if the head is not asked, and need not suit."""
    asked = how.by is not None and "head" in how.by
    if data.test.labels is None or not (asked or how.by is None):
        return None
    try:
        return columns_for(data.test.classes, extractor.outputs, extractor.labels, how.classes)
    except SnapvitError:
        if asked or how.classes is not None:
            raise
        return None


def _usual(data: DataSet, columns: Columns | None) -> tuple[Way, ...]:
    ways: list[Way] = [] if columns is None else ["head"]
    if data.train is not None and data.train.labels is not None and data.train.count >= NEIGHBOURS:
        ways.append("knn")
    if not ways:
        why = (
            "has no labels" if data.test.labels is None else "has other classes than the head, and few images to train"
        )
        raise SnapvitError(f"{data.name}: {why}, so nothing can be judged. Give --classes FILE, --by, or other --data")
    return tuple(ways)


def _check_data(data: DataSet, ways: Sequence[Way]) -> None:
    """Refuse ways that the data does not allow, before any image is read."""
    if data.test.labels is None and (unlabelled := [way for way in ways if way != "segment"]):
        raise SnapvitError(f"{data.name}: has no labels, which --by {unlabelled[0]} needs. Give --data a labelled set")
    if data.train is None and (untrained := [way for way in ways if way != "head"]):
        raise SnapvitError(f"{data.name}: has no training images, which --by {untrained[0]} needs. Give --data more")
    if "segment" in ways:
        for source in (data.train, data.test):
            assert source is not None
            check_masks(source)


def _read(data: DataSet, ways: Sequence[Way], preprocessing: Preprocessing, progress: Progress) -> dict[str, Images]:
    """The images of the splits that these ways look at."""
    wanted = {"head": ("test",), "segment": ("train", "test")}
    names = {name for way in ways for name in wanted.get(way, ("train", "valid", "test"))}
    splits = {name: source for name, source in data.splits.items() if name in names}
    return dict(zip(splits, read_images(list(splits.values()), preprocessing, progress)))


def _features(extractor: Extractor, images: dict[str, Images], how: Judging, progress: Progress) -> Features:
    """What the model makes of the images, or what it made of them before."""
    made_by = MadeBy(
        model=extractor.name,
        weights_sha256=extractor.weights_sha256,
        runtime=extractor.runtime,
        preprocessing=extractor.preprocessing,
        images={name: part.fingerprint for name, part in images.items()},
        classes=tuple(images["test"].classes),
    )
    if how.features is not None and how.features.exists():
        kept = Features.load(how.features)
        if _suits(kept, made_by, images):
            progress.note(f"features are taken from {how.features}")
            return kept
        progress.note(f"{how.features} is of other weights or images and will be replaced")
    progress.phase("taking features", sum(map(len, images.values())))
    splits = {name: _split(extractor, part, name == "test", progress) for name, part in images.items()}
    features = Features(made_by, splits["test"], splits.get("train"), splits.get("valid"))
    if how.features is not None:
        features.save(how.features)
    return features


def _suits(kept: Features, made_by: MadeBy, images: dict[str, Images]) -> bool:
    """Whether features are of these weights, images and labels; more splits than are needed do no harm."""
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


def _by_features(
    features: Features, columns: Columns | None, ways: Sequence[Way], seed: int, progress: Progress
) -> Found:
    found: Found = {}
    test = features.test
    assert test.targets is not None
    if "head" in ways:
        assert columns is not None
        assert test.logits is not None
        first, five = head_right(test.logits, test.targets, columns)
        found["top1"] = share(first)
        if five is not None:
            found["top5"] = share(five)
    if "knn" in ways:
        progress.phase("looking for nearest neighbours")
        bank = features.merge_train_valid().train
        assert bank is not None
        assert bank.targets is not None
        found["knn"] = share(neighbours_right(bank.features, bank.targets, test.features, test.targets))
    if "linear" in ways:
        progress.phase("training a linear probe", linear.EPOCHS)
        found["linear"] = share(linear_right(features, seed, progress.advance))
    return found


def _by_segments(
    extractor: Extractor, data: DataSet, images: dict[str, Images], how: Judging, progress: Progress
) -> Found:
    parts = {"train": data.train, "test": data.test}
    progress.phase("reading masks", sum(len(images[name]) for name in parts))
    raw = {
        name: prepare_masks(source, extractor.preprocessing, images[name].unreadable, progress.advance)
        for name, source in parts.items()
        if source is not None
    }
    masks, values = numbered(raw, how.ignore)
    progress.phase("taking patch tokens", sum(len(images[name]) for name in parts))
    train, test = (extractor.tokens(images[name], progress) for name in parts)
    progress.phase("training a segmenter", segmentation.EPOCHS)
    tally = segmentation.segment(train, masks["train"], test, masks["test"], len(values), how.seed, progress.advance)
    return {"miou": (tally.miou(), tally.standard_error(how.seed))}
