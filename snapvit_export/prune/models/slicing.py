"""Physical slicing: a Plan and a Ranking make a new, truly smaller timm module.

Every tensor that heads or neurons own is cut as `timm_blocks` describes; the rest of the module is copied. The dense
module is left unchanged, and no dense matrix is ever duplicated: the memo of the copy already has the smaller tensor
in the place of each dense one.

A sub-layer of which nothing is kept is removed with its norm, LayerScale and drop-path (`pruned_block`); the bias that
it would add is added by the layer before it.

Tokens need no weights: a smaller grid resamples the positions, as timm does, and makes rotary tables anew; where a Plan
merges tokens, the blocks become `merging.MergingBlock`s and pooling counts patches.

Where a norm runs over what is cut (EVA-02's inner MLP norm, scale-norm attention), the smaller model normalises over
what is kept; so does `masking`, and both stay equal.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from msgspec import UNSET
from timm.models.eva import Eva, EvaAttention
from torch import Tensor, nn

from ...errors import SnapvitError
from ...model.anatomy import Anatomy
from ...model.plan import Part, Plan
from ...model.ranking import Ranking
from ..blocks.eva_attention import ElasticEvaAttention
from ..blocks.merging import Holder, MergingBlock, WeightedPooling
from ..blocks.pruned_block import MEMBERS, PrunedBlock, added_by, fold
from ..blocks.timm_blocks import PARTS, as_module, blocks_of, head_shares, layer_scale_of, neuron_shares, output_of
from .read_anatomy import read_anatomy

if TYPE_CHECKING:  # which imports this file
    from .load import Model


def kept(ranking: Ranking, plan: Plan, block: int) -> tuple[Tensor, Tensor]:
    """Return the heads and the neurons that a block keeps, in their original order."""
    heads = torch.from_numpy(ranking.head_order(block)[: plan.heads[block]].copy()).sort().values
    neurons = torch.from_numpy(ranking.neuron_order(block)[: plan.neurons[block]].copy()).sort().values
    return heads, neurons  # (heads kept,), (neurons kept,)


def shrink(model: Model | nn.Module, ranking: Ranking, plan: Plan) -> nn.Module:
    """Return a smaller copy of the module; `model`, which `load_model` returned or timm made, is left unchanged.

    >>> small = shrink(model, ranking, planner.sparsity(0.3))
    """
    small = shrink_unfolded(as_module(model), ranking, plan)
    fold(small)
    return small


def shrink_unfolded(model: nn.Module, ranking: Ranking, plan: Plan) -> nn.Module:
    """Do as `shrink`, but leave what removed sub-layers add unfolded: for corrections that change that vector."""
    anatomy = read_anatomy(model, ranking.model or "model")
    if anatomy.merged is not UNSET:
        raise SnapvitError(f"{ranking.model or 'the model'} merges tokens already. Cut the model that it was made from")
    ranking.check_fits(anatomy)
    plan.check_fits(anatomy)
    keep = [kept(ranking, plan, i) for i in range(len(anatomy.blocks))]
    removed: list[list[Part]] = [[part for part, kept in zip(PARTS, pair) if not len(kept)] for pair in keep]
    small: Any = copy.deepcopy(model, _replacements(model, keep) | _removals(model, removed))
    for i, (block, dense, parts) in enumerate(zip(blocks_of(small), blocks_of(model), removed)):
        if parts:
            small.blocks[i] = block = _pruned(block, dense, anatomy.blocks[i].head_dim, parts)
        _update_settings(block, len(keep[i][0]))
    if plan.grid not in (None, anatomy.grid):
        small.set_input_size(img_size=anatomy.image_of(plan))
    if any(plan.merged):
        _merge(small, anatomy, plan)
    return small


def _merge(small: Any, anatomy: Anatomy, plan: Plan) -> None:
    """Let the blocks of a module merge tokens."""
    holder = Holder(anatomy.prefix)
    for i, (block, of) in enumerate(zip(blocks_of(small), anatomy.blocks)):
        small.blocks[i] = MergingBlock(block, of.head_dim, i, plan.merged[i], holder)
    with_prefix = small.attn_pool is not None if isinstance(small, Eva) else bool(small.pool_include_prefix)
    small.__dict__["pool"] = WeightedPooling(small, holder, with_prefix)  # in front of the method of its class


def _replacements(model: nn.Module, keep: list[tuple[Tensor, Tensor]]) -> dict[int, Any]:
    """Return a memo for deepcopy: wherever it meets a dense tensor, it takes the smaller one instead of copying."""
    memo: dict[int, Any] = {}
    for block, (heads, neurons) in zip(blocks_of(model), keep):
        for shares, chosen in ((head_shares(block.attn), heads), (neuron_shares(block.mlp), neurons)):
            for share in shares:
                smaller = share.taken(chosen)
                is_parameter = isinstance(share.tensor, nn.Parameter)
                memo[id(share.tensor)] = nn.Parameter(smaller, share.tensor.requires_grad) if is_parameter else smaller
    return memo


def _removals(model: nn.Module, removed: list[list[Part]]) -> dict[int, Any]:
    """Return a memo for deepcopy that leaves out all members of removed sub-layers."""
    return {
        id(getattr(block, name)): None
        for block, parts in zip(blocks_of(model), removed)
        for part in parts
        for name in MEMBERS[part]
        if hasattr(block, name)
    }


def _pruned(block: Any, dense: Any, head_dim: int, parts: list[Part]) -> PrunedBlock:
    pruned = PrunedBlock(block, head_dim)
    for part in parts:
        linear, layer_scale = output_of(dense, part), layer_scale_of(dense, part)
        if linear is not None and linear.bias is not None:
            pruned.add(part, linear.bias.detach() if layer_scale is None else linear.bias.detach() * layer_scale)
        elif linear is None and (left := added_by(dense, part)) is not None:  # removed before this cut
            pruned.add(part, left)
    return pruned


def _update_settings(block: Any, heads: int) -> None:
    """Make the recorded sizes of the modules agree with their tensors."""
    attn = block.attn
    if isinstance(attn, EvaAttention):
        block.attn = attn = ElasticEvaAttention(attn)
    elif attn is not None and not isinstance(attn, ElasticEvaAttention):
        attn.attn_dim = heads * attn.head_dim
    if attn is not None:
        attn.num_heads = heads
    for module in (inner for part in (attn, block.mlp) if part is not None for inner in part.modules()):
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif hasattr(module, "normalized_shape") and getattr(module, "weight", None) is not None:
            module.normalized_shape = tuple(module.weight.shape)
