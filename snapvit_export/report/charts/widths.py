"""Heat maps of the heads and neurons that each block of each variant keeps (Figure 8 of the SnapViT paper).

Ten shades for shares, so that two cells can be compared by eye; a sub-layer that is removed has no shade but an
empty cell with a cross.
"""

from __future__ import annotations

from typing import Literal

from ..data import InDepth, Widths
from .rows import drawn, left_out
from .style import HEAT, INK, MUTED, PAPER, Chart, Spec, base, tips

Kind = Literal["heads", "neurons"]
ROW, SMALL_ROW, MANY = 24, 15, 16  # pixels of a row, and from how many rows on it is smaller
_BLOCKS: Spec = {"title": "block", "labelAngle": 0, "labelOverlap": True, "ticks": False, "domain": False}
_NAMES: Spec = {"title": None, "ticks": False, "domain": False, "labelLimit": 90}


def widths(report: InDepth, kind: Kind) -> Chart:
    """Draw the heat map of heads or of neurons."""
    whole = report.dense_heads if kind == "heads" else report.dense_neurons
    names = set(drawn(report, [variant.name for variant in report.widths]))
    shown = [variant for variant in report.widths if variant.name in names]
    rows = [row for variant in shown for row in _cells(variant, kind, whole)]
    height = len(shown) * (ROW if len(shown) <= MANY else SMALL_ROW)
    removed = any(row["kept"] == 0 for row in rows)
    spec = base(
        height,
        data={"values": rows},
        encoding={
            "x": {"field": "block", "type": "ordinal", "axis": _BLOCKS},
            "y": {"field": "name", "type": "nominal", "sort": None, "axis": _NAMES},
            "tooltip": tips(("name", report.noun), ("block_text", "block"), ("text", "keeps"), ("percent", "share")),
        },
        layer=[_shades(kind), *(_crosses() if removed else [])],
    )
    least = min(rows, key=lambda row: row["share"])
    return Chart(
        name=kind,
        title=f"{kind.capitalize()} kept in each block",
        caption=f"Share of the {kind} that each block keeps, from the input on the left to the output on the right."
        + (" A cross: the sub-layer is removed." if removed else "")
        + left_out(len(shown), len(report.widths), report.noun),
        alt=f"Heat map of {len(shown)} {report.noun}s by {len(whole)} blocks. "
        f"Least is kept in block {least['block']} of {least['name']}: {least['text']}.",
        spec=spec,
        columns=(report.noun, *(f"block {i}" for i in range(len(whole)))),
        rows=tuple((v.name, *(f"{k} of {n}" for k, n in zip(getattr(v, kind), whole))) for v in report.widths),
    )


def _cells(variant: Widths, kind: Kind, whole: tuple[int, ...]) -> list[Spec]:
    kept = variant.heads if kind == "heads" else variant.neurons
    return [
        {
            "name": variant.name,
            "block": i,
            "block_text": str(i),
            "kept": k,
            "share": k / max(n, 1),  # the dense model may lack it too
            "text": f"{k} of {n} {kind}" if k else "nothing: the sub-layer is removed",
            "percent": f"{100 * k / max(n, 1):.0f} %",
        }
        for i, (k, n) in enumerate(zip(kept, whole))
    ]


def _shades(kind: Kind) -> Spec:
    legend = {
        "title": f"share of {kind} kept",
        "orient": "top",
        "direction": "horizontal",
        "gradientLength": 160,
        "gradientThickness": 10,
        "format": ".0%",
        "titlePadding": 6,
        "offset": 8,
    }
    scale = {"type": "quantize", "domain": [0, 1], "range": list(HEAT)}
    return {
        "mark": {"type": "rect", "stroke": PAPER, "strokeWidth": 1.5},
        "encoding": {"color": {"field": "share", "type": "quantitative", "scale": scale, "legend": legend}},
    }


def _crosses() -> list[Spec]:
    removed = [{"filter": {"field": "kept", "equal": 0}}]
    empty: Spec = {
        "transform": removed,
        "mark": {"type": "rect", "color": PAPER, "stroke": MUTED, "strokeWidth": 1, "strokeDash": [2, 2]},
        "encoding": {},
    }
    cross: Spec = {
        "transform": [*removed, {"calculate": "'×'", "as": "cross"}],
        "mark": {"type": "text", "color": INK, "fontSize": 13, "fontWeight": 700, "baseline": "middle"},
        "encoding": {"text": {"field": "cross", "type": "nominal"}},
    }
    return [empty, cross]
