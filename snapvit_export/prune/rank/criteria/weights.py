"""Scores that need no images: magnitude and LAMP of the weights, and random ones.

| symbol | meaning                                         | shape                 |
|--------|-------------------------------------------------|-----------------------|
| w      | a neuron's row of fc1, a head's value rows      | (structures, entries) |

LAMP of an entry: |w| over the root of the sum of squares of all entries of its matrix that are not smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ....model.scores import Scores
from .base import Batch, Need, Rule, scored_rows, to_scores


@dataclass(frozen=True)
class WeightCriterion:
    """A rule over w."""

    name: str
    rule: Rule
    needs: ClassVar[Need] = "nothing"

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        return []

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        lines = [(rows.grouped(rows.weight.detach().double()),) for rows in scored_rows(module)]
        return to_scores(module, list(self.rule.over(module, lines)))


@dataclass(frozen=True)
class Random:
    """Scores drawn once, so that what a sparsity keeps contains what every higher one keeps."""

    name: str
    seed: int
    needs: ClassVar[Need] = "nothing"

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name, "seed": self.seed}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        return []

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        rng = np.random.default_rng(self.seed)
        counts = [len(rows.grouped(rows.weight)) for rows in scored_rows(module)]
        return to_scores(module, [torch.from_numpy(rng.random(count)) for count in counts])


def lamp(w: Tensor) -> Tensor:
    """Return LAMP of every entry of one matrix, in float64: a running difference in float32 ends below zero."""
    size = w.double().abs()
    ascending = size.flatten().sort().values
    tails = ascending.square().flip(0).cumsum(0).flip(0)  # (entries,) sum of this square and all after it
    first_equal = torch.searchsorted(ascending, size.flatten())
    first_equal = first_equal.clamp(max=size.numel() - 1)  # the search for NaN ends behind the last entry
    not_smaller = tails[first_equal].view_as(size)
    return torch.where(size == 0, 0.0, size / not_smaller.sqrt())


def _lamp_mean(w: Tensor) -> Tensor:
    return lamp(w).mean(1)


def _norm(w: Tensor) -> Tensor:
    return w.norm(dim=1)


MAGNITUDE = Rule(neurons=_norm, heads=_norm)
LAMP = Rule(neurons=_lamp_mean, heads=_lamp_mean)
