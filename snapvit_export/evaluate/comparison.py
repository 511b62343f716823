"""The contents of `compare.json`: pruning methods side by side on one model and the same images. Light."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ..allocation.recipe import ADDS_BIASES
from ..family.evaluation import HEADLINE, Evaluation, Measure
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, Ratio, Value, read_json, write_json

COMPARISON = "compare.json"
Axis = Literal["sparsity", "flops"]  # share of prunable parameters that is cut, or of the blocks' FLOPs that is kept


class CutResult(Value, frozen=True, kw_only=True):
    """The size and quality of a cut model."""

    sparsity: Ratio
    flops_ratio: Ratio  # of the blocks, to the dense ones
    params: Count
    correction: str | None
    evaluation: Evaluation


class MethodResult(CutResult, frozen=True, kw_only=True):
    """The result of one pruning method at one size."""

    recipe: str
    asked: Ratio  # on the axis of the comparison


def sizes_of(plan: Plan, anatomy: Anatomy, correction: str | None) -> dict[str, Any]:
    """Return the fields of a `CutResult` that follow from the Plan of a model."""
    after = anatomy.with_output_biases() if correction in ADDS_BIASES else anatomy
    return {
        "sparsity": plan.sparsity(anatomy),
        "flops_ratio": plan.flops_ratio(anatomy),
        "params": after.params(plan),
        "correction": correction,
    }


class Comparison(Value, frozen=True, kw_only=True):
    """The results of all methods and the inputs they come from; a run with the same inputs can resume."""

    format_version: Literal[1] = 1
    model: str
    weights_sha256: str
    calibration: dict[str, Any]  # fingerprint of the calibration images
    judged_on: dict[str, Any]  # fingerprints of the images that were evaluated on, by split
    settings: dict[str, Any]  # by recipe
    axis: Axis
    dense: Evaluation
    contestants: tuple[MethodResult, ...] = ()

    def __post_init__(self) -> None:
        if self._common is None:
            raise ValueError("its results have no measure that all of them took")
        if unknown := [each.recipe for each in self.contestants if each.recipe not in self.settings]:
            raise ValueError(f"{unknown[0]} has results and no settings")

    def continues(self, other: Comparison) -> bool:
        """Return True if the results of another comparison belong in this one."""
        same = ("model", "weights_sha256", "calibration", "judged_on", "axis")
        return all(getattr(self, name) == getattr(other, name) for name in same)

    def found(self, recipe: str, asked: float) -> MethodResult | None:
        """Return the result of a method at a size, if there is one."""
        return next((c for c in self.contestants if (c.recipe, c.asked) == (recipe, asked)), None)

    @property
    def measure(self) -> Measure:
        """The measure that methods are compared by: the first that all results have."""
        assert self._common is not None, "it checks itself"
        return self._common

    @property
    def _common(self) -> Measure | None:
        taken = [self.dense, *(c.evaluation for c in self.contestants)]
        return next((name for name in HEADLINE if all(e.value(name) is not None for e in taken)), None)

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        write_json(folder / COMPARISON, self)

    @staticmethod
    def load(folder: Path) -> Comparison | None:
        """Read it from a folder; None if there is none."""
        path = folder / COMPARISON
        return read_json(path, Comparison) if path.is_file() else None
