"""The wording of a report: numbers with units and intervals, and the sentences with the result. Light."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..family.evaluation import TITLES, Measure
from ..family.fidelity import Fidelity
from ..family.manifest import DroppedPrecision, Shipped
from ..model.timing import Timing
from ..profiling.drift import BEYOND
from ..profiling.sampling import COVERS
from ..visible import visible
from .data import AlternativeRow, MeasurementRow, Point, ReportData
from .variant_words import precision_word

UNKNOWN = "–"
SAME = {"predictions": "same top answer", "neighbours": "same nearest image"}  # what agreement of a fidelity counts


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


def energy(value: float | None, between: tuple[float, float] | None) -> str:
    """Format millijoules with their interval: 12.30 mJ (12.10 to 12.60)."""
    if value is None:
        return UNKNOWN
    text = f"{value:.2f} mJ" if value < 100 else f"{value:.0f} mJ"
    return text if between is None else f"{text} ({interval(between)})"


def limits(report: ReportData) -> str:
    """Write the budget of a choice: 10 ms, 15 mJ, or 10 ms and 15 mJ."""
    found = [] if report.budget_ms is None else [budget(report.budget_ms)]
    found += [] if report.budget_mj is None else [f"{report.budget_mj:.4g} mJ"]
    return " and ".join(found)


def quality(measure: Measure | None, value: float | None, error: float | None) -> str:
    """Format a share in per cent with its standard error; a cosine as it is."""
    if value is None:
        return UNKNOWN
    if measure == "cosine":
        return f"{value:.4f} ± {error:.4f}" if error else f"{value:.4f}"
    return f"{100 * value:.1f} ± {100 * error:.1f} %" if error else f"{100 * value:.1f} %"


def same(fidelity: Fidelity | None) -> str:
    """Write of how many in a hundred held-out images the answer is the dense model's: 98.4 ± 0.6."""
    if fidelity is None:
        return UNKNOWN
    about = "~" if fidelity.estimated else ""
    value, error = 100 * fidelity.agreement, 100 * fidelity.agreement_error
    return f"{about}{value:.1f} ± {error:.1f}" if error else f"{about}{value:.1f}"


def divergence(fidelity: Fidelity | None) -> str:
    """Write the divergence with its standard error, to the digits that this one allows: 0.012 ± 0.001."""
    if fidelity is None:
        return UNKNOWN
    value, error = fidelity.divergence, fidelity.standard_error
    about = "~" if fidelity.estimated else ""
    if not error:
        return f"{about}{value:.3g}"
    digits = min(max(-math.floor(math.log10(error)), 2), 6)
    return f"{about}{value:.{digits}f} ± {error:.{digits}f}"


def same_title(report: ReportData) -> str:
    """Return what the answers of a model are that its fidelity compares."""
    return SAME[report.compares or "predictions"]


def seconds(stages: Mapping[str, float]) -> str:
    """Write where the time went: Took 61 s: ranking 14, timing 15.

    Stages of less than half a second say nothing beside others and are left out, if the whole took longer.
    """
    total = sum(stages.values())
    digits = 0 if total >= 10 else 1
    shown = [f"{name} {value:.{digits}f}" for name, value in stages.items() if value >= 0.5 * 10**-digits]
    minutes = f" ({total / 60:.1f} min)" if total >= 120 else ""
    return f"Took {total:.{digits}f} s{minutes}" + (f": {', '.join(shown)}" if shown else "")


def took(timing: Timing) -> str:
    """Write how long a ranking took, where, and each phase of it: Took 4.1 s: search 3.0, scores 1.1; 1 process."""
    counts = ((timing.processes, "process", "es"), (timing.threads, "thread", "s"))
    processes, threads = (f"{count} {what}{ending if count != 1 else ''}" for count, what, ending in counts)
    where = "" if timing.device == "cpu" else f", on {visible(timing.device)}"
    phases = {visible(name): value for name, value in timing.seconds.items()}
    return f"{seconds(phases)}; {processes} of {threads}{where}"


