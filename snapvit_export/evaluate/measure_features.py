"""Measures that follow from features and logits alone: by the head, by nearest neighbours, by a linear probe. Light."""

from __future__ import annotations

from collections.abc import Sequence

from ..family.evaluation import MeasuredValues, share
from ..progress import Progress
from . import linear
from .features import Features
from .head import Columns, head_right
from .knn import neighbours_right
from .linear import linear_right
from .options import EvalOptions, Metric


def measure_features(
    features: Features, metrics: Sequence[Metric], columns: Columns | None, options: EvalOptions, progress: Progress
) -> MeasuredValues:
    """Measure features of labelled images; `columns`: the outputs of the head that stand for their classes."""
    found: MeasuredValues = {}
    test = features.test
    if not metrics:
        return found
    assert test.targets is not None
    merge = features.merge if options.merge is None else options.merge
    if "head" in metrics:
        assert columns is not None
        assert test.logits is not None
        first, five = head_right(test.logits, test.targets, columns)
        found["top1"] = share(first)
        if five is not None:
            found["top5"] = share(five)
    if "knn" in metrics:
        progress.phase("finding nearest neighbours", len(test))
        bank = (features if merge is False else features.merge_train_valid()).train
        assert bank is not None
        assert bank.targets is not None
        right = neighbours_right(bank.features, bank.targets, test.features, test.targets, progress=progress.advance)
        found["knn"] = share(right)
    if "linear" in metrics:
        progress.phase("training a linear probe", linear.EPOCHS)
        found["linear"] = share(linear_right(features, options.seed, progress.advance, merge is True))
    return found
