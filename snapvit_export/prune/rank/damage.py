"""A Ranking from the Statistics of a module: `correction.ordering` on the weights of its proj and fc2 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...correction.cholesky import Factors
from ...correction.moments import Damping, Statistics
from ...correction.ordering import MOST_AT_ONCE, OutputLayer, Parts, check_order, in_parallel, ordered_part, ranking_of
from ...model.ranking import Ranking
from ...model.scores import Scores
from ...runtimes.device import usable_cores
from ..blocks.timm_blocks import blocks_of
from ..correct.elastic import PrunableLayer, check_statistics, unordered_layers
from ..models.load import Model
from ..stats.single_thread import single_thread


def damage_ranking(
    model: Model,
    statistics: Statistics,
    order: str = "backward",
    scores: Scores | None = None,
    damping: Damping = Damping(),
    provenance: Mapping[str, Any] | None = None,
) -> tuple[Ranking, Factors]:
    """Return the ranking with its damage curves, and the factors that correct any Plan of it.

    `order` is one of `ORDER_RULES`; "criterion" takes the order of `scores`, "product" that of both together.

    >>> ranking, factors = damage_ranking(model, observe(model, images))
    """
    found = ordered_layers(model, statistics, order, scores, damping)
    return ranking_of(found, model.anatomy, model.name, damping, statistics, provenance)


def ordered_layers(
    model: Model, statistics: Statistics, order: str, scores: Scores | None, damping: Damping
) -> list[Parts]:
    """Return the ordered attention and MLP of every block; None for one that was removed from the model."""
    check_statistics(model, statistics)
    check_order(order, scores is not None)
    blocks = blocks_of(model.module)

    def ordered(i: int) -> Parts:
        given = (None, None) if scores is None else (scores.heads[i], scores.neurons[i])
        layers, moments = unordered_layers(blocks[i]), (statistics.proj[i], statistics.fc2[i])
        proj, fc2 = (
            ordered_part(_as_read(layer), own, order, by, damping) for layer, own, by in zip(layers, moments, given)
        )
        return proj, fc2

    # Each block on one thread: the number of cores must not decide between two structures that are nearly equal.
    with single_thread():
        return in_parallel(ordered, len(blocks), min(MOST_AT_ONCE, usable_cores()))


def _as_read(layer: PrunableLayer | None) -> OutputLayer | None:
    return None if layer is None else OutputLayer(layer.weight, layer.unit, layer.layer_scale)
