"""Markdown for a README: the report of a family, and the table of `snapvit compare`, also for the terminal. Light."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from ..evaluate.comparison import Comparison
from ..family.evaluation import TITLES, Evaluation
from ..visible import say, visible
from . import text as words
from .data import ReportData
from .draw import MADE_BY
from .ranking_data import RankingReport
from .ranking_text import PLAN_COLUMNS, headline, plan_cells
from .terminal import print_rows
from .variants import variant_table


def markdown(report: ReportData, plot: str | None) -> str:
    """Write the report in Markdown; `plot` is the file name of the chart beside it, if there is one."""
    table = variant_table(report)
    lines = [f"**{text(words.headline(report))}**", ""]
    lines += [f"{text(note)}\n" for note in words.missing(report)]
    if report.doubt:
        lines += [f"Not decided: {text(report.doubt)}.", ""]
    if plot is not None:
        title = f"{'fidelity' if report.by_fidelity else words.measure_title(report)} against latency of {report.model}"
        lines += [f"![{text(title)}](<{quote(plot)}>)", ""]
    columns = table["columns"]
    lines.append(line([text(column["title"]) for column in columns]))
    lines.append(line(["---" if column["words"] else "--:" for column in columns]))
    for row in table["rows"]:
        cells = [text(cell["text"]) for cell in row["cells"]]
        lines.append(line([f"**{cell}**" if row["chosen"] else cell for cell in cells]))
    lines += ["", text(table["caption"]), ""]
    if report.chosen and report.looks:
        proof = [
            words.decision(report),
            words.comparison(report),
            words.alone(report),
            *(f"{words.dropped(found)}." for found in report.dropped),
        ]
        lines += [part for sentence in filter(None, proof) for part in (text(sentence), "")]
    return "\n".join([*lines, f"<!-- {MADE_BY} -->", ""])


def ranking_markdown(report: RankingReport, plots: Mapping[str, str]) -> str:
    """Write the report of a ranking in Markdown; `plots` are the file names of the plots beside it, by their titles."""
    lines = [f"**{text(headline(report))}**", ""]
    for title, file in plots.items():
        lines += [f"![{text(title)}](<{quote(file)}>)", ""]
    lines += [line(list(PLAN_COLUMNS)), line(["---", *["--:"] * (len(PLAN_COLUMNS) - 1)])]
    lines += [line([text(cell) for cell in plan_cells(plan)]) for plan in report.plans]
    lines += ["", *(f"{text(words.took(timing))}.\n" for timing in report.timings)]
    return "\n".join([*lines, f"<!-- {MADE_BY} -->", ""])


def line(cells: list[str]) -> str:
    """Write a row of a table."""
    return f"| {' | '.join(cells)} |"


def text(raw: str) -> str:
    """Escape text for Markdown and for the HTML that it becomes."""
    escaped = raw.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!$])", r"\\\1", escaped)


def table(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: a row for each method, a column for each size."""
    sizes = list(dict.fromkeys(c.asked for c in found.contestants))
    methods = list(dict.fromkeys(c.recipe for c in found.contestants))
    rows = []
    for method in methods:
        cells = [visible(method)]
        for size in sizes:
            result = found.found(method, size)
            cells.append(words.UNKNOWN if result is None else _quality(found, result.evaluation))
        rows.append(cells)
    return ["method", *(f"{found.axis} {size:g}" for size in sizes)], rows


def print_comparison(found: Comparison) -> None:
    """Print the table, and the dense model below it."""
    columns, rows = table(found)
    print_rows(columns, rows, left={"method"})
    say(_dense(found))


def comparison_markdown(found: Comparison) -> str:
    """Write the table and the chart in Markdown."""
    columns, rows = table(found)
    lines = [line([text(column) for column in columns]), line(["---", *["--:"] * (len(columns) - 1)])]
    lines += [line([text(cell) for cell in row]) for row in rows]
    return "\n".join([*lines, "", text(_dense(found)), "", "![methods](compare.svg)", ""])


def _dense(found: Comparison) -> str:
    where = f"{found.dense.images} images of {visible(found.dense.source)}"
    return f"{visible(found.model)}: {TITLES[found.measure]}, dense {_quality(found, found.dense)}, on {where}."


def _quality(found: Comparison, evaluation: Evaluation) -> str:
    return words.quality(found.measure, evaluation.value(found.measure), evaluation.error(found.measure))
