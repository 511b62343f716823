"""A model at its full width with the tokens of a Plan: what statistics, streams and divergences are taken of."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ...model.plan import Plan
from ...model.ranking import Ranking
from .load import Model
from .slicing import shrink


def with_tokens(model: Model, merged: Sequence[int] = (), grid: tuple[int, int] | None = None) -> Model:
    """Return the model with tokens merged, or for smaller images; the same model if nothing changes."""
    plan = Plan.dense(model.anatomy).with_tokens(merged, None if grid == model.anatomy.grid else grid)
    if not plan.changes_tokens:
        return model
    anatomy = model.anatomy.with_counts(plan)
    module = shrink(model.module, Ranking.flat(model.anatomy), plan)
    described = replace(model.description, preprocessing=model.preprocessing.at(anatomy.image))
    return Model(module, anatomy, described)
