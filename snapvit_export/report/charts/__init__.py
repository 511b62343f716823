"""The plots of a report as Vega-Lite specifications: plain dicts, one file for each plot.

No name, label or path ever becomes part of an expression or a field name: they are values of rows under fixed fields.
"""

from __future__ import annotations

from ..data import ReportData
from .deadlines import deadlines
from .depth import depth
from .latencies import latencies
from .pareto import pareto
from .proof import proof
from .rounds import rounds
from .search import search
from .style import Chart
from .widths import widths


def all_charts(report: ReportData) -> list[Chart]:
    """Return the charts that there is data for, in the order of the page."""
    kinds = (widths(report, "heads"), widths(report, "neurons"))
    found = (
        pareto(report),
        proof(report),
        *kinds,
        latencies(report),
        deadlines(report.trace),
        search(report),
        rounds(report.rounds, "gflops"),
        rounds(report.rounds, "params"),
        depth(report),
    )
    return [chart for chart in found if chart is not None]
