"""NViT (Yang et al., "Global Vision Transformer Pruning with Hessian-Aware Saliency", CVPR 2023): Taylor with cost.

| symbol | meaning                                                                    | shape         |
|--------|----------------------------------------------------------------------------|---------------|
| g, w   | gradient of a batch's mean loss, and the weights, of all that a structure owns | (entries,) |
| I      | sum over batches of (sum of g w)^2: the squared change of the loss, to first order | (structures,) |
| C      | FLOPs that the structure takes                                             | (structures,) |

    score = I / mean(I) + MU (max(C) - C) / mean(C),    means over all structures of the model

A structure owns its rows of fc1, its columns of fc2, its rows of q, k and v and its columns of proj, with biases.
The published score is I - mu C with the latency of a lookup table for C and a mu for one model and loss; that depends
on the scale of the loss, so here both terms are relative to their means. The constant keeps scores above zero and
changes no order. Latency is proportional to FLOPs here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....model.scores import Scores
from ...blocks.timm_blocks import Share, blocks_of, head_shares, neuron_shares
from ...models.read_anatomy import read_anatomy
from .base import Batch, Need, to_scores
from .losses import Loss

MU = 0.01  # of C, relative to its mean: docs/method.md


@dataclass(frozen=True)
class TaylorWithCost:
    """Contributions: (sum of g w)^2 of the neurons of every MLP, then of the heads."""

    name: str
    loss: Loss

    @property
    def needs(self) -> Need:
        return self.loss.needs

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name, **self.loss.settings, "mu": MU}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        owned = [[*shares] for shares in _owned(module)]
        weights = [share.tensor for shares in owned for share in shares]
        loss = self.loss(module, batch).mean()
        gradients = iter(torch.autograd.grad(loss, weights, allow_unused=True))
        changes = [torch.stack([_change(share, next(gradients)) for share in shares]).sum(0) for shares in owned]
        return [change.square() for change in changes]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        mean = torch.cat(list(sums)).mean()
        flops = read_anatomy(module, "the model").structure_flops()
        blocks = blocks_of(module)
        each = [neuron for block, (_, neuron) in zip(blocks, flops) if block.mlp is not None]
        each += [head for block, (head, _) in zip(blocks, flops) if block.attn is not None]
        average = sum(cost * len(own) for cost, own in zip(each, sums)) / sum(map(len, sums))
        return to_scores(module, [own / mean + MU * (max(each) - cost) / average for own, cost in zip(sums, each)])


def _owned(module: nn.Module) -> Iterator[Iterator[Share]]:
    """Yield the parameters that the neurons of every MLP own, then those of the heads of every attention."""
    for shares, part in ((neuron_shares, "mlp"), (head_shares, "attn")):
        for block in blocks_of(module):
            if getattr(block, part) is not None:
                yield (share for share in shares(getattr(block, part)) if share.tensor.requires_grad)


def _change(share: Share, gradient: Tensor | None) -> Tensor:
    """Return the sum of g w over the entries of each structure, in float64; 0 where the loss does not depend on it."""
    weight = share.tensor.detach()
    product = torch.zeros_like(weight) if gradient is None else weight * gradient
    each = product.double().movedim(share.axis, 0).unflatten(0, (share.sections, -1, share.unit))
    return each.flatten(3).sum((0, 2, 3)) if each.dim() > 3 else each.sum((0, 2))
