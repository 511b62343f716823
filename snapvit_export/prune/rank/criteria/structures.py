"""Where a criterion looks, and Scores from what it found: lists with the neurons of every block first, then the heads.

`scored_rows` are the weights that make a structure (fc1 or the gate, the value rows), `columns` those that read it
(fc2, proj). Both go through the blocks in the same order, so that lists made from one fit the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....errors import SnapvitError
from ....model.scores import Scores, stacked
from ...blocks.timm_blocks import (
    Share,
    blocks_of,
    head_columns,
    neuron_columns,
    scored_head_weight,
    scored_neuron_weight,
)


@dataclass(frozen=True)
class Rows:
    """The scored rows of one tensor: one of its sections, `share.unit` rows for each structure."""

    share: Share
    section: int

    @property
    def weight(self) -> Tensor:
        return self.share.tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Those rows of a tensor that is laid out like the weight: (structures*unit, ...)."""
        return tensor.unflatten(0, (self.share.sections, -1))[self.section]

    def grouped(self, tensor: Tensor) -> Tensor:
        """The same, one line per structure: (structures, unit*...)."""
        return self.of(tensor).unflatten(0, (-1, self.share.unit)).flatten(1)


class Rule(NamedTuple):
    """How one line of numbers per structure becomes one score: (structures, entries) to (structures,)."""

    neurons: Callable[..., Tensor]
    heads: Callable[..., Tensor]

    def over(self, lines: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
        """Scores of all blocks' neurons, then heads."""
        depth = len(lines) // 2
        yield from (self.neurons(*line) for line in lines[:depth])
        yield from (self.heads(*line) for line in lines[depth:])


def scored_rows(module: nn.Module) -> list[Rows]:
    """fc1 or the gate of every block (the first section), then the values of every block (the last)."""
    blocks = blocks_of(module)
    neurons = [Rows(scored_neuron_weight(block.mlp), 0) for block in blocks]
    return neurons + [Rows(scored_head_weight(block.attn), -1) for block in blocks]


def columns(module: nn.Module) -> list[Share]:
    """fc2 of every block, then proj of every block."""
    blocks = blocks_of(module)
    return [neuron_columns(block.mlp) for block in blocks] + [head_columns(block.attn) for block in blocks]


def to_scores(values: Sequence[Tensor]) -> Scores:
    """Scores from one tensor per block for the neurons, then one per block for the heads."""
    broken = sum(int((~torch.isfinite(block)).sum()) for block in values)
    if broken:
        raise SnapvitError(f"{broken} scores are not finite numbers. Are the weights of this model whole?")
    arrays = [block.detach().cpu().numpy() for block in values]
    depth = len(arrays) // 2
    return Scores(heads=stacked(arrays[depth:]), neurons=stacked(arrays[:depth]))
