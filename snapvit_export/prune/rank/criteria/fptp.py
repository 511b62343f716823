"""FPTP (Kwon et al., "A Fast Post-Training Pruning Framework for Transformers", NeurIPS 2022): search, rearrangement.

| symbol | meaning                                                                  | shape                    |
|--------|--------------------------------------------------------------------------|--------------------------|
| g      | gradient of one image's loss by the masks of one layer, which are ones   | (structures,)            |
| F      | Fisher information of these masks: sum over images of g g^T              | (structures, structures) |
| c      | 1 where a structure is cut                                               | (structures,)            |

Mask search takes F for diagonal: the scores are its diagonal, and with `--allocation summed` the counts of a FLOPs
target are those whose cut scores sum to the least, which is what the paper's Algorithm 1 finds.

Mask rearrangement keeps the counts and makes c^T F c of each layer smaller, by swaps: each kept structure in turn, the
smallest score first, is cut too, and of all that are cut that one is taken back which leaves the least.

The published method does this for one target. Here the rearranged cut of each of SIZES contains those of the larger
ones, so that all are prefixes of one order. A place in the order has the score that it had before the rearrangement:
the search, and so the counts of any size, are as published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ....allocation.from_scores import summed
from ....allocation.planner import Planner
from ....model.ranking import Order
from ....model.scores import Scores
from ...models.read_anatomy import read_anatomy
from .base import Batch, Need, to_scores
from .losses import Loss
from .per_image import mask_gradients

Fisher = npt.NDArray[np.float64]
SIZES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)  # of the blocks' FLOPs; the smallest that there is comes last


@dataclass(frozen=True)
class RearrangedFisher:
    """Contributions: F of the neurons of every MLP, then of the heads of every attention."""

    name: str
    loss: Loss

    @property
    def needs(self) -> Need:
        return self.loss.needs

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name, **self.loss.settings, "sizes": list(SIZES)}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        return [(g.T @ g).double() for g in mask_gradients(self.loss, module, batch)]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        searched = to_scores(module, [fisher.diagonal() for fisher in sums])
        anatomy = read_anatomy(module, "the model")
        planner = Planner(summed(searched, "", anatomy, {}), anatomy)
        least = planner.sparsest.flops_ratio(anatomy)
        plans = [planner.flops(size) for size in SIZES if size > least] + [planner.sparsest]
        counts = [[plan.neurons[i] for plan in plans] for i, n in enumerate(anatomy.neurons) if n]
        counts += [[plan.heads[i] for plan in plans] for i, n in enumerate(anatomy.heads) if n]
        placed = [_placed(fisher.numpy(), widths) for fisher, widths in zip(sums, counts)]
        return to_scores(module, [torch.from_numpy(scores) for scores in placed])


def _placed(fisher: Fisher, widths: Sequence[int]) -> Fisher:
    """Return the diagonal of F, its largest entry at the best structure of the rearranged order, and so on."""
    scores = np.empty(len(fisher))
    scores[rearranged(fisher, widths)] = np.sort(np.diag(fisher))[::-1]
    return scores


def rearranged(fisher: Fisher, widths: Sequence[int]) -> Order:
    """Return an order, best first: for each k of `widths`, its first k are what is kept after rearrangement."""
    by_score = np.argsort(-np.diag(fisher), kind="stable")
    steps = sorted({len(fisher), *widths}, reverse=True)
    kept, order = by_score, by_score[:0]
    for wide, narrow in pairwise(steps):
        gone = np.isin(kept, swapped(fisher, kept, order, wide - narrow))
        kept, order = kept[~gone], np.concatenate([kept[gone], order])
    return np.concatenate([kept, order])


def swapped(fisher: Fisher, kept: Order, before: Order, count: int) -> Order:
    """Return the `count` of `kept`, which is best first, to cut besides those cut `before`, after the swaps."""
    cut = list(kept[::-1][:count])
    c = np.zeros(len(fisher))
    c[[*before, *cut]] = 1
    product = fisher @ c
    for more in kept[::-1][count:]:
        cut.append(more)
        product += fisher[more]  # c^T F c without j is c^T F c - (2 F c - diag F)_j
        back = cut.pop(int(np.argmax(2 * product[cut] - np.diag(fisher)[cut])))
        product -= fisher[back]
    return np.array(cut)
