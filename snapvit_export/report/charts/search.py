"""Chart of the search for a ranking: the best fitness so far, and the mean of each generation."""

from __future__ import annotations

from ..data import InDepth
from .style import FAMILY_COLOURS, MUTED, Chart, Spec, axis, base, tips

HEIGHT = 240


def search(report: InDepth) -> Chart | None:
    """Draw fitness by evaluations; None if there was no search."""
    found = report.search
    if found is None:
        return None
    start = [] if found.start_fitness is None else [{"n": 0, "value": found.start_fitness, "which": "best so far"}]
    best = start + [{"n": g.evaluations, "value": g.best, "which": "best so far"} for g in found.history]
    mean = [
        {"n": g.evaluations, "value": g.mean, "which": "mean of a generation"}
        for g in found.history
        if g.mean is not None
    ]
    rows = [{**row, "at": str(row["n"]), "text": f"{row['value']:.5g}"} for row in best + mean]
    values = [value for g in found.history for value in (g.best, g.mean) if value is not None]
    values += [] if found.start_fitness is None else [found.start_fitness]
    y = axis(values, least=1e-6 * max(map(abs, values)))
    colour = {
        "field": "which",
        "type": "nominal",
        "scale": {"domain": ["best so far", "mean of a generation"], "range": [FAMILY_COLOURS[0], MUTED]},
        "legend": {"orient": "bottom", "title": None, "columns": 2},
    }
    encoding: Spec = {
        "x": {
            "field": "n",
            "type": "quantitative",
            "axis": {"title": "evaluations", "grid": False, "tickCount": 6, "tickMinStep": 1},
        },
        "y": {
            "field": "value",
            "type": "quantitative",
            "scale": y.scale,
            "axis": {"title": "fitness (less is better)", "values": list(y.ticks)},
        },
        "color": colour,
        "tooltip": tips(("which", "which"), ("at", "evaluations"), ("text", "fitness")),
    }
    layers: list[Spec] = [
        {
            "transform": [{"filter": {"field": "which", "equal": "best so far"}}],
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2.5},
            "encoding": {"tooltip": None},
        },
        {"mark": {"type": "point", "filled": True, "size": 30, "opacity": 0.9}, "encoding": {}},
    ]
    first, last = rows[0], best[-1]
    return Chart(
        name="search",
        title="Search for the ranking",
        caption="What the search minimises, without labels. The best so far, and the mean of each generation.",
        alt=f"Line from {first['text']} at the start to {last['value']:.5g} after {last['n']} evaluations.",
        spec=base(HEIGHT, data={"values": rows}, encoding=encoding, layer=layers),
        columns=("evaluations", "best so far", "mean of the generation"),
        rows=tuple(
            (str(g.evaluations), f"{g.best:.5g}", "–" if g.mean is None else f"{g.mean:.5g}") for g in found.history
        ),
    )
