"""Heat strips of the damage and divergence of every attention and MLP, along the depth of the model."""

from __future__ import annotations

from collections.abc import Sequence

from ..data import InDepth, SubLayerRow
from .style import HEAT, PAPER, Chart, Spec, base, tips

MEASURES = ("damage", "divergence")


def depth(report: InDepth) -> Chart | None:
    """Draw damage and divergence of each sub-layer; None if they were not measured."""
    found = report.sublayers
    if not found:
        return None
    rows = [row for measure in MEASURES for row in _rows(found, measure)]
    if not rows:
        return None
    legend = {
        "title": "share of the largest",
        "orient": "top",
        "direction": "horizontal",
        "gradientLength": 160,
        "gradientThickness": 10,
        "format": ".0%",
    }
    shade = {
        "field": "share",
        "type": "quantitative",
        "scale": {"type": "quantize", "domain": [0, 1], "range": list(HEAT)},
        "legend": legend,
    }
    plain: Spec = {"ticks": False, "domain": False}
    fields = (
        ("block_text", "block"),
        ("part", "part"),
        ("divergence", "divergence"),
        ("turned", "turned"),
        ("damage", "damage"),
    )
    spec = base(
        26 * len({row["strip"] for row in rows}),
        data={"values": rows},
        mark={"type": "rect", "stroke": PAPER, "strokeWidth": 1.5},
        encoding={
            "x": {"field": "block", "type": "ordinal", "axis": {"title": "block", "labelAngle": 0, **plain}},
            "y": {
                "field": "strip",
                "type": "nominal",
                "sort": None,
                "axis": {"title": None, "labelLimit": 160, **plain},
            },
            "color": shade,
            "tooltip": tips(*fields),
        },
    )
    worst = max(found, key=lambda item: item.damage or item.divergence or 0.0)
    return Chart(
        name="sublayers",
        title="Effect of each sub-layer",
        caption="Damage: the output divergence from the dense model when one attention or MLP is replaced by its mean "
        "output. Divergence: the length of what it adds, against that of the stream.",
        alt=f"Strip over {len(found)} sub-layers. The most is lost without the {worst.part} of block {worst.block}.",
        spec=spec,
        columns=("block", "part", "divergence", "turned", "damage"),
        rows=tuple((str(s.block), s.part, _text(s.divergence), _text(s.turned), _text(s.damage)) for s in found),
    )


def _rows(found: Sequence[SubLayerRow], measure: str) -> list[Spec]:
    """Return a strip for attention and one for the MLPs, as shares of the largest value; none without values."""
    values = [getattr(item, measure) for item in found]
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return []
    return [
        {
            "block": item.block,
            "block_text": str(item.block),
            "part": item.part,
            "strip": f"{item.part}, {measure}",
            "share": max(0.0, (value or 0.0) / most),
            **{name: _text(getattr(item, name)) for name in ("divergence", "turned", "damage")},
        }
        for item, value in zip(found, values)
    ]


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
