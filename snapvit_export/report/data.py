"""The data of a report, collected from manifests: everything that a page, a plot or a table shows. Light.

A latency is the one that was compared with the budget, if there was a choice (`Measurement.latency_ms`, corrected for
machine drift), since variants that were timed at different moments can only be compared so; otherwise it is the
profile's. Control characters of strings become visible here, before they reach a plot or a page.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from ..allocation.levers import Lever
from ..budget import Budget
from ..errors import SnapvitError, UsageError
from ..evaluate.pareto import Tradeoff, dominated
from ..family.evaluation import Evaluation, Measure
from ..family.fidelity import Fidelity
from ..family.manifest import (
    Alternative,
    Choice,
    DroppedPrecision,
    Manifest,
    Measurement,
    Shipped,
    Variant,
    Verdict,
    verdict_on,
)
from ..family.trace import Trace
from ..family.validation import Validation
from ..model.rounds import RecoveredRounds
from ..profiling.conditions import worst_warnings
from ..profiling.profile import Percentile, Profile
from ..storage.json import Value
from ..target import ON_CPU
from ..visible import visible
from .quality import QualityMeasure, best_of, fidelity_of, measure_of
from .variant_words import levers, measured_verdict

MOST_SAMPLES = 2000  # in the plot of all variants; more would only be slower
LEAST_SAMPLES, ENOUGH_SAMPLES = 40, 160  # of one variant


class Spread(Value, frozen=True, kw_only=True):
    """The distribution of a variant's runs."""

    runs: int
    p1_ms: float
    p25_ms: float
    p50_ms: float
    p75_ms: float
    p99_ms: float
    shown_ms: tuple[float, ...]  # runs at equal steps in the order of their latency


class Point(Value, frozen=True, kw_only=True):
    """A variant with the numbers that the report shows."""

    family: str
    name: str
    levers: str  # in words
    precision: str
    runtime: str
    sparsity: float
    params: int
    flops: int
    flops_ratio: float
    tokens: tuple[int, ...]  # before the first block, and after each
    image_size: tuple[int, int]
    size_bytes: int
    latency_ms: float | None
    between_ms: tuple[float, float] | None
    p90_ms: float | None
    quality: float | None  # by the measure of the report
    error: float | None
    fidelity: Fidelity | None  # of the dense model in fp32: full, by definition
    agreement: float | None  # on the images of an evaluation, as is the cosine
    cosine: float | None
    parity: float | None
    dominated_by: str | None
    is_dense: bool
    is_chosen: bool  # in the report's own family; others may have been chosen for another budget
    verdict: Verdict | None  # on the budget of the report


class MeasurementRow(Value, frozen=True, kw_only=True):
    """A candidate that was timed on the way to the choice."""

    name: str
    levers: str
    precision: str
    sparsity: float
    flops: int
    size_bytes: int
    latency_ms: float
    between_ms: tuple[float, float]
    energy_mj: float | None = None  # of one run
    energy_between_mj: tuple[float, float] | None = None
    quality: float | None
    error: float | None
    fidelity: Fidelity | None
    correction: str | None
    fits: bool
    verdict: Verdict
    is_dense: bool
    is_chosen: bool
    compared: bool | None = None  # False: its answers in its runtime were not compared with its graph's; None: no need


class AlternativeRow(Value, frozen=True, kw_only=True):
    """The best that one lever alone reaches within the budget."""

    lever: Lever
    name: str
    levers: str
    latency_ms: float
    between_ms: tuple[float, float]
    fidelity: Fidelity | None
    verdict: Verdict


class Generation(Value, frozen=True, kw_only=True):
    """The state of a search after one generation."""

    evaluations: int
    best: float
    mean: float | None = None
    least: float | None = None


class Search(Value, frozen=True, kw_only=True):
    """The history of the search for factors."""

    start_fitness: float | None = None
    best_fitness: float | None = None
    history: tuple[Generation, ...]


class SubLayerRow(Value, frozen=True, kw_only=True):
    """The statistics of one attention or MLP: its effect on the stream, and the damage without it."""

    block: int
    part: str
    divergence: float | None = None
    turned: float | None = None
    damage: float | None = None


class Widths(Value, frozen=True, kw_only=True):
    """The heads and neurons that each block of a variant keeps."""

    name: str
    heads: tuple[int, ...]
    neurons: tuple[int, ...]


