"""Criteria that score heads and neurons, in a table by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ....errors import UsageError
from .base import Batch as Batch
from .base import Criterion as Criterion
from .flow_divergence import FlowDivergence
from .fptp import RearrangedFisher
from .gradients import SNIP, SQUARED, TAYLOR, SummedGradient
from .kfac import KroneckerCost
from .losses import CrossEntropy, Loss, SelfSupervised
from .nvit import TaylorWithCost
from .per_image import MaskFisher, PerSampleGradient
from .sparsegpt import LeftToRightError
from .variance import Variance
from .views import ViewMode
from .weights import LAMP, MAGNITUDE, Random, WeightCriterion

Reduction = Literal["summed", "per_sample"]


class CriterionOptions(NamedTuple):
    """The choices of a caller; each criterion has some of them."""

    views: ViewMode = "paired"
    reduction: Reduction = "summed"
    seed: int = 0


@dataclass(frozen=True)
class Entry:
    """The constructor of a criterion, and which of `views` and `reduction` it has."""

    make: Callable[[str, CriterionOptions], Criterion]
    options: tuple[str, ...] = ()


def _label_free(options: CriterionOptions) -> Loss:
    return SelfSupervised(options.views, options.seed)


def _squared(name: str, loss: Loss, reduction: Reduction) -> Criterion:
    return SummedGradient(name, loss, SQUARED) if reduction == "summed" else PerSampleGradient(name, loss)


CRITERIA: dict[str, Entry] = {
    "self-supervised": Entry(lambda name, o: _squared(name, _label_free(o), o.reduction), ("views", "reduction")),
    "cross-entropy": Entry(lambda name, o: _squared(name, CrossEntropy(), o.reduction), ("reduction",)),
    "snip": Entry(lambda name, o: SummedGradient(name, _label_free(o), SNIP), ("views",)),
    "snip-cross-entropy": Entry(lambda name, o: SummedGradient(name, CrossEntropy(), SNIP)),
    "taylor": Entry(lambda name, o: SummedGradient(name, _label_free(o), TAYLOR), ("views",)),
    "fisher-masks": Entry(lambda name, o: MaskFisher(name, _label_free(o)), ("views",)),
    "fptp": Entry(lambda name, o: RearrangedFisher(name, _label_free(o)), ("views",)),
    "fptp-cross-entropy": Entry(lambda name, o: RearrangedFisher(name, CrossEntropy())),
    "sparsegpt": Entry(lambda name, o: LeftToRightError(name)),
    "llm-surgeon": Entry(lambda name, o: KroneckerCost(name, _label_free(o)), ("views",)),
    "llm-surgeon-cross-entropy": Entry(lambda name, o: KroneckerCost(name, CrossEntropy())),
    "nvit": Entry(lambda name, o: TaylorWithCost(name, _label_free(o)), ("views",)),
    "nvit-cross-entropy": Entry(lambda name, o: TaylorWithCost(name, CrossEntropy())),
    "vbp": Entry(lambda name, o: Variance(name, by_column=False)),
    "variance": Entry(lambda name, o: Variance(name)),
    "divergence": Entry(lambda name, o: FlowDivergence(name)),
    "lamp": Entry(lambda name, o: WeightCriterion(name, LAMP)),
    "magnitude": Entry(lambda name, o: WeightCriterion(name, MAGNITUDE)),
    "random": Entry(lambda name, o: Random(name, o.seed)),
}


def make_criterion(
    name: str, *, views: ViewMode = "paired", reduction: Reduction = "summed", seed: int = 0
) -> Criterion:
    """Return the criterion of that name. A seed is never refused: where nothing is drawn, it changes nothing.

    >>> make_criterion("self-supervised", reduction="per_sample").settings
    """
    entry = CRITERIA.get(name)
    if entry is None:
        raise UsageError(f"no criterion is called '{name}'. Known: {', '.join(CRITERIA)}")
    _check_option(entry, name, "views", views, get_args(ViewMode))
    _check_option(entry, name, "reduction", reduction, get_args(Reduction))
    return entry.make(name, CriterionOptions(views, reduction, seed))


def _check_option(entry: Entry, name: str, option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{option} '{value}' is not known. Known: {', '.join(known)}")
    if option not in entry.options and value != CriterionOptions._field_defaults[option]:
        have = ", ".join(other for other, its in CRITERIA.items() if option in its.options)
        raise UsageError(f"the criterion {name} has no {option} to choose. Those that have: {have}")
