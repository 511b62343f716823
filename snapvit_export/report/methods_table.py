"""A comparison of methods as a table: for the terminal, and as Markdown."""

from __future__ import annotations

from ..evaluate.comparison import Comparison
from ..family.evaluation import TITLES, Evaluation
from . import text as words
from .data import plain
from .markdown import line, text
from .terminal import print_rows


def table(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row for each method, a column for each size."""
    sizes = list(dict.fromkeys(c.asked for c in found.contestants))
    methods = list(dict.fromkeys(c.recipe for c in found.contestants))
    rows = []
    for method in methods:
        cells = [plain(method)]
        for size in sizes:
            one = found.found(method, size)
            cells.append(words.UNKNOWN if one is None else _quality(found, one.evaluation))
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
    lines = [line([text(column) for column in columns]), line(["---", *["--:"] * (len(columns) - 1)])]
    lines += [line([text(cell) for cell in row]) for row in rows]
    return "\n".join([*lines, "", text(_dense(found)), "", "![methods](compare.svg)", ""])


def _dense(found: Comparison) -> str:
    where = f"{found.dense.images} images of {plain(found.dense.source)}"
    return f"{plain(found.model)}: {TITLES[found.measure]}, dense {_quality(found, found.dense)}, on {where}."


def _quality(found: Comparison, evaluation: Evaluation) -> str:
    return words.quality(found.measure, evaluation.value(found.measure), evaluation.error(found.measure))