class InDepth(Protocol):
    """What reports of a family and of a ranking share: what each block keeps, and what the ranking was made by."""

    @property
    def noun(self) -> str: ...  # for one of the widths: a variant, or a Plan that nobody has built

    @property
    def main(self) -> Collection[str]: ...  # names of those that are drawn whatever else is left out

    @property
    def dense_heads(self) -> tuple[int, ...]: ...

    @property
    def dense_neurons(self) -> tuple[int, ...]: ...

    @property
    def widths(self) -> tuple[Widths, ...]: ...

    @property
    def search(self) -> Search | None: ...

    @property
    def sublayers(self) -> tuple[SubLayerRow, ...]: ...


class ReportData(Value, frozen=True, kw_only=True):
    """Everything that a report shows."""

    model: str
    families: tuple[str, ...]  # the first is the report's own
    measure: Measure | None  # of quality; None: nothing was evaluated
    by_fidelity: bool  # True: no quality by labels is known, and `agreement` is that of the fidelity
    compares: Literal["predictions", "neighbours"] | None  # what fidelity compares; None where it is not known
    judged: str | None  # the images that quality was measured on
    at: Percentile
    budget_ms: float | None
    budget_mj: float | None = None  # energy of one run
    chosen: str | None
    next_denser: str | None
    decided: bool
    doubt: str | None
    compared: bool | None = None  # of the chosen one, as in its row
    comparison: str | None = None  # what was found, with its figures
    best: str  # what the choice took of all that fits: the "most faithful", the "most accurate" or the "densest"
    alternatives: tuple[AlternativeRow, ...]
    dropped: tuple[DroppedPrecision, ...]
    points: tuple[Point, ...]
    looks: tuple[MeasurementRow, ...]  # candidates that were timed for the choice; a key of report.json
    dense_heads: tuple[int, ...]
    dense_neurons: tuple[int, ...]
    widths: tuple[Widths, ...]
    spreads: dict[str, Spread]  # by variant of the own family
    search: Search | None
    rounds: RecoveredRounds | None  # of cutting and recovering, by which the ranking was made
    sublayers: tuple[SubLayerRow, ...]
    warnings: tuple[str, ...]
    seconds: dict[str, float]  # that each stage of the export or choice took
    shipped: Shipped | None  # the chosen variant as a model that runs alone
    trace: Trace | None = None  # requests that were answered before a deadline

    @property
    def noun(self) -> str:
        return "variant"

    @property
    def main(self) -> Collection[str]:
        """The dense variant, the chosen one, and the next better."""
        dense = {point.name for point in self.own if point.is_dense}
        return dense | {name for name in (self.chosen, self.next_denser) if name is not None}

    @property
    def own(self) -> tuple[Point, ...]:
        """The variants of the report's own family."""
        return tuple(point for point in self.points if point.family == self.families[0])

    def point(self, name: str) -> Point:
        """Return a variant of the report's own family."""
        return next(point for point in self.own if point.name == name)


@dataclass(frozen=True)
class LoadedFamily:
    """A family that was read from a folder."""

    folder: Path
    manifest: Manifest
    validation: Validation | None = None
    trace: Trace | None = None


