"""Scores from squared gradients of single images: of the scored weights, or of masks on heads and neurons (FPTP).

| symbol | meaning                                                       | shape              |
|--------|---------------------------------------------------------------|--------------------|
| x      | input of a linear layer, all views and tokens of one image    | (V*T, in)          |
| d      | gradient of that image's loss by the layer's output           | (V*T, out)         |
| G      | its gradient by the weight, d^T x                             | (rows, in)         |
| m      | a factor of 1 on the output of a head to proj, a neuron to fc2 | (structures,)     |

One backward pass serves the whole batch: images do not interact in the network, so the gradient of the summed loss by
an activation is that of the activation's own image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....model.scores import Scores
from .base import Batch, Need, Recorder, Rows, columns, scored_rows, to_scores
from .losses import Loss


@dataclass(frozen=True)
class PerSampleGradient:
    """The Fisher information of the scored weights: the mean over images and entries of G^2."""

    name: str
    loss: Loss

    @property
    def needs(self) -> Need:
        return self.loss.needs

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name, **self.loss.settings, "reduction": "per_sample"}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        watched = scored_rows(module)
        with Recorder([rows.weight for rows in watched]) as record:
            losses = self.loss(module, batch)  # (B,)
        gradients = torch.autograd.grad(losses.sum(), record.outputs)
        return [
            _summed_squares(rows, x.detach(), d, len(losses)) for rows, x, d in zip(watched, record.inputs, gradients)
        ]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        return to_scores(module, [total / images for total in sums])


@dataclass(frozen=True)
class MaskFisher:
    """The Fisher information of m: the sum over images of the squared gradient by m."""

    name: str
    loss: Loss

    @property
    def needs(self) -> Need:
        return self.loss.needs

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name, **self.loss.settings}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        return [gradients.square().sum(0) for gradients in mask_gradients(self.loss, module, batch)]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        return to_scores(module, sums)


def _summed_squares(rows: Rows, x: Tensor, d: Tensor, images: int) -> Tensor:
    """Return the sum over images of the mean of G^2 over each structure's entries: (structures,)."""
    x, d = (tensor.unflatten(0, (-1, images)) for tensor in (x, d))  # (V, B, T, in or out)
    total = x.new_zeros(())
    for i in range(images):  # one image's G is as large as the weight: never a batch of them at once
        own = rows.of(d[:, i].flatten(0, 1).T) @ x[:, i].flatten(0, 1)  # (structures*unit, in)
        total = total + own.unflatten(0, (-1, rows.share.unit)).square().mean((1, 2))
    return total


def mask_gradients(loss: Loss, module: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the gradient of each image's loss by the m of every MLP, then of every attention: (B, structures) each."""
    watched = columns(module)
    with Recorder([share.tensor for share in watched]) as record:
        losses = loss(module, batch)  # (B,)
    gradients = torch.autograd.grad(losses.sum(), record.inputs)
    return [_summed(x.detach() * d, share.unit, len(losses)) for share, x, d in zip(watched, record.inputs, gradients)]


def _summed(terms: Tensor, unit: int, images: int) -> Tensor:
    """Return the gradient of each image's loss by m, from x times the gradient by x: (B, structures)."""
    own = terms.unflatten(0, (-1, images)).sum((0, 2))  # (V, B, T, width) to (B, width)
    return own.unflatten(1, (-1, unit)).sum(2)
