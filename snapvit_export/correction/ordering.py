"""From Statistics to a Ranking: the order of the structures in every layer, the damage of every width. Light: numpy.

The damage of a layer is the squared error of its output, after LayerScale, that correction cannot remove. Errors of
all layers are added to the same residual stream, so damages of heads and neurons of all blocks are comparable as they
are; a search may then put a factor on each layer's curve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..model.anatomy import Anatomy
from ..model.ranking import Order, Ranking
from .cholesky import Factor, Factors, make_factor, no_factor
from .moments import Array, Damping, Moments, Statistics
from .orders import ORDER_RULES, product

BY_SCORES = ("criterion", "product")  # orders that scores decide, alone or together with `backward`
MOST_AT_ONCE = 4  # blocks: each needs a few matrices of its hidden width squared, in float64


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The proj or fc2 of one block, which reads its structures: `unit` columns each, in the model's own order."""

    weight: Array  # (E, d)
    unit: int
    layer_scale: Array | None = None  # LayerScale after the layer, (E,)


class OrderedPart(NamedTuple):
    """One attention or MLP: its structures best first, and the factor that corrects any number of them."""

    order: Order
    factor: Factor


Parts = tuple[OrderedPart | None, OrderedPart | None]  # the attention and the MLP of a block; None for what it lacks


def check_order(order: str, has_scores: bool) -> None:
    """Refuse an order that does not exist, or that needs scores where there are none."""
    if order not in (*ORDER_RULES, *BY_SCORES):
        raise UsageError(f"no order is called '{order}'. Known: {', '.join((*ORDER_RULES, *BY_SCORES))}")
    if not has_scores and order in BY_SCORES:
        raise UsageError(f"order {order} needs scores")


def ordered_part(
    layer: OutputLayer | None, moments: Moments, order: str, scores: npt.ArrayLike | None, damping: Damping
) -> OrderedPart | None:
    """Order the structures of a layer, and factor it along that order; None for a layer that the model lacks."""
    if layer is None:
        return None
    best_first = _order(layer, moments, order, scores, damping)
    return OrderedPart(
        best_first, make_factor(layer.weight, moments, best_first, layer.unit, damping, layer.layer_scale)
    )


def _order(layer: OutputLayer, moments: Moments, order: str, scores: npt.ArrayLike | None, damping: Damping) -> Order:
    if order == "criterion":
        return np.argsort(-np.asarray(scores), kind="stable")
    weight = layer.weight if layer.layer_scale is None else layer.weight * layer.layer_scale[:, None]  # (E, d)
    ordered = ORDER_RULES["backward" if order == "product" else order](weight, moments, layer.unit, damping)
    return (product(ordered, np.asarray(scores)) if order == "product" else ordered).order


def in_parallel(ordered: Callable[[int], Parts], blocks: int, at_once: int) -> list[Parts]:
    """Order all blocks, some at a time; the caller keeps linear algebra to one thread, so that cores decide nothing."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ordered, range(blocks)))


def ranking_of(
    parts: Sequence[Parts],
    anatomy: Anatomy,
    model: str,
    damping: Damping,
    statistics: Statistics,
    provenance: Mapping[str, Any] | None = None,
) -> tuple[Ranking, Factors]:
    """Return the ranking of ordered parts with its damage curves, and the factors that correct any Plan of it."""
    embed = anatomy.embed_dim
    attention = [part or _nothing(block.head_dim, embed) for (part, _), block in zip(parts, anatomy.blocks)]
    mlps = [part or _nothing(1, embed) for _, part in parts]
    damage = tuple((a.factor.errors(), m.factor.errors()) for a, m in zip(attention, mlps))
    orders = [part.order for part in attention], [part.order for part in mlps]
    ranking = Ranking.from_orders(*orders, damage, model, anatomy, provenance or {})
    proj, fc2 = (tuple(part.factor for part in each) for each in (attention, mlps))
    return ranking, Factors(proj, fc2, ranking.order_sha256, damping, statistics.images)


def _nothing(unit: int, embed: int) -> OrderedPart:
    return OrderedPart(np.zeros(0, np.int64), no_factor(unit, embed))
