"""Ranking in rounds with training between them (IDAP++ as published): cut a little, recover, rank what is left again.

As in `rank.iterative`, what a round cuts stays cut, and the Plans of all rounds are prefixes of one order. But a round
cuts the model that the round before has trained, with the dense model as the teacher of all of them, and the next order
is that of the trained model. So beside the ranking there is a model: that of the last round which lost no more than it
was allowed to.

By damage curves (`default`) a cut is refitted before it is trained, and depth is traded against width. By scores alone
(`idap`) Plans lie on the line of `planner.STAGES`: depth after width, and sub-layers are measured again on what was
trained. What is there no more comes first in the order of removal then, as it was removed.

What a round has lost is told by images that nothing was fitted to, nor stopped by: the share on which its answer is not
the dense model's, or with labels the accuracy that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...allocation.planner import Planner, check_reach
from ...allocation.recipe import Rounds, Settings, protection_of
from ...calibration.images import Images
from ...errors import UsageError
from ...family.fidelity import Comparison, NotFinite
from ...model.plan import Plan, Protection
from ...model.ranking import Ranking
from ...model.scores import Scores
from ...model.sublayer import IMAGES, KEY, SubLayer
from ...model.timing import KEY as TIMING
from ...model.timing import PhaseClock, read_timings
from ...progress import Progress, Silent
from ...storage.json import as_builtins
from ..correct.refit import refit
from ..models.load import Model, with_weights
from ..models.read_anatomy import read_anatomy
from ..models.slicing import kept, shrink
from ..rank.checkpoint import Checkpoint, SavedState
from ..rank.distributed import Processes
from ..rank.iterative import RoundRanker, RoundsState, protection_in_rounds
from ..rank.provenance import check, criterion_of
from ..rank.rank import score
from ..rank.rescored import rescored
from ..stats.sublayer_stats import measure_sublayers
from .augment import Pictures
from .loop import Outcome, checkpoint_at, train
from .settings import TrainingSettings
from .student import Student, Teacher, outputs_of

MEASURED, STOPPING = 4, 8  # one image in so many measures what a round lost, one in so many decides when to stop
LEAST_IMAGES = 32  # so that eight measure it
WEIGHTS = "module."  # of a checkpoint's tensors


@dataclass(frozen=True, eq=False)
class Lessons:
    """The images of rounds that recover: three parts, none of which has an image of another."""

    pictures: Pictures  # to train on
    fitted: Images  # the same, as models take them: scores, statistics and refits are of these
    stopping: Images  # decide which weights of a round are the best
    measured: Images  # tell what it lost
    columns: npt.NDArray[np.int64] | None = None  # the output of each class of the labels, where they are known


@dataclass(frozen=True)
class Limit:
    """What the rounds may lose."""

    most: float = 0.05
    by_labels: bool = False  # of the accuracy; False: share of images with another answer than the dense model's

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 1:
            raise UsageError(f"a drop of {self.most:g} is no share of the images. Give --max-drop 0 to 1, such as 0.05")


def rank_and_recover(
    model: Model,
    lessons: Lessons,
    rounds: Rounds,
    settings: Settings,
    training: TrainingSettings,
    limit: Limit,
    *,
    made: Mapping[str, Any],
    checkpoint: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> tuple[Ranking, Model]:
    """Return the ranking after the last round within the limit, and its trained model (the dense one if there is none).

    `made`: all that decides the run, which the ranking keeps and a checkpoint is bound to. A run that was begun with a
    checkpoint goes on after its last whole round, and within a round where its training was saved.
    """
    _check(model, lessons, rounds, settings)
    run = _Run(model, lessons, settings, training, limit, device, progress or Silent(), checkpoint, made)
    return run.whole(rounds)


def _check(model: Model, lessons: Lessons, rounds: Rounds, settings: Settings) -> None:
    if settings.allocation not in ("joint", "pairs"):
        raise UsageError(f"rounds go without --allocation {settings.allocation}. Give joint or pairs")
    check(criterion_of(settings), model, lessons.fitted, settings)
    if settings.evaluations:
        raise UsageError("rounds go without a search. Use settings without evaluations")
    count = len(lessons.fitted) + len(lessons.stopping) + len(lessons.measured)
    if count < LEAST_IMAGES:
        raise UsageError(
            f"{count} images are too few for rounds that recover, which hold three eighths back. "
            f"Give {LEAST_IMAGES} or more, better 1000"
        )
    check_reach(model.anatomy, _protection(settings), flops=rounds.flops)


def _protection(settings: Settings) -> Protection:
    """Return the protection: by scores alone, depth comes after width."""
    return protection_of(settings) if settings.allocation == "pairs" else protection_in_rounds(settings)


@dataclass
class _State:
    """The ranking and the trained model after some rounds."""

    rounds: RoundsState
    model: Model
    there: Plan  # as the Plan of the last round, but for a sub-layer that is gone: its counts before that

    @property
    def plan(self) -> Plan:
        return self.rounds.plan


class _Run:
    """All rounds of one model."""

    def __init__(
        self,
        model: Model,
        lessons: Lessons,
        settings: Settings,
        training: TrainingSettings,
        limit: Limit,
        device: str,
        progress: Progress,
        checkpoint: Path | None,
        made: Mapping[str, Any],
    ) -> None:
        self.model, self.lessons, self.settings, self.training = model, lessons, settings, training
        self.limit, self.device, self.progress, self.made = limit, device, progress, dict(made)
        self.path = checkpoint
        self.clock = PhaseClock(threads=torch.get_num_threads(), device=device)
        self.checkpoint = None if checkpoint is None else Checkpoint(checkpoint, self.made, self.clock)
        self.ranker = RoundRanker(model, lessons.fitted, settings, progress, device, self.clock)
        self.teacher = Teacher(model, lessons.stopping, torch.device(device), None)
        self.meter = _Meter(model, lessons, device)

    def whole(self, rounds: Rounds) -> tuple[Ranking, Model]:
        saved = None if self.checkpoint is None else self.checkpoint.load()
        self.clock.earlier = () if saved is None else read_timings(saved.rest)
        state = self._begin() if saved is None else self._restored(saved)
        if state.rounds.rounds:
            self.progress.note(f"going on after round {len(state.rounds.rounds)} of {len(rounds.flops)}")
        for fraction in rounds.flops[len(state.rounds.rounds) :]:
            self._save(state)
            if not self._round(state, fraction):
                break
        for number in range(1, len(rounds.flops) + 1):
            self._forget(number)
        found = state.rounds
        measured = {"before_rounds": self.meter.dense, "rounds": found.rounds, TIMING: self.clock.in_plain_values()}
        described = {**measured, **found.ranking.provenance}
        return replace(found.ranking, provenance={**self.made, **described}), state.model

    def _begin(self) -> _State:
        return _State(self.ranker.begin(), self.model, Plan.dense(self.model.anatomy))

    def _round(self, state: _State, fraction: float) -> bool:
        """Cut, train and measure; take the round over and return True if it lost no more than it may."""
        number = len(state.rounds.rounds) + 1
        plan = self._plan(state, fraction)
        cut = self._cut(state, plan)
        with self.clock("measuring"):
            before = self.meter.of(cut)
        with self.clock("recovering"):
            module, outcome = self._trained(cut, number)
        with self.clock("measuring"):
            after = self.meter.of(module)
        lost = self._lost(after)
        goes_on = lost <= self.limit.most  # false for a NaN
        step = {
            "flops": fraction,
            "gflops": self.model.anatomy.flops(plan) / 1e9,
            "params": self.model.anatomy.params(plan),
            "before": before,
            "after": after,
            "steps": outcome.steps,
            "best_step": outcome.best_step,
            "kept": goes_on,
            "plan": as_builtins(plan),
        }
        state.rounds.rounds.append(step)
        self.progress.note(f"round {number}, {fraction:g} of the FLOPs: {self._told(lost)}")
        if not goes_on:
            self.progress.note(f"stopped: more than {100 * self.limit.most:g} % are not to be lost")
            return False
        smaller = Model(module, read_anatomy(module, self.model.name), self.model.description)
        self._take_over(state, plan, smaller)
        return True

    def _told(self, lost: float) -> str:
        if math.isnan(lost):
            return "its outputs are no numbers"
        return f"{100 * lost:.1f} % of {'top-1' if self.limit.by_labels else 'the answers'} lost"

    def _lost(self, found: Mapping[str, float | None]) -> float:
        name = "top1" if self.limit.by_labels else "agreement"
        now, whole = found[name], self.meter.dense[name]
        return math.nan if now is None or whole is None else whole - now

    def _plan(self, state: _State, fraction: float) -> Plan:
        """Return the next Plan, which keeps nothing that was cut before."""
        if self.ranker.by_damage:
            return self.ranker.plan(state.rounds, fraction)
        found = Planner(state.rounds.ranking, self.model.anatomy, _protection(self.settings)).flops(fraction)
        return _common(found, state.plan)

    def _cut(self, state: _State, plan: Plan) -> nn.Module:
        """Return the last round's model, cut to a Plan."""
        own = _of_what_is_left(state.rounds.ranking, state.plan, state.model)
        with self.clock("cutting"):
            if not self.ranker.by_damage:
                return shrink(state.model.module, own, plan)
            images, damping = self.lessons.fitted, self.ranker.damping
            return refit(state.model, own, plan, images, damping, progress=self.progress)

    def _trained(self, module: nn.Module, number: int) -> tuple[nn.Module, Outcome]:
        labels = self.lessons.columns if self.training.labels else None
        student = Student(module, self.teacher, self.training, labels)
        state = None
        if self.path is not None:
            state = checkpoint_at(self._path(number), self.training, {**self.made, "round": number}, None)
        outcome = train(
            student,
            self.lessons.pictures,
            self.training,
            name=f"round {number}",
            checkpoint=state,
            processes=Processes(device=torch.device(self.device)),
            progress=self.progress,
        )
        return student.close(), outcome

    def _take_over(self, state: _State, plan: Plan, smaller: Model) -> None:
        """Rank again by the trained model."""
        found = state.rounds
        if self.ranker.by_damage:
            found.ranking = self.ranker.again(found.ranking, plan, smaller)
        else:
            with self.clock("scores"):
                again = score(smaller, self.lessons.fitted, self.settings, self.progress, self.device)
            state.there, scores = _with_those_of_removed(plan, state.there, again)
            found.ranking = rescored(found.ranking, state.there, scores)
            if self.settings.depth:
                found.ranking = self._measured_again(found.ranking, plan, smaller)
        state.model = smaller

    def _measured_again(self, ranking: Ranking, plan: Plan, smaller: Model) -> Ranking:
        few = self.lessons.fitted.first(IMAGES)
        with self.clock("sub-layers"):
            again = measure_sublayers(smaller, few, None, self.progress, self.device)
        assert ranking.sublayers is not None
        found = after_removed(ranking.sublayers, again, plan)
        return replace(ranking, provenance={**ranking.provenance, KEY: as_builtins(found)})

    def _path(self, number: int) -> Path:
        assert self.path is not None
        return self.path.parent / f"{self.path.name}.round{number}"

    def _forget(self, number: int) -> None:
        if self.path is not None:
            self._path(number).unlink(missing_ok=True)

    def _save(self, state: _State) -> None:
        if self.checkpoint is None:
            return
        found = state.rounds
        weights = {f"{WEIGHTS}{n}": t.detach().cpu().numpy() for n, t in state.model.module.state_dict().items()}
        rest = {
            "provenance": dict(found.ranking.provenance),
            "rounds": found.rounds,
            "there": as_builtins(state.there),
        }
        self.checkpoint.save("rounds", {**found.ranking.arrays(), **weights}, rest)
        self._forget(len(found.rounds))

    def _restored(self, saved: SavedState) -> _State:
        arrays = {name: array for name, array in saved.arrays.items() if not name.startswith(WEIGHTS)}
        ranking = Ranking.of_arrays(arrays, self.model.name, self.model.anatomy, saved.rest["provenance"])
        rounds = RoundsState(ranking, list(saved.rest["rounds"]))
        there = msgspec.convert(saved.rest["there"], Plan)
        if not rounds.rounds:
            return _State(rounds, self.model, there)
        weights = {
            name.removeprefix(WEIGHTS): torch.from_numpy(array.copy())
            for name, array in saved.arrays.items()
            if name.startswith(WEIGHTS)
        }
        assert self.path is not None
        module = with_weights(self.model.module, rounds.plan, weights, self.path)
        return _State(rounds, Model(module, read_anatomy(module, self.model.name), self.model.description), there)


