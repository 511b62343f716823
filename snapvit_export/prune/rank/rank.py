"""Rank a model on images: scores or damage curves, then a search for factors on them; resumable and distributed.

Three things never change the result: how many processes share the work, where it was interrupted, and what else runs
on the machine. Scores are sums of the batches' contributions, added in fixed point; each candidate of the search is
evaluated whole by one process; all random numbers depend on the seed and a counter. With joint allocation every process
observes all images; machines of one kind with as many threads find the same order, and that is checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ...allocation.follow_model import follow_model
from ...allocation.from_scores import ranking_from
from ...allocation.recipe import Settings, in_shots, uses_scores
from ...calibration.images import Images
from ...correction.cholesky import Factors
from ...correction.moments import Damping
from ...errors import SnapvitError
from ...model.ranking import Ranking
from ...model.scores import Scores
from ...model.sublayer import IMAGES, KEY, SubLayer
from ...model.timing import KEY as TIMING
from ...model.timing import PhaseClock, read_timings
from ...progress import Progress, Silent
from ...storage.json import as_builtins
from ..models.class_names import as_outputs
from ..models.load import Model, as_model
from ..stats.observe import observe
from ..stats.output_divergence import OutputDivergence
from ..stats.sublayer_stats import measure_sublayers
from .checkpoint import Checkpoint, SavedState
from .criteria.base import Batch, Criterion
from .damage import damage_ranking
from .distributed import Processes
from .provenance import (
    BATCH,
    check,
    cka_images,
    corrects,
    criterion_of,
    divergence_of,
    provenance_of,
    searched_over,
)
from .reproducible import ExactSum, choose_exponents
from .search.candidate_runner import CandidateRunner
from .search.covariance import CkaInputs, FirstCovariance
from .search.damage_fitness import DamageFitness
from .search.engine import Autocast, EngineName, engine_name
from .search.fitness import Fitness, scaled_by
from .search.loop import Objective, SearchState, search
from .search.optimiser import Optimiser, Vector
from .search.snes import LogSNES
from .search.xnes import XNES
from .shots import rank_in_shots

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
    cka: CkaInputs | None = None,
) -> tuple[Ranking, Factors | None]:
    """Return the ranking, and the factors that correct any Plan of it where ranking made them.

    With a `checkpoint` path, what was begun there is resumed. `cka`: images of its own for the first covariance.
    """
    settings = follow_model(settings, model.name, model.description.architecture, model.anatomy)
    criterion = criterion_of(settings)
    check(criterion, model, images, settings)
    clock = PhaseClock(processes.count, torch.get_num_threads(), processes.device.type)
    how = {"engine": engine_name(engine, processes.device, autocast), "device": processes.device.type}
    cka = cka or CkaInputs(images)
    provenance = provenance_of(model, images, settings, criterion, {**how, "autocast": autocast}, cka.images)
    state = Checkpoint(checkpoint, provenance, clock) if checkpoint is not None else None
    saved = SavedState.unpacked(
        processes.from_first(lambda: SavedState.packed(state.load() if state is not None else None))
    )
    clock.earlier = () if saved is None else read_timings(saved.rest)
    seconds = SAVE_SECONDS if save_seconds is None else save_seconds
    run = _Run(
        model,
        images,
        settings,
        criterion,
        processes,
        state,
        seconds,
        progress or Silent(),
        engine,
        autocast,
        clock,
        cka,
    )
    if settings.allocation == "joint":
        ranking, factors = run.joint(saved, provenance)
    elif in_shots(settings):
        mine = state if processes.is_first else None
        with clock("scores"):
            ranking = rank_in_shots(model, settings, run.score_of, provenance, mine, saved, run.progress)
        factors = None
    else:
        ranking, factors = run.by_scores(saved, provenance), None
    return replace(ranking, provenance={**ranking.provenance, TIMING: clock.in_plain_values()}), factors


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
    clock: PhaseClock
    cka: CkaInputs

    def by_scores(self, saved: SavedState | None, provenance: dict[str, Any]) -> Ranking:
        """Return the ranking by scores, which a search may weight."""
        settings = self.settings
        covariance = None
        if settings.cka and settings.evaluations:
            covariance = FirstCovariance(self.model, self.cka, cka_images(settings), self.processes)
            covariance.look()
        with self.clock("scores"):
            scores = self.score(saved)
        if settings.evaluations:
            scores, found = self.search(scores, saved, covariance)
            provenance = {**provenance, **found}
        if settings.depth:
            provenance = {**provenance, KEY: as_builtins(self.sublayers())}
        return ranking_from(scores, settings.allocation, self.model.name, self.model.anatomy, provenance)

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

    def search(
        self, scores: Scores, saved: SavedState | None, first: FirstCovariance | None
    ) -> tuple[Scores, dict[str, Any]]:
        """Return the scores weighted by the best factors of the search, and a summary of it."""
        settings, over = self.settings, searched_over(self.settings)
        self.progress.phase("preparing the search")
        with self.clock("preparation"):
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
                over=over,
                timer=self.clock,
            )
        notes = {"autocast": fitness.runner.autocast}
        resumes = saved is not None and saved.phase == "search"  # the checkpoint has what became of the covariance
        with self.clock("cka") if first is not None else nullcontext():
            covariance = None if first is None or resumes else first.matrix(self.progress)
        start = starting_factors(scores)
        if over == "mlp":
            mlps = len(scores.neurons)
            start, covariance = start[:mlps], None if covariance is None else covariance[:mlps, :mlps]
        optimiser = make_optimiser(settings, start, covariance)
        factors, summary = self._minimise(fitness, optimiser, _arrays_of(scores), notes, saved)
        with self.clock("sorting"):
            return scaled_by(scores, factors, over), summary

    def joint(self, saved: SavedState | None, provenance: dict[str, Any]) -> tuple[Ranking, Factors]:
        """Return orders and damage curves from the dense model's statistics; a search may then weight the curves."""
        settings = self.settings
        scores = None
        if uses_scores(settings):
            with self.clock("scores"):
                scores = self.score(saved)
        ranking, factors = self._ordered(scores, provenance)
        self._check_same_order(ranking, saved)
        provenance = {**provenance, KEY: as_builtins(self.sublayers())}
        ranking = replace(ranking, provenance=provenance)
        if not settings.evaluations:
            return ranking, factors
        self.progress.phase("preparing the search")
        with self.clock("preparation"):
            runner = CandidateRunner(
                self.model,
                self.images.first(settings.search_images),
                self.engine,
                self.processes.device,
                self._precision(saved),
                self.processes.from_first,
            )
            divergence = OutputDivergence(divergence_of(settings, self.model), self.model, runner.dense)
        corrected_by = factors if corrects(settings) else None
        fitness = DamageFitness(runner, ranking, corrected_by, divergence, settings.flops, self.clock)
        optimiser = make_optimiser(settings, np.ones(2 * len(self.model.anatomy.blocks)))
        arrays = {} if scores is None else _arrays_of(scores)
        notes = {"autocast": runner.autocast, "order_sha256": ranking.order_sha256}
        weights, summary = self._minimise(fitness, optimiser, arrays, notes, saved)
        weighted = ranking.weighted(np.reshape(weights, (-1, 2)))
        return replace(weighted, provenance={**weighted.provenance, **summary}), factors

    def _ordered(self, scores: Scores | None, provenance: dict[str, Any]) -> tuple[Ranking, Factors]:
        """Return the ranking and its factors. The statistics, gigabytes for a large model, are freed on return."""
        with self.clock("statistics"):
            statistics = observe(self.model, self.images, self.progress, str(self.processes.device))
        self.progress.phase("ordering heads and neurons")
        damping = Damping.parse(self.settings.damping)
        with self.clock("ordering"):
            return damage_ranking(self.model, statistics, self.settings.order, scores, damping, provenance)

    def sublayers(self) -> tuple[SubLayer, ...]:
        """Return the measurements of the sub-layers, made by the first process, so that all have the same numbers."""
        few, device = self.images.first(IMAGES), str(self.processes.device)
        measured = partial(measure_sublayers, self.model, few, None, self.progress, device)
        with self.clock("sub-layers"):
            found = self.processes.from_first(lambda: as_builtins(measured()))
        return msgspec.convert(found, tuple[SubLayer, ...])

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

        with self.clock("search"):
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
                self.clock,
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


def score(model: Model, images: Images, settings: Settings, progress: Progress, device: str = "cpu") -> Scores:
    """Return the scores of the criterion of these settings, computed by this process alone."""
    run = _Run(
        model,
        images,
        settings,
        criterion_of(settings),
        Processes(device=torch.device(device)),
        None,
        SAVE_SECONDS,
        progress,
        engine=None,
        autocast=None,
        clock=PhaseClock(),
        cka=CkaInputs(images),
    )
    return run.score(None)


def _arrays_of(scores: Scores) -> dict[str, np.ndarray]:
    kinds: Sequence[tuple[str, tuple[np.ndarray, ...]]] = (("heads", scores.heads), ("neurons", scores.neurons))
    return {f"scores.{kind}.{i}": block for kind, blocks in kinds for i, block in enumerate(blocks)}


def _scores_from(arrays: dict[str, np.ndarray], depth: int) -> Scores:
    heads, neurons = (tuple(arrays[f"scores.{kind}.{i}"] for i in range(depth)) for kind in ("heads", "neurons"))
    return Scores(heads, neurons)
