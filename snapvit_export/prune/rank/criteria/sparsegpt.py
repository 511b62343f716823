"""SparseGPT (Frantar and Alistarh, ICML 2023) for whole structures: the error that its own update leaves behind.

| symbol | meaning                                                               | shape          |
|--------|-----------------------------------------------------------------------|----------------|
| W      | weight of fc2 or proj                                                 | (E, d)         |
| H      | damped second moment of the layer's input, about zero                 | (d, d)         |
| U      | upper triangular, U^T U = H^-1                                        | (d, d)         |
| s      | a structure: neighbouring columns, one of fc2 or head_dim of proj     |                |

    score = |W_s U_ss^-1|^2,    of one column sum over rows of W_rj^2 / U_jj^2

is the error of the layer's output, per token, when s alone is cut and the columns after it make up for that as well as
they can: what `correction.sparsegpt.left_to_right` does. U_jj^2 is [H^-1]_jj of the columns from j on. Published masks
are of single weights, chosen by the same error in each row; here a column is cut in all rows, so the rows are summed,
and a head is cut as one group of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....correction.moments import Damping, Moments
from ....correction.sparsegpt import upper_of_inverse
from ....model.scores import Scores
from ...blocks.timm_blocks import Share
from .base import Batch, Need, Recorder, columns, to_scores

DAMPING = Damping()  # a hundredth of the mean of the diagonal, as published


@dataclass(frozen=True)
class LeftToRightError:
    """Contributions: the sum of x x^T for every layer, then the number of tokens."""

    name: str
    needs: ClassVar[Need] = "images"

    @property
    def settings(self) -> dict[str, Any]:
        return {"criterion": self.name}

    @torch.no_grad()
    def contribution(self, module: Any, batch: Batch) -> list[Tensor]:
        with Recorder([share.tensor for share in columns(module)]) as record:
            module.forward_features(batch.images)
        flat = [x.flatten(0, -2) for x in record.inputs]  # (n, d) each
        return [*((x.T @ x).double() for x in flat), torch.tensor([float(len(flat[0]))], dtype=torch.float64)]

    def finish(self, module: nn.Module, sums: Sequence[Tensor], images: int) -> Scores:
        *seconds, tokens = sums
        shares = columns(module)
        return to_scores(module, [_errors(share, total / tokens) for share, total in zip(shares, seconds)])


def _errors(share: Share, second: Tensor) -> Tensor:
    """Return the score of each structure of one layer: (structures,)."""
    if not torch.isfinite(second).all():
        return second.diagonal()  # refused as scores, in words
    weight = share.tensor.detach().cpu().double()
    weight = torch.where(second.diagonal() > 0, weight, 0.0)  # an input that is always zero contributes nothing
    moments = Moments(1.0, second.new_zeros(len(second)).numpy(), second.numpy())
    upper = torch.from_numpy(upper_of_inverse(moments, DAMPING))
    parts = [slice(start, start + share.unit) for start in range(0, len(second), share.unit)]
    left = [torch.linalg.solve_triangular(upper[s, s], weight[:, s], upper=True, left=False) for s in parts]
    return torch.stack([part.square().sum() for part in left])
