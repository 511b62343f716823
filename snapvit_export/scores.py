"""Scores: one number per structure from one criterion, larger for what matters more. Light: numpy.

A Ranking is made of Scores, as they are or after a search has weighted them: the factor of a block scales all its
neurons, the factor of a head that head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        """How many factors a search has: one per block for its neurons, then one per head, block by block."""
        return len(self.neurons) + sum(len(block) for block in self.heads)

    def scaled(self, factors: npt.ArrayLike) -> Scores:
        """Every score times the absolute value of its factor."""
        c = np.abs(np.asarray(factors, np.float64))
        if c.shape != (self.factors,):
            raise ValueError(f"expected {self.factors} factors, got shape {c.shape}")
        depth = len(self.neurons)
        neurons = tuple(_times(block, c[i]) for i, block in enumerate(self.neurons))
        per_head = np.split(c[depth:], np.cumsum([len(block) for block in self.heads])[:-1])
        return Scores(tuple(_times(block, c_b) for block, c_b in zip(self.heads, per_head)), neurons)


def stacked(values: Sequence[npt.ArrayLike]) -> tuple[Array, ...]:
    """Turn one array-like per block into the tuple that Scores holds."""
    return tuple(np.array(block, np.float32) for block in values)


def _times(scores: Array, factor: npt.ArrayLike) -> Array:
    return (scores * np.asarray(factor)).astype(np.float32)
