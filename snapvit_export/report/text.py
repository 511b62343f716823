"""The wording of a report: numbers with units and intervals, and the sentence with the result. Light."""

from __future__ import annotations

from collections.abc import Sequence

from ..family.evaluation import TITLES, Measure
from ..profiling.drift import BEYOND
from ..profiling.sampling import COVERS
from .data import Point, ReportData

UNKNOWN = "–"


def ms(value: float | None) -> str:
    """Format milliseconds with their significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def interval(between: tuple[float, float] | None) -> str:
    if between is None:
        return UNKNOWN
    digits = 2 if between[1] < 100 else 0
    return f"{between[0]:.{digits}f} to {between[1]:.{digits}f}"


def interval_title(report: ReportData) -> str:
    """Return the name of the latency intervals that are shown: those a choice compared cover another share."""
    if len(report.families) > 1:
        return "interval"  # each family has those of its own choice, or of its timing
    covered = 1 - 2 * BEYOND if report.looks else COVERS
    return f"{100 * covered:.0f} % interval"


def latency(value: float | None, between: tuple[float, float] | None) -> str:
    return ms(value) if between is None else f"{ms(value)} ({interval(between)})"


def budget(value: float) -> str:
    return f"{value:.4g} ms"


def quality(measure: Measure | None, value: float | None, error: float | None) -> str:
    """Format a share in per cent with its standard error; a cosine as it is."""
    if value is None:
        return UNKNOWN
    if measure == "cosine":
        return f"{value:.4f} ± {error:.4f}" if error else f"{value:.4f}"
    return f"{100 * value:.1f} ± {100 * error:.1f} %" if error else f"{100 * value:.1f} %"


def millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def gflops(count: int) -> str:
    return f"{count / 1e9:.2f}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def small(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1e}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def cosine(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"


def tokens(counts: Sequence[int]) -> str:
    """Write the first and the last number of tokens, or one if none are merged: 197 -> 99."""
    return f"{counts[0]} -> {counts[-1]}" if counts[0] != counts[-1] else f"{counts[0]}"


def pixels(image: tuple[int, int]) -> str:
    """Write height and width: 160x160."""
    return f"{image[0]}x{image[1]}"


def measure_title(report: ReportData) -> str:
    return TITLES[report.measure] if report.measure else "FLOPs kept"


def headline(report: ReportData) -> str:
    """Write the result in one or two sentences."""
    if report.chosen is not None:
        return _choice(report)
    timed = [p for p in report.own if p.latency_ms is not None]
    dense = next(p for p in report.own if p.is_dense)
    if not timed:
        return f"{len(report.own)} variants of {report.model}, none of them timed yet."
    if report.budget_ms is None:
        fast = min(timed, key=lambda p: p.latency_ms or 0)
        ends = [f"{p.name}, {latency(p.latency_ms, p.between_ms)}" for p in (dense, fast)]
        several = f"{len(report.own)} variants of {report.model}: from {ends[0]}, to {ends[1]}"
        return f"{several}{_against(fast, dense, report)}." if len(timed) > 1 else f"One variant, {ends[0]}."
    best = best_variant(report)
    if best is None:
        return f"No variant surely meets {budget(report.budget_ms)}."
    return (
        f"{best.name} is the densest variant that meets {budget(report.budget_ms)}: "
        f"{latency(best.latency_ms, best.between_ms)}{_against(best, dense, report)}. No choice was proved."
    )


def best_variant(report: ReportData) -> Point | None:
    """Return the chosen variant; without a choice the densest that surely meets the budget, if there is one."""
    if report.chosen is not None:
        return report.point(report.chosen)
    limit = report.budget_ms
    fits = [p for p in report.own if limit is not None and p.between_ms is not None and p.between_ms[1] <= limit]
    return max(fits, key=lambda p: p.flops, default=None)


def _choice(report: ReportData) -> str:
    assert report.chosen is not None
    assert report.budget_ms is not None
    chosen = report.point(report.chosen)
    dense = next(p for p in report.own if p.is_dense)
    at = "" if report.at == "p50" else f" at {report.at}"
    text = (
        f"{chosen.name} takes {latency(chosen.latency_ms, chosen.between_ms)}{at} and fits {budget(report.budget_ms)}"
    )
    if chosen.is_dense:
        return f"{text}: it is the dense model, nothing had to be cut."
    return f"{text}{_against(chosen, dense, report)}."


def _against(point: Point, dense: Point, report: ReportData) -> str:
    """Write the quality of a variant, beside that of the dense model."""
    if point.quality is None or point is dense:
        return ""
    text = f", with {measure_title(report)} {quality(report.measure, point.quality, point.error)}"
    known = dense.quality is not None and report.measure not in ("agreement", "cosine")
    return f"{text} where the dense model has {quality(report.measure, dense.quality, dense.error)}" if known else text


def missing(report: ReportData) -> list[str]:
    """Return notes on missing measurements, with the commands that take them."""
    notes = []
    if all(point.latency_ms is None for point in report.own):
        notes.append("No latency was measured. This measures it: snapvit choose FAMILY --budget 10ms")
    if report.measure is None:
        text = "Accuracy is missing: the chart shows the share of FLOPs kept instead."
        notes.append(f"{text} This measures it: snapvit validate FAMILY --data DIR")
    return notes
