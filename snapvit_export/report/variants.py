"""The table of variants, for the page and for Markdown; columns without any value are left out. Light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import text as words
from .data import MeasurementRow, Point, ReportData

Reader = Callable[[Point], tuple[Any, str]]  # a sort key, and the text


def variant_table(report: ReportData) -> dict[str, Any]:
    """Return caption, columns and rows of all variants in the report."""
    columns = _columns(report)
    rows = [
        {
            "chosen": point.is_chosen,
            "cells": [_cell(read(point), is_words) for _, is_words, read in columns],
        }
        for point in report.points
    ]
    dense = " Agreement and cosine are with the dense model." if _any(report, "cosine") else ""
    torch = " Parity is the largest difference to torch, of the largest output." if _any(report, "parity") else ""
    between = words.interval_title(report)
    cut = [point for point in report.points if not point.is_dense]
    known = bool(cut) and all(point.fidelity is not None for point in cut)
    order = "the most faithful first" if known and len(report.families) == 1 else "from dense to sparse"
    on = f" Quality on {report.judged}." if report.judged else ""
    if _any(report, "fidelity"):
        on += (
            f" Fidelity is to the dense model in fp32, on images that nothing was fitted on: in how many of a hundred "
            f"the {words.same_title(report)}, and the KL divergence in nats, each with its standard error."
        )
    return {
        "caption": f"All variants, {order}; latency with its {between}.{on}{dense}{torch}",
        "columns": [{"title": title, "words": is_words} for title, is_words, _ in columns],
        "rows": rows,
    }


def _cell(pair: tuple[Any, str], is_words: bool) -> dict[str, Any]:
    value, text = pair
    return {"value": "" if value is None else value, "text": text, "words": is_words}


def _columns(report: ReportData) -> list[tuple[str, bool, Reader]]:
    """Return for each column its title, True if it holds words, and its reader."""
    measure, title = report.measure, words.measure_title(report)
    candidates: list[tuple[bool, str, bool, Reader]] = [
        (True, "variant", True, lambda p: (p.name, p.name)),
        (True, "levers", True, lambda p: (p.levers, p.levers)),
        (report.budget_ms is not None or report.budget_mj is not None, "verdict", True, _verdict),
        (len(report.families) > 1, "family", True, lambda p: (p.family, p.family)),
        (_any(report, "latency_ms"), report.at, False, lambda p: (p.latency_ms, words.ms(p.latency_ms))),
        (_any(report, "between_ms"), "interval, ms", False, _interval),
        (
            measure is not None and not report.by_fidelity,
            title,
            False,
            lambda p: (p.quality, words.quality(measure, p.quality, p.error)),
        ),
        (_any(report, "fidelity"), f"{words.same_title(report)}, %", False, _same),
        (_any(report, "fidelity"), "divergence", False, _divergence),
        (True, "size", False, lambda p: (p.size_bytes, words.megabytes(p.size_bytes))),
        (True, "sparsity", False, lambda p: (p.sparsity, f"{p.sparsity:.3f}")),
        (_differ(report, "precision"), "precision", True, lambda p: (p.precision, p.precision)),
        (_differ(report, "tokens"), "tokens", False, lambda p: (p.tokens[-1], words.tokens(p.tokens))),
        (_differ(report, "image_size"), "pixels", False, lambda p: (p.image_size[0], words.pixels(p.image_size))),
        (True, "params", False, lambda p: (p.params, words.millions(p.params))),
        (True, "GFLOPs (GMACs)", False, lambda p: (p.flops, words.gflops(p.flops))),
        (_any(report, "p90_ms"), "p90, last run", False, lambda p: (p.p90_ms, words.ms(p.p90_ms))),
        (
            _any(report, "agreement") and (measure != "agreement" or report.by_fidelity),
            "agreement",
            False,
            lambda p: (p.agreement, words.share(p.agreement)),
        ),
        (
            _any(report, "cosine") and measure != "cosine",
            "cosine",
            False,
            lambda p: (p.cosine, words.cosine(p.cosine)),
        ),
        (_any(report, "parity"), "parity", False, lambda p: (p.parity, words.small(p.parity))),
        (
            _any(report, "dominated_by"),
            "dominated by",
            True,
            lambda p: (p.dominated_by, p.dominated_by or words.UNKNOWN),
        ),
    ]
    return [(title, is_words, read) for wanted, title, is_words, read in candidates if wanted]


def _differ(report: ReportData, name: str) -> bool:
    return len({getattr(point, name) for point in report.points}) > 1


def _any(report: ReportData, name: str) -> bool:
    return any(getattr(point, name) is not None for point in report.points)


def _interval(point: Point) -> tuple[float | None, str]:
    return (point.between_ms[0] if point.between_ms else None), words.interval(point.between_ms)


def _same(row: Point) -> tuple[float | None, str]:
    return (row.fidelity.agreement if row.fidelity else None), words.same(row.fidelity)


def _divergence(row: Point) -> tuple[float | None, str]:
    return (row.fidelity.divergence if row.fidelity else None), words.divergence(row.fidelity)


def _verdict(point: Point) -> tuple[str | None, str]:
    if point.verdict is None:
        return None, words.UNKNOWN
    text = f"{point.verdict}{', chosen' if point.is_chosen else ''}"
    return text, text


def measurement_rows(report: ReportData) -> dict[str, Any]:
    """Return columns and rows of all measurements on the way to the choice."""
    labelled = report.measure is not None and not report.by_fidelity
    compared = any(row.fidelity is not None for row in report.looks)
    candidates: list[tuple[bool, str, Callable[[MeasurementRow], str]]] = [
        (True, "variant", lambda row: row.name),
        (True, "levers", lambda row: row.levers),
        (True, "precision", lambda row: row.precision),
        (True, "sparsity", lambda row: f"{row.sparsity:.3f}"),
        (True, f"latency {report.at}", lambda row: words.ms(row.latency_ms)),
        (True, f"{words.interval_title(report)}, ms", lambda row: words.interval(row.between_ms)),
        (
            any(row.energy_mj is not None for row in report.looks),
            f"energy ({words.interval_title(report)})",
            lambda row: words.energy(row.energy_mj, row.energy_between_mj),
        ),
        (True, "size", lambda row: words.megabytes(row.size_bytes)),
        (compared, f"{words.same_title(report)}, %", lambda row: words.same(row.fidelity)),
        (compared, "divergence", lambda row: words.divergence(row.fidelity)),
        (labelled, words.measure_title(report), lambda row: words.quality(report.measure, row.quality, row.error)),
        (True, "correction", lambda row: row.correction or "none"),
        (True, "verdict", lambda row: f"{row.verdict}{', chosen' if row.is_chosen else ''}"),
    ]
    wanted = [(title, read) for shown, title, read in candidates if shown]
    rows = [tuple(read(row) for _, read in wanted) for row in report.looks]
    return {"columns": [title for title, _ in wanted], "rows": rows}


def alternative_rows(report: ReportData) -> dict[str, Any]:
    """Return columns and rows of the best that each single lever reaches within the budget."""
    columns = ["lever", "variant", "levers", f"latency {report.at}", f"{words.interval_title(report)}, ms"]
    rows = [
        (
            words.lever_title(row),
            row.name,
            row.levers,
            words.ms(row.latency_ms),
            words.interval(row.between_ms),
            words.same(row.fidelity),
            words.divergence(row.fidelity),
            row.verdict,
        )
        for row in report.alternatives
    ]
    return {"columns": [*columns, f"{words.same_title(report)}, %", "divergence", "verdict"], "rows": rows}
