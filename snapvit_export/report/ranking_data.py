"""The data of the report of a ranking alone: what each block keeps, its scores, and how it was made. Light."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..allocation.asked import percent
from ..allocation.planner import Planner
from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..model.rounds import RecoveredRounds
from ..model.timing import Timing, untimed_part
from ..storage.json import Value
from ..visible import visible
from .data import Search, SubLayerRow, Widths, search_of, sublayers_of

Kind = Literal["heads", "neurons"]
SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # drawn unless others are asked for: the nominal ones of the paper
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
DENSE = "dense"


class PlanRow(Value, frozen=True, kw_only=True):
    """A Plan of the ranking, and what is left of the model."""

    name: str
    sparsity: float
    flops_ratio: float  # of the blocks
    params: int
    heads: int
    neurons: int


class BlockScores(Value, frozen=True, kw_only=True):
    """The scores of the heads or of the neurons of one block, as quantiles of those above 0."""

    block: int
    kind: Kind
    structures: int
    positive: int
    quantiles: tuple[float, ...]  # at `QUANTILES`; none if no score is above 0


class RankingReport(Value, frozen=True, kw_only=True):
    """Everything that the report of a ranking shows."""

    model: str
    plans: tuple[PlanRow, ...]  # the dense model first
    out_of_reach: tuple[str, ...]  # Plans that protection forbids
    dense_heads: tuple[int, ...]
    dense_neurons: tuple[int, ...]
    widths: tuple[Widths, ...]
    scores: tuple[BlockScores, ...]
    search: Search | None
    rounds: RecoveredRounds | None  # of cutting and recovering
    sublayers: tuple[SubLayerRow, ...]
    timings: tuple[Timing, ...]
    provenance: dict[str, Any]  # without the timings

    @property
    def noun(self) -> str:
        return "plan"

    @property
    def scores_are_places(self) -> bool:
        """True if scores are places in an order that several models made: they tell which goes first alone."""
        if self.provenance.get("allocation") == "joint":
            return False
        none_kept = self.rounds is not None and not any(step.kept for step in self.rounds.steps)
        return "shots" in self.provenance or ("rounds" in self.provenance and not none_kept)

    @property
    def main(self) -> Collection[str]:
        return (DENSE,)


def collect_ranking(
    ranking: Ranking,
    sparsity: Sequence[float] = (),
    flops: Sequence[float] = (),
    pairs: Sequence[tuple[float, float]] = (),
) -> RankingReport:
    """Collect the numbers of a ranking at these sizes, or at six sparsities, of which those out of reach are left out.

    >>> collect_ranking(ranking, flops=[0.7, 0.5]).widths
    """
    anatomy = ranking.anatomy
    if anatomy is None:
        raise SnapvitError(
            "the ranking does not say what its model is made of, so its Plans are not known. Import it again: "
            "snapvit import-scores FILE --model NAME"
        )
    planner = Planner(ranking, anatomy, ranking.protection)
    plans = {DENSE: planner.dense, **_asked(planner, sparsity, flops, pairs)}
    out_of_reach: tuple[str, ...] = ()
    if len(plans) == 1:
        found, out_of_reach = _usual(planner)
        plans |= found
    return RankingReport(
        model=visible(ranking.model),
        plans=tuple(_row(name, plan, anatomy) for name, plan in plans.items()),
        out_of_reach=out_of_reach,
        dense_heads=anatomy.heads,
        dense_neurons=anatomy.neurons,
        widths=tuple(Widths(name=name, heads=plan.heads, neurons=plan.neurons) for name, plan in plans.items()),
        scores=(*_scores("heads", ranking.head_scores), *_scores("neurons", ranking.neuron_scores)),
        search=search_of(dict(ranking.provenance)),
        rounds=RecoveredRounds.of(ranking.provenance, anatomy),
        sublayers=sublayers_of(dict(ranking.provenance)),
        timings=ranking.timings,
        provenance=untimed_part(ranking.provenance),
    )


def _asked(
    planner: Planner, sparsity: Sequence[float], flops: Sequence[float], pairs: Sequence[tuple[float, float]]
) -> Mapping[str, Plan]:
    """Return the Plans that were asked for; those out of reach are refused."""
    found = {_sparsity_name(fraction): planner.sparsity(fraction) for fraction in sorted(sparsity)}
    found |= {f"{percent(fraction)} % FLOPs": planner.flops(fraction) for fraction in sorted(flops, reverse=True)}
    return found | {f"{percent(mlp)}:{percent(head)} %": planner.pair(mlp, head) for mlp, head in sorted(pairs)}


def _usual(planner: Planner) -> tuple[dict[str, Plan], tuple[str, ...]]:
    """Return the Plans of the usual sparsities, and the names of those that protection forbids."""
    names = {_sparsity_name(fraction): fraction for fraction in SPARSITIES}
    within = {name: fraction for name, fraction in names.items() if fraction <= planner.largest_sparsity}
    found = {name: planner.sparsity(fraction) for name, fraction in within.items()}
    return found, tuple(name for name in names if name not in within)


def _sparsity_name(fraction: float) -> str:
    return f"{percent(fraction)} % cut"


def _row(name: str, plan: Plan, anatomy: Anatomy) -> PlanRow:
    return PlanRow(
        name=name,
        sparsity=plan.sparsity(anatomy),
        flops_ratio=plan.flops_ratio(anatomy),
        params=anatomy.params(plan),
        heads=sum(plan.heads),
        neurons=sum(plan.neurons),
    )


def _scores(kind: Kind, blocks: Sequence[npt.NDArray[np.float32]]) -> list[BlockScores]:
    return [_block_scores(i, kind, scores) for i, scores in enumerate(blocks)]


def _block_scores(block: int, kind: Kind, scores: npt.NDArray[np.float32]) -> BlockScores:
    positive = scores[scores > 0].astype(np.float64)
    quantiles = tuple(float(q) for q in np.quantile(positive, QUANTILES)) if len(positive) else ()
    return BlockScores(block=block, kind=kind, structures=len(scores), positive=len(positive), quantiles=quantiles)
