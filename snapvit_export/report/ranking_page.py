"""The report of a ranking as one HTML file: what each block keeps, its scores, its search, and how it was made."""

from __future__ import annotations

from typing import Any

from ..visible import visible
from .charts.ranking import ranking_charts
from .ranking_data import RankingReport
from .ranking_text import PLAN_COLUMNS, facts_of, headline, notes, plan_cells, tiles
from .shell import brief, facts, plain_json, render, tight


def ranking_page(report: RankingReport) -> str:
    """Write the page of a ranking."""
    return render(
        "ranking_page.html",
        ranking_charts(report),
        side_by_side=("heads", "neurons", "scores-heads", "scores-neurons"),
        report=report,
        headline=tight(headline(report)),
        tiles=[dict(title=title, value=tight(value), detail=tight(detail)) for title, value, detail in tiles(report)],
        notes=notes(report),
        plans={"columns": PLAN_COLUMNS, "rows": [plan_cells(plan) for plan in report.plans]},
        provenance=[facts("How it was made", facts_of(report)), *_timings(report)],
        recipe=plain_json(brief(report.provenance)),
    )


def _timings(report: RankingReport) -> list[dict[str, Any]]:
    """Return the seconds of each phase, one part for every way in which parts of the run were made."""
    return [
        facts(
            f"Time in {timing.processes} process{'es' if timing.processes != 1 else ''} of {timing.threads} "
            f"thread{'s' if timing.threads != 1 else ''}, {visible(timing.device)}",
            [*((name, f"{value:.2f} s") for name, value in timing.seconds.items()), ("all", f"{timing.total:.2f} s")],
        )
        for timing in report.timings
    ]
