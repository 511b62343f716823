"""A ranking after a round: what a Plan keeps is ordered anew, what it cuts goes behind, in the order that it had.

Within a layer that keeps K, the damage of k structures is that of K before, and for fewer the new curve on top of it:

    D'(k) = D(k) for k >= K,    D'(k) = D(K) + d(k) for k < K.

A sub-layer that is gone has nothing to look at again; its curve stays as it was.

Scores of two models cannot be compared, and without curves only their order over all blocks counts. So there they
become places in that order: first all that is cut, by the scores of before, then what is kept, by the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import UsageError
from ...model.plan import Plan
from ...model.ranking import Array, Curve, Damage, Order, Ranking
from ...model.scores import Scores
from ..models.slicing import kept
from .damage import Ordered


def refined(ranking: Ranking, plan: Plan, again: Sequence[tuple[Ordered | None, Ordered | None]]) -> Ranking:
    """The ranking, but what `plan` keeps has the order and damage of `again`, which was made of that part alone."""
    if ranking.damage is None:
        raise UsageError("only a ranking with damage curves can be refined")
    heads, neurons, damage = [], [], []
    for i, (before, after) in enumerate(zip(ranking.damage, again)):
        chosen = [part.numpy() for part in kept(ranking, plan, i)]
        orders = (ranking.head_order(i), ranking.neuron_order(i))
        (head_order, head_curve), (neuron_order, neuron_curve) = map(_continued, orders, before, chosen, after)
        heads.append(head_order)
        neurons.append(neuron_order)
        damage.append((head_curve, neuron_curve))
    made: Damage = tuple(damage)
    return Ranking.from_orders(heads, neurons, made, ranking.model, ranking.anatomy, ranking.provenance)


def _continued(order: Order, curve: Curve, chosen: Order, again: Ordered | None) -> tuple[Order, Curve]:
    """What is kept in its new order, then what was cut as it was; `chosen`: the kept ones as the smaller model has."""
    if again is None:
        return order, curve
    keep = len(chosen)
    new = np.concatenate([curve[keep] + again.factor.errors()[:-1], curve[keep:]])
    return np.concatenate([chosen[again.order], order[keep:]]), new


def rescored(ranking: Ranking, plan: Plan, again: Scores) -> Ranking:
    """A ranking by scores alone, but what `plan` keeps is ordered by `again`, the scores of that part alone."""
    chosen = [kept(ranking, plan, i) for i in range(len(ranking.heads))]
    heads = _places(ranking.head_scores, [part[0].numpy() for part in chosen], again.heads)
    neurons = _places(ranking.neuron_scores, [part[1].numpy() for part in chosen], again.neurons)
    return Ranking(heads, neurons, ranking.model, ranking.anatomy, ranking.provenance)


def _places(before: Sequence[Array], chosen: Sequence[Order], again: Sequence[Array]) -> tuple[Array, ...]:
    """0 for what goes first, and so on: equal scores go from the last block, last index, as in every ranking."""
    sizes = [len(block) for block in before]
    offsets = np.cumsum([0, *sizes[:-1]])
    stays = np.concatenate([rows + offset for rows, offset in zip(chosen, offsets)])  # (all that is kept,)
    values, is_kept = np.concatenate(before), np.zeros(sum(sizes), bool)
    values[stays], is_kept[stays] = np.concatenate(again), True
    first_to_go = np.lexsort((-np.arange(len(values)), values, is_kept))
    places = np.empty(len(values), np.float32)  # whole numbers far below 2**24
    places[first_to_go] = np.arange(len(values))
    return tuple(np.split(places, offsets[1:]))
