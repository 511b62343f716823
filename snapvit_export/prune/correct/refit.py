"""Refit one Plan on images: every layer also makes up for a share of what the layers before it have lost.

| symbol | meaning                                                                        | shape     |
|--------|--------------------------------------------------------------------------------|-----------|
| x      | the stream before the layer: of the blocks before, cut and refitted already     | (N, T, E) |
| a, a_K | the full input that the dense layer would have on that stream; its kept columns | (N, T, d) |
| u      | the output of the dense layer for it: W a + b                                   | (N, T, E) |
| y      | the stream after the same layer in the dense model, on its own stream          | (N, T, E) |
| t      | what is missing there: y - x - g u, with LayerScale g                          | (N, T, E) |

The elastic and the sequential correction fit every layer to the output of the dense layer for the same input: that is
least squares from a_K to u. Errors of earlier layers then pass through. Fitting to all of y instead does harm: a_K
predicts the missing part badly, and least squares shrinks what it cannot predict, layer after layer. A share of it,
fitted with heavy damping, helps much, most in the first blocks:

    W' = (plain fit of u) + PULL cov(t, a_K) (cov(a_K) + damping)^-1 / g,    the bias takes the means.

The plain fit is damped towards the weights that the kept columns had. Layers that keep everything keep these weights
and only add their share of t. Only cov(a_K), cov(u, a_K) and cov(t, a_K) are needed, so a deep cut is refitted faster
than a shallow one. The work is for one Plan, with images; memory holds the tokens of all images three times. Only proj
and fc2 change, as in every correction here.

A removed sub-layer has no column: it is replaced by a vector, the mean of g u and of the same share of t, which the
layer before adds. The rest of its output is missing from then on, and the layers that follow make up for their shares
of it.

Where the Plan merges tokens, x is the stream of the merged ones and y the mean of the dense stream over the patches
that each token stands for, so what merging loses is a part of t. The dense stream has the Plan's own grid of patches:
those of another grid have no counterparts.

Where a norm runs over what is cut (EVA-02), a_K is the real input of the cut layer, normalised over what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...calibration.images import Images
from ...correction.cholesky import cholesky
from ...correction.moments import Array, Damping, Moments
from ...errors import GateFailed, SnapvitError
from ...model.plan import Part, Plan
from ...model.ranking import Ranking
from ...progress import Progress, Silent
from ..blocks.pruned_block import fold
from ..blocks.timm_blocks import (
    BRANCHES,
    PARTS,
    Branch,
    attention_branch,
    blocks_of,
    branch_of,
    give_bias,
    mlp_branch,
    output_of,
)
from ..models.load import Model, as_model
from ..models.slicing import shrink_unfolded
from ..models.tokens import with_tokens
from ..stats.moments import RunningRegression
from ..stats.stream import Stream, capture_input
from ..stats.token_weights import TokenWeights, checked_weights, counted
from .elastic import PrunableLayer, layers_of

PULL = 0.6  # share of t that the first block makes up for; it falls linearly, to none after the last
PULL_DAMPING = Damping(fraction=0.1)  # of the fit to t
LAYER_SCALE_FLOOR = 1e-2  # of the root mean square: behind a smaller LayerScale no weight can make up for anything


@torch.no_grad()
def refit(
    model: Model | nn.Module,
    ranking: Ranking,
    plan: Plan,
    images: Images,
    damping: Damping = Damping(),
    pull: float = PULL,
    progress: Progress | None = None,
    token_weights: TokenWeights | None = None,  # None: as the model reads them
) -> nn.Module:
    """Return a cut and refitted copy of the model; `model`, loaded or a timm module, is left unchanged.

    >>> small = refit(model, ranking, planner.flops(0.6), images)
    """
    if not len(images):
        raise SnapvitError("a refit needs images. Give --data")
    progress, model = progress or Silent(), as_model(model)
    small = shrink_unfolded(model.module, ranking, plan)
    if plan.with_tokens() == Plan.dense(model.anatomy):
        return small
    model = with_tokens(model, grid=plan.grid)
    anatomy, lengths = model.anatomy, model.anatomy.lengths(plan)
    weights = checked_weights(anatomy, token_weights, plan)
    stream = Stream.of(model, images, merging=any(plan.merged))  # of the cut model
    goal = Stream(list(stream.chunks), stream.extra)  # of the dense one
    _check_branches(blocks_of(model.module)[0], goal)
    progress.phase("refitting block by block", len(plan.heads))
    for i, (dense, cut) in enumerate(zip(blocks_of(model.module), blocks_of(small))):
        fits = _layer_refits(dense, cut, layers_of(dense, ranking, i), (plan.heads[i], plan.neurons[i]), i)
        for part, fit, tokens in zip(PARTS, fits, lengths[i]):
            goal.go_through(branch_of(part, dense))
            if fit is not None:
                counts = [counted(anatomy, len(images), n, weights[i], tokens) for n in range(len(stream.chunks))]
                fit.apply(fit.collect(stream, goal, counts), damping, pull * (1 - i / len(plan.heads)))
            stream.go_through(branch_of(part, cut))
        progress.advance()
    fold(small)
    return small


def _check_branches(block: Any, stream: Stream) -> None:
    """The gate: both residual branches, one after the other, must be the block itself."""
    chunk = stream.chunks[0][:1]
    whole = block(chunk, **stream.extra)
    off = float((mlp_branch(block, attention_branch(block, chunk, stream.extra), {}) - whole).abs().max())
    if not off <= 1e-4 * max(1.0, float(whole.abs().max())):
        raise GateFailed(f"a block is not its attention and its MLP one after the other: they differ by {off:.1e}")


@dataclass(frozen=True)
class _LayerStatistics:
    """Moments of the kept columns of a layer's input on the cut stream, and of u and t with them."""

    moments: Moments  # of a_K
    mean: Array  # (2, E) of u and t
    cross: Array  # (2, E, k) covariance of each with a_K