def collect(own: LoadedFamily, beside: Sequence[LoadedFamily] = (), budget: Budget | None = None) -> ReportData:
    """Collect the numbers of a family, and of others of the same model in the same chart."""
    manifest = own.manifest
    for other in beside:
        if other.manifest.anatomy != manifest.anatomy or other.manifest.model != manifest.model:
            theirs, ours = other.manifest.model, manifest.model
            raise SnapvitError(f"{other.folder}: a family of {theirs}, not of {ours}. Give families of the same model")
        theirs_on, ours_on = ({_images(v.evaluation) for v in m.variants} for m in (other.manifest, manifest))
        if theirs_on != ours_on and None not in theirs_on | ours_on:
            raise SnapvitError(
                f"{other.folder}: was evaluated on other images. Validate both families on the same --data"
            )
    families = [own, *beside]
    labels = _labels(families)
    at: Percentile = manifest.choice.limits.at if manifest.choice else "p50"
    measure, by_fidelity = measure_of([family.manifest for family in families])
    choice = manifest.choice
    budget_ms = _budget_ms(manifest, budget)
    measured_by = QualityMeasure(at, measure, by_fidelity, budget_ms)
    points = [
        point
        for family, label in zip(families, labels)
        for point in _points(family.manifest, label, measured_by, choice if family is own else None)
    ]
    return ReportData(
        model=visible(manifest.model),
        families=tuple(labels),
        measure=measure,
        by_fidelity=by_fidelity,
        compares=next((v.fidelity.by for v in manifest.variants if v.fidelity is not None), None),
        judged=_held_out(manifest) if by_fidelity else _evaluated_on(manifest, measure),
        at=at,
        budget_ms=budget_ms,
        budget_mj=choice.budget_mj if choice else None,
        chosen=visible(choice.variant) if choice else None,
        next_denser=visible(choice.next_denser) if choice and choice.next_denser else None,
        decided=choice.decided if choice else True,
        doubt=visible(choice.doubt) if choice and choice.doubt else None,
        compared=_compared(_chosen_profile(choice), manifest, choice) if choice else None,
        comparison=_comparison(_chosen_profile(choice)) if choice else None,
        best=best_of(choice),
        alternatives=tuple(_alternative(found, manifest, choice) for found in choice.alternatives) if choice else (),
        dropped=tuple(msgspec.structs.replace(d, reason=visible(d.reason)) for d in choice.dropped) if choice else (),
        points=tuple(points),
        looks=_measurement_rows(measured_by, manifest, choice) if choice else (),
        dense_heads=tuple(block.heads for block in manifest.anatomy.blocks),
        dense_neurons=tuple(block.hidden for block in manifest.anatomy.blocks),
        widths=tuple(Widths(name=visible(v.name), heads=v.heads, neurons=v.neurons) for v in _ordered(manifest)),
        spreads=_spreads(_ordered(manifest)),
        search=search_of(manifest.recipe),
        rounds=_rounds(manifest),
        sublayers=sublayers_of(manifest.recipe),
        warnings=tuple(worst_warnings(v.profile.conditions for v in manifest.variants if v.profile)),
        seconds={visible(stage): seconds for stage, seconds in manifest.seconds.items()},
        shipped=manifest.shipped,
        trace=own.trace,
    )


def _labels(families: Sequence[LoadedFamily]) -> list[str]:
    """Label the families by precision and runtime, and by folder where those are the same."""
    labels = [f"{precisions(family.manifest)}, {family.manifest.target.runtime}" for family in families]
    named = [
        f"{label} ({visible(family.folder.resolve().name)})" if labels.count(label) > 1 else label
        for label, family in zip(labels, families)
    ]
    return [f"{label} #{i + 1}" if named.count(label) > 1 else label for i, label in enumerate(named)]


def _ordered(manifest: Manifest) -> list[Variant]:
    """Return the variants from dense to sparse, or the most faithful first where that is known of all."""
    cut = [variant for variant in manifest.variants if variant.name != manifest.dense]
    if cut and all(variant.fidelity is not None for variant in cut):
        faithful = sorted(cut, key=lambda v: (v.fidelity.divergence if v.fidelity else 0.0, v.sparsity, -v.flops))
        return [manifest.variant(manifest.dense), *faithful]
    return sorted(manifest.variants, key=lambda v: (v.name != manifest.dense, v.sparsity, -v.flops))


def precisions(manifest: Manifest) -> str:
    """Write the precisions of a family's variants, that of the dense model first."""
    return " + ".join(dict.fromkeys(variant.precision for variant in _ordered(manifest)))


def _points(manifest: Manifest, label: str, measured_by: QualityMeasure, choice: Choice | None) -> list[Point]:
    rows: list[tuple[Variant, float | None, tuple[float, float] | None]] = []
    for variant in _ordered(manifest):
        found = manifest.latency(variant.name, measured_by.at)
        rows.append((variant, *(found or (None, None))))
    qualities = {
        v.name: measured_by.quality(v.evaluation, fidelity_of(v.name, v.fidelity, manifest))[0] for v, _, _ in rows
    }
    by = dominated(
        {v.name: Tradeoff(ms, q) for v, ms, _ in rows if ms is not None and (q := qualities[v.name]) is not None}
    )
    verdicts = {m.variant: measured_verdict(m, choice) for m in choice.measurements} if choice else {}
    return [_point(manifest, label, row, measured_by, by.get(row[0].name), choice, verdicts) for row in rows]


