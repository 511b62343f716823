"""The residual stream of all images at one depth of the model, and the moments of a layer's input on it.

A `Stream` holds the tokens before one block and is passed on block by block, dense or cut. `capture_input` takes the
input of a layer out of a forward pass and stops the pass there, so that nothing after the layer is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration.images import Images
from ...correction.moments import Moments
from ..blocks.functional import embed_tokens
from ..blocks.merging import Groups
from ..models.load import Model
from .moments import RunningMoments
from .token_weights import batch_size


class _InputCaptured(Exception):
    """Ends a forward pass once the layer has its input."""


def capture_input(linear: nn.Linear, run: Callable[[], object]) -> Tensor:
    """Return the input that `linear` gets when `run` is called, (B, T, d); `run` is stopped there."""
    found: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
        found.append(inputs[0])
        raise _InputCaptured

    handle = linear.register_forward_pre_hook(hook)
    try:
        run()
    except _InputCaptured:
        pass
    finally:
        handle.remove()
    return found[0]


@dataclass
class Stream:
    """The tokens of all images before the current block, in chunks, and the other arguments of its blocks."""

    chunks: list[Tensor]  # (B, T, E) each
    extra: dict[str, Tensor]  # the rotary embedding, where the family has one
    groups: list[Groups] | None = None  # of each chunk, in a stream whose tokens are merged on the way

    @staticmethod
    def of(model: Model, images: Images, merging: bool = False) -> Stream:
        """Return the stream before the first block; `merging`: blocks that it goes through merge tokens."""
        made = [
            embed_tokens(model.module, torch.from_numpy(b))
            for b in images.batches(batch_size(model.anatomy, len(images)))
        ]
        rope = made[0][1]
        groups = [Groups(model.anatomy.prefix) for _ in made] if merging else None
        return Stream([tokens for tokens, _ in made], {} if rope is None else {"rope": rope}, groups)

    def arguments(self, chunk: int) -> dict[str, Any]:
        """Return the arguments of blocks and branches beside the tokens of a chunk."""
        return dict(self.extra) if self.groups is None else {**self.extra, "groups": self.groups[chunk]}

    def go_through(self, run: Callable[..., Tensor]) -> None:
        """Replace the tokens by the output of a block, or of one residual branch, on them."""
        for i, chunk in enumerate(self.chunks):
            self.chunks[i] = run(chunk, **self.arguments(i))

    def moments(self, run: Callable[..., Tensor], linear: nn.Linear, name: str, weights: Tensor | None) -> Moments:
        """Return the moments of the input of `linear` when `run` gets the stream; nothing after it is computed."""
        sums = RunningMoments(name, linear.in_features)
        for i, chunk in enumerate(self.chunks):
            sums.add(capture_input(linear, partial(run, chunk, **self.arguments(i))), weights)
        return sums.result()
