"""Refit one Plan on images: every layer also takes back a part of what the layers before it have lost.

| symbol | meaning                                                                        | shape     |
|--------|--------------------------------------------------------------------------------|-----------|
| x      | the stream before the layer: of the blocks before, cut and refitted already     | (N, T, E) |
| a      | the full input that the dense layer would have on that stream                  | (N, T, d) |
| y      | the stream after the same layer in the dense model, on its own stream          | (N, T, E) |
| t      | what is missing there: y - x - g (W a + b), with LayerScale g                  | (N, T, E) |

The elastic correction, and the sequential one, ask every layer to do what the dense layer would do with the same input:
that is least squares from the kept columns of a to W a + b. Errors of earlier layers then pass through. Asking for all
of y instead overreaches: a's kept columns foretell the missing part badly, and a fit that follows them too far harms
new images. A small share of it, fitted with heavy damping, helps much:

    W' = (plain fit) + PULL cov(t, a_K) (cov(a_K) + damping)^-1 / g,    the bias takes the means.

Layers that keep everything are refitted too: they can take back what others lost. The work is for one Plan, with
images; memory holds the tokens of all images three times. Only proj and fc2 change, as in every correction here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..calibration.images import Images
from ..correction.damping import Damping
from ..correction.statistics import Array, Moments
from ..errors import GateFailed, SnapvitError
from ..plan import Plan
from ..progress import Progress, Silent
from ..ranking import Ranking
from .correct import Layer, layers_of
from .load import Model
from .one_thread import one_thread
from .parts import blocks_of, give_bias
from .reaching import input_of
from .running_moments import RunningMoments
from .sequential import Stream
from .slicing import shrink

PULL = 0.3  # share of what is missing that a layer is asked to give back
PULL_DAMPING = Damping(fraction=0.1)  # of that part of the fit
WIDE = 2048  # columns from which on a solve is worth several threads
LEAST_GAIN = 1e-2  # of the root mean square: a LayerScale smaller than this cannot give anything back


@torch.no_grad()
def refit(
    model: Model,
    ranking: Ranking,
    plan: Plan,
    images: Images,
    damping: Damping = Damping(),
    pull: float = PULL,
    progress: Progress | None = None,
) -> nn.Module:
    """A cut and refitted copy of the model; `model` itself is left unchanged.

    >>> small = refit(model, ranking, planner.flops(0.6), images)
    """
    if not len(images):
        raise SnapvitError("a refit needs images. Give --data")
    progress = progress or Silent()
    small = shrink(model.module, ranking, plan)
    if plan == Plan.dense(model.anatomy):
        return small
    stream = Stream.of(model, images)  # of the cut model
    goal = Stream(list(stream.chunks), stream.extra)  # of the dense one
    _check_halves(blocks_of(model.module)[0], stream)
    progress.phase("refitting block by block", len(plan.heads))
    for i, (dense, cut) in enumerate(zip(blocks_of(model.module), blocks_of(small))):
        layers = layers_of(dense, ranking, i)
        for half, layer, target, keep in (
            (_attention_half, layers[0], cut.attn.proj, plan.heads[i]),
            (_mlp_half, layers[1], cut.mlp.fc2, plan.neurons[i]),
        ):
            goal.chunks = [half(dense, chunk, goal.extra) for chunk in goal.chunks]
            name = f"blocks.{i}.{'attn.proj' if half is _attention_half else 'mlp.fc2'}"
            seen = _look(half, dense, layer, stream, goal, name)
            small_solve = one_thread() if layer.linear.in_features < WIDE else nullcontext()
            with small_solve:  # threads that wait for each other cost more than they bring there
                _put(target, layer, seen, keep, damping, pull)
            stream.chunks = [half(cut, chunk, stream.extra) for chunk in stream.chunks]
        progress.advance()
    return small


Half = Callable[[Any, Tensor, dict[str, Tensor]], Tensor]


def _attention_half(block: Any, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
    """The stream after the attention of a block."""
    y = block.attn(block.norm1(x), **extra)
    return x + (block.gamma_1 * y if getattr(block, "gamma_1", None) is not None else _scaled(block, "ls1", y))


def _mlp_half(block: Any, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
    """The stream after the MLP of a block, from that after its attention."""
    y = block.mlp(block.norm2(x))
    return x + (block.gamma_2 * y if getattr(block, "gamma_2", None) is not None else _scaled(block, "ls2", y))


def _scaled(block: Any, name: str, y: Tensor) -> Tensor:
    scale = getattr(block, name, None)
    return y if scale is None else scale(y)


def _check_halves(block: Any, stream: Stream) -> None:
    """The gate: both halves together must be the block itself."""
    chunk = stream.chunks[0][:1]
    whole = block(chunk, **stream.extra)
    off = float((_mlp_half(block, _attention_half(block, chunk, stream.extra), {}) - whole).abs().max())
    if not off <= 1e-4 * max(1.0, float(whole.abs().max())):
        raise GateFailed(f"a block is not its attention and its MLP one after the other: they differ by {off:.1e}")


@dataclass
class _Seen:
    """The moments of a layer's full input on the cut stream, and how it goes with what is missing."""

    moments: Moments
    missing: Array  # (E,) mean of t
    cross: Array  # (E, d) covariance of t and the input


