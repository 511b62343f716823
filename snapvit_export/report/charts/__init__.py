"""The plots of a report as Vega-Lite specifications: plain dicts, one file for each plot.

No name, label or path ever becomes part of an expression or a field name: they are values of rows under fixed fields.
"""

from __future__ import annotations

from ..data import Numbers
from .depth import depth
from .latencies import latencies
from .look import Chart
from .pareto import pareto
from .proof import proof
from .search import search
from .widths import widths


def all_charts(numbers: Numbers) -> list[Chart]:
    """Those that there are numbers for, in the order of the page."""
    kinds = (widths(numbers, "heads"), widths(numbers, "neurons"))
    found = (pareto(numbers), proof(numbers), *kinds, latencies(numbers), search(numbers), depth(numbers))
    return [chart for chart in found if chart is not None]
