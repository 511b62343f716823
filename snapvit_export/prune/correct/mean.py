"""Mean-shift compensation: the bias takes over the mean of what is cut, and no weight changes. As VBP does.

    b' = b + W_P mu_P,    P the cut columns of proj or fc2, mu the mean of the dense model's input to it

All tokens count the same, and one pass over the images serves every Plan. A removed sub-layer is replaced by its mean.
A layer that had no bias gets one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ...correction.moments import Statistics
from ...model.plan import Plan
from ...model.ranking import Ranking
from ..blocks.pruned_block import fold
from ..blocks.timm_blocks import PARTS, blocks_of, give_bias, output_of
from ..models.load import Model
from ..models.slicing import shrink_unfolded
from .elastic import layers_of, put_mean


@torch.no_grad()
def shift_means(model: Model, ranking: Ranking, plan: Plan, statistics: Statistics) -> nn.Module:
    """Return a cut copy of the model whose biases make up for means; `model` itself is left unchanged.

    >>> small = shift_means(model, ranking, planner.flops(0.7), observe(model, images))
    """
    small = shrink_unfolded(model.module, ranking, plan)
    kept = zip(plan.heads, plan.neurons)
    means = zip(statistics.proj, statistics.fc2)
    for i, (cut, counts, moments) in enumerate(zip(blocks_of(small), kept, means)):
        dense = layers_of(blocks_of(model.module)[i], ranking, i)
        for part, layer, keep, own in zip(PARTS, dense, counts, moments):
            if layer is None:
                continue
            without = np.setdiff1d(np.arange(own.width), layer.columns(keep))
            shift = layer.weight[:, without] @ own.mean[without]  # (E,)
            if (target := output_of(cut, part)) is None:
                put_mean(cut, part, shift, layer.layer_scale)
                continue
            give_bias(target)
            target.bias.add_(torch.from_numpy(shift).to(target.bias))
    fold(small)
    return small
