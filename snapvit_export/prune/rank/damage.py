"""A Ranking from Statistics: an order of the structures in every layer, and the damage of every width along it.

The damage of a layer is the squared error of its output, after LayerScale, that correction cannot remove. Errors of
all layers are added to the same residual stream, so damages of heads and neurons of all blocks are comparable as they
are; a search may then put a factor on each layer's curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ...correction.cholesky import Factor, Factors, no_factor
from ...correction.moments import Damping, Moments, Statistics
from ...correction.orders import ORDER_RULES, product
from ...errors import UsageError
from ...model.ranking import Order, Ranking
from ...model.scores import Scores
from ...runtimes.device import usable_cores
from ..blocks.timm_blocks import blocks_of
from ..correct.elastic import PrunableLayer, check_statistics, unordered_layers
from ..models.load import Model
from ..stats.single_thread import single_thread

MOST_AT_ONCE = 4  # blocks: each needs a few matrices of its hidden width squared, in float64


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
    embed = model.anatomy.embed_dim
    attention = [part or _nothing(block.head_dim, embed) for (part, _), block in zip(found, model.anatomy.blocks)]
    mlps = [part or _nothing(1, embed) for _, part in found]
    damage = tuple((a.factor.errors(), m.factor.errors()) for a, m in zip(attention, mlps))
    orders = [part.order for part in attention], [part.order for part in mlps]
    ranking = Ranking.from_orders(*orders, damage, model.name, model.anatomy, provenance or {})
    proj, fc2 = (tuple(part.factor for part in parts) for parts in (attention, mlps))
    return ranking, Factors(proj, fc2, ranking.order_sha256, damping, statistics.images)


class OrderedPart(NamedTuple):
    """One attention or MLP: its structures best first, and the factor that corrects any number of them."""

    order: Order
    factor: Factor


def _nothing(unit: int, embed: int) -> OrderedPart:
    return OrderedPart(np.zeros(0, np.int64), no_factor(unit, embed))


def ordered_layers(
    model: Model, statistics: Statistics, order: str, scores: Scores | None, damping: Damping
) -> list[tuple[OrderedPart | None, OrderedPart | None]]:
    """Return the ordered attention and MLP of every block; None for one that was removed from the model."""
    check_statistics(model, statistics)
    if order not in (*ORDER_RULES, "criterion", "product"):
        raise UsageError(f"no order is called '{order}'. Known: {', '.join((*ORDER_RULES, 'criterion', 'product'))}")
    if scores is None and order in ("criterion", "product"):
        raise UsageError(f"order {order} needs scores")
    blocks = blocks_of(model.module)

    def ordered(i: int) -> tuple[OrderedPart | None, OrderedPart | None]:
        given = (None, None) if scores is None else (scores.heads[i], scores.neurons[i])
        layers, moments = unordered_layers(blocks[i]), (statistics.proj[i], statistics.fc2[i])
        proj, fc2 = (_ordered(*part, order, damping) for part in zip(layers, moments, given))
        return proj, fc2

    # Each block on one thread: the number of cores must not decide between two structures that are nearly equal.
    with single_thread(), ThreadPoolExecutor(min(MOST_AT_ONCE, usable_cores())) as pool:
        return list(pool.map(ordered, range(len(blocks))))


def _ordered(
    layer: PrunableLayer | None, moments: Moments, scores: Any, order: str, damping: Damping
) -> OrderedPart | None:
    if layer is None:
        return None
    best_first = _order(layer, moments, order, scores, damping)
    return OrderedPart(best_first, layer.with_order(best_first).factored(moments, damping))


def _order(layer: PrunableLayer, moments: Moments, order: str, scores: Any, damping: Damping) -> Any:
    if order == "criterion":
        return np.argsort(-scores, kind="stable")
    weight = layer.weight if layer.layer_scale is None else layer.weight * layer.layer_scale[:, None]  # (E, d)
    ordered = ORDER_RULES["backward" if order == "product" else order](weight, moments, layer.unit, damping)
    return (product(ordered, scores) if order == "product" else ordered).order
