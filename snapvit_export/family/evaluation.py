"""The measured quality of a variant: measures by name, with standard errors. Light.

top1, top5   with the model's own head
knn          nearest neighbours of the embedding
linear       a linear probe of the embedding
miou         a linear probe of patch tokens, on masks
in_context   classes of the nearest patches of other images, on masks; left out of files where it was not measured
agreement    share of images for which the dense model gives the same class; needs no labels
cosine       mean cosine of the outputs to those of the dense model; needs no labels
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from ..storage.json import Some, Value

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Measure = Literal["top1", "top5", "knn", "linear", "miou", "in_context", "agreement", "cosine"]
MeasuredValues = dict[Measure, tuple[float, float]]  # value and standard error
MEASURES: tuple[Measure, ...] = get_args(Measure)
HEADLINE: tuple[Measure, ...] = ("top1", "knn", "linear", "miou", "in_context", "agreement", "cosine")  # best first
TITLES: dict[Measure, str] = {
    "top1": "top-1",
    "top5": "top-5",
    "knn": "k-NN",
    "linear": "linear probe",
    "miou": "mIoU",
    "in_context": "in-context mIoU",
    "agreement": "agreement with dense",
    "cosine": "cosine to dense",
}


class Evaluation(Value, frozen=True, kw_only=True):
    """Quality on images that took no part in calibration; what was not measured is None."""

    source: str
    images: Some  # that were evaluated
    top1: Fraction | None = None
    top5: Fraction | None = None
    knn: Fraction | None = None
    linear: Fraction | None = None
    miou: Fraction | None = None
    in_context: Fraction | UnsetType = UNSET
    agreement: Fraction | None = None
    cosine: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None = None
    standard_errors: dict[Measure, Annotated[float, msgspec.Meta(ge=0, le=2)]] = msgspec.field(default_factory=dict)

    @staticmethod
    def of(found: MeasuredValues, images: int, source: str) -> Evaluation:
        """Make an Evaluation of the values measured on `images` images of a source."""
        values = {measure: value for measure, (value, _) in found.items()}
        errors = {measure: error for measure, (_, error) in found.items()}
        return Evaluation(source=source, images=images, standard_errors=errors, **values)

    def value(self, measure: Measure) -> float | None:
        """Return the measure of that name, or None if it was not taken."""
        found: float | UnsetType | None = getattr(self, measure)
        return None if isinstance(found, UnsetType) else found

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that were taken."""
        return tuple(name for name in MEASURES if self.value(name) is not None)

    @property
    def headline(self) -> Measure | None:
        """The one measure that stands for the quality: accuracy with the head, or the next best that was taken."""
        return next((name for name in HEADLINE if self.value(name) is not None), None)

    def error(self, measure: Measure) -> float:
        """Return the standard error of a measure."""
        return self.standard_errors.get(measure, 0.0)


def share(right: npt.ArrayLike) -> tuple[float, float]:
    """Return the share of trues and its standard error, which is that of Agresti and Coull.

    Theirs is of a share drawn a little towards a half, so it is not zero where all are right: a few more images would
    disprove that.
    """
    hits = np.asarray(right, bool)  # (N,)
    drawn = (float(hits.sum()) + 2) / (len(hits) + 4)
    return float(hits.mean()), math.sqrt(drawn * (1 - drawn) / len(hits))


def mean(values: npt.ArrayLike) -> tuple[float, float]:
    """Return the mean of one value per image, and its standard error."""
    x = np.asarray(values, np.float64)  # (N,)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else 0.0
