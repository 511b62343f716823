"""Refit one Plan on images: every layer also takes back a part of what the layers before it have lost.

| symbol | meaning                                                                        | shape     |
|--------|--------------------------------------------------------------------------------|-----------|
| x      | the stream before the layer: of the blocks before, cut and refitted already     | (N, T, E) |
| a, a_K | the full input that the dense layer would have on that stream; its kept columns | (N, T, d) |
| u      | what the dense layer makes of it: W a + b                                       | (N, T, E) |
| y      | the stream after the same layer in the dense model, on its own stream          | (N, T, E) |
| t      | what is missing there: y - x - g u, with LayerScale g                          | (N, T, E) |

The elastic correction, and the sequential one, ask every layer to do what the dense layer would do with the same input:
that is least squares from a_K to u. Errors of earlier layers then pass through. Asking for all of y instead
overreaches: a_K foretells the missing part badly, and what least squares cannot foretell it shrinks, layer after layer.
A share of it, fitted with heavy damping, helps much, in the first blocks most:

    W' = (plain fit of u) + PULL cov(t, a_K) (cov(a_K) + damping)^-1 / g,    the bias takes the means.

The plain fit is damped towards the weights that the kept columns had. Layers that keep everything keep these weights
and are only asked for their share of t. Only cov(a_K), cov(u, a_K) and cov(t, a_K) are needed, so a deep cut is
refitted faster than a shallow one. The work is for one Plan, with images; memory holds the tokens of all images
three times. Only proj and fc2 change, as in every correction here.

A sub-layer that is gone has no column: all that is left of it is a vector, the mean of g u and of the same share of t,
which the layer before adds. What it would have done beside that is missing from then on, and the layers that follow
are asked for their shares of it.

Where a norm runs over what is cut (EVA-02), a_K is what really reaches the cut layer, normed over what is kept.
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
from ..blocks.timm_blocks import BRANCHES, PARTS, Branch, attention_branch, blocks_of, give_bias, mlp_branch, output_of
from ..models.load import Model, as_model
from ..models.slicing import shrink_unfolded
from ..stats.moments import RunningRegression
from ..stats.stream import Stream, capture_input
from ..stats.token_weights import TokenWeights, checked_weights, counted
from .elastic import PrunableLayer, layers_of

PULL = (
    0.6  # share of what is missing that the first block is asked to give back; it falls evenly, to none behind the last
)
PULL_DAMPING = Damping(fraction=0.1)  # of that part of the fit
LAYER_SCALE_FLOOR = 1e-2  # of the root mean square: a LayerScale smaller than this cannot give anything back


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
    """A cut and refitted copy of the model; `model`, loaded or a timm module, is left unchanged.

    >>> small = refit(model, ranking, planner.flops(0.6), images)
    """
    if not len(images):
        raise SnapvitError("a refit needs images. Give --data")
    progress, model = progress or Silent(), as_model(model)
    small = shrink_unfolded(model.module, ranking, plan)
    if plan == Plan.dense(model.anatomy):
        return small
    weights = checked_weights(model.anatomy, token_weights, plan)
    stream = Stream.of(model, images)  # of the cut model
    goal = Stream(list(stream.chunks), stream.extra)  # of the dense one
    _check_branches(blocks_of(model.module)[0], stream)
    progress.phase("refitting block by block", len(plan.heads))
    for i, (dense, cut) in enumerate(zip(blocks_of(model.module), blocks_of(small))):
        counts = [counted(model.anatomy, len(images), n, weights[i]) for n in range(len(stream.chunks))]
        fits = _layer_refits(dense, cut, layers_of(dense, ranking, i), (plan.heads[i], plan.neurons[i]), i)
        for branch, fit in zip(BRANCHES.values(), fits):
            goal.chunks = [branch(dense, chunk, goal.extra) for chunk in goal.chunks]
            if fit is not None:
                fit.apply(fit.collect(stream, goal, counts), damping, pull * (1 - i / len(plan.heads)))
            stream.chunks = [branch(cut, chunk, stream.extra) for chunk in stream.chunks]
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
    """The kept columns of a layer's input on the cut stream, and how u and t go with them."""

    moments: Moments  # of a_K
    mean: Array  # (2, E) of u and t
    cross: Array  # (2, E, k) covariance of each with a_K


