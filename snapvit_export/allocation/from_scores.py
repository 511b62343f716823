"""From Scores to a Ranking, by how the counts of a target are found from them. Light: numpy.

| allocation | what a target cuts                                                                    |
|------------|---------------------------------------------------------------------------------------|
| pairs      | the smallest scores of heads, and of neurons, in the published pairs of ratios        |
| mixed      | the smallest scores of heads and neurons together, in one order                       |
| uniform    | the same share of every layer, its smallest scores                                    |
| summed     | what has the smallest sum of scores, of all counts that cost no more than was asked   |

`summed` takes a layer's scores for the damage of cutting its structures, and that for additive: the sum of the k
smallest is the damage of cutting k. The knapsack of damage curves then finds the best counts for any cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..model.anatomy import Anatomy
from ..model.ranking import MIXED, Curve, Order, Ranking
from ..model.scores import Scores, stacked

ByScores = Literal["pairs", "mixed", "uniform", "summed"]
BY_SCORES: tuple[str, ...] = get_args(ByScores)


def ranking_from(
    scores: Scores, allocation: str, model: str, anatomy: Anatomy, provenance: Mapping[str, Any] | None = None
) -> Ranking:
    """Return the ranking of these scores; `provenance` is that of the run, which names the allocation too.

    >>> ranking_from(scores, "mixed", model.name, model.anatomy).is_mixed
    True
    """
    made = dict(provenance or {})
    if allocation == "summed":
        return summed(scores, model, anatomy, made)
    if allocation == "uniform":
        scores = Scores(heads=stacked([*map(_places, scores.heads)]), neurons=stacked([*map(_places, scores.neurons)]))
    ranking = Ranking(scores.heads, scores.neurons, model, anatomy, made)
    return replace(ranking, provenance=made | {MIXED: True}) if allocation in ("mixed", "uniform") else ranking


def summed(scores: Scores, model: str, anatomy: Anatomy, provenance: Mapping[str, Any]) -> Ranking:
    """Return a ranking whose damage curves are sums of scores, smallest first."""
    heads, neurons = ([_best_first(block) for block in kind] for kind in (scores.heads, scores.neurons))
    damage = tuple((_sums(head), _sums(neuron)) for head, neuron in zip(scores.heads, scores.neurons))
    return Ranking.from_orders(heads, neurons, damage, model, anatomy, provenance)


def _best_first(scores: npt.NDArray[np.float32]) -> Order:
    return np.argsort(-scores, kind="stable")


def _sums(scores: npt.NDArray[np.float32]) -> Curve:
    """Return the sum of all scores but the k largest, for k from 0 to all."""
    rising = np.sort(scores.astype(np.float64))
    return np.concatenate([[0.0], np.cumsum(rising)])[::-1]


def _places(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the share of its layer that is cut once a structure is: 1 for the best."""
    places = np.empty(len(scores), np.float32)
    places[_best_first(scores)] = np.arange(len(scores), 0, -1) / max(len(scores), 1)
    return places