@dataclass(frozen=True)
class _LayerRefit:
    """The refit of one proj or fc2: the dense layer, and the cut one that gets the refitted weights."""

    name: str
    part: Part
    branch: Branch
    dense: Any
    cut: Any
    layer: PrunableLayer
    target: nn.Linear | None  # None: the part is removed
    keep: int
    renormed: bool  # a norm runs over what is cut, so the cut layer's input is no subset of the dense one's columns

    def collect(self, stream: Stream, goal: Stream, counts: Sequence[Tensor | None]) -> _LayerStatistics:
        """Run the dense sub-layer on the cut stream up to the layer; `goal` is the dense stream after it."""
        linear, columns = self.layer.linear, torch.from_numpy(self.layer.columns(self.keep))
        layer_scale = 1.0 if self.layer.layer_scale is None else torch.from_numpy(self.layer.layer_scale).float()
        sums = RunningRegression(self.name, len(columns), 2 * linear.out_features)
        for n, (x, y, weights) in enumerate(zip(stream.chunks, goal.chunks, counts)):
            used, extra = slice(None) if weights is None else weights > 0, stream.arguments(n)
            y = y if stream.groups is None else stream.groups[n].average(y)
            a = self.input_at(used, linear, self.dense, x, extra)
            kept = a.index_select(-1, columns)
            if self.renormed and self.target is not None:
                kept = self.input_at(used, self.target, self.cut, x, extra)
            u = linear(a)
            t = y[:, used] - x[:, used] - layer_scale * u
            sums.add(kept, torch.cat([u, t], -1), None if weights is None else weights[used])
        moments, mean, cross = sums.result()
        return _LayerStatistics(moments, mean.reshape(2, -1), cross.reshape(2, linear.out_features, -1))

    def input_at(self, used: Any, linear: nn.Linear, block: Any, x: Tensor, extra: dict[str, Any]) -> Tensor:
        """Return the input of `linear` at the tokens that count, when this branch of `block` runs on `x`."""
        if self.part == "mlp":  # an MLP treats each token separately, so the others need not run
            return capture_input(linear, partial(self.branch, block, x[:, used], extra))
        return capture_input(linear, partial(self.branch, block, x, extra))[:, used]

    def apply(self, found: _LayerStatistics, damping: Damping, pull: float) -> None:
        """Give the cut layer its plain fit on this stream, plus its share of t."""
        if self.target is None:
            layer_scale = 1.0 if self.layer.layer_scale is None else self.layer.layer_scale
            left = layer_scale * found.mean[0] + pull * found.mean[1]  # (E,)
            setattr(self.cut, f"{self.part}_added", torch.from_numpy(left).float())
            return
        share = pull * _inverse(self.layer.layer_scale, len(found.mean[0]))  # (E,)
        more = share[:, None] * _solved(found.moments, found.cross[1], PULL_DAMPING)  # (E, k)
        weight = self.layer.weight[:, self.layer.columns(self.keep)]
        bias = 0.0 if self.layer.linear.bias is None else self.layer.linear.bias.double().numpy()
        if self.keep < len(self.layer.order):
            varies = np.diag(found.moments.covariance) > 0  # (k,); the bias takes a column that is constant
            weight = np.where(varies, weight, 0.0)
            towards = damping.amount(found.moments.covariance) * weight
            weight = _solved(found.moments, found.cross[0] + towards, damping)
            bias = found.mean[0] - weight @ found.moments.mean
        bias = bias + share * found.mean[1] - more @ found.moments.mean
        give_bias(self.target)
        self.target.weight.copy_(torch.from_numpy(weight + more))
        self.target.bias.copy_(torch.from_numpy(bias))


def _layer_refits(
    dense: Any, cut: Any, layers: tuple[PrunableLayer | None, PrunableLayer | None], keep: tuple[int, int], i: int
) -> list[_LayerRefit | None]:
    """Return the refits of a block's proj and fc2; None for one that was removed from the dense model already."""
    named = zip(("attn.proj", "mlp.fc2"), PARTS, (dense.attn, dense.mlp), layers, keep)
    return [
        None
        if layer is None
        else _LayerRefit(
            f"blocks.{i}.{name}", part, BRANCHES[part], dense, cut, layer, output_of(cut, part), kept, _has_norm(inner)
        )
        for name, part, inner, layer, kept in named
    ]


def _has_norm(part: Any) -> bool:
    """Return True if a norm over what is cut comes before the last layer of an attention or MLP."""
    return not isinstance(getattr(part, "norm", None), nn.Identity | None)


def _solved(moments: Moments, right: Array, damping: Damping) -> Array:
    """Return X with X (S + damping) = right, for the covariance S."""
    lower = torch.from_numpy(cholesky(damping.added_to(moments.covariance)))
    return torch.cholesky_solve(torch.from_numpy(right.T.copy()), lower).T.numpy()


def _inverse(layer_scale: Array | None, width: int) -> Array:
    """Return 1 / LayerScale, going to zero where the scale is so small that only huge weights could compensate it."""
    if layer_scale is None:
        return np.ones(width)
    return layer_scale / (np.square(layer_scale) + LAYER_SCALE_FLOOR**2 * np.mean(np.square(layer_scale)) + 1e-30)
