"""The table and the plots of `levers.py`: quality kept against measured latency, means of both halves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from results import Row, share_error, table, write_section

from snapvit_export.report.charts.style import (
    FAMILY_COLOURS,
    FAMILY_SHAPES,
    INK,
    MUTED,
    Chart,
    Spec,
    axis,
    base,
    legend_below,
)
from snapvit_export.report.draw import svg

TITLES = {
    "all": "all levers together",
    "precision": "precision alone",
    "tokens": "tokens alone",
    "width+depth": "width and depth alone",
}
WANTED = {0.7: (0.98, 0.99), 0.5: (0.96, 0.98), 0.35: (0.90, 0.95), 0.25: (0.75, 0.85)}  # top-1 kept: least, aim
HEIGHT = 400
INTRODUCTION = """\
`python benchmarks/levers.py` (the whole command is in its docstring): DeiT-Tiny, ONNX Runtime, one thread, batch 1,
{cpu}. An export sees one half of {images} ImageNet images and no label; top-1 and fidelity are of the other half; both
halves in turn, means of both. *Kept* is top-1 relative to the dense model's on the same images, ± one standard error of
a share of all images that reported; *same answer* the share of them with the dense model's own answer. Latency is
relative to the dense model in fp32, pooled over all runs of the choice; peers are timed in turns with our dense graph,
median of some new processes. The empty diamond is the dense model. Nothing of the choice was tuned on these figures,
but constants of the refit and shapes of merging were chosen on these images before: on others expect some points
less."""
PEERS = """\
What others do, none of it retrained. The quantised models are ONNX Runtime's own quantiser on our dense graph (linear
layers, per channel) and NNCF's in OpenVINO (with the settings that `snapvit` uses); Torch-Pruning's models are written
by the standard export of torch, which alone costs a tenth more than our graph; onnxsim prunes MLPs and heads by Wanda's
order and refits by ridge regression."""


def write_report(ours: Sequence[Row], peers: Sequence[Row], docs: Path) -> None:
    """Write the section and the two plots."""
    if not ours and not peers:
        raise SystemExit("there are no rows to write. Measure some first")
    rows = [*ours, *peers]
    images = sum({row["half"]: row["images"] for row in rows if row["reached"]}.values())
    cpu = "; ".join(sorted({row["cpu"] for row in rows}))
    parts = [INTRODUCTION.format(cpu=cpu, images=images), "![top-1 kept against latency](levers.svg)"]
    parts += ["![fidelity against latency](levers-fidelity.svg)", _summary(ours), _details(ours)]
    if peers:
        parts += [PEERS, _peers(peers)]
    write_section(docs, "levers", "Every lever", "\n\n".join(parts))
    points = [*_our_points(ours), *_peer_points(peers)]
    for name, field, error, title in (
        ("levers", "kept", "kept_error", "top-1 on held-out images, relative to dense"),
        ("levers-fidelity", "agreement", "agreement_error", "images with the same answer as the dense model"),
    ):
        (docs / f"{name}.svg").write_bytes(svg(chart(points, name, field, error, title)))


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    """Both halves of one row together."""
    count, images = len(rows), sum(row["images"] for row in rows)
    dense, top1 = (sum(row[name] for row in rows) / count for name in ("dense_top1", "top1"))
    agreement = sum(row["agreement"] for row in rows) / count
    return {
        "latency": sum(row["latency"] for row in rows) / count,
        "kept": sum(row["top1"] / row["dense_top1"] for row in rows) / count,
        "kept_error": share_error(top1, images) / dense,
        "agreement": agreement,
        "agreement_error": share_error(agreement, images),
        "divergence": sum(row["divergence"] for row in rows) / count,
    }


def _at(ours: Sequence[Row], levers: str, share: float) -> list[Row]:
    return [row for row in ours if row["levers"] == levers and row["share"] == share]


def _shares(ours: Sequence[Row]) -> list[float]:
    return sorted({row["share"] for row in ours}, reverse=True)


def _summary(ours: Sequence[Row]) -> str:
    """Top-1 kept, a line for each set of levers and a column for each budget."""
    shares = _shares(ours)
    lines = []
    for levers, title in TITLES.items():
        if any(row["levers"] == levers for row in ours):
            lines.append([title, *(_cell(_at(ours, levers, share), levers == "all") for share in shares)])
    wanted = [f"{WANTED[share][0]:.2f} ({WANTED[share][1]:.2f})" if share in WANTED else "" for share in shares]
    lines.append(["wanted at least (aim)", *wanted])
    return table(["kept, at a budget of", *(f"{share:g} of dense fp32" for share in shares)], lines)


def _cell(rows: Sequence[Row], strong: bool) -> str:
    if not rows:
        return "-"
    reached = [row for row in rows if row["reached"]]
    if len(reached) < len(rows):
        return "out of reach"
    found = _mean(reached)
    kept = f"{found['kept']:.3f}"
    return f"{f'**{kept}**' if strong else kept} ± {found['kept_error']:.3f} at {found['latency']:.3f}"


def _details(ours: Sequence[Row]) -> str:
    """Every choice of both halves."""
    columns = ("levers", "budget", "half", "chosen", "latency / dense (interval)", "decided", "top-1 (dense)", "kept")
    columns += ("same answer", "divergence, nats", "took, s")
    lines = []
    for row in sorted(ours, key=lambda row: (list(TITLES).index(row["levers"]), -row["share"], row["half"])):
        start = [TITLES[row["levers"]], f"{row['share']:g}", row["half"]]
        if not row["reached"]:
            lines.append([*start, "out of reach", *[""] * (len(columns) - 5), f"{row['seconds']:.0f}"])
            continue
        low, high = row["between"]
        cells = [row["words"], f"{row['latency']:.3f} ({low:.3f} to {high:.3f})", "yes" if row["decided"] else "no"]
        cells += [f"{row['top1']:.3f} ({row['dense_top1']:.3f})", f"{row['top1'] / row['dense_top1']:.3f}"]
        cells += [f"{row['agreement']:.3f}", f"{row['divergence']:.4f} ± {row['divergence_error']:.4f}"]
        lines.append([*start, *cells, f"{row['seconds']:.0f}"])
    return table(columns, lines)


def _by_title(peers: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in peers:
        found.setdefault(row["title"], []).append(row)
    return found


def _peers(peers: Sequence[Row]) -> str:
    lines = []
    for title, rows in _by_title(peers).items():
        reached = [row for row in rows if row["reached"]]
        if not reached:
            lines.append([rows[0]["said"], "", "", "", ""])
            continue
        found = _mean(reached)
        kept = f"{found['kept']:.3f} ± {found['kept_error']:.3f}"
        lines.append(
            [title, f"{found['latency']:.3f}", kept, f"{found['agreement']:.3f}", f"{found['divergence']:.4f}"]
        )
    return table(("peer", "latency / dense", "kept", "same answer", "divergence, nats"), lines)


# -- the plots --------------------------------------------------------------------------------------------------------


def _our_points(ours: Sequence[Row]) -> list[Spec]:
    found: list[Spec] = []
    for levers, title in TITLES.items():
        for share in _shares(ours):
            rows = _at(ours, levers, share)
            if rows and all(row["reached"] for row in rows):
                found.append({"series": title, "kind": "ours", **_mean(rows)})
    return found


def _peer_points(peers: Sequence[Row]) -> list[Spec]:
    """A peer's settings are points of one mark; its name is what comes before the comma."""
    found: list[Spec] = []
    for title, rows in _by_title(peers).items():
        if reached := [row for row in rows if row["reached"]]:
            name = title if title.startswith("OpenVINO") else title.partition(",")[0]
            found.append({"series": name, "kind": "peer", **_mean(reached)})
    return found


