"""Chart of quality against latency: all variants with intervals, the Pareto front, the budget, the chosen one.

Names of points are placed beside them, never over each other or over a point: greedily, the most important first. A
name that finds no free place is left out, since the tooltip and the table have it. Places are computed for the width of
a phone: what is free there is free everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import text as words
from ..data import MeasurementRow, Point, ReportData
from .style import (
    BUDGET,
    FAMILY_COLOURS,
    FAMILY_SHAPES,
    FITS,
    INK,
    MUTED,
    PAPER,
    Axis,
    Chart,
    Spec,
    axis,
    base,
    budget_layers,
    tips,
    with_halo,
)

HEIGHT = 380
LABEL = 18  # letters of a name beside its point
TIPS = (
    ("name", "variant"),
    ("levers", "levers"),
    ("family", "family"),
    ("latency", "latency"),
    ("between", "interval"),
    ("p90", "p90, last timing run"),
    ("quality", "quality"),
    ("same", "same answer"),
    ("divergence", "divergence"),
    ("kept", "FLOPs kept"),
    ("params", "parameters"),
    ("gflops", "GFLOPs (GMACs)"),
    ("size", "size"),
    ("precision", "precision"),
    ("sparsity", "sparsity"),
    ("tokens", "tokens"),
    ("beaten", "dominated by"),
)
WIDTH, LABEL_HEIGHT = 270, 340  # pixels of the plot that labels are placed in
LETTER, LINE = 7.2, 14  # of a label
PLACES = (("left", 9, -9), ("right", -9, -9), ("left", 9, 11), ("right", -9, 11), ("center", 0, -17), ("center", 0, 18))
DOT = 7
LEAST_HEIGHT, ERRORS_HIGH = 0.05, 8  # of the upward axis: of the whole scale, and in standard errors
FAR = 20  # above a point whose label finds no free place and must be there
MOST_LABELS = 100  # that a place is looked for, beside those of the chosen and the dense
_ABOVE = {"titleAnchor": "start", "titleX": 0, "titleY": -22, "titleBaseline": "bottom", "titlePadding": 0}


@dataclass(frozen=True)
class PlacedLabel:
    """A label and its offset from its point."""

    index: int
    align: str
    dx: int
    dy: int


def place(points: Sequence[tuple[float, float, str]], order: Sequence[int], sure: int = 0) -> list[PlacedLabel]:
    """Place the labels of points (x, y from 0 to 1, text), tried in that order; the first `sure` always get a place."""
    dots = [_around(x * WIDTH, (1 - y) * LABEL_HEIGHT) for x, y, _ in points]
    taken: list[tuple[float, float, float, float]] = []
    found = []
    for rank, index in enumerate(order):
        x, y, text = points[index]
        others = [dot for i, dot in enumerate(dots) if i != index] + taken
        for align, dx, dy in PLACES:
            box = _box(x * WIDTH + dx, (1 - y) * LABEL_HEIGHT + dy, align, len(text) * LETTER)
            if box[0] >= 0 and box[2] <= WIDTH and box[1] >= -4 and not any(_overlap(box, other) for other in others):
                taken.append(box)
                found.append(PlacedLabel(index, align, dx, dy))
                break
        else:
            if rank < sure:
                align = "left" if x < 0.3 else "right" if x > 0.7 else "center"
                taken.append(_box(x * WIDTH, (1 - y) * LABEL_HEIGHT - FAR, align, len(text) * LETTER))
                found.append(PlacedLabel(index, align, 0, -FAR))
    return found


def _around(x: float, y: float) -> tuple[float, float, float, float]:
    return x - DOT, y - DOT, x + DOT, y + DOT


def _box(x: float, y: float, align: str, width: float) -> tuple[float, float, float, float]:
    left = x - {"left": 0.0, "center": width / 2, "right": width}[align]
    return left, y - LINE / 2, left + width, y + LINE / 2


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def pareto(report: ReportData) -> Chart | None:
    """Draw all variants of the report; None if nothing was timed, or no quality is known to draw against it."""
    shown = [p for p in report.points if p.latency_ms is not None and _y(p, report) is not None]
    if not shown or report.measure is None:
        return None
    timed = _only_timed(report)
    x, y = _axes(report, [*shown, *timed])
    title = _y_title(report)
    short = title.split(",")[0]
    rows = [_row(point, report) for point in shown]
    faint = [_faint_row(row, report) for row in timed]
    spec = base(
        HEIGHT,
        data={"values": rows},
        encoding={
            "x": {
                "field": "x",
                "type": "quantitative",
                "scale": x.scale,
                "axis": {"values": list(x.ticks), "title": f"latency {report.at}, ms", "grid": False},
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": y.scale,
                "axis": {"values": list(y.ticks), "title": title, "titleAngle": 0, "titleAlign": "left", **_ABOVE},
            },
        },
        layer=[
            *_budget_region(report, x),
            *budget_layers(report.budget_ms, x),
            *_faint(faint),
            *_front(rows),
            *_bars(report),
            *_dots(report),
            *_names(report, shown, rows, x, y),
            _hover(report),
        ],
    )
    return Chart(
        name="pareto",
        title=f"{'Fidelity' if report.by_fidelity else short[0].upper() + short[1:]} against latency",
        caption=_caption(report, shown),
        alt=f"Scatter plot of {len(shown)} variants. {words.headline(report)}",
        spec=spec,
        columns=("variant", "family", f"latency {report.at}", words.interval_title(report), short),
        rows=tuple((r["name"], r["family"], r["latency"], r["between"], r["quality"]) for r in [*rows, *faint]),
    )


def _only_timed(report: ReportData) -> list[MeasurementRow]:
    """Return the candidates that were timed for the choice and not kept: single levers, precisions, neighbours."""
    kept = {point.name for point in report.own}
    return [row for row in report.looks if row.name not in kept and row.quality is not None]


def _faint_row(row: MeasurementRow, report: ReportData) -> Spec:
    value, error = (row.quality or 0.0) * _unit(report), (row.error or 0.0) * _unit(report)
    return {
        "x": row.latency_ms,
        "low": row.between_ms[0],
        "high": row.between_ms[1],
        "y": value,
        "down": value - error,
        "up": min(value + error, _unit(report)),
        "name": row.name,
        "family": report.families[0],
        "levers": row.levers,
        "latency": words.ms(row.latency_ms),
        "between": f"{words.interval(row.between_ms)} ms",
        "quality": words.quality(report.measure, row.quality, row.error),
    }


def _faint(rows: list[Spec]) -> list[Spec]:
    """Draw what was timed and not kept: smaller, grey, with its name in the tooltip."""
    if not rows:
        return []
    data = {"values": rows}
    tooltip = tips(("name", "timed, not kept"), ("levers", "levers"), ("latency", "latency"), ("quality", "quality"))
    return [
        {
            "data": data,
            "mark": {"type": "rule", "strokeWidth": 1, "opacity": 0.35, "color": MUTED},
            "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
        },
        {
            "data": data,
            "mark": {"type": "rule", "strokeWidth": 1, "opacity": 0.35, "color": MUTED},
            "encoding": {"y": {"field": "down", "type": "quantitative"}, "y2": {"field": "up"}},
        },
        {
            "data": data,
            "mark": {"type": "point", "filled": True, "shape": "circle", "size": 45, "opacity": 0.8, "color": MUTED},
            "encoding": {"tooltip": tooltip},
        },
    ]


def _y(point: Point | MeasurementRow, report: ReportData) -> float | None:
    return None if point.quality is None else point.quality * _unit(report)


def _unit(report: ReportData) -> float:
    return 1.0 if report.measure == "cosine" else 100.0


def _y_title(report: ReportData) -> str:
    title = words.measure_title(report)
    return title if report.measure == "cosine" else f"{title}, %"


def _axes(report: ReportData, shown: Sequence[Point | MeasurementRow]) -> tuple[Axis, Axis]:
    """Return both axes; upwards so long that a standard error is little of it, or noise would look like a trade."""
    xs = [ms for point in shown for ms in point.between_ms or () if ms is not None]
    xs += [report.budget_ms] if report.budget_ms is not None else []
    ys = []
    for point in shown:
        value, error = _y(point, report) or 0.0, (point.error or 0.0) * _unit(report)
        ys += [value - error, min(value + error, _unit(report))]
    largest = max((point.error or 0.0) for point in shown) * _unit(report)
    least = max(LEAST_HEIGHT * _unit(report), ERRORS_HIGH * largest)
    return axis(xs, least=0.05 * max(xs), floor=0.0), axis(ys, least=least, pad=0.12, most=_unit(report))


def _row(point: Point, report: ReportData) -> Spec:
    value = _y(point, report) or 0.0
    error = (point.error or 0.0) * _unit(report)
    low, high = point.between_ms or (point.latency_ms, point.latency_ms)
    return {
        "x": point.latency_ms,
        "low": low,
        "high": high,
        "y": value,
        "down": value - error,
        "up": min(value + error, _unit(report)),
        "family": point.family,
        "name": point.name,
        "levers": point.levers,
        "label": point.name if len(point.name) <= LABEL else f"{point.name[: LABEL - 1]}…",
        "latency": words.ms(point.latency_ms),
        "between": f"{words.interval(point.between_ms)} ms",
        "p90": words.ms(point.p90_ms),
        "quality": words.quality(report.measure, point.quality, point.error),
        "same": f"{words.same(point.fidelity)} %",
        "divergence": words.divergence(point.fidelity),
        "kept": words.share(point.flops_ratio),
        "params": words.millions(point.params),
        "gflops": words.gflops(point.flops),
        "size": words.megabytes(point.size_bytes),
        "precision": point.precision,
        "sparsity": f"{point.sparsity:.3f}",
        "tokens": f"{words.tokens(point.tokens)}, of {words.pixels(point.image_size)} pixels",
        "beaten": point.dominated_by or "none",
        "dominated": point.dominated_by is not None,
        "chosen": point.is_chosen,
        "order": point.latency_ms,
    }


def _by_family(report: ReportData, values: tuple[str, ...]) -> Spec:
    """Encode a colour or a shape for each family, with one legend for all layers if there are several."""
    count = len(report.families)
    return {
        "field": "family",
        "type": "nominal",
        "scale": {"domain": list(report.families), "range": [values[i % len(values)] for i in range(count)]},
        "legend": {"orient": "bottom", "title": None, "columns": 1, "symbolOpacity": 1} if count > 1 else None,
    }


def _budget_region(report: ReportData, x: Axis) -> list[Spec]:
    """Shade the region that meets the budget."""
    if report.budget_ms is None:
        return []
    data = {"values": [{"from": x.low, "to": report.budget_ms}]}
    ends = {"x": {"field": "from", "type": "quantitative"}, "x2": {"field": "to"}, "y": {"value": 0}}
    return [
        {
            "data": data,
            "mark": {"type": "rect", "color": FITS, "opacity": 0.07},
            "encoding": {**ends, "y2": {"value": HEIGHT}},
        }
    ]


def _front(rows: list[Spec]) -> list[Spec]:
    """Join the variants that are not dominated; families of one such variant have no line."""
    kept = [row for row in rows if not row["dominated"]]
    if len(kept) < 2:
        return []
    encoding = {"order": {"field": "order", "type": "quantitative"}, "detail": {"field": "family", "type": "nominal"}}
    mark = {"type": "line", "color": MUTED, "strokeWidth": 1.5, "opacity": 0.7}
    return [{"data": {"values": kept}, "mark": mark, "encoding": encoding}]


def _bars(report: ReportData) -> list[Spec]:
    colour = _by_family(report, FAMILY_COLOURS)
    faint = {"type": "rule", "strokeWidth": 1.5, "opacity": 0.45}
    across: Spec = {
        "mark": faint,
        "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}, "color": colour},
    }
    up: Spec = {
        "mark": faint,
        "encoding": {"y": {"field": "down", "type": "quantitative"}, "y2": {"field": "up"}, "color": colour},
    }
    return [across, up]


def _dots(report: ReportData) -> list[Spec]:
    """Draw points: full if not dominated, hollow if dominated, and a ring around the chosen one."""
    colour, shape = _by_family(report, FAMILY_COLOURS), _by_family(report, FAMILY_SHAPES)
    hollow: Spec = {
        "transform": [{"filter": {"field": "dominated", "equal": True}}],
        "mark": {"type": "point", "filled": False, "fill": PAPER, "size": 75, "strokeWidth": 2, "opacity": 1},
        "encoding": {"color": colour, "shape": shape},
    }
    full: Spec = {
        "transform": [{"filter": {"field": "dominated", "equal": False}}],
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
        "encoding": {"color": colour, "shape": shape},
    }
    ring: Spec = {
        "transform": [{"filter": {"field": "chosen", "equal": True}}],
        "mark": {"type": "point", "filled": False, "color": INK, "size": 330, "strokeWidth": 2, "opacity": 1},
        "encoding": {},
    }
    return [hollow, full, ring]


def _names(report: ReportData, shown: list[Point], rows: list[Spec], x: Axis, y: Axis) -> list[Spec]:
    """Write the names of the chosen one, the dense ones, and of the others where there is room."""
    spots = [(x.at(row["x"]), y.at(row["y"]), row["label"]) for row in rows]
    rank = sorted(range(len(shown)), key=lambda i: (not shown[i].is_chosen, not shown[i].is_dense, i))
    sure = sum(point.is_chosen or point.is_dense for point in shown)
    step = 1 + (len(shown) - sure) // MOST_LABELS  # of very many only some: no more find a place
    rank = rank[:sure] + rank[sure::step]
    layers: list[Spec] = []
    places = place(spots, rank, sure=sum(point.is_chosen for point in shown))
    for align, dx, dy in dict.fromkeys((p.align, p.dx, p.dy) for p in places):
        here = [p.index for p in places if (p.align, p.dx, p.dy) == (align, dx, dy)]
        for bold in (True, False):
            values = [rows[i] for i in here if shown[i].is_chosen is bold]
            if not values:
                continue
            far = 5 if bold else 0  # beyond the ring
            mark = {
                "type": "text",
                "align": align,
                "baseline": "middle",
                "dx": dx + (far if dx > 0 else -far if dx < 0 else 0),
                "dy": dy + (far if dy > 0 else -far),
                "color": INK if bold else MUTED,
                "fontWeight": 700 if bold else 400,
            }
            text = {"text": {"field": "label", "type": "nominal"}}
            layers += with_halo({"data": {"values": values}, "mark": mark, "encoding": text})
    return layers


def _hover(report: ReportData) -> Spec:
    """Draw large invisible points on top, which are easy to hit, also with a thumb."""
    fields = [(name, words.measure_title(report) if name == "quality" else title) for name, title in TIPS]
    if len(report.families) == 1:
        fields = [pair for pair in fields if pair[0] != "family"]
    compares = any(point.fidelity is not None for point in report.points)
    left_out = {"same"} if report.by_fidelity else {"same", "divergence"} if not compares else set()
    fields = [(name, words.same_title(report) if name == "same" else title) for name, title in fields]
    fields = [pair for pair in fields if pair[0] not in left_out]
    return {
        "mark": {"type": "point", "filled": True, "shape": "circle", "size": 450, "opacity": 0, "color": BUDGET},
        "encoding": {"tooltip": tips(*fields)},
    }


def _caption(report: ReportData, shown: list[Point]) -> str:
    parts = [f"Bars across are {words.interval_title(report)}s of the latency"]
    parts[0] += f", bars upwards one standard error of {words.measure_title(report)}"
    parts[0] += f" on {report.judged}" if report.judged else ""
    if _only_timed(report):
        parts.append("Small and grey: timed on the way and not kept, such as single levers")
    if any(p.dominated_by for p in shown):
        parts.append("Hollow: another variant is as fast and as good or better. The line joins the others")
    if any(p.is_chosen for p in shown):
        parts.append("The ring is the chosen variant")
    if report.budget_ms is not None:
        parts.append("Left of the dashed line is within the budget")
    return ". ".join(parts) + "."