def to_ship(shipped: Shipped, folder: str) -> str:
    """Write what has to be copied to a product, and its size."""
    files = " and ".join(f"{folder}/{name}" for name in shipped.files)
    return f"To ship: {files}, {shipped.size_bytes / 1e6:.1f} MB, and nothing else."


def millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def gflops(count: int) -> str:
    """Write billions of FLOPs, of which a multiply-add is two, and of multiply-adds, as others count: 2.51 (1.26)."""
    return f"{count / 1e9:.2f} ({count / 2e9:.2f})"


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
    """Return the title of the quality that the report shows."""
    if report.by_fidelity:
        return f"{same_title(report)} as dense"
    return TITLES[report.measure] if report.measure else "quality"


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
        f"{_with_levers(best)} is the {report.best} variant that meets {budget(report.budget_ms)}: "
        f"{latency(best.latency_ms, best.between_ms)}{_against(best, dense, report)}. No choice was proved."
    )


def best_variant(report: ReportData) -> Point | None:
    """Return the chosen variant; without a choice the densest that surely meets the budget, if there is one.

    Densest is by FLOPs, which are known of every variant.
    """
    if report.chosen is not None:
        return report.point(report.chosen)
    limit = report.budget_ms
    fits = [p for p in report.own if limit is not None and p.between_ms is not None and p.between_ms[1] <= limit]
    return max(fits, key=lambda p: p.flops, default=None)


def _choice(report: ReportData) -> str:
    assert report.chosen is not None
    chosen = report.point(report.chosen)
    dense = next(p for p in report.own if p.is_dense)
    at = "" if report.at == "p50" else f" at {report.at}"
    text = (
        f"{chosen.name} takes {latency(chosen.latency_ms, chosen.between_ms)}{at} and {_fits(chosen)} {limits(report)}"
    )
    if chosen.is_dense:
        return f"{text}: it is the dense model, nothing had to be cut."
    return f"{text}: {chosen.levers}{_against(chosen, dense, report)}."


def _with_levers(row: Point | MeasurementRow) -> str:
    return row.name if row.levers in (row.name, "dense") else f"{row.name} ({row.levers})"


def decision(report: ReportData) -> str:
    """Write the choice in one sentence: what was taken, what it costs and keeps, and what was next and too slow.

    Latencies are those that decided: of all runs, corrected for machine drift.
    """
    by_name = {row.name: row for row in report.looks}
    if report.chosen not in by_name:
        return headline(report)  # by the profiles of the variants: how the choice came about is not recorded
    chosen, better = by_name[report.chosen], by_name.get(report.next_denser or "")
    within = f"{limits(report)}{'' if report.at == 'p50' else f' at {report.at}'}"
    if chosen.is_dense:
        text = f"{chosen.name} takes {_takes(chosen, report)} and fits {within}"
        text += ": it is the dense model, nothing had to be cut"
    else:
        text = f"{_with_levers(chosen)} is the {report.best} that {_fits(chosen)} {within}: "
        text += f"{_takes(chosen, report)}{_kept(chosen, report)}"
    if better is not None:
        than = "denser" if report.best == "densest" else "better"
        text += f"; the next {than}, {_with_levers(better)}, takes {_takes(better, report)}"
        text += ", but is too large" if _is_too_large(better, report) else ""
        text += ", and may fit on an idle machine" if better.verdict == "unsure" and report.doubt is None else ""
    if report.doubt is not None:
        names = " and ".join(filter(None, [report.next_denser, report.chosen]))
        text += f"; too noisy to decide between {names}: {report.doubt}"
    if report.compared is False:
        text += "; its answers there were not compared"
    return f"{text}."


