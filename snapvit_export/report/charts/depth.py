"""What every attention and MLP does, along the depth of the model: a strip, if the recipe recorded it."""

from __future__ import annotations

from ..numbers import Numbers, SubLayer
from .look import HEAT, PAPER, Chart, Spec, base, tips


def depth(numbers: Numbers) -> Chart | None:
    """How far the outputs move when one sub-layer is left out; None if nobody looked."""
    found = numbers.sublayers
    if not found:
        return None
    most = max((item.divergence or 0.0 for item in found), default=0.0) or 1.0
    rows = [_row(item, most) for item in found]
    legend = {
        "title": "divergence, of the largest",
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
    fields = ("block_text", "block"), ("part", "part"), ("divergence", "divergence"), ("turned", "turned"), _DAMAGE
    spec = base(
        26 * len({row["part"] for row in rows}),
        data={"values": rows},
        mark={"type": "rect", "stroke": PAPER, "strokeWidth": 1.5},
        encoding={
            "x": {"field": "block", "type": "ordinal", "axis": {"title": "block", "labelAngle": 0, **plain}},
            "y": {"field": "part", "type": "nominal", "sort": None, "axis": {"title": None, **plain}},
            "color": shade,
            "tooltip": tips(*fields),
        },
    )
    worst = max(found, key=lambda item: item.divergence or 0.0)
    return Chart(
        name="sublayers",
        title="What each sub-layer does",
        caption="How far the dense model's answers move when one attention or MLP is left out. Pale: hardly used.",
        says=f"Strip over {len(found)} sub-layers. The most is lost without the {worst.part} of block {worst.block}.",
        spec=spec,
        columns=("block", "part", "divergence", "turned", "damage"),
        rows=tuple((r["block_text"], r["part"], r["divergence"], r["turned"], r["damage"]) for r in rows),
    )


_DAMAGE = ("damage", "damage")


def _row(item: SubLayer, most: float) -> Spec:
    return {
        "block": item.block,
        "block_text": str(item.block),
        "part": item.part,
        "share": max(0.0, (item.divergence or 0.0) / most),
        **{name: _text(getattr(item, name)) for name in ("divergence", "turned", "damage")},
    }


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
