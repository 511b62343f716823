"""Elastic correction of a cut module: proj and fc2 get the weights and bias nearest to the dense layer's output.

`make_factors` does the work that is common to all Plans, once; `correct_module` puts the weights of one Plan into a
module that `shrink` made. A Factor has its columns in rank order, the module in their original order: this is the one
place that converts between them.

A cut layer that had no bias gets one, since it must add the mean of what was cut:
`Anatomy.with_output_biases` is the anatomy of the result. A layer that keeps everything keeps its very weights.

A removed sub-layer is replaced by its mean: without any column, least squares can do no better. The layer before adds
it (`pruned_block.fold`).

Where a norm runs over what is cut (EVA-02's inner MLP norm, scale-norm attention), the cut layer's input is normalised
over what is kept, so dense statistics only approximate it. On a small random EVA-02, correction still lowered the
squared error of the features, 4 to 40 times where the larger channels are kept. Where channels are very uneven it
helped less under a random ranking (once it lost 4 %), and where the small ones are kept and the large ones cut it
raised the error, up to 7 times. Rankings keep the larger channels, so these layers are corrected as well; evaluate
before trusting it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...correction.cholesky import Factor, Factors, columns_of, from_rank_order, make_factor, no_factor
from ...correction.moments import Array, Damping, Moments, Statistics
from ...correction.sparsegpt import left_to_right
from ...errors import SnapvitError
from ...model.plan import Part, Plan
from ...model.ranking import Order, Ranking
from ..blocks.pruned_block import PrunedBlock, fold
from ..blocks.timm_blocks import PARTS, blocks_of, give_bias, layer_scale_of, output_of
from ..models.load import Model

Correction = Literal["elastic", "sparsegpt"]


@dataclass(frozen=True, eq=False)
class PrunableLayer:
    """The proj or fc2 of one block, which reads its structures: `unit` columns each."""

    linear: nn.Linear
    unit: int
    order: Order  # structures, best first
    layer_scale: Array | None  # LayerScale after the layer, (E,)

    @property
    def weight(self) -> Array:
        return self.linear.weight.detach().cpu().double().numpy()  # (E, d)

    def factored(self, moments: Moments, damping: Damping) -> Factor:
        return make_factor(self.weight, moments, self.order, self.unit, damping, self.layer_scale)

    def with_order(self, order: Order) -> PrunableLayer:
        return replace(self, order=order)

    def from_rank_order(self, keep: int) -> Order:
        """Return the positions in rank order of the kept columns, in their original order."""
        return from_rank_order(self.order, keep, self.unit)

    def columns(self, keep: int) -> Order:
        """Return the columns of the `keep` best structures, in their original order."""
        return columns_of(np.sort(self.order[:keep]), self.unit)


def layers_of(block: Any, ranking: Ranking, i: int) -> tuple[PrunableLayer | None, PrunableLayer | None]:
    """Return the proj and the fc2 of block `i`; None for what was removed."""
    proj, fc2 = unordered_layers(block)
    return proj and proj.with_order(ranking.head_order(i)), fc2 and fc2.with_order(ranking.neuron_order(i))


def unordered_layers(block: Any) -> tuple[PrunableLayer | None, PrunableLayer | None]:
    """Return the proj and the fc2 of a block, structures in their original order; None for what was removed."""
    units = (getattr(block.attn, "head_dim", 0), 1)
    proj, fc2 = (
        None
        if (linear := output_of(block, part)) is None
        else PrunableLayer(linear, unit, np.arange(linear.in_features // unit), _layer_scale(block, part))
        for part, unit in zip(PARTS, units)
    )
    return proj, fc2


def make_factors(model: Model, ranking: Ranking, statistics: Statistics, damping: Damping = Damping()) -> Factors:
    """Factor every layer of the dense model once; any Plan of this ranking is then corrected without images.

    >>> factors = make_factors(model, ranking, observe(model, images))
    """
    ranking.check_fits(model.anatomy)
    check_statistics(model, statistics)
    embed = model.anatomy.embed_dim
    proj: list[Factor] = []
    fc2: list[Factor] = []
    for i, block in enumerate(blocks_of(model.module)):
        first, second = layers_of(block, ranking, i)
        unit = model.anatomy.blocks[i].head_dim
        proj.append(no_factor(unit, embed) if first is None else first.factored(statistics.proj[i], damping))
        fc2.append(no_factor(1, embed) if second is None else second.factored(statistics.fc2[i], damping))
    return Factors(tuple(proj), tuple(fc2), ranking.order_sha256, damping, statistics.images)


def correct_module(small: nn.Module, ranking: Ranking, plan: Plan, factors: Factors) -> None:
    """Put corrected weights into `small`, which `shrink` made by the same ranking and plan. Changes `small`.

    >>> small = shrink(model.module, ranking, plan)
    >>> correct_module(small, ranking, plan, factors)
    """
    factors.check_made_for(ranking)
    blocks = blocks_of(small)
    if not len(blocks) == len(plan.heads) == len(factors.proj):
        raise SnapvitError(f"a plan of {len(plan.heads)} blocks and a module of {len(blocks)} do not go together")
    for i, block in enumerate(blocks):
        counts, made = (plan.heads[i], plan.neurons[i]), (factors.proj[i], factors.fc2[i])
        for part, layer, factor, keep in zip(PARTS, layers_of(block, ranking, i), made, counts):
            if layer is not None:
                put_factor(layer.linear, layer, factor, keep)
            elif keep:
                raise SnapvitError(f"block {i}: the module lacks its {part}, of which the plan keeps {keep}")
            elif factor.structures:  # otherwise it was removed before ranking, and the module adds its mean already
                put_mean(block, part, factor.corrected(0)[1], factor.layer_scale)
    fold(small)


def put_factor(target: nn.Linear, layer: PrunableLayer, factor: Factor, keep: int) -> None:
    """Give the cut `target` the corrected weight and bias of `keep` structures."""
    _check_width(target, factor.unit * keep)
    give_bias(target)
    if keep == factor.structures:
        return
    weight, shift = factor.corrected(keep)  # (E, keep*unit) in rank order
    with torch.no_grad():
        target.weight.copy_(_like(target.weight, weight[:, layer.from_rank_order(keep)]))
        target.bias.add_(_like(target.bias, shift))


def put_mean(block: PrunedBlock, part: Part, shift: Array, layer_scale: Array | None) -> None:
    """Let a removed part of `block` add its mean besides its bias: `shift` (E,) before LayerScale."""
    after = torch.from_numpy(shift if layer_scale is None else shift * layer_scale)
    like = next(block.parameters(), None)
    block.add(part, after.float() if like is None else after.to(like))


def put_left_to_right(target: nn.Linear, layer: PrunableLayer, moments: Moments, keep: int, damping: Damping) -> None:
    """Give the cut `target` the weight of the left-to-right correction (`sparsegpt`); its bias stays."""
    columns = layer.columns(keep)
    _check_width(target, len(columns))
    if len(columns) == moments.width:
        return
    mask = np.zeros(moments.width, bool)
    mask[columns] = True
    weight = left_to_right(layer.weight, moments, mask, damping)
    with torch.no_grad():
        target.weight.copy_(_like(target.weight, weight[:, columns]))


def _layer_scale(block: Any, part: Part) -> Array | None:
    gamma = layer_scale_of(block, part)
    return None if gamma is None else gamma.cpu().double().numpy()


def _like(tensor: Tensor, values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(tensor)


def check_statistics(model: Model, statistics: Statistics) -> None:
    """Refuse statistics of another model."""
    if len(statistics.proj) != len(model.anatomy.blocks):
        raise SnapvitError(
            f"the statistics are of {len(statistics.proj)} blocks, the model has {len(model.anatomy.blocks)}"
        )
    made_from = statistics.provenance.get("weights_sha256")
    if made_from is not None and made_from != model.weights_sha256:
        raise SnapvitError(f"the statistics were taken from other weights of {model.name}. Observe this model first")


def _check_width(target: nn.Linear, columns: int) -> None:
    if target.in_features != columns:
        raise SnapvitError(f"the module has a layer of {target.in_features} columns where the plan keeps {columns}")
