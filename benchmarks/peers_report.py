"""docs/peers.md: the table and the plot of `all_peers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from levers_report import chart
from results import Row, cpu_words, share_error, table

from snapvit_export.report.draw import svg

LIMITS = (0.95, 0.7, 0.5, 0.35, 0.25)  # of the dense latency
PAGE, PLOT = "peers.md", "peers.svg"
OURS = "snapvit"
ABOUT = "DeiT-Tiny, one half of the images; nothing is trained but what is called so"
INTRODUCTION = """\
# Peers

What else there is to make a ViT faster without its training set, on the same axes, measured in one run: DeiT-Tiny in
ONNX Runtime (NNCF's models in OpenVINO), one thread, batch 1, {cpu}. Everybody sees the same half of 500 ImageNet
images; {images} others report. *Kept* is top-1 relative to the dense model's, {dense:.3f}, ± one standard error of a
share; *same answer* the share of images with the dense model's own answer. Latency is relative to our dense graph in
float32, all files in turns, the median of {rounds} new processes with the least and the most of them. This page is
written by `benchmarks/all_peers.py`, whose docstring has the command. Some constants of ours were chosen on these
images before ([quality.md](quality.md)): on others expect some points less.

![top-1 kept against latency]({plot})
"""
EQUAL = """\
## At equal latency

The most top-1 that is kept by a file of each that takes at most so much of the dense latency, by the least of the
latencies below: in some round it did. Bold is the most of all, and what is within one standard error of it.
"""
EACH = """\
## Every file
"""
USED = {
    "ours": "`snapvit export --budget 70%` and so on, all levers, no labels",
    "ours-precision": "the same with `--levers precision`",
    "ours-tokens": "the same with `--levers tokens`",
    "ours-width": "the same with `--levers width,depth`",
    "ours-recovered": "`--budget 70%` and `50%` with `--levers width,depth`, then `snapvit recover --minutes 5`, "
    "no labels",
    "released": "`snapvit rank --recipe paper` on 128 images (1000 as published), then `export --pair`, in our graph",
    "released-corrected": "the same with `--correction elastic`, the closed form that its ElasticViT uses",
    "merging": "as many tokens in every block, bipartite soft matching with proportional attention, in our graph",
    "onnxruntime": "`quantize_dynamic` and `quantize_static` of our dense graph, linear layers, per channel",
    "nncf": "int8 of our dense graph, linear layers, with the settings that `snapvit` uses; and OpenVINO in float32",
    "modelopt": "`modelopt.onnx.quantization.quantize`, int8, matrix products, of our dense graph",
    "torch-pruning": "Taylor and Hessian from labelled images, heads and MLPs, global; standard export of torch, "
    "which alone costs a tenth more than our graph",
    "torch-pruning-best": "the same with `--normalizer none --head-share 0.5 --mean-hessian`, the best that was tried "
    "on halves of these images at 0.72 of the FLOPs and above",
    "onnxsim": "Wanda order of MLPs and heads with its refit, of our dense graph",
}


def write_page(rows: Sequence[Row], made: Sequence[Row], docs: Path, rounds: int) -> None:
    """Write the page and its plot."""
    if not rows:
        raise SystemExit("there are no rows to write. Measure some first")
    intro = INTRODUCTION.format(
        cpu=rows[0].get("cpu", cpu_words()),
        images=rows[0]["images"],
        dense=rows[0]["dense_top1"],
        rounds=rounds,
        plot=PLOT,
    )
    parts = [intro, EQUAL, _equal(rows), EACH, _each(rows), "## How each was used\n", _used(made)]
    (docs / PAGE).write_text("\n".join(parts) + "\n")
    points = [_point(row) for row in sorted(rows, key=lambda row: row["latency"])]
    (docs / PLOT).write_bytes(
        svg(chart(points, "peers", "kept", "kept_error", "top-1 on held-out images, relative to dense", ABOUT))
    )


def kept(row: Row) -> float:
    return row["top1"] / row["dense_top1"]


def error(row: Row) -> float:
    return share_error(row["top1"], row["images"]) / row["dense_top1"]


def _point(row: Row) -> Row:
    is_ours = row["series"].startswith(OURS)
    return {
        "series": row["series"],
        "kind": "ours" if is_ours else "peer",
        "latency": row["latency"],
        "kept": kept(row),
        "kept_error": error(row),
    }


def _equal(rows: Sequence[Row]) -> str:
    """The best file of each contender within each latency, and in words who keeps the most."""
    names = list(dict.fromkeys(row["series"] for row in rows))
    best = {
        (name, limit): max(
            (r for r in rows if r["series"] == name and r["between"][0] <= limit), key=kept, default=None
        )
        for name in names
        for limit in LIMITS
    }
    most = {
        limit: max((r for (_, at), r in best.items() if at == limit and r), key=kept, default=None) for limit in LIMITS
    }
    lines = [[name, *(_cell(best[name, limit], most[limit]) for limit in LIMITS)] for name in names]
    found = table(["kept, of the dense latency at most", *(f"{limit:g}" for limit in LIMITS)], lines)
    return found + "\n\n" + "\n".join(_in_words(rows, limit) for limit in LIMITS) + "\n"


def _in_words(rows: Sequence[Row], limit: float) -> str:
    """Return the line that names the best of ours and of the peers within a latency."""
    within = [row for row in rows if row["between"][0] <= limit]
    ours = max((row for row in within if row["series"].startswith(OURS)), key=kept, default=None)
    peer = max((row for row in within if not row["series"].startswith(OURS)), key=kept, default=None)
    if ours is None or peer is None:
        only = ours or peer
        return f"- {limit:g}: " + ("nobody." if only is None else f"{only['series']} alone, {kept(only):.3f}.")
    apart = kept(ours) - kept(peer)
    verdict = (
        "within one standard error" if abs(apart) <= error(ours) else "ours keeps more" if apart > 0 else "it wins"
    )
    said = f"the best peer is {peer['series']} with {kept(peer):.3f}, ours {ours['series']} with {kept(ours):.3f}"
    return f"- {limit:g}: {said}: {verdict}."


def _cell(row: Row | None, most: Row | None) -> str:
    if row is None or most is None:
        return ""
    text = f"{kept(row):.3f}"
    return f"**{text}**" if kept(row) >= kept(most) - error(most) else text


def _each(rows: Sequence[Row]) -> str:
    columns = ("contender", "file", "latency / dense (least to most)", "kept", "same answer", "divergence, nats")
    lines = []
    for row in rows:
        low, high = row["between"]
        what = row["title"] + (f": {row['note']}" if row["note"] else "")
        cells = [f"{row['latency']:.3f} ({low:.3f} to {high:.3f})", f"{kept(row):.3f} ± {error(row):.3f}"]
        lines.append([row["series"], what, *cells, f"{row['agreement']:.3f}", f"{row['divergence']:.4f}"])
    return table(columns, lines) + "\n"


def _used(made: Sequence[Row]) -> str:
    lines = []
    for row in made:
        what = USED[row["contender"]] if row["files"] else row["said"]
        lines.append([row["title"], row["version"] or "", what, f"{row.get('seconds', 0):.0f}"])
    return table(("contender", "version", "how", "made in, s"), lines)
