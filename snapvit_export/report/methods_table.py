"""A comparison of methods as a table: for the terminal, and as Markdown."""

from __future__ import annotations

from ..comparison import Comparison
from ..evaluate.evaluation import TITLES
from . import words
from .markdown import cell
from .numbers import plain
from .table import print_rows


def table(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row for each method, a column for each size."""
    sizes = list(dict.fromkeys(c.asked for c in found.contestants))
    methods = list(dict.fromkeys(c.recipe for c in found.contestants))
    rows = []
    for method in methods:
        cells = [plain(method)]
        for size in sizes:
            one = found.found(method, size)
            e = None if one is None else one.evaluation
            value = words.UNKNOWN if e is None else words.quality(found.measure, e.value(found.measure), e.error(found.measure))
            cells.append(value)
        rows.append(cells)
    return ["method", *(f"{found.axis} {size:g}" for size in sizes)], rows


def print_comparison(found: Comparison) -> None:
    """The table, and what stands above it all: the dense model."""
    columns, rows = table(found)
    print_rows(columns, rows, left={"method"})
    print(_dense(found))


def markdown(found: Comparison) -> str:
    """The table and the picture for a README."""
    columns, rows = table(found)
    lines = [f"| {' | '.join(map(cell, columns))} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join([*lines, "", f"{_dense(found)}", "", "![methods](compare.svg)", ""])


def _dense(found: Comparison) -> str:
    e = found.dense
    value = words.quality(found.measure, e.value(found.measure), e.error(found.measure))
    return f"{plain(found.model)}: {TITLES[found.measure]}, dense {value}, on {e.images} images of {plain(e.source)}."
