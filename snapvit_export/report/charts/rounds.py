"""Charts of a ranking in rounds that recover: what each lost, before its training and after it, by size."""

from __future__ import annotations

from typing import Literal

from ...model.rounds import RecoveredRounds
from .. import text as words
from .style import FAMILY_COLOURS, MUTED, Chart, Spec, axis, base, tips

HEIGHT = 260
AFTER, CUT, TOP1 = "same answers, recovered", "same answers, cut", "top-1, recovered"
COLUMNS = ("round", "of the FLOPs", "GFLOPs", "parameters", "same answers, cut", "recovered", "divergence", "top-1", "")


def rounds(found: RecoveredRounds | None, by: Literal["gflops", "params"]) -> Chart | None:
    """Draw fidelity and accuracy against FLOPs or parameters; None if there were no such rounds."""
    if found is None:
        return None
    rows = _points(found, by)
    if not rows:
        return None
    x, y = axis([row["x"] for row in rows]), axis([row["y"] for row in rows], least=0.02, floor=0.0, most=1.0)
    used = [which for which in (AFTER, CUT, TOP1) if any(row["which"] == which for row in rows)]
    colours = {AFTER: FAMILY_COLOURS[0], CUT: MUTED, TOP1: FAMILY_COLOURS[1]}
    unit = "GFLOPs" if by == "gflops" else "million parameters"
    encoding: Spec = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "scale": x.scale,
            "axis": {"title": unit, "values": list(x.ticks), "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "scale": y.scale,
            "axis": {"title": "share of the images", "values": list(y.ticks), "format": ".0%"},
        },
        "color": {
            "field": "which",
            "type": "nominal",
            "scale": {"domain": used, "range": [colours[which] for which in used]},
            "legend": {"orient": "bottom", "title": None, "columns": 3},
        },
        "tooltip": tips(("which", "which"), ("name", "round"), ("text", "share"), ("size", unit)),
    }
    layers: list[Spec] = [
        {
            "transform": [{"filter": {"not": {"field": "which", "equal": CUT}}}],
            "mark": {"type": "line", "strokeWidth": 2.5},
            "encoding": {"tooltip": None},
        },
        {"mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.95}, "encoding": {}},
    ]
    kept = sum(step.kept for step in found.steps)
    return Chart(
        name=f"rounds-{by}",
        title=f"Rounds of cutting and recovering, by {'FLOPs' if by == 'gflops' else 'parameters'}",
        caption="Each round cuts the model of the one before, trains it with the dense model as the teacher, and ranks "
        "it again. Grey: just cut. On images that nothing was fitted to. The last round may be the one that lost too "
        "much, and then has no part in the ranking.",
        alt=f"{len(found.steps)} rounds down to {found.steps[-1].flops:.0%} of the FLOPs, of which {kept} stayed "
        "within the limit.",
        spec=base(HEIGHT, data={"values": rows}, encoding=encoding, layer=layers),
        columns=COLUMNS,
        rows=table(found),
    )


def table(found: RecoveredRounds) -> tuple[tuple[str, ...], ...]:
    """Return the rows of the table of rounds, the dense model first."""
    return tuple(
        (
            "dense" if number == 0 else str(number),
            f"{step.flops:.0%}",
            f"{step.gflops:.4g}",
            words.millions(step.params),
            words.share(step.before.agreement),
            words.share(step.after.agreement),
            words.UNKNOWN if step.after.divergence is None else f"{step.after.divergence:.3f}",
            words.share(step.after.top1),
            "" if step.kept else "too much lost",
        )
        for number, step in enumerate((found.dense, *found.steps))
    )


def _points(found: RecoveredRounds, by: Literal["gflops", "params"]) -> list[Spec]:
    points: list[Spec] = []
    for number, step in enumerate((found.dense, *found.steps)):
        x = step.gflops if by == "gflops" else step.params / 1e6
        shares = {AFTER: step.after.agreement, CUT: step.before.agreement if number else None, TOP1: step.after.top1}
        points += [
            {
                "x": x,
                "y": share,
                "which": which,
                "name": "dense" if number == 0 else f"{number}",
                "text": words.share(share),
                "size": f"{x:.4g}",
            }
            for which, share in shares.items()
            if share is not None
        ]
    return points
