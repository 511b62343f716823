"""Iterative ranking (as in IDAP++): cut a little, rank the smaller model again, until its outputs diverge too far.

The damage curves of the dense model do not know what a cut does to the structures that remain. So each round cuts the
model a little and refits it, and orders what it keeps again by the statistics of that smaller model. Rounds end when
the output divergence of the cut model from the dense one exceeds a limit. It is measured on images that nothing was
fitted on: on the others a refit looks many times better than it is.

What a round cuts stays cut: no layer of a later round's Plan keeps more than in an earlier one. After a round, what its
Plan keeps has a new order, and what it cuts follows in the order that it had. So the Plans of all rounds are prefixes
of one order, and each is contained in every earlier one.

With damage curves (`refined`), in a layer that keeps K structures, the damage D of K or more stays, and fewer add the
new curve d of the smaller model:

    D'(k) = D(k) for k >= K,    D'(k) = D(K) + d(k) for k < K.

The curve of a removed sub-layer stays as it was.

Where the recipe ranks by scores alone (`rescored`), as `idap` does, the cut model is not refitted but scored as it is,
and Plans lie on the published line, which is nested by itself. Scores of two models cannot be compared, and only their
order over all blocks counts. So they become positions in that order: first all that is cut, by the scores of before,
then what is kept, by the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ...allocation.costs import flops_costs
from ...allocation.depth import DepthAllocator, Removal
from ...allocation.knapsack import Allocator
from ...allocation.planner import Planner, check_reach
from ...allocation.recipe import DEFAULT, RECIPES, Rounds, Settings, protection_of, uses_scores
from ...calibration.images import Images
from ...calibration.sampling import shuffled
from ...correction.moments import Damping, Statistics
from ...correction.ordering import OrderedPart, Parts
from ...errors import UsageError
from ...model.plan import Plan, Protection
from ...model.ranking import Curve, Damage, Order, Ranking
from ...model.scores import Scores
from ...model.sublayer import IMAGES, KEY
from ...model.timing import KEY as TIMING
from ...model.timing import PhaseClock, read_timings
from ...progress import Progress, Silent
from ...storage.json import as_builtins
from ..correct.refit import refit
from ..models.load import Model
from ..models.read_anatomy import read_anatomy
from ..models.slicing import kept, shrink
from ..stats.observe import observe
from ..stats.output_divergence import DivergenceName, OutputDivergence
from ..stats.sublayer_stats import measure_sublayers
from .checkpoint import Checkpoint, SavedState
from .damage import damage_ranking, ordered_layers
from .provenance import check, criterion_of, divergence_of, provenance_of
from .rank import score
from .rescored import rescored

HELD_BACK = 4  # one image in so many measures the divergence, and nothing is fitted on it
LEAST_IMAGES = 16  # so that at least four measure it


def refined(ranking: Ranking, plan: Plan, again: Sequence[Parts]) -> Ranking:
    """Return the ranking with the order and damage of `again`, made of the cut model, for what `plan` keeps."""
    if ranking.damage is None:
        raise UsageError("only a ranking with damage curves can be refined")
    heads, neurons, damage = [], [], []
    for i, (before, after) in enumerate(zip(ranking.damage, again)):
        chosen = [part.numpy() for part in kept(ranking, plan, i)]
        orders = (ranking.head_order(i), ranking.neuron_order(i))
        (head_order, head_curve), (neuron_order, neuron_curve) = map(_continued, orders, before, chosen, after)
        heads.append(head_order)
        neurons.append(neuron_order)
        damage.append((head_curve, neuron_curve))
    made: Damage = tuple(damage)
    return Ranking.from_orders(heads, neurons, made, ranking.model, ranking.anatomy, ranking.provenance)


def _continued(order: Order, curve: Curve, chosen: Order, again: OrderedPart | None) -> tuple[Order, Curve]:
    """Return the order and the curve of a layer: what is kept as `again` has it, then what was cut as before.

    `chosen` are the original numbers of the smaller model's structures.
    """
    if again is None:
        return order, curve
    keep = len(chosen)
    new = np.concatenate([curve[keep] + again.factor.errors()[:-1], curve[keep:]])
    return np.concatenate([chosen[again.order], order[keep:]]), new


def made_by(
    model: Model, images: Images, settings: Settings, rounds: Rounds | None, of_cka: Images | None = None
) -> dict[str, Any]:
    """Return all that decides a ranking, in rounds or not, but for the machine that evaluates candidates."""
    made = provenance_of(model, images, settings, criterion_of(settings), {}, of_cka)
    if rounds is None:
        return made
    name = divergence_of(settings, model)
    limit = rounds.limit(name)
    described = {
        "flops": list(rounds.flops),
        "divergence": name,
        "most_moved": limit if isfinite(limit) else None,
        "held_back": len(images) // HELD_BACK,
    }
    return {**made, "rounds_settings": described}


def rank_in_rounds(
    model: Model,
    images: Images,
    rounds: Rounds = Rounds(),
    settings: Settings = RECIPES[DEFAULT],
    *,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
) -> Ranking:
    """Return a ranking made in rounds, as many as stay within the limit of the output divergence.

    Provenance lists the rounds under `rounds`; the last of them may be the one that exceeded the limit, and then does
    not affect the ranking. With a `checkpoint` path, a run that was begun there resumes after its last whole round.

    >>> rank_in_rounds(model, images, Rounds((0.8, 0.6))).provenance["rounds"]
    """
    progress = progress or Silent()
    _check(model, images, rounds, settings)
    name = divergence_of(settings, model)
    limit = rounds.limit(name)
    fitted, held_back = _split(images, settings.seed)
    made, clock = made_by(model, images, settings, rounds), PhaseClock(threads=torch.get_num_threads(), device=device)
    ranker = RoundRanker(model, fitted, settings, progress, device, clock)
    state = None if checkpoint is None else Checkpoint(checkpoint, made, clock)
    saved = None if state is None else state.load()
    clock.earlier = () if saved is None else read_timings(saved.rest)
    found = _restored(saved, model) or ranker.begin()
    if found.rounds:
        progress.note(f"going on after round {len(found.rounds)} of {len(rounds.flops)}")
    meter = _DivergenceMeter(name, model, held_back, device)
    for fraction in rounds.flops[len(found.rounds) :]:
        if state is not None:
            found.save(state)
        plan = ranker.plan(found, fraction)
        module = ranker.cut(found.ranking, plan)
        with clock("divergence"):
            divergence = meter.of(module)
        goes_on = divergence <= limit  # false for a NaN
        found.rounds.append({"flops": fraction, "moved": divergence, "kept": goes_on, "plan": as_builtins(plan)})
        if not goes_on:
            progress.note(
                f"stopped at {fraction:g} of the FLOPs: output divergence {divergence:.3g}, beyond {limit:.3g}"
            )
            break
        smaller = Model(module, read_anatomy(module, model.name), model.description)
        found.ranking = ranker.again(found.ranking, plan, smaller)
    timed = {"rounds": found.rounds, TIMING: clock.in_plain_values()}
    return replace(found.ranking, provenance={**made, **timed, **found.ranking.provenance})


@dataclass
class RoundsState:
    """The ranking after some rounds, and the record of each."""

    ranking: Ranking  # whose provenance has the sub-layers of the whole model, if they were measured
    rounds: list[dict[str, Any]]

    @property
    def plan(self) -> Plan:
        """The Plan of the last round."""
        assert self.ranking.anatomy is not None
        return msgspec.convert(self.rounds[-1]["plan"], Plan) if self.rounds else Plan.dense(self.ranking.anatomy)

    def save(self, state: Checkpoint) -> None:
        known = {"provenance": dict(self.ranking.provenance), "rounds": self.rounds}
        state.save("rounds", self.ranking.arrays(), known)


def _restored(saved: SavedState | None, model: Model) -> RoundsState | None:
    if saved is None:
        return None
    ranking = Ranking.of_arrays(saved.arrays, model.name, model.anatomy, saved.rest["provenance"])
    return RoundsState(ranking, saved.rest["rounds"])


@dataclass(frozen=True)
class RoundRanker:
    """Ranks, plans and cuts models by the same images and settings in every round."""

    model: Model
    images: Images
    settings: Settings
    progress: Progress
    device: str = "cpu"  # of statistics and scores; a refit is made on the CPU
    clock: PhaseClock = field(default_factory=PhaseClock)

    @property
    def damping(self) -> Damping:
        return Damping.parse(self.settings.damping)

    @property
    def by_damage(self) -> bool:
        """True if there are damage curves, False if there are scores alone."""
        return self.settings.allocation == "joint"

    def begin(self) -> RoundsState:
        """Return the ranking of the dense model, before any round."""
        if self.by_damage:
            statistics = self._statistics(self.model)
            with self.clock("ordering"):
                ranking, _ = damage_ranking(self.model, *statistics, self.damping)
        else:
            scores = self._scores(self.model)
            ranking = Ranking(scores.heads, scores.neurons, self.model.name, self.model.anatomy)
        if self.by_damage or self.settings.depth:
            with self.clock("sub-layers"):
                sublayers = measure_sublayers(self.model, self.images.first(IMAGES), None, self.progress, self.device)
            ranking = replace(ranking, provenance={KEY: as_builtins(sublayers)})
        return RoundsState(ranking, [])

    def cut(self, ranking: Ranking, plan: Plan) -> nn.Module:
        """Return the model of a Plan: refitted, unless the recipe ranks by scores alone."""
        with self.clock("cutting"):
            if not self.by_damage:
                return shrink(self.model.module, ranking, plan)
            return refit(self.model, ranking, plan, self.images, self.damping, progress=self.progress)

    def again(self, ranking: Ranking, plan: Plan, smaller: Model) -> Ranking:
        """Return the ranking with what `plan` keeps ordered by the smaller model."""
        if not self.by_damage:
            return rescored(ranking, plan, self._scores(smaller))
        statistics = self._statistics(smaller)
        with self.clock("ordering"):
            return refined(ranking, plan, ordered_layers(smaller, *statistics, self.damping))

    def _scores(self, model: Model) -> Scores:
        with self.clock("scores"):
            return score(model, self.images, self.settings, self.progress, self.device)

    def _statistics(self, model: Model) -> tuple[Statistics, str, Scores | None]:
        """Return the statistics, the name of the order, and scores if it needs them."""
        with self.clock("statistics"):
            statistics = observe(model, self.images, self.progress, self.device, warn=model is self.model)
        scores = self._scores(model) if uses_scores(self.settings) else None
        self.progress.phase("ordering heads and neurons")
        return statistics, self.settings.order, scores

    def plan(self, found: RoundsState, fraction: float) -> Plan:
        """Return the Plan with the least damage for these FLOPs that keeps nothing which was cut before."""
        anatomy, ranking = self.model.anatomy, found.ranking
        if ranking.damage is None:
            return Planner(ranking, anatomy).flops(fraction)  # cuts first what earlier rounds have cut
        given = flops_costs(anatomy), protection_in_rounds(self.settings).least(anatomy)
        allocator = (
            Allocator(ranking.damage, *given, most=found.plan)
            if protection_in_rounds(self.settings).sublayers
            else DepthAllocator(Removal.of(ranking.damage, ranking.sublayers), *given, anatomy, most=found.plan)
        )
        return allocator.within(fraction * anatomy.block_flops())


def protection_in_rounds(settings: Settings) -> Protection:
    """Return the protection: whole sub-layers are removable if the settings say so and nothing has to be scored."""
    return msgspec.structs.replace(protection_of(settings), sublayers=not settings.depth or uses_scores(settings))


class _DivergenceMeter:
    """Measures the output divergence of cut models from the dense one, on images of its own."""

    def __init__(self, name: DivergenceName, model: Model, images: Images, device: str) -> None:
        self.images, self.device = images, device
        self.divergence = OutputDivergence(name, model, _embedding(model.module, images, device))

    def of(self, module: Any) -> float:
        """Return the mean output divergence of a cut model from the dense one."""
        return float(self.divergence(_embedding(module, self.images, self.device), slice(0, len(self.images))).mean())


@torch.no_grad()
def _embedding(module: Any, images: Images, device: str) -> torch.Tensor:
    module.to(device)
    batches = (torch.from_numpy(batch).to(device) for batch in images.batches(16))
    found = [module.forward_head(module.forward_features(batch), pre_logits=True).cpu() for batch in batches]
    module.to("cpu")
    return torch.cat(found)


def _split(images: Images, seed: int) -> tuple[Images, Images]:
    """Return the images to fit on, and those that measure the divergence: a quarter, by seed."""
    order, held_back = shuffled(len(images), seed), len(images) // HELD_BACK
    return images.only(sorted(order[held_back:])), images.only(sorted(order[:held_back]))


def _check(model: Model, images: Images, rounds: Rounds, settings: Settings) -> None:
    """Refuse before any work what can be refused then."""
    check(criterion_of(settings), model, images, settings)
    if settings.allocation not in ("joint", "pairs"):
        raise UsageError(f"rounds go without --allocation {settings.allocation}. Give joint or pairs")
    if settings.evaluations:
        raise UsageError("rounds go without a search. Use settings without evaluations")
    if len(images) < LEAST_IMAGES:
        raise UsageError(
            f"{len(images)} images are too few for rounds, which hold a quarter back. Give {LEAST_IMAGES} or more"
        )
    check_reach(model.anatomy, protection_in_rounds(settings), flops=rounds.flops)
