"""The plots of the report of a ranking: those of a family that need no variant, and the scores."""

from __future__ import annotations

from ..ranking_data import RankingReport
from .depth import depth
from .rounds import rounds
from .scores import scores
from .search import search
from .style import Chart
from .widths import widths


def ranking_charts(report: RankingReport) -> list[Chart]:
    """Return the charts that there is data for, in the order of the page."""
    found = (
        widths(report, "heads"),
        widths(report, "neurons"),
        depth(report),
        search(report),
        rounds(report.rounds, "gflops"),
        rounds(report.rounds, "params"),
        scores(report, "heads"),
        scores(report, "neurons"),
    )
    return [chart for chart in found if chart is not None]
