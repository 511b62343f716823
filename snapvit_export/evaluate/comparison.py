"""Pruning methods side by side on one model and one set of images: what `snapvit compare` writes. Light."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ..family.evaluation import HEADLINE, Evaluation, Measure
from ..storage.json import Count, Ratio, Value, read_json, write_json

COMPARISON = "compare.json"
Axis = Literal["sparsity", "flops"]  # share of prunable parameters that is cut, or of the blocks' FLOPs that is kept


class MethodResult(Value, frozen=True, kw_only=True):
    """One method at one size."""

    recipe: str
    asked: Ratio  # on the axis of the comparison
    sparsity: Ratio
    flops_ratio: Ratio
    params: Count
    correction: str | None
    evaluation: Evaluation


class Comparison(Value, frozen=True, kw_only=True):
    """All of them, with what they were made from: only then may a run go on where another one stopped."""

    format_version: Literal[1] = 1
    model: str
    weights_sha256: str
    calibration: dict[str, Any]  # fingerprint of the images
    judged_on: dict[str, Any]  # of those that judge
    settings: dict[str, Any]  # by recipe
    axis: Axis
    dense: Evaluation
    contestants: tuple[MethodResult, ...] = ()

    def continues(self, other: Comparison) -> bool:
        """Whether the contestants of another comparison could stand in this one."""
        same = ("model", "weights_sha256", "calibration", "judged_on", "axis")
        return all(getattr(self, name) == getattr(other, name) for name in same)

    def found(self, recipe: str, asked: float) -> MethodResult | None:
        """What is known of a method at a size."""
        return next((c for c in self.contestants if (c.recipe, c.asked) == (recipe, asked)), None)

    @property
    def measure(self) -> Measure:
        """What the comparison is about: the first measure that all have."""
        taken = [self.dense, *(c.evaluation for c in self.contestants)]
        return next(name for name in HEADLINE if all(e.value(name) is not None for e in taken))

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        write_json(folder / COMPARISON, self)

    @staticmethod
    def load(folder: Path) -> Comparison | None:
        """Read it from a folder; None if there is none."""
        path = folder / COMPARISON
        return read_json(path, Comparison) if path.is_file() else None
