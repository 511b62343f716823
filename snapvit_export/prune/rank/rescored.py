"""A ranking by scores after a part is cut and the rest scored again: places in the order of removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...model.plan import Plan
from ...model.ranking import Array, Order, Ranking
from ...model.scores import Scores
from ..models.slicing import kept


def rescored(ranking: Ranking, plan: Plan, again: Scores) -> Ranking:
    """Return a ranking by scores alone in which what `plan` keeps is ordered by `again`, the cut model's scores."""
    chosen = [kept(ranking, plan, i) for i in range(len(ranking.heads))]
    if ranking.is_mixed:
        rows = [part[kind].numpy() for kind in (0, 1) for part in chosen]
        both = _places(ranking.head_scores + ranking.neuron_scores, rows, again.heads + again.neurons)
        return replace(ranking, head_scores=both[: len(chosen)], neuron_scores=both[len(chosen) :])
    heads = _places(ranking.head_scores, [part[0].numpy() for part in chosen], again.heads)
    neurons = _places(ranking.neuron_scores, [part[1].numpy() for part in chosen], again.neurons)
    return Ranking(heads, neurons, ranking.model, ranking.anatomy, ranking.provenance)


def _places(before: Sequence[Array], chosen: Sequence[Order], again: Sequence[Array]) -> tuple[Array, ...]:
    """Return positions in the order of removal, 0 first; equal scores from the last block and index, as everywhere."""
    sizes = [len(block) for block in before]
    offsets = np.cumsum([0, *sizes[:-1]])
    stays = np.concatenate([rows + offset for rows, offset in zip(chosen, offsets)])  # (all that is kept,)
    values, is_kept = np.concatenate(before), np.zeros(sum(sizes), bool)
    values[stays], is_kept[stays] = np.concatenate(again), True
    removal_order = np.lexsort((-np.arange(len(values)), values, is_kept))
    places = np.empty(len(values), np.float32)  # whole numbers far below 2**24
    places[removal_order] = np.arange(len(values))
    return tuple(np.split(places, offsets[1:]))
