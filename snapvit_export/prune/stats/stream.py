"""The stream of tokens: what runs through the blocks for all images, and the moments of what reaches a layer there.

What reaches a layer: its input when something is run, without running what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...calibration.images import Images
from ...correction.moments import Moments
from ..blocks.functional import embed_tokens
from ..models.load import Model
from .moments import RunningMoments
from .token_weights import batch_size


class _InputCaptured(Exception):
    """The layer got its input: the rest need not run."""


def capture_input(linear: nn.Linear, run: Callable[[], object]) -> Tensor:
    """The input that `linear` gets when `run` is called: (B, T, d)."""
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
    """The tokens of all images before the present block, in chunks, and how its blocks are called."""

    chunks: list[Tensor]  # (B, T, E) each
    extra: dict[str, Tensor]  # rotary embedding, where the family has one

    @staticmethod
    def of(model: Model, images: Images) -> Stream:
        made = [
            embed_tokens(model.module, torch.from_numpy(b))
            for b in images.batches(batch_size(model.anatomy, len(images)))
        ]
        rope = made[0][1]
        return Stream([tokens for tokens, _ in made], {} if rope is None else {"rope": rope})

    def go_through(self, run: Callable[..., Tensor]) -> None:
        """Through a block, or a half of one."""
        for i, chunk in enumerate(self.chunks):
            self.chunks[i] = run(chunk, **self.extra)

    def moments(self, run: Callable[..., Tensor], linear: nn.Linear, name: str, weights: Tensor | None) -> Moments:
        """The moments of what reaches `linear` when `run` gets the stream; nothing after it is computed."""
        sums = RunningMoments(name, linear.in_features)
        for chunk in self.chunks:
            sums.add(capture_input(linear, partial(run, chunk, **self.extra)), weights)
        return sums.result()
