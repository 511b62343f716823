"""A Ranking from Statistics: an order of the structures in every layer, and the damage of every width along it.

The damage of a layer is the squared error of its output, after LayerScale, that correction cannot give back. Errors of
all layers are added to the same residual stream, so that heads and neurons of all blocks can be weighed against each
other as they are; a search may then put a factor on each layer's curve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..correction.damping import Damping
from ..correction.factor import Factor
from ..correction.factors import Factors
from ..correction.orders import ORDERS, Ordered, product
from ..correction.statistics import Array, Moments, Statistics
from ..errors import UsageError
from ..ranking import Ranking
from ..scores import Scores
from .correct import Layer, check_statistics, layers_of
from .load import Model
from .one_thread import one_thread
from .parts import blocks_of


def damage_ranking(
    model: Model,
    statistics: Statistics,
    order: str = "backward",
    scores: Scores | None = None,
    damping: Damping = Damping(),
    provenance: Mapping[str, Any] | None = None,
) -> tuple[Ranking, Factors]:
    """The ranking with its damage curves, and the factors that correct any Plan of it.

    `order` is one of `ORDERS`; "criterion" takes the order of `scores`, "product" that of both together.

    >>> ranking, factors = damage_ranking(model, observe(model, images))
    """
    check_statistics(model, statistics)
    if order not in (*ORDERS, "criterion", "product"):
        raise UsageError(f"no order is called '{order}'. Known: {', '.join((*ORDERS, 'criterion', 'product'))}")
    if scores is None and order in ("criterion", "product"):
        raise UsageError(f"order {order} needs scores")
    flat = Ranking.flat(model.anatomy)
    proj: list[Factor] = []
    fc2: list[Factor] = []
    heads: list[Array] = []
    neurons: list[Array] = []
    with one_thread():  # so that the number of cores cannot decide between two structures that are nearly equal
        for i, block in enumerate(blocks_of(model.module)):
            given = (None, None) if scores is None else (scores.heads[i], scores.neurons[i])
            moments_of, results = (statistics.proj[i], statistics.fc2[i]), ((heads, proj), (neurons, fc2))
            for layer, moments, own, (found, factors) in zip(layers_of(block, flat, i), moments_of, given, results):
                best_first = _order(layer, moments, order, own, damping)
                found.append(best_first)
                factors.append(layer.with_order(best_first).factored(moments, damping))
    damage = tuple((a.errors(), m.errors()) for a, m in zip(proj, fc2))
    ranking = Ranking.from_orders(heads, neurons, damage, model.name, model.anatomy, provenance or {})
    return ranking, Factors(tuple(proj), tuple(fc2), ranking.order_sha256, damping, statistics.images)


def _order(layer: Layer, moments: Moments, order: str, scores: Any, damping: Damping) -> Any:
    if order == "criterion":
        return np.argsort(-scores, kind="stable")
    weight = layer.weight if layer.gain is None else layer.weight * layer.gain[:, None]  # (E, d)
    ordered: Ordered = ORDERS["backward" if order == "product" else order](weight, moments, layer.unit, damping)
    return (product(ordered, scores) if order == "product" else ordered).order
