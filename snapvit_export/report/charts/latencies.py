"""Strip plot of all runs of each variant: a mark for a run, a box between quartiles, a line at the median."""

from __future__ import annotations

from .. import text as words
from ..data import ReportData, Spread
from .rows import drawn, left_out
from .style import FAMILY_COLOURS, INK, Chart, Spec, axis, base, budget_layers, tips

ROW, SMALL_ROW, MANY = 30, 18, 16
_NAMES: Spec = {"title": None, "ticks": False, "domain": False, "grid": False, "labelLimit": 90}
_TIPS = tips(("name", "variant"), ("median", "median"), ("middle", "middle half"), ("far", "99th percentile"))


def latencies(report: ReportData) -> Chart | None:
    """Draw the distribution of the runs; None if there are no samples."""
    if not report.spreads:
        return None
    spreads = {name: report.spreads[name] for name in drawn(report, list(report.spreads))}
    ends = [ms for spread in spreads.values() for ms in (spread.p1_ms, spread.p99_ms)]
    x = axis(ends, least=0.05 * max(ends), pad=0.04, floor=0.0)
    runs = [
        {"name": name, "ms": ms} for name, spread in spreads.items() for ms in spread.shown_ms if x.low <= ms <= x.high
    ]
    boxes = [_box(name, spread) for name, spread in spreads.items()]
    row = ROW if len(spreads) <= MANY else SMALL_ROW
    y = {"field": "name", "type": "nominal", "sort": None, "scale": {"domain": list(spreads)}, "axis": _NAMES}
    scale = {
        "type": "quantitative",
        "scale": x.scale,
        "axis": {"values": list(x.ticks), "title": "latency of a run, ms"},
    }
    colour = FAMILY_COLOURS[0]
    spec = base(
        row * len(spreads),
        layer=[
            {
                "data": {"values": runs},
                "mark": {"type": "tick", "color": colour, "opacity": 0.28, "thickness": 1.2, "size": row * 0.62},
                "encoding": {"x": {"field": "ms", **scale}, "y": y},
            },
            {
                "data": {"values": boxes},
                "mark": {"type": "bar", "color": colour, "opacity": 0.5, "height": row * 0.3, "cornerRadius": 2},
                "encoding": {"x": {"field": "p25", **scale}, "x2": {"field": "p75"}, "y": y, "tooltip": _TIPS},
            },
            {
                "data": {"values": boxes},
                "mark": {"type": "tick", "color": INK, "thickness": 2, "size": row * 0.62},
                "encoding": {"x": {"field": "p50", **scale}, "y": y, "tooltip": _TIPS},
            },
            *budget_layers(report.budget_ms, x),
        ],
    )
    return Chart(
        name="latencies",
        title="Latency of single runs",
        caption="A thin mark is a run as the clock saw it, the box holds the middle half, the dark line is the median. "
        "Variants that were timed at other moments saw another machine drift, which the intervals allow for. "
        "The slowest runs, beyond the 99th percentile, are left out of the plot."
        + left_out(len(spreads), len(report.spreads)),
        alt=f"Strip plot of the runs of {len(spreads)} variants; the table has their percentiles.",
        spec=spec,
        columns=("variant", "runs", "1st percentile", "quartile", "median", "quartile ", "99th percentile"),
        rows=tuple(
            (name, str(s.runs), *(words.ms(ms) for ms in (s.p1_ms, s.p25_ms, s.p50_ms, s.p75_ms, s.p99_ms)))
            for name, s in report.spreads.items()
        ),
    )


def _box(name: str, spread: Spread) -> Spec:
    return {
        "name": name,
        "p25": spread.p25_ms,
        "p50": spread.p50_ms,
        "p75": spread.p75_ms,
        "median": words.ms(spread.p50_ms),
        "middle": f"{words.interval((spread.p25_ms, spread.p75_ms))} ms",
        "far": words.ms(spread.p99_ms),
    }