def _common(plan: Plan, other: Plan) -> Plan:
    """Return what both keep: along a line of whole numbers a Plan may have one structure more than the one before."""
    heads = tuple(map(min, plan.heads, other.heads))
    return Plan(heads=heads, neurons=tuple(map(min, plan.neurons, other.neurons)))


def _of_what_is_left(ranking: Ranking, plan: Plan, small: Model) -> Ranking:
    """Return the ranking of a cut model, whose structures are those that the Plan keeps, in their original order."""
    chosen = [kept(ranking, plan, i) for i in range(len(ranking.heads))]
    heads = tuple(scores[heads.numpy()] for scores, (heads, _) in zip(ranking.head_scores, chosen))
    neurons = tuple(scores[neurons.numpy()] for scores, (_, neurons) in zip(ranking.neuron_scores, chosen))
    return Ranking(heads, neurons, ranking.model, small.anatomy)


def _with_those_of_removed(plan: Plan, before: Plan, again: Scores) -> tuple[Plan, Scores]:
    """Return a Plan in which removed sub-layers keep what they had, and scores of these above all others.

    A removed sub-layer is no matter of width: were all of it taken as cut by width, the ratio of a line would be used
    up by it, and other layers would get back what was cut.
    """
    counts, scores = [], []
    for now, earlier, made in ((plan.heads, before.heads, again.heads), (plan.neurons, before.neurons, again.neurons)):
        highest = max((float(block.max()) for block in made if len(block)), default=0.0)
        above = np.float32(highest + abs(highest) + 1)
        counts.append(tuple(count or old for count, old in zip(now, earlier)))
        scores.append(tuple(b if n else np.full(old, above, np.float32) for b, n, old in zip(made, now, earlier)))
    return Plan(heads=counts[0], neurons=counts[1]), Scores(*scores)


