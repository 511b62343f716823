"""Where a criterion looks, and Scores from what it found: lists with the neurons of every block first, then the heads.

`scored_rows` are the weights that make a structure (fc1 or the gate, the value rows), `columns` those that read it
(fc2, proj). Both go through the blocks in the same order, so that lists made from one fit the other. Of a part that a
block lacks there is nothing in any list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
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

    def over(self, module: nn.Module, lines: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
        """Scores of all blocks' neurons, then heads."""
        mlps = len(_mlps(module))
        yield from (self.neurons(*line) for line in lines[:mlps])
        yield from (self.heads(*line) for line in lines[mlps:])


def scored_rows(module: nn.Module) -> list[Rows]:
    """fc1 or the gate of every block (the first section), then the values of every block (the last)."""
    neurons = [Rows(scored_neuron_weight(mlp), 0) for mlp in _mlps(module)]
    return neurons + [Rows(scored_head_weight(attn), -1) for attn in _attentions(module)]


def columns(module: nn.Module) -> list[Share]:
    """fc2 of every block, then proj of every block."""
    return [*map(neuron_columns, _mlps(module)), *map(head_columns, _attentions(module))]


def _mlps(module: nn.Module) -> list[Any]:
    return [block.mlp for block in blocks_of(module) if block.mlp is not None]


def _attentions(module: nn.Module) -> list[Any]:
    return [block.attn for block in blocks_of(module) if block.attn is not None]


def to_scores(module: nn.Module, values: Sequence[Tensor]) -> Scores:
    """Scores from one tensor for the neurons of each MLP, then one for the heads of each attention."""
    broken = sum(int((~torch.isfinite(block)).sum()) for block in values)
    if broken:
        raise SnapvitError(f"{broken} scores are not finite numbers. Are the weights of this model whole?")
    arrays = iter([block.detach().cpu().numpy() for block in values])
    blocks, none = blocks_of(module), np.zeros(0)
    neurons = [none if block.mlp is None else next(arrays) for block in blocks]
    return Scores(heads=stacked([none if b.attn is None else next(arrays) for b in blocks]), neurons=stacked(neurons))
