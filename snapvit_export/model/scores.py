"""Scores: one number per structure from one criterion, larger for what matters more. Light: numpy.

A Ranking is made of Scores, as they are or after a search has weighted them: the factor of a block scales all its
neurons, the factor of a head that head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of the heads and of the neurons of every block, in float32, neither flushed nor normalised."""

    heads: tuple[Array, ...]
    neurons: tuple[Array, ...]

    @property
    def factors(self) -> int:
        """The number of factors of a search: one per block for its neurons, then one per head, block by block."""
        return len(self.neurons) + sum(len(block) for block in self.heads)

    def scaled(self, factors: npt.ArrayLike) -> Scores:
        """Return every score times the absolute value of its factor."""
        c = np.abs(np.asarray(factors, np.float64))
        if c.shape != (self.factors,):
            raise ValueError(f"expected {self.factors} factors, got shape {c.shape}")
        depth = len(self.neurons)
        neurons = tuple(_times(block, c[i]) for i, block in enumerate(self.neurons))
        per_head = np.split(c[depth:], np.cumsum([len(block) for block in self.heads])[:-1])
        return Scores(tuple(_times(block, c_b) for block, c_b in zip(self.heads, per_head)), neurons)


def stacked(values: Sequence[npt.ArrayLike]) -> tuple[Array, ...]:
    """Return one float32 array per block, as Scores holds them."""
    return tuple(np.array(block, np.float32) for block in values)


def _times(scores: Array, factor: npt.ArrayLike) -> Array:
    return (scores * np.asarray(factor)).astype(np.float32)


def strictly_falling(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the smallest numbers of the same type that are at least `values`, each larger than the next.

    >>> strictly_falling(np.array([3.0, 1.0, 2.0]))     # 3, just above 2, 2
    array([3., 2., 2.])
    """
    if not len(values):  # of a removed sub-layer
        return values
    whole = {2: np.int16, 4: np.int32, 8: np.int64}[values.dtype.itemsize]
    # Floats that are not negative sort like the integers of the same bits, and the next float is the next integer.
    steps = (np.maximum(values, 0) + values.dtype.type(0))[::-1].copy().view(whole).astype(np.int64)  # no -0.0
    places = np.arange(len(values))
    raised = np.maximum.accumulate(steps - places) + places
    return np.asarray(raised.astype(whole).view(values.dtype)[::-1])