def after_removed(before: Sequence[SubLayer], again: Sequence[SubLayer], plan: Plan) -> tuple[SubLayer, ...]:
    """Return sub-layers as measured again; removed ones as before, and none of the others with less damage than those.

    So the order of removal begins with those that are gone, in the order in which they went.
    """
    gone = {(i, part) for i, part in plan.removed}
    largest = max((s.damage for s in before if (s.block, s.part) in gone), default=-math.inf)
    least = 0.0 if largest == -math.inf else float(np.nextafter(largest, np.inf))
    return tuple(
        old if (old.block, old.part) in gone else msgspec.structs.replace(new, damage=max(new.damage, least))
        for old, new in zip(before, again)
    )


class _Meter:
    """Compares models with the dense one on the images that measure."""

    def __init__(self, model: Model, lessons: Lessons, device: str) -> None:
        self.images, self.columns = lessons.measured, lessons.columns
        self.device, self.classifies = torch.device(device), model.anatomy.classes > 1
        self._dense = self._outputs(model.module)
        self.dense = self.of(model.module)

    def of(self, module: nn.Module) -> dict[str, float | None]:
        """Return divergence and agreement, and accuracy where labels are known; None where outputs are no numbers."""
        outputs = self._outputs(module)
        try:
            found = Comparison.of(outputs, self._dense, self.classifies).fidelity()
        except NotFinite:
            return {"divergence": None, "agreement": None, "top1": None}
        return {"divergence": found.divergence, "agreement": found.agreement, "top1": self._top1(outputs)}

    def _outputs(self, module: nn.Module) -> npt.NDArray[np.float32]:
        try:
            return outputs_of(module.to(self.device), self.images, self.device)
        finally:
            module.to("cpu")

    def _top1(self, outputs: npt.NDArray[np.float32]) -> float | None:
        if self.columns is None or self.images.labels is None:
            return None
        return float((outputs.argmax(1) == self.columns[self.images.labels]).mean())
