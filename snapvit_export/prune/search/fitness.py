"""Fitness of a set of factors: how far the pruned model's embedding turns away from the dense one's, without labels.

| symbol | meaning                                            | shape      |
|--------|----------------------------------------------------|------------|
| z      | pre-logits embedding of the dense model            | (N, E)     |
| P      | PCA of z: centred, exact, not whitened             | (E, pca)   |
| z'     | embedding of the model pruned to one (mlp, head) pair | (N, E)  |

Loss (to minimise) = mean over pairs of 1 - mean_i cos(P z'_i, P z_i). The patch embedding of all images, and
what the first block's heads attend to, are computed once; a candidate is a set of sliced tensors, never a copy of the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...calibration.images import Images
from ...errors import GateFailed, SnapvitError
from ...plan import Plan, Planner, Protection
from ...ranking import Ranking
from ...recipe import SEARCH_PAIRS
from ...scores import Scores
from ..load import Model
from ..one_thread import one_thread
from ..parts import blocks_of
from ..slicing import kept
from .engine import Autocast, EngineName, choose_autocast, make_engine
from .forward import Weights, all_weights, attend_first, block_weights, embed_tokens, pooled, read_body

CHUNK = 4  # images at a time: what fits the cache of one core serves best
PerImage = npt.NDArray[np.float64]


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


def check_enough_images(images: int, pca: int, embed_dim: int) -> None:
    """Refuse a PCA that so few images cannot give."""
    if images < pca < embed_dim:
        raise SnapvitError(
            f"a PCA to {pca} dimensions needs as many images, not {images}. Give more --images or less --pca"
        )


class Fitness:
    """Evaluates factors; everything that does not depend on them is computed once, here.

    >>> fitness = Fitness(model, scores, images)
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
        autocast: Autocast | None = "none",  # None: whatever is fastest and faithful here, by trying
        agree: Callable[[Callable[[], Any]], Any] = lambda make: make(),  # one process decides for all
    ) -> None:
        workers = torch.get_num_threads()
        self.model, self.scores, self.pairs, self.protection = model, scores, tuple(pairs), protection
        self.blocks, self.count = blocks_of(model.module), len(images)
        self.device = torch.device(device)
        with torch.no_grad(), one_thread():
            self.tokens, rope = self._embed(images)
            self.body = read_body(model.module, model.anatomy, rope)
            order, plan = _order(scores), Plan.dense(model.anatomy)
            self.first = self._attend_first()
            dense, columns = self._weights(order, plan)
            example = (self.tokens[0], self.first[0])
            if autocast is None:
                autocast = agree(lambda: choose_autocast(self.body, self.device, dense, *example))
            self.autocast: Autocast = autocast
            self.engine = make_engine(engine, self.body, self.device, dense, *example, autocast, workers)
            z = self._embedding(self.engine.prepare(dense), columns, range(len(self.tokens)))  # (N, E)
            self._check(images, z)
            self.projection = Projection.fit(z, pca)
            self.teacher = self.projection(z)  # (N, pca)

    def __call__(self, factors: npt.ArrayLike) -> float:
        """The loss of these factors over all images."""
        return float(self.per_image(factors).mean())

    @property
    def chunks(self) -> int:
        """How many chunks of images there are: what a race counts in."""
        return len(self.tokens)

    def per_image(self, factors: npt.ArrayLike, chunks: range | None = None) -> PerImage:
        """1 - cos for every pair and image of the given chunks: (pairs, images)."""
        chunks = range(len(self.tokens)) if chunks is None else chunks
        rows = slice(chunks.start * CHUNK, min(chunks.stop * CHUNK, self.count))
        ranking = _order(self.scores.scaled(factors))
        planner = Planner(ranking, self.model.anatomy, self.protection)
        found = []
        with torch.no_grad():
            for mlp, head in self.pairs:
                weights, columns = self._weights(ranking, planner.pair(mlp, head))
                z = self._embedding(self.engine.prepare(weights), columns, chunks)
                with one_thread():
                    z = self.projection(z)  # (n, pca)
                cosine = torch.nn.functional.cosine_similarity(z, self.teacher[rows], dim=1)
                found.append(1 - cosine.double().numpy())
        return np.stack(found)

    def _weights(self, ranking: Ranking, plan: Plan) -> tuple[list[Weights], Tensor]:
        """A candidate's tensors, and the columns that its heads have in what the first block attends to."""
        keep = [kept(ranking, plan, i) for i in range(len(self.blocks))]
        unit = self.model.anatomy.blocks[0].head_dim
        columns = (keep[0][0][:, None] * unit + torch.arange(unit)).flatten()  # (kept*head_dim,)
        return all_weights(self.model.module, self.body, keep), columns

    def _attend_first(self) -> list[Tensor]:
        """The output of all heads of the first block, for every chunk: the same for all candidates."""
        heads, neurons = (torch.arange(n) for n in (self.model.anatomy.heads[0], self.model.anatomy.neurons[0]))
        single = len(self.blocks) == 1 and self.body.needed is not None
        weights = block_weights(self.blocks[0], heads, neurons, split_query=single)
        return [attend_first(tokens, weights, self.body) for tokens in self.tokens]

    def _embed(self, images: Images) -> tuple[list[Tensor], Tensor | None]:
        made = [embed_tokens(self.model.module, torch.from_numpy(batch)) for batch in images.batches(CHUNK)]
        return [tokens for tokens, _ in made], made[0][1]  # chunks of (<=CHUNK, T, E)

    def _embedding(self, prepared: Any, columns: Tensor, chunks: range) -> Tensor:
        def one(i: int) -> Tensor:
            with torch.no_grad():  # each thread has its own setting
                first = self.first[i].index_select(2, columns)
                return pooled(self.model.module, self.engine.run(self.tokens[i], first, prepared).cpu())

        if self.engine.workers == 1:
            return torch.cat([one(i) for i in chunks]).float()
        with ThreadPoolExecutor(self.engine.workers) as pool:
            return torch.cat(list(pool.map(one, chunks))).float()  # (n, E)

    def _check(self, images: Images, z: Tensor) -> None:
        """The gate: the functional form must equal the module itself on the first images."""
        module: Any = self.model.module
        batch = torch.from_numpy(next(images.batches(CHUNK)))
        reference = module.forward_head(module.forward_features(batch), pre_logits=True)
        off = float((z[: len(batch)] - reference).abs().max() / reference.abs().max())
        if not off <= (1e-3 if self.autocast == "none" else 5e-2):
            raise GateFailed(f"{self.model.name}: the search's forward pass differs from the model by {off:.1e}")


def _order(scores: Scores) -> Ranking:
    return Ranking(scores.heads, scores.neurons)
