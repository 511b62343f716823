"""Chart of the proof: intervals against the budget, of the chosen variant, the next better one and single levers."""

from __future__ import annotations

from .. import text as words
from ..data import MeasurementRow, ReportData
from .style import BUDGET, FITS, INK, MUTED, Chart, Spec, axis, base, budget_layers, tips, with_halo

ROW = 56


def proof(report: ReportData) -> Chart | None:
    """Draw the intervals and the budget; None without a choice."""
    by_name = {row.name: row for row in report.looks}
    wanted = dict.fromkeys((report.next_denser, report.chosen, *(found.name for found in report.alternatives)))
    names = [name for name in wanted if name in by_name]
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
        "scale": {"domain": ["fits", "no", "unsure"], "range": [FITS, BUDGET, MUTED]},
        "legend": None,
    }
    compares = any(measured.fidelity is not None for measured in compared)
    tooltip = tips(
        ("name", "variant"),
        ("levers", "levers"),
        ("latency", "latency"),
        ("between", words.interval_title(report)),
        *([("same", f"{words.same_title(report)}, %"), ("divergence", "divergence")] if compares else []),
        ("fits", "verdict"),
    )
    alone = " Below them is the best that single levers reach alone." if report.alternatives else ""
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
        f"A variant fits when its whole bar meets the budget, and does not when none of it does.{alone}",
        alt=" ".join(
            f"{row['name']}: {row['latency']}, interval {row['between']}, verdict: {row['fits']}." for row in rows
        ),
        spec=spec,
        columns=tuple(tip["title"] for tip in tooltip),
        rows=tuple(tuple(row[tip["field"]] for tip in tooltip) for row in rows),
    )


def _row(measured: MeasurementRow, report: ReportData) -> Spec:
    return {
        "name": measured.name,
        "ms": measured.latency_ms,
        "low": measured.between_ms[0],
        "high": measured.between_ms[1],
        "latency": words.ms(measured.latency_ms),
        "between": f"{words.interval(measured.between_ms)} ms",
        "levers": measured.levers,
        "same": words.same(measured.fidelity),
        "divergence": words.divergence(measured.fidelity),
        "fits": measured.verdict,
        "verdict": f"{words.ms(measured.latency_ms)}{_role(measured, report)}",
    }


def _role(measured: MeasurementRow, report: ReportData) -> str:
    """Write why a candidate stands in the chart."""
    if measured.is_chosen:
        return ", chosen"
    alone = [found for found in report.alternatives if found.name == measured.name]
    return "".join(f", {words.lever_title(found)} alone" for found in alone)
