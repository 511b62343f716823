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
    limit, unit = (report.budget_mj, "mJ") if report.budget_ms is None else (report.budget_ms, "ms")
    if limit is None or report.chosen not in by_name:
        return None
    compared = [by_name[name] for name in names if name is not None]
    ends = [value for measured in compared for value in _interval(measured, unit)[1:]] + [limit]
    x = axis(ends, least=0.02 * limit, pad=0.18, floor=0.0)
    rows = [_row(measured, report, unit) for measured in compared]
    what = f"latency {report.at}" if unit == "ms" else "energy of a run"
    points = "latencies corrected for machine drift" if unit == "ms" else "energies of a run"
    position = {
        "type": "quantitative",
        "scale": x.scale,
        "axis": {"values": list(x.ticks), "title": f"{what}, {unit}", "grid": False},
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
        ("latency", "latency" if unit == "ms" else "energy"),
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
            *budget_layers(limit, x, unit=unit),
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
        caption=f"The variants on both sides of the budget, timed side by side; points are {points}, bars their "
        f"{words.interval_title(report)}s. "
        f"A variant fits when its whole bar meets the budget, and does not when none of it does.{alone}",
        alt=" ".join(
            f"{row['name']}: {row['latency']}, interval {row['between']}, verdict: {row['fits']}." for row in rows
        ),
        spec=spec,
        columns=tuple(tip["title"] for tip in tooltip),
        rows=tuple(tuple(row[tip["field"]] for tip in tooltip) for row in rows),
    )


def _interval(measured: MeasurementRow, unit: str) -> tuple[float, float, float]:
    """Return what the budget limits, with its interval: milliseconds or millijoules."""
    if unit == "ms":
        return measured.latency_ms, *measured.between_ms
    energy = measured.energy_mj or 0.0
    return energy, *(measured.energy_between_mj or (energy, energy))


def _row(measured: MeasurementRow, report: ReportData, unit: str) -> Spec:
    value, low, high = _interval(measured, unit)
    text = words.ms(value) if unit == "ms" else words.energy(value, None)
    return {
        "name": measured.name,
        "ms": value,
        "low": low,
        "high": high,
        "latency": text,
        "between": f"{words.interval((low, high))} {unit}",
        "levers": measured.levers,
        "same": words.same(measured.fidelity),
        "divergence": words.divergence(measured.fidelity),
        "fits": measured.verdict,
        "verdict": f"{text}{_role(measured, report)}",
    }


def _role(measured: MeasurementRow, report: ReportData) -> str:
    """Write why a candidate stands in the chart."""
    if measured.is_chosen:
        return ", chosen"
    alone = [found for found in report.alternatives if found.name == measured.name]
    return "".join(f", {words.lever_title(found)} alone" for found in alone)
