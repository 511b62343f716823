"""A model cut and corrected from statistics of the dense one, in either variant."""

from __future__ import annotations

from torch import nn

from snapvit_export.correction.moments import Damping, Statistics
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.correct.elastic import (
    Correction,
    check_statistics,
    correct_module,
    layers_of,
    make_factors,
    put_left_to_right,
)
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.models.slicing import shrink


def corrected(
    model: Model,
    ranking: Ranking,
    plan: Plan,
    statistics: Statistics,
    damping: Damping = Damping(),
    correction: Correction = "elastic",
) -> nn.Module:
    """A cut and corrected copy of the model, from statistics of the dense one.

    "sparsegpt" is the released code's left-to-right variant, for comparison; see `correction.sparsegpt`.
    """
    small = shrink(model.module, ranking, plan)
    if correction == "elastic":
        correct_module(small, ranking, plan, make_factors(model, ranking, statistics, damping))
        return small
    ranking.check_fits(model.anatomy)
    check_statistics(model, statistics)
    for i, (block, target) in enumerate(zip(blocks_of(model.module), blocks_of(small))):
        proj, fc2 = layers_of(block, ranking, i)
        if proj is not None and plan.heads[i]:  # what is gone keeps its bias, as all biases stay in this variant
            put_left_to_right(target.attn.proj, proj, statistics.proj[i], plan.heads[i], damping)
        if fc2 is not None and plan.neurons[i]:
            put_left_to_right(target.mlp.fc2, fc2, statistics.fc2[i], plan.neurons[i], damping)
    return small