@dataclass(frozen=True)
class _LayerRefit:
    """The attention or the MLP of a block: dense, and where the refitted weights go."""

    name: str
    part: Part
    branch: Branch
    dense: Any
    cut: Any
    layer: PrunableLayer
    target: nn.Linear | None  # None: the part is gone
    keep: int
    renormed: bool  # a norm runs over what is cut, so that the cut layer's input is not a part of the dense one's

    def collect(self, stream: Stream, goal: Stream, counts: Sequence[Tensor | None]) -> _LayerStatistics:
        """Run the dense sub-layer on the cut stream up to the layer; `goal` is the dense stream after it."""
        linear, columns = self.layer.linear, torch.from_numpy(self.layer.columns(self.keep))
        layer_scale = 1.0 if self.layer.layer_scale is None else torch.from_numpy(self.layer.layer_scale).float()
        sums = RunningRegression(self.name, len(columns), 2 * linear.out_features)
        for x, y, weights in zip(stream.chunks, goal.chunks, counts):
            used = slice(None) if weights is None else weights > 0
            a = self.input_at(used, linear, self.dense, x, stream.extra)
            kept = a.index_select(-1, columns)
            if self.renormed and self.target is not None:
                kept = self.input_at(used, self.target, self.cut, x, stream.extra)
            u = linear(a)
            t = y[:, used] - x[:, used] - layer_scale * u
            sums.add(kept, torch.cat([u, t], -1), None if weights is None else weights[used])
        moments, mean, cross = sums.result()
        return _LayerStatistics(moments, mean.reshape(2, -1), cross.reshape(2, linear.out_features, -1))

    def input_at(self, used: Any, linear: nn.Linear, block: Any, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        """What reaches `linear` at the tokens that count, when this half of `block` runs on `x`."""
        if self.part == "mlp":  # each token by itself, so the others need not run
            return capture_input(linear, partial(self.branch, block, x[:, used], extra))
        return capture_input(linear, partial(self.branch, block, x, extra))[:, used]

    def apply(self, found: _LayerStatistics, damping: Damping, pull: float) -> None:
        """Give the cut layer its plain fit on this stream, plus its share of what is missing."""
        if self.target is None:
            layer_scale = 1.0 if self.layer.layer_scale is None else self.layer.layer_scale
            setattr(
                self.cut,
                f"{self.part}_added",
                torch.from_numpy(layer_scale * found.mean[0] + pull * found.mean[1]).float(),
            )
            return
        share = pull * _inverse(self.layer.layer_scale, len(found.mean[0]))  # (E,)
        more = share[:, None] * _solved(found.moments, found.cross[1], PULL_DAMPING)  # (E, k)
        weight = self.layer.weight[:, self.layer.columns(self.keep)]
        bias = 0.0 if self.layer.linear.bias is None else self.layer.linear.bias.double().numpy()
        if self.keep < len(self.layer.order):
            weight = np.where(
                np.diag(found.moments.covariance) > 0, weight, 0.0
            )  # what never varies goes into the bias
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
    """The attention and the MLP of a block; None for one that the dense model lacks."""
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
    """Whether a norm stands before the last layer of an attention or MLP, over what is cut."""
    return not isinstance(getattr(part, "norm", None), nn.Identity | None)


def _solved(moments: Moments, right: Array, damping: Damping) -> Array:
    """X with X (S + damping) = right, for the covariance S."""
    lower = torch.from_numpy(cholesky(damping.added_to(moments.covariance)))
    return torch.cholesky_solve(torch.from_numpy(right.T.copy()), lower).T.numpy()


def _inverse(layer_scale: Array | None, width: int) -> Array:
    """1 / LayerScale, falling back to zero where the scale is so small that only huge weights could pass it."""
    if layer_scale is None:
        return np.ones(width)
    return layer_scale / (np.square(layer_scale) + LAYER_SCALE_FLOOR**2 * np.mean(np.square(layer_scale)) + 1e-30)