def comparison(report: ReportData) -> str | None:
    """Write if the answers of the chosen variant were compared with its graph's; None where there is no need."""
    if report.compared is None or report.chosen is None:
        return None
    if not report.compared:
        return f"Not compared: nobody has looked if {report.chosen} answers in its runtime as in ONNX Runtime."
    return f"Compared with {report.comparison}."


def _takes(row: MeasurementRow, report: ReportData) -> str:
    """Write what decided about a candidate: its energy where that was limited, and its latency."""
    spent = "" if report.budget_mj is None else f"{energy(row.energy_mj, row.energy_between_mj)}, "
    return f"{spent}{latency(row.latency_ms, row.between_ms)}"


def _is_too_large(row: MeasurementRow, report: ReportData) -> bool:
    """Return True if a candidate meets the budget and was refused all the same."""
    most_mj = math.inf if report.budget_mj is None else report.budget_mj
    frugal = row.energy_between_mj is None or row.energy_between_mj[0] <= most_mj
    return row.verdict == "no" and frugal and (report.budget_ms is None or row.between_ms[1] <= report.budget_ms)


def _fits(row: Point | MeasurementRow) -> str:
    return "fits" if row.verdict == "fits" else "may fit"


def _kept(row: MeasurementRow, report: ReportData) -> str:
    """Write what a variant keeps: the dense model's answers, and quality by labels where it is known."""
    found = []
    if row.fidelity is not None:
        found.append(f"the {same_title(report)} as the dense model in {same(row.fidelity)} of 100 held-out images")
    if not report.by_fidelity and row.quality is not None:
        dense = next((r for r in report.looks if r.is_dense and r.quality is not None), None)
        known = report.measure not in ("agreement", "cosine") and dense is not None
        beside = f" (dense {quality(report.measure, dense.quality, dense.error)})" if known and dense else ""
        found.append(f"{measure_title(report)} {quality(report.measure, row.quality, row.error)}{beside}")
    return f", with {' and '.join(found)}" if found else ""


def alone(report: ReportData) -> str | None:
    """Write in one line what single levers reach within the budget; None if nothing is known of them."""
    found = [
        f"{lever_title(row)} {same(row.fidelity)} % ({row.name}, {ms(row.latency_ms)}{_unless_it_fits(row.verdict)})"
        for row in report.alternatives
    ]
    return f"With one lever alone, {same_title(report)}: {', '.join(found)}." if found else None


def lever_title(row: AlternativeRow) -> str:
    """Name the lever; width goes with depth where whole sub-layers are removed too."""
    return "width and depth" if "sub-layer" in row.levers and row.lever == "width" else row.lever


def _unless_it_fits(verdict: str) -> str:
    return {"fits": "", "no": ", too slow", "unsure": ", unsure"}[verdict]


def dropped(found: DroppedPrecision) -> str:
    """Write why no variant has a precision: fp16 is not faster here: 1.07 of the dense latency."""
    reason = found.reason.removeprefix("is ")
    return f"{precision_word(found.precision)} is {reason}: {found.ratio:.2f} of the dense latency"


def _against(point: Point, dense: Point, report: ReportData) -> str:
    """Write the quality of a variant, beside that of the dense model."""
    if point.quality is None or point is dense:
        return ""
    if report.by_fidelity:
        kept = quality(report.measure, point.quality, point.error)
        return f", with the {same_title(report)} as the dense model in {kept} of the images"
    text = f", with {measure_title(report)} {quality(report.measure, point.quality, point.error)}"
    known = dense.quality is not None and report.measure not in ("agreement", "cosine")
    return f"{text} where the dense model has {quality(report.measure, dense.quality, dense.error)}" if known else text


def missing(report: ReportData) -> list[str]:
    """Return notes on missing measurements, with the commands that take them."""
    notes = []
    if all(point.latency_ms is None for point in report.own):
        notes.append("No latency was measured. This measures it: snapvit choose FAMILY --budget 10ms")
    if report.measure is None:
        notes.append("Accuracy is missing. This measures it: snapvit validate FAMILY --data DIR")
    return notes