def _point(
    manifest: Manifest,
    label: str,
    row: tuple[Variant, float | None, tuple[float, float] | None],
    measured_by: QualityMeasure,
    dominated_by: str | None,
    choice: Choice | None,
    verdicts: Mapping[str, Verdict],
) -> Point:
    variant, latency, between = row
    fidelity = fidelity_of(variant.name, variant.fidelity, manifest)
    quality, error = measured_by.quality(variant.evaluation, fidelity)
    by = dominated_by
    unmeasured = (
        None if between is None or measured_by.budget_ms is None else verdict_on(between, measured_by.budget_ms)
    )
    return Point(
        family=label,
        name=visible(variant.name),
        levers=visible(levers(variant, manifest)),
        precision=variant.precision,
        runtime=manifest.target.runtime,
        sparsity=variant.sparsity,
        params=variant.params,
        flops=variant.flops,
        flops_ratio=variant.flops_ratio,
        tokens=manifest.tokens_of(variant),
        image_size=variant.image_of(manifest.anatomy),
        size_bytes=variant.size_bytes,
        latency_ms=latency,
        between_ms=between,
        p90_ms=variant.profile.p90_ms if variant.profile else None,
        quality=quality,
        error=error,
        fidelity=fidelity,
        agreement=variant.evaluation.agreement if variant.evaluation else None,
        cosine=variant.evaluation.cosine if variant.evaluation else None,
        parity=variant.parity,
        dominated_by=visible(by) if by else None,
        is_dense=variant.name == manifest.dense,
        is_chosen=choice is not None and variant.name == choice.variant,
        verdict=verdicts.get(variant.name, unmeasured),
    )


def _measurement_rows(measured_by: QualityMeasure, manifest: Manifest, choice: Choice) -> tuple[MeasurementRow, ...]:
    seen = {_images(each) for v in manifest.variants for each in (v.evaluation, *v.evaluations)}
    return tuple(_measurement_row(m, measured_by, manifest, choice, seen) for m in choice.measurements)


def _measurement_row(
    measurement: Measurement,
    measured_by: QualityMeasure,
    manifest: Manifest,
    choice: Choice,
    seen: Collection[tuple[str, int] | None],
) -> MeasurementRow:
    """Make a row; its quality is left out if the family was validated on other images since, those `seen`."""
    fidelity = fidelity_of(measurement.variant, measurement.fidelity, manifest)
    evaluation = measurement.evaluation if _images(measurement.evaluation) in seen else None
    quality, error = measured_by.quality(evaluation, fidelity)
    return MeasurementRow(
        name=visible(measurement.variant),
        levers=visible(levers(measurement, manifest)),
        precision=measurement.precision or manifest.target.precision,
        sparsity=measurement.sparsity,
        flops=measurement.flops,
        size_bytes=measurement.size_bytes,
        latency_ms=measurement.latency_ms,
        between_ms=measurement.between_ms,
        energy_mj=measurement.energy_mj,
        energy_between_mj=measurement.energy_between_mj,
        quality=quality,
        error=error,
        fidelity=fidelity,
        correction=visible(measurement.correction) if measurement.correction else None,
        fits=measurement.fits,
        verdict=measured_verdict(measurement, choice),
        is_dense=measurement.variant == manifest.dense,
        is_chosen=measurement.variant == choice.variant,
        compared=_compared(measurement.profile, manifest, choice),
    )


def _chosen_profile(choice: Choice) -> Profile:
    return next(each.profile for each in choice.measurements if each.variant == choice.variant)


def _compared(profile: Profile, manifest: Manifest, choice: Choice) -> bool | None:
    """Return if answers in a runtime were compared; None for ONNX Runtime, and older choices on the CPU do not say."""
    runtime = manifest.target.runtime
    if runtime == "onnxruntime" or (choice.compared is None and runtime in ON_CPU):
        return None
    return profile.compared is not None


BESIDE = {
    "graph": "its graph in ONNX Runtime",
    "fp32": "the fp32 graph that it was made of, in ONNX Runtime",
    "export": "its answers where it was exported",
}


def _comparison(profile: Profile) -> str | None:
    return None if profile.compared is None else f"{BESIDE[profile.compared.beside]}: {profile.compared.told}"


