"""Chart of the proof: the chosen variant and the next denser one with their intervals, against the budget."""

from __future__ import annotations

from .. import text as words
from ..data import MeasurementRow, ReportData
from .style import BUDGET, FITS, INK, Chart, Spec, axis, base, budget_layers, tips, with_halo

ROW = 56


def proof(report: ReportData) -> Chart | None:
    """Draw both intervals and the budget; None without a choice."""
    by_name = {row.name: row for row in report.looks}
    names = [name for name in (report.next_denser, report.chosen) if name in by_name]
    if report.budget_ms is None or report.chosen not in by_name:
        return None
    compared = [by_name[name] for name in names if name is not None]
    ends = [ms for measured in compared for ms in measured.between_ms] + [report.budget_ms]
    x = axis(ends, least=0.02 * report.budget_ms, pad=0.18, floor=0.0)
    rows = [_row(measured, report) for measured in compared]
    position = {
        "type": "quantitative",
        "scale": x.scale,
        "axis": {"values": list(x.ticks), "title": f"latency {report.at}, ms", "grid": False},
    }
    y = {"field": "name", "type": "nominal", "sort": None, "axis": {"title": None, "ticks": False, "domain": False}}
    fits = {
        "field": "fits",
        "type": "nominal",
        "scale": {"domain": ["fits", "does not surely fit"], "range": [FITS, BUDGET]},
        "legend": None,
    }
    tooltip = tips(
        ("name", "variant"), ("latency", "latency"), ("between", words.interval_title(report)), ("fits", "verdict")
    )
    spec = base(
        ROW * len(rows),
        data={"values": rows},
        encoding={"y": y, "tooltip": tooltip},
        layer=[
            {
                "mark": {"type": "rule", "strokeWidth": 7, "opacity": 0.55, "strokeCap": "round"},
                "encoding": {"x": {"field": "low", **position}, "x2": {"field": "high"}, "color": fits},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
                "encoding": {"x": {"field": "ms", **position}, "color": fits},
            },
            *budget_layers(report.budget_ms, x),
            *with_halo(
                {
                    "mark": {"type": "text", "dy": -15, "color": INK, "fontSize": 12},
                    "encoding": {"x": {"field": "ms", **position}, "text": {"field": "verdict", "type": "nominal"}},
                }
            ),
        ],
    )
    return Chart(
        name="proof",
        title="Proof of the choice",
        caption="The variants on both sides of the budget, timed side by side; points are latencies corrected for "
        f"machine drift, bars their {words.interval_title(report)}s. "
        "A variant fits when its whole bar meets the budget.",
        alt=" ".join(f"{row['name']}: {row['latency']}, interval {row['between']}, {row['fits']}." for row in rows),
        spec=spec,
        columns=("variant", f"latency {report.at}", words.interval_title(report), "verdict"),
        rows=tuple((row["name"], row["latency"], row["between"], row["fits"]) for row in rows),
    )


def _row(measured: MeasurementRow, report: ReportData) -> Spec:
    return {
        "name": measured.name,
        "ms": measured.latency_ms,
        "low": measured.between_ms[0],
        "high": measured.between_ms[1],
        "latency": words.ms(measured.latency_ms),
        "between": f"{words.interval(measured.between_ms)} ms",
        "fits": "fits" if measured.fits else "does not surely fit",
        "verdict": f"{words.ms(measured.latency_ms)}{', chosen' if measured.name == report.chosen else ''}",
    }
