"""Chart of a ranking's scores: how they spread over the heads or the neurons of each block, on a logarithmic axis."""

from __future__ import annotations

import math

from ..ranking_data import BlockScores, Kind, RankingReport
from .style import FAMILY_COLOURS, INK, Chart, Spec, base, tips

HEIGHT = 240
MOST_DECADES = 12  # below the largest score: what is smaller lies at the foot of the axis
MOST_TICKS = 7


def scores(report: RankingReport, kind: Kind) -> Chart | None:
    """Draw the quantiles of the scores of each block; None if none is above 0."""
    found = [block for block in report.scores if block.kind == kind]
    drawn = [block for block in found if block.quantiles]
    if not drawn:
        return None
    most = max(block.quantiles[-1] for block in drawn)
    high = math.floor(math.log10(most)) + 1
    least = min(block.quantiles[0] for block in drawn)
    low = max(math.floor(math.log10(least)), high - MOST_DECADES)
    rows = [_row(block, 10.0**low) for block in drawn]
    step = -(-(high - low) // MOST_TICKS)
    scale = {"type": "log", "domain": [10.0**low, 10.0**high], "nice": False, "clamp": True}
    ticks = [10.0**power for power in range(high, low - 1, -step)]
    x: Spec = {
        "field": "block",
        "type": "ordinal",
        "axis": {"title": "block", "labelAngle": 0, "labelOverlap": True, "ticks": False},
    }
    y_axis = {"title": f"score of its {kind}", "values": ticks, "format": ".0e"}
    tip = tips(("at", "block"), ("median", "median"), ("middle", "middle half"), ("count", kind))
    colour = FAMILY_COLOURS[0 if kind == "neurons" else 1]
    layers: list[Spec] = [
        {
            "mark": {"type": "rule", "color": colour, "strokeWidth": 1.5},
            "encoding": _between("q10", "q90", scale, y_axis),
        },
        {
            "mark": {"type": "bar", "color": colour, "opacity": 0.45, "width": {"band": 0.5}},
            "encoding": _between("q25", "q75", scale, y_axis),
        },
        {
            "mark": {"type": "tick", "color": INK, "thickness": 2, "width": {"band": 0.5}, "orient": "horizontal"},
            "encoding": {"y": {"field": "q50", "type": "quantitative", "scale": scale, "axis": y_axis}},
        },
    ]
    best = max(drawn, key=lambda block: block.quantiles[2])
    return Chart(
        name=f"scores-{kind}",
        title=f"Scores of the {kind} in each block",
        caption=f"Bars: the middle half of a block's {kind}, a line at the median; whiskers from the lowest tenth "
        "to the highest. What scores least over all blocks is cut first.",
        alt=f"Quantiles of the scores of {len(drawn)} blocks. The largest median, {best.quantiles[2]:.3g}, is of block "
        f"{best.block}.",
        spec=base(HEIGHT, data={"values": rows}, encoding={"x": x, "tooltip": tip}, layer=layers),
        columns=("block", kind, "above 0", "lowest tenth", "median", "highest tenth"),
        rows=tuple(_table_row(block) for block in found),
    )


def _between(low: str, high: str, scale: Spec, y_axis: Spec) -> Spec:
    return {
        "y": {"field": low, "type": "quantitative", "scale": scale, "axis": y_axis},
        "y2": {"field": high},
    }


def _row(block: BlockScores, floor: float) -> Spec:
    named = {f"q{name}": max(value, floor) for name, value in zip((10, 25, 50, 75, 90), block.quantiles)}
    first, median, third = block.quantiles[1:4]
    return {
        "block": block.block,
        "at": str(block.block),
        **named,
        "median": f"{median:.3g}",
        "middle": f"{first:.3g} to {third:.3g}",
        "count": f"{block.structures}" + _not_positive(block),
    }


def _not_positive(block: BlockScores) -> str:
    rest = block.structures - block.positive
    return f", {rest} of them score 0 or less" if rest else ""


def _table_row(block: BlockScores) -> tuple[str, ...]:
    low, median, high = (block.quantiles[i] for i in (0, 2, 4)) if block.quantiles else (None, None, None)
    shown = ("–" if value is None else f"{value:.3g}" for value in (low, median, high))
    return (str(block.block), str(block.structures), str(block.positive), *shown)
