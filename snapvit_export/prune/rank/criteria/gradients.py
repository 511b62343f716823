"""Scores from one gradient of the scored weights, summed over batches: its square, SNIP, or first-order Taylor.

| symbol | meaning                                                      | shape                 |
|--------|--------------------------------------------------------------|-----------------------|
| g      | sum over batches of the gradient of the batch-mean loss      | (structures, entries) |
| w      | the weights it belongs to                                    | (structures, entries) |
| q      | SNIP's |g w| + alpha w^2                                     | (structures, entries) |

Entries: a neuron's row of fc1 (of the gate in a gated MLP); a head's value rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....model.scores import Scores
from .base import Batch, Need, Rule, scored_rows, to_scores
from .losses import Loss

ALPHA = 1e-3  # weight of w^2 in SNIP's q, as in the released code


@dataclass(frozen=True)
class SummedGradient:
    """A rule over (g, w). The gradient is summed before it is squared, so the scores depend on the batch size."""

    name: str
    loss: Loss
    rule: Rule

    @property
    def needs(self) -> Need:
        return self.loss.needs

    @property
    def settings(self) -> dict[str, Any]:
        extra = {"alpha": ALPHA} if self.rule is SNIP else {}
        return {"criterion": self.name, **self.loss.settings, "reduction": "summed", **extra}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        loss = self.loss(module, batch).mean()
        return list(torch.autograd.grad(loss, [rows.weight for rows in scored_rows(module)]))

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        lines = [
            (rows.grouped(total), rows.grouped(rows.weight.detach().to(total)))
            for rows, total in zip(scored_rows(module), sums)
        ]
        return to_scores(module, list(self.rule.over(module, lines)))


def _mean_square(g: Tensor, w: Tensor) -> Tensor:
    return g.square().mean(1)


def _taylor(g: Tensor, w: Tensor) -> Tensor:
    return (g * w).square().sum(1)


def _snip(g: Tensor, w: Tensor) -> Tensor:
    return (g * w).abs() + ALPHA * w.square()


SQUARED = Rule(neurons=_mean_square, heads=_mean_square)
TAYLOR = Rule(neurons=_taylor, heads=_taylor)
# The released code squares q for heads and not for neurons; the two are ranked apart, so the units need not agree.
SNIP = Rule(neurons=lambda g, w: _snip(g, w).mean(1), heads=lambda g, w: _snip(g, w).square().mean(1))
