"""A mixed ranking in shots: score, cut a part of the one order of heads and neurons, score what is left again.

What a shot cuts stays cut and is not corrected. Scores of two models cannot be compared, so the ranking holds places in
the order of removal: first all that is cut, as it was cut, then what is kept, by the newest scores. So the Plans of all
sizes are prefixes of one order, whatever number of shots made it.

`Settings.shots` are even parts of SHOT_SPARSITY, as LLM Surgeon's schedule to its target; what is smaller still is cut
by the scores of the last shot. `Settings.step` is a number of structures, as NViT's, until all that may be cut is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...allocation.from_scores import ranking_from
from ...allocation.planner import Planner
from ...allocation.recipe import SHOT_SPARSITY, Settings, protection_of
from ...model.plan import Plan
from ...model.ranking import MIXED, Ranking
from ...model.scores import Scores
from ...progress import Progress
from ..models.load import Model
from ..models.read_anatomy import read_anatomy
from ..models.slicing import shrink
from .checkpoint import Checkpoint, SavedState
from .rescored import rescored

PHASE = "shots"


def rank_in_shots(
    model: Model,
    settings: Settings,
    score: Callable[[Model], Scores],
    provenance: dict[str, Any],
    state: Checkpoint | None,
    saved: SavedState | None,
    progress: Progress,
) -> Ranking:
    """Return the mixed ranking of all shots; `score` is called on smaller and smaller models.

    It is saved in `state`, if there is one, after each shot, and goes on from `saved`.
    """
    if saved is not None:
        done, ranking = (
            saved.rest["shots"],
            Ranking.of_arrays(saved.arrays, model.name, model.anatomy, provenance | {MIXED: True}),
        )
        progress.note(f"going on after shot {done}")
    else:
        done, ranking = 1, ranking_from(score(model), "mixed", model.name, model.anatomy, provenance)
        _save(state, ranking, done)
    while (plan := _next_plan(ranking, model, settings, done)) is not None:
        module = shrink(model, ranking, plan)
        smaller = Model(module, read_anatomy(module, model.name), model.description)
        ranking = rescored(ranking, plan, score(smaller))
        done += 1
        _save(state, ranking, done)
    return ranking


def _next_plan(ranking: Ranking, model: Model, settings: Settings, done: int) -> Plan | None:
    """Return what is left when the model is scored for shot `done` + 1; None after the last one."""
    planner = Planner(ranking, model.anatomy, protection_of(settings))
    if settings.step is None:
        target = min(SHOT_SPARSITY, planner.largest_sparsity) * done / settings.shots
        return planner.sparsity(target) if done < settings.shots else None
    plan = planner.without(settings.step * done)
    return None if plan == planner.sparsest else plan


def _save(state: Checkpoint | None, ranking: Ranking, done: int) -> None:
    if state is not None:
        state.save(PHASE, ranking.arrays(), {"shots": done})
