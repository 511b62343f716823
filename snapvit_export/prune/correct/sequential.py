"""Sequential correction of one Plan: every layer is fitted to its real input after the cut and corrected layers.

After a deep cut the input of a late layer is no longer distributed as in the dense model. So the images go through the
blocks once: at each layer the moments of its full input are taken on the stream of the blocks before it, cut and
corrected already; the layer is corrected by them; the stream continues through the result. The work is for one Plan,
and the tokens of all images are held (N T E float32), where `elastic` serves every Plan without any image.

Within a block, fc2 is fitted after the cut and corrected attention. The released code differs there, and "sparsegpt"
follows it: the moments of both layers come from the dense block, after cut blocks, and so of tokens that this block has
not merged yet.

A removed sub-layer is replaced by the mean of the dense one's output on this stream; with "sparsegpt" only by its bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration.images import Images
from ...correction.moments import Damping
from ...errors import SnapvitError
from ...model.plan import Plan
from ...model.ranking import Ranking
from ...progress import Progress, Silent
from ..blocks.pruned_block import fold
from ..blocks.timm_blocks import PARTS, blocks_of, branch_of, give_bias, output_of, whole_block
from ..models.load import Model
from ..models.slicing import shrink_unfolded
from ..models.tokens import with_tokens
from ..stats.stream import Stream
from ..stats.token_weights import TokenWeights, checked_weights, shortened
from .elastic import Correction, PrunableLayer, layers_of, put_factor, put_left_to_right, put_mean


@torch.no_grad()
def correct_in_sequence(
    model: Model,
    ranking: Ranking,
    plan: Plan,
    images: Images,
    damping: Damping = Damping(),
    correction: Correction = "elastic",
    progress: Progress | None = None,
    token_weights: TokenWeights | None = None,
) -> nn.Module:
    """Return a cut copy of the model, corrected layer after layer; `model` itself is left unchanged.

    >>> small = correct_in_sequence(model, ranking, planner.sparsity(0.6), images)
    """
    if not len(images):
        raise SnapvitError("sequential correction needs images. Give --data")
    progress = progress or Silent()
    if correction == "sparsegpt" and token_weights is None:
        token_weights = [None] * len(plan.heads)  # the released code weighs all tokens the same
    small = shrink_unfolded(model.module, ranking, plan)
    model = with_tokens(model, grid=plan.grid)
    weights, lengths = checked_weights(model.anatomy, token_weights, plan), model.anatomy.lengths(plan)
    stream = Stream.of(model, images, merging=any(plan.merged))
    correct_block = _correct_block if correction == "elastic" else _correct_block_as_released
    progress.phase("correcting block by block", len(weights))
    for i, (dense, cut) in enumerate(zip(blocks_of(model.module), blocks_of(small))):
        of_parts = [shortened(weights[i], model.anatomy, tokens) for tokens in lengths[i]]
        step = _Step(i, dense, cut, layers_of(dense, ranking, i), (plan.heads[i], plan.neurons[i]), of_parts, damping)
        correct_block(step, stream)
        progress.advance()
    fold(small)
    return small


@dataclass(frozen=True)
class _Step:
    """One block, dense and cut: its proj and fc2, and the number of structures that each keeps."""

    number: int
    dense: Any
    cut: Any
    layers: tuple[PrunableLayer | None, PrunableLayer | None]  # None: removed from the dense model already
    keep: tuple[int, int]
    weights: Sequence[Tensor | None]  # of the tokens that the attention, and the MLP, computes with
    damping: Damping

    def names(self) -> tuple[str, str]:
        return f"blocks.{self.number}.attn.proj", f"blocks.{self.number}.mlp.fc2"

    def targets(self) -> tuple[nn.Linear | None, nn.Linear | None]:
        return output_of(self.cut, "attention"), output_of(self.cut, "mlp")

    def is_cut(self) -> Sequence[bool]:
        return [layer is not None and keep < len(layer.order) for layer, keep in zip(self.layers, self.keep)]


def _correct_block(step: _Step, stream: Stream) -> None:
    """Correct proj by the output of all heads, then fc2 by that of all neurons after the corrected attention."""
    for part, layer, target, keep, name, is_cut, weights in zip(
        PARTS, step.layers, step.targets(), step.keep, step.names(), step.is_cut(), step.weights
    ):
        if target is not None:
            give_bias(target)
        if layer is not None and is_cut:
            moments = stream.moments(branch_of(part, step.dense), layer.linear, name, weights)
            if target is None:
                put_mean(step.cut, part, layer.weight @ moments.mean, layer.layer_scale)
            else:
                put_factor(target, layer, layer.factored(moments, step.damping), keep)
        stream.go_through(branch_of(part, step.cut))


def _correct_block_as_released(step: _Step, stream: Stream) -> None:
    """Correct both layers by their inputs in the dense block, each from left to right."""
    for layer, target, keep, name, is_cut in zip(step.layers, step.targets(), step.keep, step.names(), step.is_cut()):
        if layer is not None and is_cut and target is not None:
            moments = stream.moments(whole_block(step.dense), layer.linear, name, step.weights[0])
            put_left_to_right(target, layer, moments, keep, step.damping)
    stream.go_through(whole_block(step.cut))
