"""The table of `snapvit evaluate`: a row for each size, a column for each data set, an average. Light.

In a terminal the columns go on below where they do not fit beside each other; nothing is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..evaluate.published import set_name
from ..evaluate.results_table import ResultsTable, TableReport, TableRow
from ..family.evaluation import TITLES
from ..visible import say, visible
from . import text as words
from .markdown import line, text
from .terminal import COLUMN_GAP, LONGEST_NAME, print_rows, width_of

Column = tuple[str, list[str]]  # title, cells
PUBLISHED_ROW = "published"


def print_results(report: TableReport, width: int | None = None) -> None:
    """Print a table for each measure, and below it what its columns mean."""
    columns_wide = width or width_of(sys.stdout)
    for table in report.tables:
        label, *others = columns(table)
        of_sets = len(table.data)
        parts = [*([column] for column in others[:of_sets]), others[of_sets:]]  # what sums up stays together
        for block in _blocks(label, parts, columns_wide):
            rows = [row for row in zip(*(cells for _, cells in block)) if any(row[1:])]
            print_rows([title for title, _ in block], rows, {label[0]}, columns_wide)
        for sentence in sentences(report, table):
            say(visible(sentence))


def results_markdown(report: TableReport) -> str:
    """Write the tables in Markdown."""
    lines: list[str] = []
    for table in report.tables:
        shown = columns(table)
        lines.append(line([text(title) for title, _ in shown]))
        lines.append(line(["---", *["--:"] * (len(shown) - 1)]))
        lines += [line([text(cell) for cell in row]) for row in zip(*(cells for _, cells in shown))]
        lines += ["", *(f"{text(sentence)}\n" for sentence in sentences(report, table))]
    return "\n".join(lines)


def columns(table: ResultsTable) -> list[Column]:
    """Return the columns of a table, that of the sizes first; published values are rows of their own."""
    several = len(table.data) > 1
    titles = [*titles_of(table.data), *["average"] * several, "Δ", "speed-up"]
    rows: list[list[str]] = []
    for row in table.rows:
        values = [*(row.values[name] for name in table.data), *[row.average] * several]
        delta = words.UNKNOWN if row.delta is None else _points(row.delta.value, row.delta.error, sign="+")
        cells = [_points(each.value, each.error) for each in values]
        rows.append([row.size.title, *cells, delta, f"{row.speed_up:.2f}x"])
        if row.published:
            rows.append([PUBLISHED_ROW, *_published(row, table.data, several), "", ""])
    only_pairs = all(row.size.pair is not None for row in table.rows[1:])
    return list(zip(["MLP:heads" if only_pairs else "size", *titles], map(list, zip(*rows))))


def titles_of(data: Sequence[str]) -> list[str]:
    """Return short names of data sets: the last part of each, if no two have the same.

    >>> titles_of(["/data/pets", "cifar10"])
    ['oxford-pets', 'cifar10']
    """
    short = [set_name(name) for name in data]
    return short if len(set(short)) == len(short) else list(data)


def sentences(report: TableReport, table: ResultsTable) -> list[str]:
    """Return what the numbers of a table are, of which model, and where published ones come from."""
    found, settings = report.evaluation, report.evaluation.settings
    corrected = settings.get("correction") or "none"
    compared = "the average" if len(table.data) > 1 else "the value"
    seeds = f" of seeds {', '.join(map(str, table.seeds))}" if len(table.seeds) > 1 else ""
    cut = f" Correction: {corrected}." if len(table.rows) > 1 else ""
    lines = [
        f"{found.model}: {TITLES[table.measure]} in %{seeds}, ± {table.errors}.{cut}",
        f"Δ: {compared} less the dense model's, in points.",
        f"Speed-up: of FLOPs, {found.anatomy.flops() / 1e9:.3g} G of the dense model. No latency was measured.",
    ]
    if table.published_as is not None:
        lines.append(f"published: {table.published_as}, by its released ranking, uncorrected.")
        lines.append(f"From {table.published_source}.")
    return lines


def _blocks(label: Column, parts: Sequence[Sequence[Column]], width: int) -> list[list[Column]]:
    """Divide the columns into blocks that fit into the width, each with the sizes at its left; no part is divided."""
    blocks, room = [[label]], width - _wide(label)
    for part in parts:
        needed = sum(map(_wide, part))
        if room < needed and len(blocks[-1]) > 1:
            blocks.append([label])
            room = width - _wide(label)
        blocks[-1] += part
        room -= needed
    return blocks


def _wide(column: Column) -> int:
    title, cells = column
    return min(max(map(len, (title, *cells))), LONGEST_NAME) + COLUMN_GAP


def _points(value: float, error: float | None, sign: str = "") -> str:
    shown = f"{100 * value:{sign}.1f}"
    return shown if error is None else f"{shown} ± {100 * error:.1f}"


def _published(row: TableRow, data: Sequence[str], several: bool) -> list[str]:
    values = [row.published.get(name) for name in data]
    known = [value for value in values if value is not None]
    average = sum(known) / len(known) if len(known) == len(data) else None
    shown = [*values, *[average] * several]
    return [words.UNKNOWN if value is None else f"{100 * value:.1f}" for value in shown]
