"""`snapvit evaluate FILE`: measures features that were kept in a file, with no model and no images. Light.

Ours are `.safetensors`, those of the released SnapViT code `.pt`, which torch reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import SnapvitError, UsageError, needs
from ..evaluate.features import Features
from ..evaluate.head import Columns, columns_for
from ..evaluate.knn import NEIGHBOURS
from ..evaluate.measure_features import measure_features
from ..evaluate.options import OF_TOKENS, EvalOptions, Metric
from ..family.evaluation import Evaluation
from ..progress import Progress

RELEASED = ".pt"
SUFFIXES = (".safetensors", RELEASED)


def is_feature_file(model: str) -> bool:
    """Return True if what stands for a model is a file of features by its name."""
    return Path(model).suffix.lower() in SUFFIXES and not Path(model).is_dir()


def is_released(path: Path | None) -> bool:
    """Return True for the name of a file as the released SnapViT code has them."""
    return path is not None and path.suffix.lower() == RELEASED


def evaluate_features(path: Path, options: EvalOptions, progress: Progress) -> Evaluation:
    """Measure features that were kept in a file; write them for the released code too if `options.features` says so."""
    if options.images is not None:
        raise UsageError(f"--images chooses images, and the features of {path} are made. Leave it out")
    if options.features is not None and not is_released(options.features):
        raise UsageError(f"{path}: its features are in a file. Give --features FILE.pt to write them as SnapViT does")
    progress.phase("reading features")
    features = read_features(path)
    metrics = _metrics(features, options.by, path)
    logits = features.test.logits
    columns = None if logits is None else _columns(features, metrics, options)
    if options.features is not None:
        save_released(features, options.features, options.seed)
    found = measure_features(features, metrics, columns, options, progress)
    source = None if features.made_by is None else features.made_by.images.get("test", {}).get("source")
    return Evaluation.of(found, len(features.test), str(source or path))


def read_features(path: Path) -> Features:
    """Read a file of features, ours or one of the released code."""
    if not is_released(path):
        return Features.load(path)
    with needs("reading a .pt file", extra="prune"):
        import torch  # noqa: F401
    from ..prune.released_features import read_released_features

    return read_released_features(path)


def save_released(features: Features, path: Path, seed: int) -> None:
    """Write features as the released code does."""
    with needs("writing a .pt file", extra="prune"):
        import torch  # noqa: F401
    from ..prune.released_features import write_released_features

    write_released_features(features, path, seed)


def _metrics(features: Features, by: Sequence[Metric] | None, path: Path) -> tuple[Metric, ...]:
    """Return the metrics that were asked for, or k-NN; refuse those that the file has too little for."""
    metrics: tuple[Metric, ...] = ("knn",) if by is None else tuple(by)
    if found := [metric for metric in metrics if metric in OF_TOKENS]:
        raise UsageError(f"{path}: has embeddings, and --by {found[0]} reads patch tokens. Give a model and --data")
    if features.test.targets is None:
        raise SnapvitError(f"{path}: its images have no labels, so nothing can be evaluated. Run a labelled set")
    if "head" in metrics and features.test.logits is None:
        raise SnapvitError(f"{path}: has no test_logits, which --by head needs. Give --by knn or linear")
    train = features.train
    if set(metrics) & {"knn", "linear"} and (train is None or train.targets is None):
        raise SnapvitError(f"{path}: has no labelled training images, which --by knn and linear need. Give --by head")
    if "knn" in metrics and train is not None and len(train) < NEIGHBOURS:
        raise SnapvitError(f"{path}: {len(train)} training images, and k-NN needs {NEIGHBOURS}. Give a larger set")
    return metrics


def _columns(features: Features, metrics: Sequence[Metric], options: EvalOptions) -> Columns | None:
    if "head" not in metrics:
        return None
    assert features.test.logits is not None
    return columns_for(features.classes, features.test.logits.shape[1], (), options.classes)