@dataclass
class _Sums:
    inputs: RunningMoments
    cross: Tensor  # (E, d) float64
    missing: Tensor = field(init=False)  # (E,)
    shift: Tensor | None = None  # (d,)

    def __post_init__(self) -> None:
        self.missing = torch.zeros(len(self.cross), dtype=torch.float64)

    def add(self, a: Tensor, t: Tensor) -> None:
        self.inputs.add(a)
        flat, inputs = t.flatten(0, -2), a.flatten(0, -2)  # (n, E), (n, d)
        if self.shift is None:
            self.shift = inputs.mean(0)  # products about it lose nothing in float32
        self.missing += flat.double().sum(0)
        self.cross += flat.T @ (inputs - self.shift)

    def result(self) -> _Seen:
        moments = self.inputs.result()
        missing = self.missing.numpy() / moments.samples
        assert self.shift is not None
        cross = self.cross.numpy() / moments.samples - np.outer(missing, moments.mean - self.shift.double().numpy())
        return _Seen(moments, missing, cross)


def _look(half: Half, block: Any, layer: Layer, stream: Stream, goal: Stream, name: str) -> _Seen:
    """Run the dense sub-layer on the cut stream up to the layer, and compare what it would give with the goal."""
    linear = layer.linear
    sums = _Sums(RunningMoments(name, linear.in_features), torch.zeros(*linear.weight.shape, dtype=torch.float64))
    gain = 1.0 if layer.gain is None else torch.from_numpy(layer.gain).float()
    for chunk, wanted in zip(stream.chunks, goal.chunks):
        a = input_of(linear, partial(half, block, chunk, stream.extra))
        sums.add(a, wanted - chunk - gain * linear(a))
    return sums.result()


def _put(target: nn.Linear, layer: Layer, seen: _Seen, keep: int, damping: Damping, pull: float) -> None:
    """Give the cut layer its plain fit on this stream, plus its share of what is missing."""
    columns = layer.columns(keep)  # original order
    weight, shift = layer.weight, np.zeros(len(layer.weight))  # a layer that keeps everything is fitted as it is
    if keep < len(layer.order):
        weight, shift = layer.factored(seen.moments, damping).corrected(keep)  # (E, k) in rank order
        weight = weight[:, layer.from_rank_order(keep)]
    damped = PULL_DAMPING.added_to(seen.moments.covariance[np.ix_(columns, columns)])
    share = pull * _inverse(layer.gain, len(weight))[:, None]  # (E, 1)
    more = share * np.linalg.solve(damped, seen.cross[:, columns].T).T  # (E, k)
    shift = shift + share[:, 0] * seen.missing - more @ seen.moments.mean[columns]
    give_bias(target)
    bias = 0.0 if layer.linear.bias is None else layer.linear.bias
    target.weight.copy_(torch.from_numpy(weight + more))
    target.bias.copy_(bias + torch.from_numpy(shift))


def _inverse(gain: Array | None, width: int) -> Array:
    """1 / LayerScale, falling back to zero where the scale is so small that only huge weights could pass it."""
    if gain is None:
        return np.ones(width)
    return gain / (np.square(gain) + LEAST_GAIN**2 * np.mean(np.square(gain)) + 1e-30)
