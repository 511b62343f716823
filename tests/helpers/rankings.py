"""Rankings that nobody had to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.timing import untimed_part


def random_ranking(anatomy: Anatomy, seed: int = 0) -> Ranking:
    """Random scores for every head and neuron."""
    rng = np.random.default_rng(seed)
    heads = tuple(rng.random(n, dtype=np.float32) for n in anatomy.heads)
    return Ranking(heads, tuple(rng.random(n, dtype=np.float32) for n in anatomy.neurons), anatomy=anatomy)


def apart_from_time(path: Path) -> tuple[Any, ...]:
    """All that a ranking file holds but for how long the phases took, which no two runs share."""
    ranking = Ranking.load(path)
    arrays = {name: (array.dtype.str, array.tobytes()) for name, array in ranking.arrays().items()}
    assert ranking.timings, "every ranking that was made here says how long it took"
    return ranking.model, ranking.anatomy, untimed_part(ranking.provenance), arrays
