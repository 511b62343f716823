"""Scores by flow divergence (IDAP++): the share of a layer's output that comes from one structure.

| symbol | meaning                                                           | shape      |
|--------|-------------------------------------------------------------------|------------|
| x_s    | output of a structure to fc2 or proj, over all images and tokens  | (n, unit)  |
| W_s    | its columns there                                                 | (E, unit)  |
| y      | output of that layer for all of them, without its bias            | (n, E)     |

    D_s = mean |W_s x_s| / mean |y|

IDAP++ (arXiv 2511.20141) ranks units by how much they change the flow through a layer; its public code multiplies the
norm of an activation by that of a weight, and does not handle tokens. For a neuron, one column, that product is the
norm of what it adds to a token. A head has several columns that may cancel, so its sum is formed first.
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
class FlowDivergence:
    """Contributions, in float64: sums over tokens of |W_s x_s| for every layer, then those of |y| for all layers."""

    name: str
    needs: ClassVar[Need] = "images"

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name}

    @torch.no_grad()
    def contribution(self, module: Any, batch: Batch) -> list[Tensor]:
        shares = columns(module)
        with Recorder([share.tensor for share in shares]) as record:
            module.forward_features(batch.images)
        inputs = [x.flatten(0, -2) for x in record.inputs]  # (n, width) each
        each = [_flows(share, x) for share, x in zip(shares, inputs)]
        whole = [(x @ share.tensor.T).norm(dim=1).double().sum() for share, x in zip(shares, inputs)]
        return [*each, torch.stack(whole)]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        *each, whole = sums
        return to_scores(module, [flow / total if total > 0 else flow for flow, total in zip(each, whole)])


def _flows(share: Share, x: Tensor) -> Tensor:
    """Return the sum over tokens of |W_s x_s|: (structures,)."""
    weight = share.tensor.detach()  # (E, width)
    if share.unit == 1:
        return x.abs().double().sum(0) * weight.norm(dim=0).double()
    parts = zip(x.split(share.unit, dim=1), weight.split(share.unit, dim=1))
    return torch.stack([(own @ read.T).norm(dim=1).double().sum() for own, read in parts])
