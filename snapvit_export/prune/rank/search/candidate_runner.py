"""Run candidates of a search over the same images: from the kept structures to the pre-logits embeddings.

A candidate is a set of sliced tensors, never a copy of the model. The patch embedding of all images, and the output of
the first block's heads, are the same for all candidates and computed once, here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ....calibration.images import Images
from ....errors import GateFailed
from ....model.plan import Plan
from ....model.ranking import Ranking
from ...blocks.functional import (
    Weights,
    all_weights,
    attend_first,
    block_weights,
    embed_tokens,
    pooled,
    read_body,
    stand_ins,
)
from ...blocks.timm_blocks import blocks_of
from ...models.load import Model
from ...models.slicing import kept
from ...stats.single_thread import single_thread
from .engine import Autocast, EngineName, choose_autocast, make_engine

CHUNK = 4  # images at a time: it is fastest where they fit the cache of one core


class CandidateRunner:
    """Runs candidates over the same images.

    >>> runner = CandidateRunner(model, images)
    >>> runner.embedding(*runner.weights(ranking, plan))     # (N, E)
    """

    def __init__(
        self,
        model: Model,
        images: Images,
        engine: EngineName | None = None,
        device: str | torch.device = "cpu",
        autocast: Autocast | None = "none",  # None: the fastest that is faithful on this device, as measured
        agree: Callable[[Callable[[], Any]], Any] = lambda make: make(),  # lets one process decide for all
    ) -> None:
        workers = torch.get_num_threads()
        self.model = model
        self.blocks, self.count = blocks_of(model.module), len(images)
        self.device = torch.device(device)
        with torch.no_grad(), single_thread():
            self.tokens, rope = self._embed(images)
            self.body = read_body(model.module, model.anatomy, rope)
            self.first = self._attend_first()
            dense, columns = self.weights(Ranking.flat(model.anatomy), Plan.dense(model.anatomy))
            example = (self.tokens[0], self.first[0])
            if autocast is None:
                autocast = agree(lambda: choose_autocast(self.body, self.device, dense, *example))
            self.autocast: Autocast = autocast
            self.engine = make_engine(engine, self.body, self.device, dense, *example, autocast, workers)
            self.dense = self.embedding(dense, columns)  # (N, E)
            self._check(images)

    @property
    def chunks(self) -> int:
        """The number of chunks of images: racing proceeds by chunks."""
        return len(self.tokens)

    def rows(self, chunks: range) -> slice:
        """Return the images of these chunks."""
        return slice(chunks.start * CHUNK, min(chunks.stop * CHUNK, self.count))

    def weights(self, ranking: Ranking, plan: Plan) -> tuple[list[Weights], Tensor]:
        """Return a candidate's tensors, and the columns of its heads in the output of the first block's heads.

        A removed sub-layer runs with its best structure, whose output is not read: a traced graph cannot have a width
        of zero.
        """
        some = Plan(heads=tuple(max(1, n) for n in plan.heads), neurons=tuple(max(1, n) for n in plan.neurons))
        keep = [kept(ranking, some, i) for i in range(len(self.blocks))]
        unit = self.model.anatomy.blocks[0].head_dim
        heads = keep[0][0] if len(keep[0][0]) else torch.arange(1)  # one head in the place of a removed attention
        columns = (heads[:, None] * unit + torch.arange(unit)).flatten()  # (kept*head_dim,)
        weights = all_weights(self.model.module, self.body, keep)
        for block in weights:  # a correction adds biases, and all candidates need the same tensors
            for name in ("proj", "fc2"):
                block.setdefault(f"{name}.bias", torch.zeros(self.model.anatomy.embed_dim))
        for i, part in plan.removed:
            silent = "proj.weight" if part == "attention" else "fc2.weight"
            weights[i][silent] = torch.zeros_like(weights[i][silent])
        return weights, columns

    def embedding(self, weights: list[Weights], columns: Tensor, chunks: range | None = None) -> Tensor:
        """Return a candidate's pre-logits embeddings of the images of these chunks, or of all: (n, E)."""
        prepared = self.engine.prepare(weights)

        def one(i: int) -> Tensor:
            with torch.no_grad():  # each thread has its own setting
                first = self.first[i].index_select(2, columns)
                return pooled(self.model.module, self.engine.run(self.tokens[i], first, prepared).cpu())

        wanted = range(self.chunks) if chunks is None else chunks
        if self.engine.workers == 1:
            return torch.cat([one(i) for i in wanted]).float()
        with ThreadPoolExecutor(self.engine.workers) as pool:
            return torch.cat(list(pool.map(one, wanted))).float()  # (n, E)

    def _embed(self, images: Images) -> tuple[list[Tensor], Tensor | None]:
        made = [embed_tokens(self.model.module, torch.from_numpy(batch)) for batch in images.batches(CHUNK)]
        return [tokens for tokens, _ in made], made[0][1]  # chunks of (<=CHUNK, T, E)

    def _attend_first(self) -> list[Tensor]:
        """Return the output of all heads of the first block, for every chunk: the same for all candidates."""
        heads, neurons = (torch.arange(n) for n in (self.model.anatomy.heads[0], self.model.anatomy.neurons[0]))
        single = len(self.blocks) == 1 and self.body.needed is not None
        weights = block_weights(self.blocks[0], heads, neurons, split_query=single)
        weights |= stand_ins(self.blocks[0], self.model.anatomy.embed_dim, single)
        return [attend_first(tokens, weights, self.body) for tokens in self.tokens]

    def _check(self, images: Images) -> None:
        """The gate: the functional form must equal the module itself on the first images."""
        module: Any = self.model.module
        batch = torch.from_numpy(next(images.batches(CHUNK)))
        reference = module.forward_head(module.forward_features(batch), pre_logits=True)
        off = float((self.dense[: len(batch)] - reference).abs().max() / reference.abs().max())
        if not off <= (1e-3 if self.autocast == "none" else 5e-2):
            raise GateFailed(f"{self.model.name}: the search's forward pass differs from the model by {off:.1e}")
