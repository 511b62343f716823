"""From a model and images to a Ranking: score by a criterion, then search for factors; resumable, on many processes.

Three things never change the result: how many processes share the work, where it was interrupted, and what else runs
on the machine. Scores are sums of what the batches contribute, added in fixed point; each candidate of the search is
evaluated whole by one process; all random numbers depend on the seed and a counter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..calibration.images import Images
from ..errors import SnapvitError, UsageError
from ..plan import Planner
from ..progress import Progress, Silent
from ..ranking import Ranking
from ..recipe import Settings
from ..scores import Scores
from ..values import as_builtins
from .checkpoint import Checkpoint, Saved
from .criteria import make_criterion
from .criteria.base import Batch, Criterion
from .exact_sum import ExactSum, choose_exponents
from .load import Model
from .one_thread import one_thread
from .processes import Processes
from .search.cka import cka_covariance
from .search.engine import Autocast, EngineName, engine_name
from .search.fitness import Fitness, check_enough_images
from .search.optimiser import Optimiser, Vector
from .search.run import Progressed, search
from .search.snes import LogSNES
from .search.xnes import XNES

BATCH = 16  # images, as in the released code; the sum over batches makes scores depend on it
SAVE_SECONDS = 30.0  # between checkpoints while scoring


def rank(
    model: Model,
    images: Images,
    settings: Settings = Settings(),
    *,
    engine: EngineName | None = None,
    autocast: Autocast | None = None,
    checkpoint: Path | None = None,
    save_seconds: float | None = None,
    processes: Processes = Processes(),
    progress: Progress | None = None,
) -> Ranking:
    """Rank the heads and neurons of `model` on `images`; with a `checkpoint` path, resume what was begun there.

    >>> ranking = rank(model, images, Settings(evaluations=50))
    """
    criterion = make_criterion(
        settings.criterion, views=settings.views, reduction=settings.reduction, seed=settings.seed
    )
    _check(criterion, model, images, settings)
    how = {"engine": engine_name(engine, processes.device, autocast), "device": processes.device.type}
    provenance = _provenance(model, images, settings, criterion, {**how, "autocast": autocast})
    state = Checkpoint(checkpoint, provenance) if checkpoint is not None else None
    saved = Saved.unpacked(processes.from_first(lambda: Saved.packed(state.load() if state is not None else None)))
    seconds = SAVE_SECONDS if save_seconds is None else save_seconds
    run = _Run(model, images, settings, criterion, processes, state, seconds, progress or Silent(), engine, autocast)
    scores = run.score(saved)
    if settings.evaluations:
        scores, found = run.search(scores, saved)
        provenance |= found
    return Ranking(scores.heads, scores.neurons, model.name, model.anatomy, provenance)


@dataclass
class _Run:
    model: Model
    images: Images
    settings: Settings
    criterion: Criterion
    processes: Processes
    state: Checkpoint | None
    save_seconds: float
    progress: Progress
    engine: EngineName | None
    autocast: Autocast | None

    def score(self, saved: Saved | None) -> Scores:
        """Add up what all batches contribute, each process its share, and finish."""
        if saved is not None and saved.phase in ("scored", "search"):
            return _scores_from(saved.arrays, len(self.model.anatomy.blocks))
        module = self.model.module
        if self.criterion.needs == "nothing":
            return self.criterion.finish(module, [], 0)
        module.to(self.processes.device)
        try:
            sums = self._sums(saved)
        finally:
            module.to("cpu")
        return self.criterion.finish(module, sums, len(self.images))

    def _sums(self, saved: Saved | None) -> list[torch.Tensor]:
        batches = range(-(-len(self.images) // BATCH))
        first = None if saved is not None else self._contribution(0)  # in every process: it tells shapes and scale
        total, begun = self._begin(first, saved)
        self.progress.phase("scoring heads and neurons", len(self.images))
        self.progress.advance(min(begun * BATCH, len(self.images)))
        last_save = time.monotonic()
        for start in range(begun, len(batches), self.processes.count):
            for number in self.processes.share(batches[start : start + self.processes.count]):
                total.add(first if number == 0 and first is not None else self._contribution(number))
            done = min(start + self.processes.count, len(batches))
            self.progress.advance(min(done * BATCH, len(self.images)) - min(start * BATCH, len(self.images)))
            due = self.processes.from_first(partial(self._due, last_save))
            if self.state is not None and due and done < len(batches):
                self._save_sums(total, done)
                last_save = time.monotonic()
        return ExactSum(total.exponents, self.processes.summed(total.totals)).values()

    def _due(self, last_save: float) -> bool:
        return time.monotonic() - last_save >= self.save_seconds

    def _begin(self, first: list[torch.Tensor] | None, saved: Saved | None) -> tuple[ExactSum, int]:
        """An empty sum, or the one of the checkpoint, which then belongs to the first process."""
        if first is None:
            assert saved is not None
            totals = [torch.from_numpy(saved.arrays[f"sum.{i}"].copy()) for i in range(len(saved.rest["exponents"]))]
            mine = totals if self.processes.is_first else [torch.zeros_like(total) for total in totals]
            return ExactSum(saved.rest["exponents"], mine), saved.rest["next_batch"]
        return ExactSum.like(first, choose_exponents(first)), 0

    def _save_sums(self, total: ExactSum, done: int) -> None:
        sums = self.processes.summed(total.totals)
        if self.processes.is_first and self.state is not None:
            arrays = {f"sum.{i}": part.numpy() for i, part in enumerate(sums)}
            self.state.save("score", arrays, {"exponents": total.exponents, "next_batch": done})

    def _contribution(self, number: int) -> list[torch.Tensor]:
        rows = slice(number * BATCH, (number + 1) * BATCH)
        pixels = self.images.preprocessing.normalise(self.images.pixels[rows])
        labels = None if self.images.labels is None else torch.from_numpy(self.images.labels[rows])
        target = self.processes.device
        batch = Batch(torch.from_numpy(pixels).to(target), None if labels is None else labels.to(target), number)
        return self.criterion.contribution(self.model.module, batch)

    def search(self, scores: Scores, saved: Saved | None) -> tuple[Scores, dict[str, Any]]:
        """Weight the scores by the factors that the search finds best."""
        settings = self.settings
        self.progress.phase("preparing the search")
        fitness = Fitness(
            self.model,
            scores,
            self.images,
            settings.pairs,
            settings.pca,
            engine=self.engine,
            device=self.processes.device,
            autocast=self._precision(saved),
            agree=self.processes.from_first,
        )
        notes = {"autocast": fitness.autocast}
        with one_thread():
            covariance = cka_covariance(self.model, self.images) if settings.cka else None
        optimiser = make_optimiser(settings, scores, covariance)
        if self.state is not None and self.processes.is_first and (saved is None or saved.phase == "score"):
            self.state.save("scored", _arrays_of(scores), notes)
        self.progress.phase("searching", settings.evaluations)
        reached = 0

        def tell(now: Progressed) -> None:
            nonlocal reached
            self.progress.describe(f"searching, best fitness {now.best_loss:.5f}")
            self.progress.advance(now.evaluations - reached)
            reached = now.evaluations

        found = search(
            fitness,
            optimiser,
            settings.evaluations,
            settings.racing,
            self.processes,
            self.state,
            saved,
            _arrays_of(scores),
            notes,
            tell,
        )
        summary = {
            "search": {
                **optimiser.summary(),
                **notes,
                "best_fitness": found.best_loss,
                "start_fitness": found.start_loss,
                "images_seen": found.images_seen,
                "history": found.history,
                "factors": [float(c) for c in found.best_factors],
            }
        }
        return scores.scaled(found.best_factors), summary

    def _precision(self, saved: Saved | None) -> Autocast | None:
        """fp32 on a CPU, so that results repeat; on a GPU what was asked for, or measured once for the whole run."""
        if saved is not None and "autocast" in saved.rest:
            return saved.rest["autocast"]
        if self.autocast is None and self.processes.device.type == "cpu":
            return "none"
        return self.autocast


def make_optimiser(settings: Settings, scores: Scores, covariance: np.ndarray | None = None) -> Optimiser:
    """The optimiser of these settings, at its start: factors from 1.2 in the first block to 0.8 in the last."""
    start = starting_factors(scores)
    if settings.optimiser == "snes-log":
        return LogSNES(start, settings.seed, settings.population)
    return XNES(start, settings.seed, settings.population, covariance)


def starting_factors(scores: Scores) -> Vector:
    """linspace(1.2, 0.8) over depth, for the MLPs and the same for every head of a block."""
    by_depth = np.linspace(1.2, 0.8, len(scores.neurons), dtype=np.float32)
    per_head = [np.full(len(block), value) for block, value in zip(scores.heads, by_depth)]
    return np.concatenate([by_depth, *per_head])


def weights_fingerprint(module: torch.nn.Module) -> str:
    """A hash of all weights by name: the same model gives the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def needs_images(settings: Settings) -> bool:
    """Whether these settings look at any image: magnitude and its like do not, unless a search follows."""
    return make_criterion(settings.criterion).needs != "nothing" or settings.evaluations > 0


