"""The quality that a report compares variants by: accuracy where labels are known, otherwise fidelity. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..allocation.levers import PUBLISHED
from ..family.evaluation import HEADLINE, Evaluation, Measure
from ..family.fidelity import Fidelity
from ..family.manifest import Choice, Manifest
from ..profiling.profile import Percentile


@dataclass(frozen=True)
class QualityMeasure:
    """What the numbers of a variant are compared by."""

    at: Percentile
    measure: Measure | None
    by_fidelity: bool
    budget_ms: float | None

    def quality(self, evaluation: Evaluation | None, fidelity: Fidelity | None) -> tuple[float | None, float | None]:
        """Return the quality and its standard error."""
        if self.by_fidelity:
            return (None, None) if fidelity is None else (fidelity.agreement, fidelity.agreement_error)
        value = None if evaluation is None or self.measure is None else evaluation.value(self.measure)
        if evaluation is None or self.measure is None or value is None:
            return None, None
        return value, evaluation.error(self.measure)


def measure_of(manifests: Sequence[Manifest]) -> tuple[Measure | None, bool]:
    """Return the best measure that all evaluated variants have, or else the best that one has.

    Where no variant was judged by labels it is the agreement of the fidelity, which choices rest on; then also True.
    """
    variants = [variant for manifest in manifests for variant in manifest.variants]
    taken = [set(v.evaluation.measures) for v in variants if v.evaluation is not None and v.evaluation.measures]
    labelled = set(HEADLINE) - {"agreement", "cosine"}
    faithful = all(any(v.fidelity is not None for v in manifest.variants) for manifest in manifests)
    if faithful and not labelled & set().union(*taken):
        return "agreement", True
    if not taken:
        return None, False
    everywhere = set.intersection(*taken)
    best = next((m for m in HEADLINE if m in everywhere), next((m for m in HEADLINE if m in set.union(*taken)), None))
    return best, False


def fidelity_of(name: str, found: Fidelity | None, manifest: Manifest) -> Fidelity | None:
    """Return the fidelity of a variant; that of the dense model in fp32 is full without an error, by definition."""
    if name != manifest.dense or manifest.variant(name).precision != "fp32":
        return found
    measurements = manifest.choice.measurements if manifest.choice else ()
    known = [found, *(v.fidelity for v in manifest.variants), *(m.fidelity for m in measurements)]
    like = next((fidelity for fidelity in known if fidelity is not None), None)
    exact = dict(divergence=0.0, standard_error=0.0, agreement=1.0, agreement_error=0.0, estimated=False)
    return None if like is None else msgspec.structs.replace(like, **exact)


def best_of(choice: Choice | None) -> str:
    """Name what the choice took of all that fits; where width and depth are the only levers, that is the densest."""
    if choice is not None and choice.prefer == "accuracy":
        return "most accurate"
    if choice is None or choice.prefer is None or set(choice.levers) <= set(PUBLISHED):
        return "densest"
    return "most faithful"
