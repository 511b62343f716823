"""The interface of a criterion: contributions of batches that add up to Scores; and what criteria have in common.

A criterion never gets more than one batch. The caller's loop (in one process or many, with or without a checkpoint)
adds the contributions; since they are plain sums, neither the number of processes nor an interruption can change the
result. Randomness must depend on the batch's number, not on earlier batches.

`scored_rows` are the weights that compute a structure (fc1 or the gate, the value rows), `columns` those that read it
(fc2, proj). Both list the neurons of every block first, then the heads, as `to_scores` expects them; a removed part has
no entry in any list.

`Recorder` keeps the inputs and outputs of chosen linear layers in one forward pass. Hooks on modules would miss some:
an EVA block with separate biases calls `F.linear` with the weight of its qkv, past the module. So the call itself is
intercepted, and a layer is identified by its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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

Need = Literal["nothing", "images", "labels"]


@dataclass(frozen=True)
class Batch:
    """Preprocessed images, their labels where known, and the number of this batch in the whole pass."""

    images: Tensor  # (B, 3, H, W)
    labels: Tensor | None  # (B,)
    number: int


class Criterion(Protocol):
    """A way to score structures; `needs` is what it needs besides the weights."""

    @property
    def needs(self) -> Need: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that changes the scores, as JSON: goes into the ranking, and a checkpoint is bound to it."""
        ...

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        """Return what one batch adds: float tensors of the same shapes for every batch."""
        ...

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        """Return the scores from the sums over all batches, of `images` images; without any, `sums` is empty."""
        ...


class Recorder(TorchFunctionMode):
    """Within the context, keeps the input and output of each layer whose weight is given, in the weights' order.

    >>> with Recorder([block.mlp.fc2.weight for block in model.module.blocks]) as record:
    ...     logits = model.module(inputs)
    >>> record.inputs[0]     # (N, T, neurons)
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._watched = list(weights)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the weight, which `_watched` keeps alive

    @property
    def inputs(self) -> list[Tensor]:
        return [self._seen[id(weight)][0] for weight in self._watched]

    @property
    def outputs(self) -> list[Tensor]:
        return [self._seen[id(weight)][1] for weight in self._watched]

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.linear:
            call = dict(zip(("input", "weight"), args), **(kwargs or {}))
            if any(call["weight"] is weight for weight in self._watched):
                self._seen[id(call["weight"])] = (call["input"], result)
        return result


@dataclass(frozen=True)
class Rows:
    """The scored rows of one tensor: one of its sections, `share.unit` rows for each structure."""

    share: Share
    section: int

    @property
    def weight(self) -> Tensor:
        return self.share.tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return those rows of a tensor that is laid out like the weight: (structures*unit, ...)."""
        return tensor.unflatten(0, (self.share.sections, -1))[self.section]

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return the same rows, one line per structure: (structures, unit*...)."""
        return self.of(tensor).unflatten(0, (-1, self.share.unit)).flatten(1)


class Rule(NamedTuple):
    """Turns one line of numbers per structure into one score: (structures, entries) to (structures,)."""

    neurons: Callable[..., Tensor]
    heads: Callable[..., Tensor]

    def over(self, module: nn.Module, lines: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
        """Yield the scores of all blocks' neurons, then of their heads."""
        mlps = len(_mlps(module))
        yield from (self.neurons(*line) for line in lines[:mlps])
        yield from (self.heads(*line) for line in lines[mlps:])


def scored_rows(module: nn.Module) -> list[Rows]:
    """Return fc1 or the gate of every block (the first section), then the values of every block (the last)."""
    neurons = [Rows(scored_neuron_weight(mlp), 0) for mlp in _mlps(module)]
    return neurons + [Rows(scored_head_weight(attn), -1) for attn in _attentions(module)]


def columns(module: nn.Module) -> list[Share]:
    """Return fc2 of every block, then proj of every block."""
    return [*map(neuron_columns, _mlps(module)), *map(head_columns, _attentions(module))]


def _mlps(module: nn.Module) -> list[Any]:
    return [block.mlp for block in blocks_of(module) if block.mlp is not None]


def _attentions(module: nn.Module) -> list[Any]:
    return [block.attn for block in blocks_of(module) if block.attn is not None]


def to_scores(module: nn.Module, values: Sequence[Tensor]) -> Scores:
    """Return the Scores from one tensor for the neurons of each MLP, then one for the heads of each attention."""
    broken = sum(int((~torch.isfinite(block)).sum()) for block in values)
    if broken:
        raise SnapvitError(f"{broken} scores are not finite numbers. Are the weights of this model whole?")
    arrays = iter([block.detach().cpu().numpy() for block in values])
    blocks, none = blocks_of(module), np.zeros(0)
    neurons = [none if block.mlp is None else next(arrays) for block in blocks]
    return Scores(heads=stacked([none if b.attn is None else next(arrays) for b in blocks]), neurons=stacked(neurons))
