"""Fitness of factors on scores, as published: the cosine distance of pruned from dense embeddings after a PCA.

| symbol | meaning                                            | shape      |
|--------|----------------------------------------------------|------------|
| z      | pre-logits embedding of the dense model            | (N, E)     |
| P      | PCA of z: centred, exact, not whitened             | (E, pca)   |
| z'     | embedding of the model pruned to one (mlp, head) pair | (N, E)  |

Loss (to minimise) = mean over pairs of 1 - mean_i cos(P z'_i, P z_i).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....allocation.planner import Planner
from ....allocation.recipe import SEARCH_PAIRS
from ....calibration.images import Images
from ....errors import SnapvitError
from ....model.plan import Protection
from ....model.ranking import Ranking
from ....model.scores import Scores
from ....model.timing import Timer, untimed
from ...models.load import Model
from ...stats.single_thread import single_thread
from .candidate_runner import CandidateRunner
from .engine import Autocast, EngineName

PerImage = npt.NDArray[np.float64]
SearchedOver = Literal["mlp", "all"]


@dataclass(frozen=True)
class Projection:
    """The PCA that both embeddings go through; the identity where it would not reduce anything."""

    mean: Tensor  # (E,)
    components: Tensor | None  # (E, pca)

    @staticmethod
    def fit(z: Tensor, dimensions: int) -> Projection:
        if dimensions >= z.shape[1]:
            return Projection(torch.zeros(z.shape[1]), None)
        check_enough_images(len(z), dimensions, z.shape[1])
        mean = z.mean(0)
        _, _, rows = torch.linalg.svd(z - mean, full_matrices=False)
        return Projection(mean, rows[:dimensions].T.contiguous())

    def __call__(self, z: Tensor) -> Tensor:
        return z if self.components is None else (z - self.mean) @ self.components


def scaled_by(scores: Scores, factors: npt.ArrayLike, over: SearchedOver) -> Scores:
    """Return the scores times the factors of a search: of every MLP alone, the heads' scores as they are, or of all."""
    given = np.asarray(factors, np.float64)
    if over == "mlp":
        given = np.concatenate([given, np.ones(scores.factors - len(scores.neurons))])
    return scores.scaled(given)


def check_enough_images(images: int, pca: int, embed_dim: int) -> None:
    """Refuse a PCA that so few images cannot give."""
    if images < pca < embed_dim:
        raise SnapvitError(
            f"a PCA to {pca} dimensions needs as many images, not {images}. Give more --images or less --pca"
        )


class Fitness:
    """Evaluates factors; everything that does not depend on them is computed once, by the runner.

    >>> fitness = Fitness(model, scores, images, pca=16)
    >>> fitness(np.ones(scores.factors))
    """

    def __init__(
        self,
        model: Model,
        scores: Scores,
        images: Images,
        pairs: Sequence[tuple[float, float]] = SEARCH_PAIRS,
        pca: int = 192,
        protection: Protection = Protection(),
        engine: EngineName | None = None,
        device: str | torch.device = "cpu",
        autocast: Autocast | None = "none",  # None: the fastest that is faithful on this device, as measured
        agree: Callable[[Callable[[], Any]], Any] = lambda make: make(),  # lets one process decide for all
        over: SearchedOver = "all",
        timer: Timer = untimed,
    ) -> None:
        self.over, self.timer = over, timer
        self.runner = CandidateRunner(model, images, engine, device, autocast, agree)
        self.model, self.scores, self.pairs, self.protection = model, scores, tuple(pairs), protection
        with torch.no_grad(), single_thread():
            self.projection = Projection.fit(self.runner.dense, pca)
            self.teacher = self.projection(self.runner.dense)  # (N, pca)

    def __call__(self, factors: npt.ArrayLike) -> float:
        """Return the loss of these factors over all images."""
        return float(self.per_image(factors).mean())

    @property
    def sizes(self) -> int:
        """The number of sizes that a candidate is cut to."""
        return len(self.pairs)

    def per_image(self, factors: npt.ArrayLike, chunks: range | None = None) -> PerImage:
        """Return 1 - cos for every pair and image of the given chunks: (pairs, images)."""
        chunks = range(self.runner.chunks) if chunks is None else chunks
        with self.timer("sorting"):
            scaled = scaled_by(self.scores, factors, self.over)
            ranking = Ranking(scaled.heads, scaled.neurons)
            planner = Planner(ranking, self.model.anatomy, self.protection)
            plans = [planner.pair(mlp, head) for mlp, head in self.pairs]
        found = []
        with torch.no_grad():
            for plan in plans:
                z = self.runner.embedding(*self.runner.weights(ranking, plan), chunks)
                with single_thread():
                    z = self.projection(z)  # (n, pca)
                cosine = torch.nn.functional.cosine_similarity(z, self.teacher[self.runner.rows(chunks)], dim=1)
                found.append(1 - cosine.double().numpy())
        return np.stack(found)
