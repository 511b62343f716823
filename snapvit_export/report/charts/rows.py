"""Which variants have a row in the charts that draw one for each: all, or of very many those that matter and some.

A chart of 500 rows takes seconds to draw and nobody reads it; the table below the chart has every variant.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..data import InDepth

MOST_ROWS = 60


def drawn(report: InDepth, names: Sequence[str]) -> list[str]:
    """Return the variants to draw, in their order: of very many the dense, the chosen, the next better, and others."""
    if len(names) <= MOST_ROWS:
        return list(names)
    main = report.main
    sure = [name for name in names if name in main][:MOST_ROWS]
    others = [name for name in names if name not in sure]
    room = MOST_ROWS - len(sure)
    wanted = {*sure, *(others[i * len(others) // room] for i in range(room))}
    return [name for name in names if name in wanted]


def left_out(drawn: int, there: int, noun: str = "variant") -> str:
    """Write what a caption says of variants that are not drawn; nothing if all are."""
    return "" if drawn == there else f" {drawn} of the {there} {noun}s, at equal steps; the table has all of them."
