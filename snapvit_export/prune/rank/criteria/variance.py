"""Scores by the loss when a structure is replaced by its mean: activation variance times squared column norm.

| symbol | meaning                                                 | shape      |
|--------|---------------------------------------------------------|------------|
| x      | input of fc2 or proj over all images and tokens         | (n, width) |
| W      | weight of fc2 or proj                                   | (E, width) |
| n      | images times tokens                                     |            |

A column j counts Var(x_j) ||W_:j||^2; a neuron is one column of fc2, a head the sum of its columns of proj. Without the
norm of the column it is the criterion of VBP (Berisha et al., "Variance-Based Pruning", ICCV 2025) for neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....model.scores import Scores
from ...blocks.timm_blocks import Share
from .base import Batch, Need, Recorder, columns, to_scores


@dataclass(frozen=True)
class Variance:
    """Contributions, in float64: (sum of x, sum of x^2) for every layer, then n."""

    name: str
    by_column: bool = True  # times the squared norm of the column that reads it
    needs: ClassVar[Need] = "images"

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name}

    @torch.no_grad()
    def contribution(self, module: Any, batch: Batch) -> list[Tensor]:
        with Recorder([share.tensor for share in columns(module)]) as record:
            module.forward_features(batch.images)
        moments = [_moments(x) for x in record.inputs]  # (2, width) each
        return [*moments, moments[0].new_tensor([record.inputs[0].shape[:-1].numel()])]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        *moments, n = sums
        return to_scores(module, [self._loss(share, total, n) for share, total in zip(columns(module), moments)])

    def _loss(self, share: Share, moments: Tensor, n: Tensor) -> Tensor:
        """Return Var(x_j), times ||W_:j||^2, summed over each structure's columns: (structures,)."""
        mean, mean_square = moments / n
        variance = (mean_square - mean.square()).clamp(min=0)  # rounding must not make a constant negative
        if self.by_column:
            variance = variance * share.tensor.detach().to(variance).square().sum(0)  # (width,)
        return variance.unflatten(0, (-1, share.unit)).sum(1)


def _moments(x: Tensor) -> Tensor:
    x = x.double().flatten(0, -2)  # (n, width)
    return torch.stack((x.sum(0), x.square().sum(0)))
