"""Rankings that nobody had to compute."""

from __future__ import annotations

import numpy as np

from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.ranking import Ranking


def random_ranking(anatomy: Anatomy, seed: int = 0) -> Ranking:
    """Random scores for every head and neuron."""
    rng = np.random.default_rng(seed)
    heads = tuple(rng.random(n, dtype=np.float32) for n in anatomy.heads)
    return Ranking(heads, tuple(rng.random(n, dtype=np.float32) for n in anatomy.neurons), anatomy=anatomy)
