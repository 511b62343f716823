"""Rank a model on images: scores or damage curves, then a search for factors on them; resumable and distributed.

Three things never change the result: how many processes share the work, where it was interrupted, and what else runs
on the machine. Scores are sums of the batches' contributions, added in fixed point; each candidate of the search is
evaluated whole by one process; all random numbers depend on the seed and a counter. With joint allocation every process
observes all images; machines of one kind with as many threads find the same order, and that is checked.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ...allocation.from_scores import ranking_from
from ...allocation.planner import Planner, check_reach
from ...allocation.recipe import Settings, in_shots, protection_of, uses_scores
from ...calibration.images import Images
from ...correction.cholesky import Factors
from ...correction.moments import Damping
from ...errors import SnapvitError, UsageError
from ...model.plan import Protection
from ...model.ranking import Ranking
from ...model.scores import Scores
from ...model.sublayer import IMAGES, KEY, SubLayer
from ...progress import Progress, Silent
from ...storage.json import as_builtins
from ..models.class_names import as_outputs
from ..models.load import Model, as_model
from ..stats.observe import observe
from ..stats.output_divergence import DivergenceName, OutputDivergence, check_divergence, default_divergence
from ..stats.single_thread import single_thread
from ..stats.sublayer_stats import measure_sublayers
from .checkpoint import Checkpoint, SavedState
from .criteria import make_criterion
from .criteria.base import Batch, Criterion
from .damage import damage_ranking
from .distributed import Processes
from .reproducible import ExactSum, choose_exponents
from .search.candidate_runner import CandidateRunner
from .search.cka import cka_covariance
from .search.damage_fitness import DamageFitness
from .search.engine import Autocast, EngineName, engine_name
from .search.fitness import Fitness, check_enough_images
from .search.loop import Objective, SearchState, search
from .search.optimiser import Optimiser, Vector
from .search.snes import LogSNES
from .search.xnes import XNES
from .shots import rank_in_shots

BATCH = 16  # images, as in the released code; the sum over batches makes scores depend on it
SAVE_SECONDS = 30.0  # between checkpoints while scoring


def rank(model: Model | torch.nn.Module, images: Images, settings: Settings = Settings(), **options: Any) -> Ranking:
    """Rank the heads and neurons of `model`, loaded or a timm module; `options` are those of `rank_and_factor`.

    >>> ranking = rank(model, images, make_settings("default"))
    """
    return rank_and_factor(as_model(model), images, settings, **options)[0]


def rank_and_factor(
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
) -> tuple[Ranking, Factors | None]:
    """Return the ranking, and the factors that correct any Plan of it where ranking made them.

    With a `checkpoint` path, what was begun there is resumed.
    """
    criterion = criterion_of(settings)
    check(criterion, model, images, settings)
    how = {"engine": engine_name(engine, processes.device, autocast), "device": processes.device.type}
    provenance = provenance_of(model, images, settings, criterion, {**how, "autocast": autocast})
    state = Checkpoint(checkpoint, provenance) if checkpoint is not None else None
    saved = SavedState.unpacked(
        processes.from_first(lambda: SavedState.packed(state.load() if state is not None else None))
    )
    seconds = SAVE_SECONDS if save_seconds is None else save_seconds
    run = _Run(model, images, settings, criterion, processes, state, seconds, progress or Silent(), engine, autocast)
    if settings.allocation == "joint":
        return run.joint(saved, provenance)
    if in_shots(settings):
        mine = state if processes.is_first else None
        return rank_in_shots(model, settings, run.score_of, provenance, mine, saved, run.progress), None
    scores = run.score(saved)
    if settings.evaluations:
        scores, found = run.search(scores, saved)
        provenance |= found
    if settings.depth:
        provenance |= {KEY: as_builtins(run.sublayers())}
    return ranking_from(scores, settings.allocation, model.name, model.anatomy, provenance), None


@dataclass
class _Run:
    """One ranking run in this process: its inputs, its checkpoint and its steps."""

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

    def score(self, saved: SavedState | None) -> Scores:
        """Return the scores from the contributions of all batches, of which each process makes its share."""
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

    def score_of(self, model: Model) -> Scores:
        """Return the scores of a smaller model, from the same images."""
        return replace(self, model=model, state=None).score(None)

    def _sums(self, saved: SavedState | None) -> list[torch.Tensor]:
        batches = range(-(-len(self.images) // BATCH))
        first = None if saved is not None else self._contribution(0)  # every process needs its shapes and scale
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

    def _begin(self, first: list[torch.Tensor] | None, saved: SavedState | None) -> tuple[ExactSum, int]:
        """Return an empty sum, or that of the checkpoint, which the first process holds; and the next batch."""
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

    @cached_property
    def labels(self) -> torch.Tensor | None:
        """The head's output that each image belongs to, if the criterion needs it: (N,)."""
        if self.criterion.needs != "labels":
            return None
        found = as_outputs(self.images, self.model, self.settings.criterion).labels
        return None if found is None else torch.from_numpy(found)

    def _contribution(self, number: int) -> list[torch.Tensor]:
        rows = slice(number * BATCH, (number + 1) * BATCH)
        pixels = self.images.preprocessing.normalise(self.images.pixels[rows])
        labels = None if self.labels is None else self.labels[rows]
        target = self.processes.device
        batch = Batch(torch.from_numpy(pixels).to(target), None if labels is None else labels.to(target), number)
        return self.criterion.contribution(self.model.module, batch)

    def search(self, scores: Scores, saved: SavedState | None) -> tuple[Scores, dict[str, Any]]:
        """Return the scores weighted by the best factors of the search, and a summary of it."""
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
        notes = {"autocast": fitness.runner.autocast}
        with single_thread():
            covariance = cka_covariance(self.model, self.images) if settings.cka else None
        optimiser = make_optimiser(settings, starting_factors(scores), covariance)
        factors, summary = self._minimise(fitness, optimiser, _arrays_of(scores), notes, saved)
        return scores.scaled(factors), summary

    def joint(self, saved: SavedState | None, provenance: dict[str, Any]) -> tuple[Ranking, Factors]:
        """Return orders and damage curves from the dense model's statistics; a search may then weight the curves."""
        settings = self.settings
        scores = self.score(saved) if uses_scores(settings) else None
        ranking, factors = self._ordered(scores, provenance)
        self._check_same_order(ranking, saved)
        provenance = {**provenance, KEY: as_builtins(self.sublayers())}
        ranking = replace(ranking, provenance=provenance)
        if not settings.evaluations:
            return ranking, factors
        self.progress.phase("preparing the search")
        runner = CandidateRunner(
            self.model,
            self.images.first(settings.search_images),
            self.engine,
            self.processes.device,
            self._precision(saved),
            self.processes.from_first,
        )
        divergence = OutputDivergence(divergence_of(settings, self.model), self.model, runner.dense)
        corrected_by = factors if _corrects(settings) else None
        fitness = DamageFitness(runner, ranking, corrected_by, divergence, settings.flops)
        optimiser = make_optimiser(settings, np.ones(2 * len(self.model.anatomy.blocks)))
        arrays = {} if scores is None else _arrays_of(scores)
        notes = {"autocast": runner.autocast, "order_sha256": ranking.order_sha256}
        weights, summary = self._minimise(fitness, optimiser, arrays, notes, saved)
        weighted = ranking.weighted(np.reshape(weights, (-1, 2)))
        return replace(weighted, provenance={**weighted.provenance, **summary}), factors

    def _ordered(self, scores: Scores | None, provenance: dict[str, Any]) -> tuple[Ranking, Factors]:
        """Return the ranking and its factors. The statistics, gigabytes for a large model, are freed on return."""
        statistics = observe(self.model, self.images, self.progress, str(self.processes.device))
        self.progress.phase("ordering heads and neurons")
        damping = Damping.parse(self.settings.damping)
        return damage_ranking(self.model, statistics, self.settings.order, scores, damping, provenance)

    def sublayers(self) -> tuple[SubLayer, ...]:
        """Return the measurements of the sub-layers, made by the first process, so that all have the same numbers."""
        few, device = self.images.first(IMAGES), str(self.processes.device)
        measured = partial(measure_sublayers, self.model, few, None, self.progress, device)
        return msgspec.convert(self.processes.from_first(lambda: as_builtins(measured())), tuple[SubLayer, ...])

    def _check_same_order(self, ranking: Ranking, saved: SavedState | None) -> None:
        """Refuse processes whose machines rounded differently and found another order: they cannot search together."""
        if self.processes.from_first(lambda: ranking.order_sha256) != ranking.order_sha256:
            raise SnapvitError("the processes of this run found different orders. Run them on machines of one kind")
        before = None if saved is None else saved.rest.get("order_sha256")
        if before not in (None, ranking.order_sha256):
            raise SnapvitError(
                "the checkpoint was made with another order of heads and neurons: another machine or number of "
                "threads. Resume there, or remove the checkpoint"
            )

    def _minimise(
        self,
        fitness: Objective,
        optimiser: Optimiser,
        arrays: dict[str, np.ndarray],
        notes: dict[str, Any],
        saved: SavedState | None,
    ) -> tuple[Vector, dict[str, Any]]:
        """Search with progress and checkpoints; return the best factors and the summary for the provenance."""
        if self.state is not None and self.processes.is_first and (saved is None or saved.phase == "score"):
            self.state.save("scored", arrays, notes)
        evaluations = self.settings.evaluations
        self.progress.phase("searching", evaluations)
        reached = 0

        def report(now: SearchState) -> None:
            nonlocal reached
            self.progress.describe(f"searching, best fitness {now.best_loss:.5f}")
            self.progress.advance(now.evaluations - reached)
            reached = now.evaluations

        found = search(
            fitness,
            optimiser,
            evaluations,
            self.settings.racing,
            self.processes,
            self.state,
            saved,
            arrays,
            notes,
            report,
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
        return found.best_factors, summary

    def _precision(self, saved: SavedState | None) -> Autocast | None:
        """Return the autocast: none on a CPU, so that results repeat; on a GPU as asked, or measured once (None)."""
        if saved is not None and "autocast" in saved.rest:
            return saved.rest["autocast"]
        if self.autocast is None and self.processes.device.type == "cpu":
            return "none"
        return self.autocast


def make_optimiser(settings: Settings, start: Vector, covariance: np.ndarray | None = None) -> Optimiser:
    """Return the optimiser of these settings, at its start."""
    if settings.optimiser == "snes-log":
        return LogSNES(start, settings.seed, settings.population)
    return XNES(start, settings.seed, settings.population, covariance)


def starting_factors(scores: Scores) -> Vector:
    """Return linspace(1.2, 0.8) over depth, for the MLPs and the same for every head of a block."""
    by_depth = np.linspace(1.2, 0.8, len(scores.neurons), dtype=np.float32)
    per_head = [np.full(len(block), value) for block, value in zip(scores.heads, by_depth)]
    return np.concatenate([by_depth, *per_head])


def score(model: Model, images: Images, settings: Settings, progress: Progress) -> Scores:
    """Return the scores of the criterion of these settings, computed by this process alone."""
    run = _Run(
        model,
        images,
        settings,
        criterion_of(settings),
        Processes(),
        None,
        SAVE_SECONDS,
        progress,
        engine=None,
        autocast=None,
    )
    return run.score(None)


def criterion_of(settings: Settings) -> Criterion:
    """Return the criterion of these settings."""
    return make_criterion(settings.criterion, views=settings.views, reduction=settings.reduction, seed=settings.seed)


def needs_images(settings: Settings) -> bool:
    """Return True if these settings use any image: magnitude and its like do not, unless a search follows."""
    joint = settings.allocation == "joint"
    return joint or settings.depth or make_criterion(settings.criterion).needs != "nothing" or settings.evaluations > 0


def _corrects(settings: Settings) -> bool:
    """Return True if the search corrects its candidates: as they will be used."""
    return settings.correction not in (None, "sparsegpt", "mean")


def divergence_of(settings: Settings, model: Model) -> DivergenceName:
    """Return the name of the output divergence: of the settings, or the best that the model allows."""
    name = default_divergence(model) if settings.divergence is None else settings.divergence
    check_divergence(name, model)
    return name  # type: ignore[return-value]


def check(criterion: Criterion, model: Model, images: Images, settings: Settings) -> None:
    """Refuse what these settings cannot do with this model and these images, before any work."""
    if needs_images(settings) and not len(images):
        what = "joint allocation" if settings.allocation == "joint" else f"criterion {settings.criterion}"
        raise SnapvitError(f"{what} needs images. Give --data")
    if uses_scores(settings) and criterion.needs == "labels":
        if images.labels is None:
            raise SnapvitError(f"criterion {settings.criterion} needs labels: one sub-folder of images per class")
        as_outputs(images, model, settings.criterion)  # refuses classes that are not the head's
    if settings.evaluations < 0:
        raise UsageError(f"{settings.evaluations} evaluations make no sense. Give 0 for no search")
    if settings.allocation == "joint":
        divergence_of(settings, model)
        if settings.evaluations:
            check_reach(model.anatomy, Protection(sublayers=not settings.depth), flops=settings.flops)
    elif settings.evaluations:
        check_enough_images(len(images), settings.pca, model.anatomy.embed_dim)
        planner = Planner(Ranking.flat(model.anatomy), model.anatomy)
        for mlp, head in settings.pairs:
            planner.pair(mlp, head)  # refuses what protection does not allow


def provenance_of(
    model: Model, images: Images, settings: Settings, criterion: Criterion, how: dict[str, Any]
) -> dict[str, Any]:
    """Return all that decides the ranking; `how`: engine, device and precision of the search's candidates."""
    described: dict[str, Any] = {"allocation": settings.allocation}
    if settings.allocation == "joint":
        described |= {"order": settings.order, "damping": settings.damping}
    if (protection := protection_of(settings)) != Protection():
        described["protection"] = as_builtins(protection)
    if in_shots(settings):
        described |= {"shots": settings.shots, "step": settings.step}
    if uses_scores(settings):
        described |= {"criterion": settings.criterion, **criterion.settings, "batch": BATCH}
        if criterion.needs == "labels":
            described["labels_sha256"] = _labels_fingerprint(as_outputs(images, model, settings.criterion))
    described |= {
        "seed": settings.seed,
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "data": images.fingerprint,
    }
    if settings.evaluations:
        own = ("flops", "search_images") if settings.allocation == "joint" else ("pairs", "pca", "cka")
        described["search_settings"] = {
            name: as_builtins(getattr(settings, name))
            for name in ("evaluations", "optimiser", "population", "racing", *own)
        } | how
        if settings.allocation == "joint":
            described["search_settings"]["divergence"] = divergence_of(settings, model)
            described["search_settings"]["corrected"] = _corrects(settings)
    return described


def _labels_fingerprint(images: Images) -> str:
    """Return a hash of the labels: that of the images covers only their pixels."""
    labels = np.zeros(0) if images.labels is None else images.labels
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def _arrays_of(scores: Scores) -> dict[str, np.ndarray]:
    kinds: Sequence[tuple[str, tuple[np.ndarray, ...]]] = (("heads", scores.heads), ("neurons", scores.neurons))
    return {f"scores.{kind}.{i}": block for kind, blocks in kinds for i, block in enumerate(blocks)}


def _scores_from(arrays: dict[str, np.ndarray], depth: int) -> Scores:
    heads, neurons = (tuple(arrays[f"scores.{kind}.{i}"] for i in range(depth)) for kind in ("heads", "neurons"))
    return Scores(heads, neurons)
