"""Sums that do not depend on the order of their terms: in fixed point, where addition is exact.

Floating-point sums change with the order, so the same images spread over two processes would give other scores than on
one. Here every term is rounded once to a multiple of a quantum and added as an integer. The quantum comes from the
first batch: the largest entry takes 40 of 63 bits, which leaves room for 2^23 such terms and resolves entries down to
1e-12 of the largest, finer than float32 itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SnapvitError

BITS = 40


def choose_exponents(first: Sequence[Tensor]) -> list[int]:
    """For each tensor the power of two that scales its largest entry of the first batch to about 2^BITS."""
    largest = [float(tensor.abs().max()) for tensor in first]
    if not all(torch.isfinite(torch.tensor(value)) for value in largest):
        raise SnapvitError("the first batch gives values that are not finite. Are the weights of this model whole?")
    return [BITS - int(torch.frexp(torch.tensor(value)).exponent) if value > 0 else BITS for value in largest]


class ExactSum:
    """A running sum of lists of tensors, the same whatever the order of `add`."""

    def __init__(self, exponents: Sequence[int], totals: Sequence[Tensor]) -> None:
        self.exponents, self.totals = list(exponents), [total.clone() for total in totals]

    @staticmethod
    def like(first: Sequence[Tensor], exponents: Sequence[int]) -> ExactSum:
        return ExactSum(exponents, [torch.zeros(t.shape, dtype=torch.int64) for t in first])

    def add(self, terms: Sequence[Tensor]) -> None:
        for total, term, exponent in zip(self.totals, terms, self.exponents):
            scaled = torch.ldexp(term.detach().double().cpu(), torch.tensor(exponent))
            if not float(scaled.abs().max()) < 2.0**62:  # also true for NaN
                raise SnapvitError("a batch gives values a million times larger than the first, or not finite ones")
            total += scaled.round().to(torch.int64)

    def values(self) -> list[Tensor]:
        """The sums as float64."""
        return [
            torch.ldexp(total.double(), torch.tensor(-exponent)) for total, exponent in zip(self.totals, self.exponents)
        ]
