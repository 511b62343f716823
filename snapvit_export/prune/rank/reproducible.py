"""Reproducible arithmetic: sums that do not depend on the order of their terms.

Neither the number of processes nor the cores of a machine may change a ranking (for the cores: `stats.single_thread`).
Floating-point sums change with the order, so the same images spread over two processes would give other scores than on
one. `ExactSum` adds in fixed point, where addition is exact: every term is rounded once to a multiple of a quantum and
added as integers, in two parts of 64 bits: a coarse one whose unit is 2^-34 of the largest entry of the first batch,
and a fine one that resolves 2^-74 of it (5e-23), so that squares of small gradients are not lost beside large ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import SnapvitError

COARSE, FINE = 34, 40  # bits of the largest entry of the first batch, and of the remainder
ROOM = 10  # bits by which later terms may be larger; with 2^18 batches the sum stays below 2^62


def choose_exponents(first: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the power of two that scales its largest entry of the first batch to about 2^COARSE."""
    largest = [float(tensor.abs().max()) for tensor in first]
    if not all(math.isfinite(value) for value in largest):
        raise SnapvitError("the first batch gives values that are not finite. Are the weights of this model whole?")
    return [COARSE - math.frexp(value)[1] if value > 0 else COARSE for value in largest]


class ExactSum:
    """A running sum of lists of tensors, the same whatever the order of `add`."""

    def __init__(self, exponents: Sequence[int], totals: Sequence[Tensor]) -> None:
        self.exponents, self.totals = list(exponents), [total.clone() for total in totals]  # each (2, *shape)

    @staticmethod
    def like(first: Sequence[Tensor], exponents: Sequence[int]) -> ExactSum:
        return ExactSum(exponents, [torch.zeros((2, *t.shape), dtype=torch.int64) for t in first])

    def add(self, terms: Sequence[Tensor]) -> None:
        for total, term, exponent in zip(self.totals, terms, self.exponents):
            scaled = torch.ldexp(term.detach().double().cpu(), torch.tensor(exponent))
            if not float(scaled.abs().max()) < 2.0 ** (COARSE + ROOM):  # also true for NaN
                raise SnapvitError("a batch gives values a thousand times larger than the first, or not finite ones")
            coarse = scaled.round()
            total[0] += coarse.to(torch.int64)
            total[1] += torch.ldexp(scaled - coarse, torch.tensor(FINE)).round().to(torch.int64)

    def values(self) -> list[Tensor]:
        """Return the sums as float64."""
        found = []
        for (coarse, fine), exponent in zip(self.totals, self.exponents):
            whole = coarse.double() + torch.ldexp(fine.double(), torch.tensor(-FINE))
            found.append(torch.ldexp(whole, torch.tensor(-exponent)))
        return found