def check_device(device: str) -> None:
    """Refuse a device that is not there, before any work."""
    if device != "cpu" and not device.startswith("cuda"):
        raise UsageError(f"device '{device}' is not cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SnapvitError("no CUDA device works here: torch finds none. Use --device cpu")


def check_engine(engine: str | None) -> EngineName | None:
    """Refuse an engine that does not exist."""
    if engine not in (None, "torch", "onnxruntime"):
        raise UsageError(f"no engine is called '{engine}'. Known: torch, onnxruntime")
    return engine  # type: ignore[return-value]


def check_autocast(autocast: str | None) -> Autocast | None:
    """Refuse a precision that does not exist; None lets a GPU measure."""
    if autocast not in (None, "none", "bf16", "fp16"):
        raise UsageError(f"no autocast is called '{autocast}'. Known: none, bf16, fp16")
    return autocast  # type: ignore[return-value]


def check_same_weights(ranking: Ranking, model: Model) -> None:
    """Refuse a ranking that says it was made from other weights."""
    made_from = ranking.provenance.get("weights_sha256")
    if made_from is not None and made_from != weights_fingerprint(model.module):
        raise SnapvitError(f"the ranking was made from other weights of {ranking.model}. Rank this model first")


def _check(criterion: Criterion, model: Model, images: Images, settings: Settings) -> None:
    if criterion.needs != "nothing" and not len(images):
        raise SnapvitError(f"criterion {settings.criterion} needs images. Give --data")
    if criterion.needs == "labels" and images.labels is None:
        raise SnapvitError(f"criterion {settings.criterion} needs labels: one sub-folder of images per class")
    if settings.evaluations < 0:
        raise UsageError(f"{settings.evaluations} evaluations make no sense. Give 0 for no search")
    if settings.evaluations:
        check_enough_images(len(images), settings.pca, model.anatomy.embed_dim)
        planner = Planner(Ranking.flat(model.anatomy), model.anatomy)
        for mlp, head in settings.pairs:
            planner.pair(mlp, head)  # refuses what protection does not allow


def _provenance(
    model: Model, images: Images, settings: Settings, criterion: Criterion, how: dict[str, Any]
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "criterion": settings.criterion,
        **criterion.settings,
        "batch": BATCH,
        "seed": settings.seed,
        "model": model.name,
        "weights_sha256": weights_fingerprint(model.module),
        "data": images.fingerprint,
    }
    if settings.evaluations:
        described["search_settings"] = {
            name: as_builtins(getattr(settings, name))
            for name in ("evaluations", "optimiser", "population", "pairs", "pca", "cka", "racing")
        } | how
    return described


def _arrays_of(scores: Scores) -> dict[str, np.ndarray]:
    kinds: Sequence[tuple[str, tuple[np.ndarray, ...]]] = (("heads", scores.heads), ("neurons", scores.neurons))
    return {f"scores.{kind}.{i}": block for kind, blocks in kinds for i, block in enumerate(blocks)}


def _scores_from(arrays: dict[str, np.ndarray], depth: int) -> Scores:
    heads, neurons = (tuple(arrays[f"scores.{kind}.{i}"] for i in range(depth)) for kind in ("heads", "neurons"))
    return Scores(heads, neurons)
