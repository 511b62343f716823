"""What an export or a choice says at its end: a short table, best first, and the lines below it. Light.

The table fits any width from 80 columns on: levers go on several lines, then columns are left out, the least needed
first; numbers are never broken.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..family.layout import RUN, RUN_ENGINE
from . import text as words
from .data import MeasurementRow, Point, ReportData

Row = MeasurementRow | Point
GAP = 2  # letters between columns
MOST_ROWS = 10
NAME, SHORT = 20, 8  # letters of a name in one line, and where there is little room
NARROW = 24  # letters of the levers in one line, below which columns are left out


@dataclass(frozen=True)
class Column:
    """A column of text: lines of its title, and of the cell of each row."""

    title: str
    cells: tuple[str, ...]
    is_words: bool = False
    left_out: int = 0  # 0: never; 1: first

    @property
    def width(self) -> int:
        return max(len(line) for text in (self.title, *self.cells) for line in text.split("\n"))

    def with_cells(self, cells: Sequence[str], before: str = "", after: str = "") -> Column:
        """Return the column with other cells, in which `before` is replaced."""
        return replace(self, cells=tuple(cell.replace(before, after) if before else cell for cell in cells))


def table(report: ReportData, width: int) -> tuple[list[Row], list[Column]]:
    """Return the rows, best first, and the columns that have room; rows without a choice have no verdict."""
    rows = _short(_best_first(report), report)
    columns = [column for column in _columns(report, rows) if any(cell.strip("-") for cell in column.cells)]
    return rows, fitted(columns, width)


def _best_first(report: ReportData) -> list[Row]:
    """Sort by what decides: the dense model, then by divergence, or by accuracy where that was preferred."""
    rows: Sequence[Row] = report.looks or report.own
    if report.best == "most accurate" and all(row.quality is not None for row in rows):
        return sorted(rows, key=lambda row: (not row.is_dense, -(row.quality or 0.0), -row.flops))
    if report.best == "densest" and report.looks:
        return sorted(rows, key=lambda row: (not row.is_dense, -row.flops))
    return sorted(rows, key=lambda row: (not row.is_dense, *_unfaithful(row)))


def _unfaithful(row: Row) -> tuple[bool, float, int]:
    """Return a key of which less is better; rows of unknown fidelity come last, the densest of them first."""
    return row.fidelity is None, row.fidelity.divergence if row.fidelity else 0.0, -row.flops


def _short(rows: list[Row], report: ReportData) -> list[Row]:
    """Keep the proof, and of the other candidates those that stand nearest to the chosen one."""
    if not report.looks or len(rows) <= MOST_ROWS:
        return rows
    names = {report.next_denser, report.chosen, *(found.name for found in report.alternatives)}
    at = next(i for i, row in enumerate(rows) if row.is_chosen)
    near = sorted(range(len(rows)), key=lambda i: (not rows[i].is_dense, rows[i].name not in names, abs(i - at), i))
    return [rows[i] for i in sorted(near[:MOST_ROWS])]


def _columns(report: ReportData, rows: Sequence[Row]) -> list[Column]:
    labelled = report.measure is not None and not report.by_fidelity
    covers = words.interval_title(report)
    title = f"{report.at} ms\n({covers})" if any(row.between_ms for row in rows) else f"{report.at} ms"
    unit = "" if report.measure == "cosine" else " %"
    measure = words.measure_title(report).replace(" with dense", "").replace(" to dense", "")
    found = [
        Column("variant", tuple(folded(row.name, NAME) for row in rows), is_words=True),
        Column("levers", tuple(row.levers for row in rows), is_words=True),
        Column(title, tuple(_latency(row) for row in rows)),
        *_energies(report, rows, covers),
        Column("MB", tuple(f"{row.size_bytes / 1e6:.1f}" for row in rows), left_out=1),
        Column(_two_lines(f"{words.same_title(report)}, %"), tuple(words.same(row.fidelity) for row in rows)),
        Column("divergence\n(KL)", tuple(words.divergence(row.fidelity) for row in rows), left_out=2),
    ]
    if labelled:
        cells = (words.quality(report.measure, row.quality, row.error).removesuffix(" %") for row in rows)
        found.append(Column(f"{measure}{unit and ', %'}", tuple(cells)))
    if report.looks:
        verdicts = (f"{row.verdict}{_not_compared(row)}{', chosen' if row.is_chosen else ''}" for row in rows)
        found.append(Column(f"verdict\n{words.limits(report)}", tuple(verdicts), is_words=True))
    return [column.with_cells(["-" if cell == words.UNKNOWN else cell for cell in column.cells]) for column in found]


def _energies(report: ReportData, rows: Sequence[Row], covers: str) -> list[Column]:
    """Return a column with the energy of every candidate, where it was limited."""
    if report.budget_mj is None:
        return []
    by_name = {row.name: words.energy(row.energy_mj, row.energy_between_mj) for row in report.looks}
    by_name = {name: text.replace(" mJ", "").replace(" to ", " – ") for name, text in by_name.items()}
    return [Column(f"mJ\n({covers})", tuple(by_name.get(row.name, words.UNKNOWN) for row in rows))]


def _not_compared(row: Row) -> str:
    return ", not compared" if isinstance(row, MeasurementRow) and row.compared is False else ""


def folded(name: str, width: int) -> str:
    """Break a long name into lines."""
    return "\n".join(name[i : i + width] for i in range(0, max(len(name), 1), width))


def _two_lines(title: str) -> str:
    """Break a title of several words before its last word."""
    first, _, last = title.replace(", %", ",\u00a0%").rpartition(" ")
    return f"{first}\n{last}".replace("\u00a0", " ")


def _latency(row: Row) -> str:
    if row.latency_ms is None:
        return words.UNKNOWN
    digits = 2 if (row.between_ms or (0.0, row.latency_ms))[1] < 100 else 0
    if row.between_ms is None:
        return f"{row.latency_ms:.{digits}f}"
    return f"{row.latency_ms:.{digits}f} ({row.between_ms[0]:.{digits}f} – {row.between_ms[1]:.{digits}f})"


def fitted(columns: Sequence[Column], width: int) -> list[Column]:
    """Return columns that fit: levers on several lines, then fewer columns, then other cells on two lines."""
    shown = list(columns)
    for leaving in sorted({column.left_out for column in columns}):
        shown = [column for column in columns if not 0 < column.left_out <= leaving]
        if _room(shown, width) >= min(NARROW, _levers(shown).width):
            return _narrowed(shown, width)
    needed = 1 + max(len(phrase) for cell in _levers(shown).cells for phrase in cell.split(", "))  # and a comma
    for before, after in ((", ", ",\n"), (" (", "\n(")):  # fits, chosen; 9.79 (9.60 – 9.93)
        if _room(shown, width) < needed:
            shown = [c if c.title == "levers" else c.with_cells(c.cells, before, after) for c in shown]
    if _room(shown, width) < needed:
        least = max(SHORT, shown[0].width - (needed - _room(shown, width)))
        shown[0] = shown[0].with_cells([folded(cell.replace("\n", ""), least) for cell in shown[0].cells])
    return _narrowed(shown, width)


def _levers(columns: Sequence[Column]) -> Column:
    return next(column for column in columns if column.title == "levers")


def _room(columns: Sequence[Column], width: int) -> int:
    """Return the letters that are left for the levers."""
    return width - sum(column.width for column in columns if column.title != "levers") - GAP * (len(columns) - 1)


def _narrowed(columns: Sequence[Column], width: int) -> list[Column]:
    room, levers = _room(columns, width), _levers(columns)
    cells = tuple(packed(cell.split(", "), room) for cell in levers.cells)
    return [column.with_cells(cells) if column is levers else column for column in columns]


def packed(phrases: Sequence[str], width: int) -> str:
    """Put phrases on lines of at most that many letters, each phrase whole.

    >>> packed(["int8", "112 of 197 tokens", "85 % width"], 24)
    'int8, 112 of 197 tokens,\\n85 % width'
    """
    lines = [phrases[0]]
    for phrase in phrases[1:]:
        longer = f"{lines[-1]}, {phrase}"
        if len(longer) < width or (len(longer) == width and phrase is phrases[-1]):  # a comma may follow
            lines[-1] = longer
        else:
            lines[-1] += ","
            lines.append(phrase)
    return "\n".join(lines)


def lines_below(
    report: ReportData, shown: int, warnings: Sequence[str] = (), folder: Path | None = None
) -> tuple[list[str], list[str]]:
    """Return the sentences that stand below the table of so many rows, and the commands that go on from here."""
    found = []
    if report.looks:
        if len(report.looks) > shown:
            found.append(f"{len(report.looks) - shown} more candidates were timed; the report shows all.")
        found.append(words.decision(report))
        found += filter(None, [words.comparison(report)])
        found += [f"Beware: {warning}." for warning in warnings]
        found += [f"{words.dropped(precision)}." for precision in report.dropped]
        found += filter(None, [words.alone(report)])
    if any(row.fidelity is not None and row.fidelity.estimated for row in report.looks or report.own):
        found.append("~ is an estimate from other variants of the model.")
    if report.seconds:
        found.append(f"{words.seconds(report.seconds)}.")
    if folder is None:
        return found, []
    timed = any(row.latency_ms is not None for row in report.own)  # otherwise it is for a device that is not here
    commands = [("Check it:", f"snapvit validate {shlex.quote(str(folder))}")] if timed else []
    commands += [("Look at it:", f"snapvit report {shlex.quote(str(folder))}")]
    if report.shipped is not None:
        found.append(words.to_ship(report.shipped, str(folder)))
        commands.insert(0, ("Run it:", f"python {shlex.quote(str(folder / RUN))} image.jpg"))
        if report.shipped.applications:
            there = f"python3 {RUN_ENGINE} --check, and with image.jpg, in a copy of {folder} beside its engines"
            commands.insert(1, ("On the GPU:", there))
    return found, [f"{title:11s} {command}" for title, command in commands]
