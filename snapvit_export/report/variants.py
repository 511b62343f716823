"""The table of variants, for the page and for Markdown; columns without any value are left out. Light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import text as words
from .data import Point, ReportData

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
    on = f" Quality on {report.judged}." if report.judged else ""
    return {
        "caption": f"All variants, from dense to sparse; latency with its {between}.{on}{dense}{torch}",
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
        (report.budget_ms is not None, "fits", True, lambda p: _verdict(p, report)),
        (len(report.families) > 1, "family", True, lambda p: (p.family, p.family)),
        (True, "sparsity", False, lambda p: (p.sparsity, f"{p.sparsity:.3f}")),
        (_differ(report, "tokens"), "tokens", False, lambda p: (p.tokens[-1], words.tokens(p.tokens))),
        (_differ(report, "image_size"), "pixels", False, lambda p: (p.image_size[0], words.pixels(p.image_size))),
        (True, "params", False, lambda p: (p.params, words.millions(p.params))),
        (True, "GFLOPs", False, lambda p: (p.flops, words.gflops(p.flops))),
        (True, "size", False, lambda p: (p.size_bytes, words.megabytes(p.size_bytes))),
        (_any(report, "latency_ms"), report.at, False, lambda p: (p.latency_ms, words.ms(p.latency_ms))),
        (_any(report, "between_ms"), "interval, ms", False, _interval),
        (_any(report, "p90_ms"), "p90", False, lambda p: (p.p90_ms, words.ms(p.p90_ms))),
        (measure is not None, title, False, lambda p: (p.quality, words.quality(measure, p.quality, p.error))),
        (
            _any(report, "agreement") and measure != "agreement",
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


def _verdict(point: Point, report: ReportData) -> tuple[str | None, str]:
    """Return yes if the whole interval meets the budget, or no; the choice's own verdict where there is one."""
    assert report.budget_ms is not None
    verdicts = {row.name: row.fits for row in report.looks} if point.family == report.families[0] else {}
    if point.name in verdicts:
        fits = verdicts[point.name]
    elif point.between_ms is None:
        return None, words.UNKNOWN
    else:
        fits = point.between_ms[1] <= report.budget_ms
    text = "yes" if fits else "no"
    text += ", chosen" if point.is_chosen else ""
    return text, text


def measurement_rows(report: ReportData) -> dict[str, Any]:
    """Return columns and rows of all measurements on the way to the choice."""
    columns = [
        "variant",
        "sparsity",
        f"latency {report.at}",
        f"{words.interval_title(report)}, ms",
        words.measure_title(report),
    ]
    rows = [
        (
            row.name,
            f"{row.sparsity:.3f}",
            words.ms(row.latency_ms),
            words.interval(row.between_ms),
            words.quality(report.measure, row.quality, row.error),
            row.correction or "none",
            "yes" if row.fits else "no",
        )
        for row in report.looks
    ]
    return {"columns": [*columns, "correction", "fits"], "rows": rows}
