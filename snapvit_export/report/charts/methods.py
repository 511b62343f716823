"""Chart of `snapvit compare`: quality over size, a line per method with standard errors, and the dense model."""

from __future__ import annotations

from typing import Any

from ...evaluate.comparison import Comparison, MethodResult
from ...family.evaluation import TITLES
from ...visible import visible
from .. import text as words
from .style import FAMILY_COLOURS, FAMILY_SHAPES, MUTED, Chart, Spec, axis, base, legend_below, tips

HEIGHT = 380
APART = 0.004  # of the axis, between methods at one size
AXES = {"sparsity": "sparsity: prunable parameters that are cut, %", "flops": "FLOPs of the blocks that are kept, %"}
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])  # after the colours have been used once, lines differ in their dashes


def methods(comparison: Comparison) -> Chart:
    """Draw the results of a comparison."""
    measure = comparison.measure
    unit = 1.0 if measure == "cosine" else 100.0
    rows = [_row(comparison, c, unit) for c in comparison.contestants]
    dense = (comparison.dense.value(measure) or 0.0) * unit
    names = list(dict.fromkeys(row["method"] for row in rows))
    x = axis([row["x"] for row in rows], least=5.0)
    for row in rows:  # side by side, so that bars at one size can be distinguished
        row["x"] += (names.index(row["method"]) - (len(names) - 1) / 2) * APART * (x.high - x.low)
    y = axis([*(row[end] for row in rows for end in ("down", "up")), dense], least=0.02 * unit, floor=0.0, most=unit)
    title = TITLES[measure] + ("" if measure == "cosine" else ", %")
    legend = legend_below(names)
    colour = _by_method(names, list(FAMILY_COLOURS), legend)
    shape = _by_method(names, list(FAMILY_SHAPES), legend)
    dashes = _by_method(names, [dash for dash in DASHES for _ in FAMILY_COLOURS], None)
    tip = tips(("method", "method"), ("size", comparison.axis), ("quality", TITLES[measure]), ("cut", "correction"))
    spec = base(
        HEIGHT,
        data={"values": rows},
        encoding={
            "x": {
                "field": "x",
                "type": "quantitative",
                "scale": {**x.scale, "reverse": comparison.axis == "flops"},
                "axis": {"values": list(x.ticks), "title": AXES[comparison.axis], "grid": False},
            },
            "y": {
                "field": "y",
                "type": "quantitative",
                "scale": y.scale,
                "axis": {"values": list(y.ticks), "title": title},
            },
        },
        layer=[
            *_dense(dense),
            {"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": {"color": colour, "strokeDash": dashes}},
            {
                "mark": {"type": "rule", "opacity": 0.45, "strokeWidth": 1.5},
                "encoding": {"y": {"field": "down", "type": "quantitative"}, "y2": {"field": "up"}, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                "encoding": {"color": colour, "shape": shape, "tooltip": tip},
            },
        ],
    )
    return Chart(
        name="compare",
        title=f"{visible(comparison.model)}, pruned by {len(names)} methods",
        caption=f"On {comparison.dense.images} images of {visible(comparison.dense.source)}; bars are standard errors.",
        alt=f"Lines of {len(names)} pruning methods over size: {', '.join(names)}.",
        spec=spec,
        columns=("method", comparison.axis, TITLES[measure]),
        rows=tuple((row["method"], row["size"], row["quality"]) for row in rows),
    )


def _by_method(names: list[str], values: list[Any], legend: Spec | None) -> Spec:
    chosen = [values[i % len(values)] for i in range(len(names))]
    return {
        "field": "method",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": names, "range": chosen},
        "legend": legend,
    }


def _dense(value: float) -> list[Spec]:
    data = {"values": [{"dense": value, "text": "dense"}]}
    place = {"y": {"field": "dense", "type": "quantitative"}, "tooltip": None}
    rule: Spec = {"mark": {"type": "rule", "color": MUTED, "strokeDash": [6, 4]}, "encoding": {**place, "x": None}}
    text: Spec = {
        "mark": {"type": "text", "color": MUTED, "align": "left", "baseline": "bottom", "dx": 4, "dy": -3},
        "encoding": {**place, "x": {"value": 0}, "text": {"field": "text", "type": "nominal"}},
    }
    return [{"data": data, **layer} for layer in (rule, text)]


def _row(comparison: Comparison, result: MethodResult, unit: float) -> Spec:
    measure = comparison.measure
    value = (result.evaluation.value(measure) or 0.0) * unit
    error = result.evaluation.error(measure) * unit
    size = result.sparsity if comparison.axis == "sparsity" else result.flops_ratio
    return {
        "method": visible(result.recipe),
        "x": 100 * size,
        "y": value,
        "down": max(0.0, value - error),
        "up": min(unit, value + error),
        "size": f"{100 * size:.1f} %",
        "quality": words.quality(measure, result.evaluation.value(measure), result.evaluation.error(measure)),
        "cut": result.correction or "none",
    }
