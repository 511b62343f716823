"""LLM Surgeon (van der Ouderaa et al., ICLR 2024): the loss of cutting rows and columns, by K-FAC of each layer.

| symbol | meaning                                                                        | shape          |
|--------|--------------------------------------------------------------------------------|----------------|
| W      | weight of a linear layer, its bias as one more column                          | (out, in)      |
| a      | its input at one token, followed by a 1 if it has a bias                       | (in,)          |
| d      | gradient of one image's loss by its output at that token                       | (out,)         |
| A      | mean over images and tokens of a a^T, damped                                   | (in, in)       |
| G      | mean over images of the sum over tokens of d d^T, damped                       | (out, out)     |
| r, c   | the rows, or the columns, of one structure in this layer                       |                |

The Fisher information of W is taken for G x A (Kronecker product), which is exact where inputs and gradients are
independent, also of other tokens. The least loss, to second order, with these rows or columns at zero and all other
weights of the layer free is

    rows:    1/2 tr([G^-1]_rr^-1 W_r A W_r^T),        columns:    1/2 tr([A^-1]_cc^-1 W_c^T G W_c).

A structure is cut from several layers: its score is the sum over its rows (fc1; q, k and v) and its columns (fc2;
proj). Published costs are of single rows and columns, of which each layer loses some; a structure is what can be cut
without the layers next to it noticing. A norm inside a sub-layer is left out of the count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....correction.cholesky import cholesky
from ....correction.moments import Damping
from ....model.scores import Scores
from ...blocks.timm_blocks import Share, blocks_of, head_shares, neuron_shares
from .base import Batch, Need, Recorder, to_scores
from .losses import Loss

DAMPING = Damping()  # of A and of G: a hundredth of the mean of the diagonal, as published


@dataclass(frozen=True)
class KroneckerCost:
    """Contributions, for every weight: sums of a a^T and of d d^T; at last the numbers of tokens and of images."""

    name: str
    loss: Loss

    @property
    def needs(self) -> Need:
        return self.loss.needs

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name, **self.loss.settings}

    def contribution(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        layers = [share for shares in _structures(module) for share in shares]
        with Recorder([share.tensor for share in layers]) as record:
            losses = self.loss(module, batch)  # (B,)
        gradients = torch.autograd.grad(losses.sum(), record.outputs)
        counts: list[float] = []
        sums: list[Tensor] = []
        for share, x, d in zip(layers, record.inputs, gradients):
            x, d = _with_ones(share, x.detach().flatten(0, -2)), d.flatten(0, -2)
            sums += [(x.T @ x).double(), (d.T @ d).double()]
            counts.append(float(len(x)))
        return [*sums, torch.tensor([*counts, float(len(losses))], dtype=torch.float64)]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        *squares, counts = sums
        pairs = iter(zip(squares[0::2], squares[1::2], counts))
        scores = []
        for shares in _structures(module):
            costs = [_cost(share, a / tokens, g / counts[-1]) for share, (a, g, tokens) in zip(shares, pairs)]
            scores.append(torch.stack(costs).sum(0))
        return to_scores(module, scores)


def _structures(module: nn.Module) -> Iterator[list[Share]]:
    """Yield the weights of linear layers that the neurons of every MLP own, then those that heads own."""
    for shares, part in ((neuron_shares, "mlp"), (head_shares, "attn")):
        for block in blocks_of(module):
            if getattr(block, part) is not None:
                mine = shares(getattr(block, part))
                yield [share for share in mine if share.name == "weight" and isinstance(share.module, nn.Linear)]


def _with_ones(share: Share, x: Tensor) -> Tensor:
    """Return the input with the 1 by which the bias is multiplied: (n, in)."""
    return x if share.module.bias is None else torch.cat([x, x.new_ones(len(x), 1)], 1)


def _cost(share: Share, a: Tensor, g: Tensor) -> Tensor:
    """Return the cost of each structure's rows or columns in one layer: (structures,)."""
    w, linear = share.tensor.detach().cpu().double(), cast(nn.Linear, share.module)
    if linear.bias is not None:
        w = torch.cat([w, linear.bias.detach().cpu().double()[:, None]], 1)
    if share.axis == 1:  # columns are the rows of the transposed layer
        w, a, g = w.T, g, a
    structures = share.tensor.shape[share.axis] // share.sections // share.unit
    rows = torch.arange(structures * share.sections * share.unit).unflatten(0, (share.sections, structures, share.unit))
    return cost_of_rows(w, a, g, rows.transpose(0, 1).flatten(1))


def cost_of_rows(w: Tensor, a: Tensor, g: Tensor, rows: Tensor) -> Tensor:
    """Return the least loss without each group of rows, when all other rows are free: `rows` (groups, rows of one)."""
    if not (torch.isfinite(a).all() and torch.isfinite(g).all()):
        return w.new_full((len(rows),), torch.nan)  # refused as scores, in words
    inverse = torch.cholesky_inverse(torch.from_numpy(cholesky(DAMPING.added_to(g.numpy()))))
    own = inverse[rows[:, :, None], rows[:, None, :]]  # (groups, r, r)
    damped = torch.from_numpy(DAMPING.added_to(a.numpy()))
    lines = w[rows]  # (groups, r, in)
    squares = lines @ damped @ lines.transpose(1, 2)  # (groups, r, r)
    return torch.linalg.solve(own, squares).diagonal(dim1=1, dim2=2).sum(1).clamp(min=0) / 2