def _alternative(found: Alternative, manifest: Manifest, choice: Choice) -> AlternativeRow:
    measured = next((m for m in choice.measurements if m.variant == found.variant), None)
    return AlternativeRow(
        lever=found.lever,
        name=visible(found.variant),
        levers=found.lever if measured is None else visible(levers(measured, manifest)),
        latency_ms=found.latency_ms,
        between_ms=found.between_ms,
        fidelity=found.fidelity,
        verdict=verdict_on(found.between_ms, choice.budget_ms or math.inf)
        if measured is None
        else measured_verdict(measured, choice),
    )


def _images(evaluation: Evaluation | None) -> tuple[str, int] | None:
    return None if evaluation is None else (evaluation.source, evaluation.images)


def _evaluated_on(manifest: Manifest, measure: Measure | None) -> str | None:
    seen = {(v.evaluation.images, v.evaluation.source) for v in manifest.variants if v.evaluation is not None}
    if measure is None or not seen:
        return None
    return "; ".join(f"{images} images of {visible(source)}" for images, source in sorted(seen))


def _held_out(manifest: Manifest) -> str | None:
    """Write how many images the fidelity was measured on."""
    counts = sorted({v.fidelity.images for v in manifest.variants if v.fidelity is not None})
    return f"{counts[0]} held-out images" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} held-out images"


def _budget_ms(manifest: Manifest, budget: Budget | None) -> float | None:
    if manifest.choice is not None:
        if budget is not None:
            raise UsageError(
                f"the family was chosen for {manifest.choice.budget}, which the report draws. "
                f"Leave --budget out, or choose again: snapvit choose FAMILY --budget {budget}"
            )
        return manifest.choice.budget_ms
    if budget is None:
        return None
    if budget.energy_mj is not None:
        raise UsageError(f"--budget {budget}: a report draws a latency. Give milliseconds, or choose by it first")
    profile = manifest.variant(manifest.dense).profile
    if profile is None and budget.is_relative:
        raise UsageError(
            f"--budget {budget} is a share of the dense latency, which was not measured. Give milliseconds"
        )
    return budget.to_ms(profile.p50_ms if profile else 0.0, manifest.target.batch)


def _spreads(variants: Sequence[Variant]) -> dict[str, Spread]:
    timed = [(variant.name, variant.profile) for variant in variants if variant.profile and variant.profile.samples_ms]
    most = min(ENOUGH_SAMPLES, max(LEAST_SAMPLES, MOST_SAMPLES // max(1, len(timed))))
    return {visible(name): _spread(profile, most) for name, profile in timed}


def _spread(profile: Profile, most: int) -> Spread:
    samples = np.sort(np.asarray(profile.samples_ms, np.float64))  # (runs,)
    chosen = np.linspace(0, len(samples) - 1, min(most, len(samples))).round().astype(int)
    p1, p25, p50, p75, p99 = (float(value) for value in np.percentile(samples, [1, 25, 50, 75, 99]))
    shown = tuple(float(ms) for ms in samples[chosen])
    return Spread(runs=len(samples), p1_ms=p1, p25_ms=p25, p50_ms=p50, p75_ms=p75, p99_ms=p99, shown_ms=shown)


def search_of(recipe: dict[str, Any]) -> Search | None:
    """Return the search history of the ranking made here, or of the one that was given."""
    given = recipe.get("ranking")
    for provenance in (recipe, given if isinstance(given, dict) else {}):
        found = _known(provenance.get("search"), Search)
        if found is not None and found.history:
            return found
    return None


def _rounds(manifest: Manifest) -> RecoveredRounds | None:
    """Return the rounds of the ranking that was given, if it was made in rounds that recover."""
    given = manifest.recipe.get("ranking")
    return RecoveredRounds.of(given, manifest.anatomy) if isinstance(given, dict) else None


def sublayers_of(recipe: dict[str, Any]) -> tuple[SubLayerRow, ...]:
    listed = recipe.get("sublayers")
    found = [_known(item, SubLayerRow) for item in listed] if isinstance(listed, list) else []
    kept = [item for item in found if item is not None and item.divergence is not None]
    return tuple(msgspec.structs.replace(item, part=visible(item.part)) for item in kept)


def _known(record: object, kind: type[Any]) -> Any:
    """Convert a part of the recipe, which is free in form; None if it is not of this kind."""
    if not isinstance(record, dict):
        return None
    try:
        fields = {name: record[name] for name in kind.__struct_fields__ if name in record}
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError:
        return None
