"""Iterative ranking (as IDAP++ has it): prune a little, look again, repeat, while the model stays itself.

The curves of the dense model do not know what a cut does to what is left. So the model is cut a little and refitted,
and what it keeps is ordered anew by the statistics of that smaller model; then it is cut a little more. A round ends
the work if the answers of its model have moved further from the dense model's than was allowed.

What a round cuts stays cut: it goes behind everything that is kept, in the order that it had. So all Plans are still
prefixes of one order, and a Plan of a later round is part of every earlier one. Within a layer that keeps K, the damage
of k structures is that of K before, and for fewer the new curve on top of it:

    D'(k) = D(k) for k >= K,    D'(k) = D(K) + d(k) for k < K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..calibration.images import Images
from ..correction.damping import Damping
from ..errors import UsageError
from ..plan import Plan, Planner, check_fraction
from ..progress import Progress, Silent
from ..ranking import Curve, Damage, Order, Ranking, check_whole
from .checks import weights_fingerprint
from .damage import damage_ranking
from .load import Model
from .observe import observe
from .refit import refit
from .search.divergence import Divergence, DivergenceName, default_divergence
from .slicing import kept
from .understand import read_anatomy

ROUNDS = (0.85, 0.7, 0.55, 0.4)  # FLOPs of the blocks after each


def rank_in_rounds(
    model: Model,
    images: Images,
    flops: Sequence[float] = ROUNDS,
    most_moved: float = float("inf"),
    order: str = "backward",
    damping: Damping = Damping(),
    divergence: DivergenceName | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """A ranking with damage curves, made in rounds of these FLOPs, until the answers move more than `most_moved`.

    Provenance says under `rounds` what each one found; the last of them may be the one that went too far, and then has
    no part in the ranking.

    >>> rank_in_rounds(model, images, most_moved=0.5).provenance["rounds"]
    """
    check_whole(model.anatomy)
    _check(flops)
    progress = progress or Silent()
    ranking, _ = damage_ranking(model, observe(model, images, progress), order, None, damping)
    judge = Divergence(divergence or default_divergence(model), model, _embedding(model.module, images))
    rounds: list[dict[str, Any]] = []
    for fraction in flops:
        plan = Planner(ranking, model.anatomy).flops(fraction)
        module = refit(model, ranking, plan, images, damping, progress=progress)
        moved = float(judge(_embedding(module, images), slice(0, len(images))).mean())
        rounds.append({"flops": fraction, "moved": moved, "kept": moved <= most_moved})
        if not moved <= most_moved:
            progress.note(f"stopped at {fraction:g} of the FLOPs: the answers moved by {moved:.3g}")
            break
        smaller = Model(module, read_anatomy(module, model.name), model.description)
        again, _ = damage_ranking(smaller, observe(smaller, images, progress, warn=False), order, None, damping)
        ranking = refined(ranking, plan, again)
    made = {"allocation": "joint", "order": order, "data": images.fingerprint, "rounds": rounds}
    return replace(ranking, provenance={**made, "weights_sha256": weights_fingerprint(model.module)})


def refined(ranking: Ranking, plan: Plan, again: Ranking) -> Ranking:
    """The ranking, but what `plan` keeps has the order and damage of `again`, a ranking of that part alone."""
    if ranking.damage is None or again.damage is None:
        raise UsageError("only rankings with damage curves can be refined")
    heads, neurons, damage = [], [], []
    for i, (before, after) in enumerate(zip(ranking.damage, again.damage)):
        chosen = [part.numpy() for part in kept(ranking, plan, i)]
        heads.append(_joined(ranking.head_order(i), chosen[0], again.head_order(i)))
        neurons.append(_joined(ranking.neuron_order(i), chosen[1], again.neuron_order(i)))
        damage.append((_continued(before[0], after[0]), _continued(before[1], after[1])))
    made: Damage = tuple(damage)
    return Ranking.from_orders(heads, neurons, made, ranking.model, ranking.anatomy, ranking.provenance)


def _joined(order: Order, chosen: Order, again: Order) -> Order:
    """What is kept in its new order, then what was cut as it was; `chosen`: the kept ones as the smaller model has."""
    return np.concatenate([chosen[again], order[len(chosen) :]])


def _continued(before: Curve, after: Curve) -> Curve:
    keep = len(after) - 1
    return np.concatenate([before[keep] + after[:-1], before[keep:]])


@torch.no_grad()
def _embedding(module: Any, images: Images) -> torch.Tensor:
    batches = (torch.from_numpy(batch) for batch in images.batches(16))
    return torch.cat([module.forward_head(module.forward_features(batch), pre_logits=True) for batch in batches])


def _check(flops: Sequence[float]) -> None:
    for fraction in flops:
        check_fraction("FLOPs", fraction)
    if not flops or list(flops) != sorted(set(flops), reverse=True):
        raise UsageError("rounds need falling fractions of the FLOPs, such as 0.85, 0.7, 0.55")
