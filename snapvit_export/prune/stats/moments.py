"""Mean and covariance of a stream of tokens that is never held whole.

| symbol | meaning                                                        | shape  |
|--------|----------------------------------------------------------------|--------|
| x      | a batch of tokens, the input of one linear layer               | (n, d) |
| w      | weights of the tokens, ones unless given                       | (n,)   |
| s      | shift: the mean of the first batch, kept for all batches       | (d,)   |
| y      | x - s: small where x is nearly constant, so float32 is enough  | (n, d) |
| N, m, C | sums of w, w y and w y y^T over all batches, in float64       | , (d,), (d, d) |

    mean = s + m / N,    covariance = C / N - (m / N)(m / N)^T.

y y^T of a wide layer costs more than the forward pass of its block. It is symmetric, so only one triangle is computed,
by blocks of columns, in float32 within a batch and added up in float64.

`RunningRegression` also sums targets of these tokens and their products with the inputs: all that least squares needs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...correction.moments import Array, Moments
from ...errors import SnapvitError

COLUMNS = 192  # per product: of 96 to 768, timed at widths of 768 and 3072, this was the fastest or close to it


def _not_finite(name: str, what: str) -> SnapvitError:
    return SnapvitError(
        f"{name}: its {what} holds values that are not finite numbers, or too large to square. "
        f"Are the weights of this model whole?"
    )


class RunningMoments:
    """Sums over batches of one layer's input; errors call the layer `name`."""

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width
        self._total = 0.0
        self.shift: Tensor | None = None
        self._first = torch.zeros(width, dtype=torch.float64)  # m
        self._second = torch.zeros(width, width, dtype=torch.float64)  # C, of which only the lower blocks are filled

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add the tokens of some images, (B, T, d); `weights` (T,) are the same for every image."""
        if weights is not None:
            weights = weights.to(x.device)
            used = weights > 0
            if not used.any():
                return
            x = x[:, used]
            weights = weights[used].repeat(len(x))  # (B*used,)
        x = x.flatten(0, -2).float()  # (n, d)
        if self.shift is None:
            self.shift = x.mean(0, dtype=torch.float64).float()  # so that a constant column gives zeros, not rounding
        y = x - self.shift
        if weights is None:
            first, total = y.sum(0), float(len(y))
        else:
            first, total = weights @ y, float(weights.sum())
            y *= weights.sqrt()[:, None]
        self._total += total
        self._first += first.double().cpu()
        for start in range(0, self.width, COLUMNS):
            stop = start + COLUMNS
            self._second[start:stop, :stop] += (y[:, start:stop].T @ y[:, :stop]).cpu()
        if not (torch.isfinite(self._first).all() and torch.isfinite(self._second.diagonal()).all()):
            raise _not_finite(self.name, "input")

    def result(self) -> Moments:
        """Return the moments of all that was added. Ends the sum: its memory becomes the covariance."""
        assert self.shift is not None
        offset = self._first / self._total  # (d,)
        covariance = self._second.div_(self._total)
        covariance.addr_(offset, offset, alpha=-1)
        covariance.diagonal().clamp_(min=0)  # rounding must not make a variance negative
        for start in range(0, self.width, COLUMNS):
            stop = start + COLUMNS
            square = covariance[start:stop, start:stop]
            square.copy_(square.tril() + square.tril(-1).T)
            covariance[:start, start:stop] = covariance[start:stop, :start].T
        mean = self.shift.double().cpu() + offset
        return Moments(self._total, mean.numpy(), covariance.numpy())


class RunningRegression:
    """Sums for the least squares fit of `outputs` targets on one layer's input."""

    def __init__(self, name: str, width: int, outputs: int) -> None:
        self.inputs = RunningMoments(name, width)
        self._shift: Tensor | None = None  # of the targets
        self._first = torch.zeros(outputs, dtype=torch.float64)
        self._cross = torch.zeros(outputs, width, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add the inputs (B, T, d) and targets (B, T, o) of some images; `weights` (T,), all above zero."""
        if not y.numel():
            return
        self.inputs.add(x, weights)
        x, y = x.flatten(0, -2), y.flatten(0, -2)  # (n, d), (n, o)
        if self._shift is None:
            self._shift = y.mean(0)
        y = y - self._shift
        if weights is not None:
            y *= weights.repeat(len(y) // len(weights))[:, None]
        self._first += y.sum(0).double()
        if not torch.isfinite(self._first).all():
            raise _not_finite(self.inputs.name, "output")
        assert self.inputs.shift is not None
        self._cross += y.T @ (x - self.inputs.shift)

    def result(self) -> tuple[Moments, Array, Array]:
        """Return the moments of the inputs, the mean of the targets (o,), their covariance with the inputs (o, d)."""
        assert self._shift is not None
        assert self.inputs.shift is not None
        moments = self.inputs.result()
        offset = self._first.numpy() / moments.samples
        centre = moments.mean - self.inputs.shift.double().numpy()
        cross = self._cross.numpy() / moments.samples - np.outer(offset, centre)
        return moments, self._shift.double().numpy() + offset, cross