def chart(
    points: Sequence[Spec], name: str, field: str, error: str, title: str, about: str = "DeiT-Tiny, not retrained"
) -> Chart:
    """Draw quality against latency: ours as lines, peers as marks."""
    rows = [{**p, "y": p[field], "down": p[field] - p[error], "up": p[field] + p[error]} for p in points]
    x = axis([*(row["latency"] for row in rows), 1.0], least=0.1, floor=0.0)
    y = axis([*(row[end] for row in rows for end in ("down", "up")), 1.0], least=0.05, floor=0.0)
    ours = list(dict.fromkeys(row["series"] for row in rows if row["kind"] == "ours"))
    theirs = list(dict.fromkeys(row["series"] for row in rows if row["kind"] == "peer"))
    names = [*ours, *theirs]
    greys = [(shape, colour) for colour in (MUTED, INK) for shape in FAMILY_SHAPES]  # of the peers, which have no line
    colours = [*FAMILY_COLOURS[: len(ours)], *(colour for _, colour in greys[: len(theirs)])]
    shapes = [*FAMILY_SHAPES[: len(ours)], *(shape for shape, _ in greys[: len(theirs)])]
    legend = legend_below(names, most=3)
    colour = {"field": "series", "type": "nominal", "scale": {"domain": names, "range": colours}, "legend": legend}
    shape = {"field": "series", "type": "nominal", "scale": {"domain": names, "range": shapes}, "legend": legend}
    only_ours = {"filter": {"field": "kind", "equal": "ours"}}
    quantity = {"type": "quantitative"}
    spec = base(
        HEIGHT,
        data={"values": rows},
        encoding={
            "x": {
                "field": "latency",
                **quantity,
                "scale": x.scale,
                "axis": {"values": list(x.ticks), "title": "measured latency, relative to dense fp32"},
            },
            "y": {"field": "y", **quantity, "scale": y.scale, "axis": {"values": list(y.ticks), "title": title}},
        },
        layer=[
            {
                "data": {"values": [{"latency": 1.0, "y": 1.0}]},
                "mark": {"type": "point", "filled": False, "color": INK, "size": 110, "shape": "diamond"},
            },
            {
                "transform": [only_ours],
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": {"color": colour},
            },
            {
                "mark": {"type": "rule", "opacity": 0.4, "strokeWidth": 1.5},
                "encoding": {
                    "y": {"field": "down", **quantity},
                    "y2": {"field": "up"},
                    "color": colour,
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 75, "opacity": 1},
                "encoding": {"color": colour, "shape": shape},
            },
        ],
    )
    return Chart(
        name=name,
        title=about,
        caption="",
        alt=f"{title}, against latency relative to the dense model in fp32; the table has the figures.",
        spec=spec,
        columns=(),
    )
