"""The fitness of factors on damage curves: the output divergence of the Plans that the weighted curves lead to.

Damage curves measure the error of each layer's own output; they do not know its effect in the layers after it. So the
curve of every attention and every MLP gets a factor. A candidate is a set of factors: the allocation finds its Plans at
a few costs, the elastic correction their weights, and the divergence from the dense model is the loss. Factors of one
are the allocation without a search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....allocation.planner import Planner
from ....correction.cholesky import Factor, Factors, from_rank_order
from ....model.plan import Plan
from ....model.ranking import Ranking
from ....model.timing import Timer, untimed
from ...blocks.functional import Weights
from ...stats.output_divergence import OutputDivergence
from ...stats.single_thread import single_thread
from .candidate_runner import CandidateRunner
from .fitness import PerImage


class DamageFitness:
    """Evaluates factors on the damage curves of a ranking.

    >>> fitness = DamageFitness(runner, ranking, factors, divergence)
    >>> fitness(np.ones(2 * len(ranking.heads)))
    """

    def __init__(
        self,
        runner: CandidateRunner,
        ranking: Ranking,
        factors: Factors | None,  # None: without correction
        divergence: OutputDivergence,
        flops: Sequence[float] = (0.6,),  # of the dense blocks: the sizes at which a candidate is evaluated
        timer: Timer = untimed,
    ) -> None:
        if factors is not None:
            factors.check_made_for(ranking)
        self.runner, self.ranking, self.factors, self.divergence = runner, ranking, factors, divergence
        self.flops, self.timer = tuple(flops), timer
        self._remembered: dict[Plan, tuple[list[Weights], Tensor]] = {}

    def __call__(self, weights: npt.ArrayLike) -> float:
        """Return the loss of these factors over all images."""
        return float(self.per_image(weights).mean())

    @property
    def sizes(self) -> int:
        return len(self.flops)

    def per_image(self, weights: npt.ArrayLike, chunks: range | None = None) -> PerImage:
        """Return the divergence at every size of every image of the given chunks: (sizes, images)."""
        with self.timer("allocation"):
            weighted = self.ranking.weighted(np.reshape(np.asarray(weights, np.float64), (-1, 2)))
            planner = Planner(weighted, self.runner.model.anatomy, self.ranking.protection)
            plans = [planner.flops(fraction) for fraction in self.flops]
        return np.stack([self.of_plan(plan, chunks) for plan in plans])

    def of_plan(self, plan: Plan, chunks: range | None = None) -> npt.NDArray[np.float64]:
        """Return the divergence of one Plan, image by image: (images,)."""
        chunks = range(self.runner.chunks) if chunks is None else chunks
        with torch.no_grad():
            z = self.embedding(plan, chunks)
            with single_thread():
                return self.divergence(z, self.runner.rows(chunks)).numpy()

    def embedding(self, plan: Plan, chunks: range | None = None) -> Tensor:
        """Return the embeddings of a Plan's corrected model: (n, E)."""
        return self.runner.embedding(*self._weights(plan), chunks)

    def _weights(self, plan: Plan) -> tuple[list[Weights], Tensor]:
        """Return the tensors of a Plan; those of the last candidate are cached, since racing runs it in pieces."""
        if plan not in self._remembered:
            if len(self._remembered) >= self.sizes:
                self._remembered.clear()
            self._remembered[plan] = self._corrected(plan)
        return self._remembered[plan]

    def _corrected(self, plan: Plan) -> tuple[list[Weights], Tensor]:
        weights, columns = self.runner.weights(self.ranking, plan)
        if self.factors is not None:
            with single_thread():
                for i, block in enumerate(weights):
                    self._correct(block, "proj", self.factors.proj[i], self.ranking.head_order(i), plan.heads[i])
                    self._correct(block, "fc2", self.factors.fc2[i], self.ranking.neuron_order(i), plan.neurons[i])
        return weights, columns

    @staticmethod
    def _correct(block: Weights, name: str, factor: Factor, order: npt.NDArray[np.int64], keep: int) -> None:
        if keep == factor.structures:
            return
        weight, shift = factor.corrected(keep)  # (E, keep*unit) in rank order
        if keep:  # otherwise the sub-layer is removed, and only its mean is added
            columns = from_rank_order(order, keep, factor.unit)
            block[f"{name}.weight"] = torch.from_numpy(weight[:, columns]).float()
        bias = block.get(f"{name}.bias", torch.zeros(len(weight)))
        block[f"{name}.bias"] = bias + torch.from_numpy(shift).float()
