"""The table and the plot of `quality.py`: means over seeds, standard errors, fractions of the dense model's top-1."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

FRACTIONS = (0.9, 0.82, 0.72, 0.60, 0.50, 0.40)
TOKEN_FRACTIONS = (0.72, 0.60, 0.50, 0.40, 0.30)
TOKEN_ROWS = {
    "width and depth": "the default recipe, for comparison | refitted",
    "resolution": "all heads and neurons, smaller images: 192, 176, 160, 144, 128 pixels | as they were",
    "merging": "all heads and neurons, tokens merged by the schedule that was measured to suit | as they were",
    "merging, sizes ignored": "the same, but later attentions do not know how many patches a token stands for "
    "| as they were",
    "resolution x merging": "smaller images and merging | as they were",
    "merging x width": "merging, and heads and neurons by the default ranking | refitted along the merged tokens",
    "all of them": "smaller images, merging, heads and neurons | refitted along the merged tokens",
}
PLOTTED = {
    "default": ("#d1495b", 2.6),
    "searched": ("#edae49", 2.0),
    "joint, backward order": ("#00798c", 1.8),
    "snapvit + elastic": ("#30638e", 1.6),
    "snapvit": ("#8d96a3", 1.6),
    "taylor": ("#b8bfc8", 1.2),
    "torch-pruning hessian": ("#7fb069", 1.4),
    "magnitude": ("#d9dde2", 1.2),
}


NEIGHBOURS = """Features of the pre-logits embedding, k = 20, calibrated on the first half of the ImageNet images.
What wins above should not be tuned to one classifier. ± is one standard error. On tiny-imagenet, whose 64 pixels
blown up to 224 are far from the calibration images, gradient scores without any correction do as well from 0.82
to 0.60: calibrate on images like those to come.
"""
FITNESS = """`benchmarks/fitness.py`: random factors on the damage curves, all Plans at the same FLOPs and corrected
elastically. Each fitness is a loss on the calibration half, so -1 is best; accuracy is on the other half.

"""
INTRODUCTION = """# Quality at equal cost, without retraining

Written by `benchmarks/quality.py` from what it measured; the command is in its docstring. DeiT-Tiny with its published
weights and 500 ImageNet images, one each of 500 classes: half of them calibrate, the others report, and then the other
way round (two halves of one split). Cost is the FLOPs of the blocks relative to dense. No row sees a label but those of
Torch-Pruning. ± is one standard error of the share of right predictions; differences of two rows on the same images are
known somewhat better than that. The few constants of the default recipe (order, shares of the tokens, share and damping
of the refit, size of the search) were tried out on the first half before, so that half flatters it a little. `halves`
is the number of halves that a row was measured on.

![top-1 against FLOPs](quality.svg)

"""

LEGEND = """
| row | order and counts | weights of what is kept |
|---|---|---|
| random, magnitude, lamp, snip, taylor | that criterion, published line of (mlp, head) ratios | as they were |
| snapvit local | self-supervised gradient, published line | as they were |
| snapvit | the same with the released search: 50 evaluations of xNES, here on 128 of the images | as they were |
| snapvit + elastic | the same | corrected from factors |
| snapvit + sparsegpt | the same | the released left-to-right correction |
| joint, X order | order X in each layer, damage curves, joint allocation | corrected from factors |
| joint, backward, tokens alike | the same, backward order, all tokens count alike | corrected from factors |
| joint, backward, sequential | the same, backward order | fitted along the cut stream |
| searched | joint, backward, and a search over the layers' curves: `--evaluations 104` | corrected from factors |
| searched, refit | joint, backward, and the search: `--evaluations 104` | refitted |
| idap | flow divergence along the published line, then a sixth of the sub-layers, then width again | as they were |
| idap, refit | the same | refitted |
| joint, in rounds, refit | joint, backward order, measured again after every round of cuts | refitted |
| default, width alone | the ranking of default, no sub-layer is removable: `--no-depth` | refitted |
| **default** | joint, backward order, sub-layers are removable: `--recipe default` | refitted |
| torch-pruning | Torch-Pruning 1.6.1, heads and MLP, as its example does | as they were |
| ..., head_share 0.5, normalizer none | a setting that suits it better, found on these images | as they were |

"""


READINGS = """Readings. Correction and allocation matter most: the joint allocation with elastic correction keeps at
0.60 what the published search keeps at 0.72. On the published search's own Plans, elastic correction keeps more than
the released left-to-right one from 0.60 down. A refit adds little at 0.72 and most where much is cut; fitting along
the cut stream gives a part of that. That the class token counts more in the statistics shows in the cosine at every
cost, not in top-1. Backward and pivoted order show no difference; variance is behind them by cosine from 0.72 down,
and gradient scores are clearly worse. A search helps the elastic correction from 0.60 down; to a refit it adds
nothing that these images could show. Flow divergence (idap) is between random and the gradients, and a refit helps it
much. FLOPs count all blocks in full, so they do not show what depth is good for: the default removes something at 0.72
alone, with the same top-1; at equal latency it gains at every budget ([benchmarks.md](benchmarks.md#depth)).

"""


TOKENS = """Fewer tokens instead of fewer weights, at the same FLOPs of the blocks ([method.md](method.md) has the
method). Rows that mix take, at each cost, the mix of input size (224, 192), width (1, 0.85 and 0.7 of the FLOPs) and
merging with the least divergence of predictions, measured without labels on a quarter of the calibration images that
the refit did not see. The shapes of the schedules were tried out without labels on the half that reports with seed 1;
on the other half, where no schedule was tried, the last row keeps 1.011, 1.011, 0.979, 0.968 and 0.931. Readings:
merging loses least down to half of the FLOPs; below, two or three moderate cuts beat a deep one: 192 pixels, merging
and 0.85 of the width keep at 0.30 what merging alone keeps at 0.40. Where tokens do not know how many patches they
stand for, much is lost at every cost but the last.

"""


def write_report(rows: list[dict], neighbours: list[dict], fitness: str, order: list[str], folder: Path) -> None:
    """Write quality.md and quality.svg; READINGS is written by hand, and to be checked against new figures.

    Tables whose rows were not measured now stay as they are, and so does the picture.
    """
    of_tokens = [row for row in rows if row["row"] in TOKEN_ROWS]
    path = folder / "quality.md"
    before = path.read_text() if path.exists() else ""
    if of_tokens:
        _replace_section(path, before, "## Tokens\n", _token_section(of_tokens, order, neighbours))
    rows = [row for row in rows if row["row"] not in TOKEN_ROWS]
    neighbours = [row for row in neighbours if row["row"] not in TOKEN_ROWS]
    if not rows:
        return
    known = {name: number for number, name in enumerate(order)}
    table = _grouped(sorted(rows, key=lambda row: known.get(row["row"], -1)))  # peers first
    unmeasured = [name for name in order if name not in table]
    legend = "\n".join(line for line in LEGEND.split("\n") if not any(f"| {name} |" in line for name in unmeasured))
    parts = [INTRODUCTION, READINGS, "## Top-1\n\n", _top1_table(table), "\n", _of_other_code(rows)]
    parts += ["\nThe rows:\n", legend]
    parts += ["## Cosine to the dense model\n\n", _cosine_table(table), "\n"]
    if neighbours:
        parts += ["\n## Other data: k nearest neighbours\n\n", NEIGHBOURS, _neighbour_table(neighbours)]
    if fitness:
        parts += ["\n## Fitness as a predictor of accuracy\n\n", FITNESS, fitness]
    tokens = path.read_text() if path.exists() else ""
    path.write_text("".join(parts))
    if "## Tokens\n" in tokens:
        _replace_section(path, path.read_text(), "## Tokens\n", _section(tokens, "## Tokens\n"))
    _plot(table, folder / "quality.svg")


def _token_section(rows: list[dict], order: list[str], neighbours: list[dict]) -> str:
    table = _grouped(sorted(rows, key=lambda row: order.index(row["row"])))
    legend = ["| row | tokens and counts | weights |", "|---|---|---|"]
    legend += [f"| {name} | {text} |" for name, text in TOKEN_ROWS.items() if name in table]
    parts = ["## Tokens\n\n", TOKENS, _top1_table(table, TOKEN_FRACTIONS), "\n\n", "\n".join(legend), "\n\n"]
    parts += [_cosine_table(table, TOKEN_FRACTIONS), "\n"]
    near = [row for row in neighbours if row["row"] in TOKEN_ROWS or row["row"] == "dense"]
    return "".join([*parts, _neighbour_table(near, TOKEN_FRACTIONS), "\n"] if near else [*parts, "\n"])


def _section(text: str, heading: str) -> str:
    """Return a section from its heading to the next one of its level."""
    start = text.index(heading)
    end = text.find("\n## ", start + len(heading))
    return text[start:] if end < 0 else text[start : end + 1]


def _replace_section(path: Path, text: str, heading: str, section: str) -> None:
    """Put a section in the place of the old one, or before the first of the others."""
    if heading in text:
        path.write_text(text.replace(_section(text, heading), section))
    else:
        start = text.index("## ") if "## " in text else len(text)
        path.write_text(text[:start] + section + text[start:])


def _grouped(rows: list[dict]) -> dict[str, dict[float, list[dict]]]:
    table: dict[str, dict[float, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row["row"]][row["flops"]].append(row)
    return table


def _kept(found: list[dict]) -> tuple[float, float]:
    """Mean over seeds of top-1 relative to the dense model's on the same images, and its standard error.

    Each half of a split reports its own images, so the error is that of a share of all images that were seen: each
    counts once per split, and splits of the same images are not independent.
    """
    ratio = sum(row["top1"] / row["dense_top1"] for row in found) / len(found)
    top1 = sum(row["top1"] for row in found) / len(found)
    dense = sum(row["dense_top1"] for row in found) / len(found)
    images = sum({row["seed"]: row["images"] for row in found if row["seed"] < 2}.values())  # of one split
    return ratio, math.sqrt(top1 * (1 - top1) / images) / dense


def _top1_table(table: dict[str, dict[float, list[dict]]], fractions: Sequence[float] = FRACTIONS) -> str:
    lines = ["| top-1 relative to dense at FLOPs of | " + " | ".join(f"{f:.2f}" for f in fractions) + " | halves |"]
    lines.append("|---|" + "---|" * (len(fractions) + 1))
    for name, costs in table.items():
        cells = []
        for fraction in fractions:
            ratio, error = _kept(costs[fraction]) if costs.get(fraction) else (math.nan, math.nan)
            cells.append("-" if math.isnan(ratio) else f"{ratio:.3f} ± {error:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {max(map(len, costs.values()))} |")
    return "\n".join(lines)


def _cosine_table(table: dict[str, dict[float, list[dict]]], fractions: Sequence[float] = FRACTIONS) -> str:
    lines = ["| cosine to the dense embedding at | " + " | ".join(f"{f:.2f}" for f in fractions) + " |"]
    lines.append("|---|" + "---|" * len(fractions))
    for name, costs in table.items():
        cells = []
        for fraction in fractions:
            found = [row["cosine"] for row in costs.get(fraction, []) if row.get("cosine") is not None]
            cells.append(f"{sum(found) / len(found):.3f}" if found else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _neighbour_table(rows: list[dict], fractions: Sequence[float] = FRACTIONS) -> str:
    dense = [row for row in rows if row["row"] == "dense"]
    if not dense:
        return "\nThe dense model was not measured.\n"
    table = _grouped([row for row in rows if row["row"] != "dense"])
    text = []
    for title in dense[-1]["knn"]:
        head = f"| {title}: k-NN accuracy, dense {_with_error(dense[-1], title)} % | "
        lines = ["", head + " | ".join(f"{f:.2f}" for f in fractions) + " |", "|---|" + "---|" * len(fractions)]
        for name, costs in table.items():
            cells = [_with_error(costs[f][-1], title) if costs.get(f) else "-" for f in fractions]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        text += lines
    return "\n".join(text) + "\n"


def _with_error(row: dict, title: str) -> str:
    share = row["knn"][title]
    return f"{100 * share:.1f} ± {100 * math.sqrt(share * (1 - share) / row['images'][title]):.1f}"


def _of_other_code(rows: list[dict]) -> str:
    """Rows that another state of the code gave than the default's, so that nobody takes them for one run."""
    wanted = {row["code"] for row in rows if row["row"] == "default"}
    other = sorted({row["row"] for row in rows if row.get("code") is not None and row["code"] not in wanted})
    return f"\nMeasured with an earlier state of the code: {', '.join(other)}.\n" if other else ""


def _plot(table: dict[str, dict[float, list[dict]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "snapvit"  # the same picture from the same rows
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, (colour, width) in PLOTTED.items():
        costs = table.get(name)
        if not costs:
            continue
        points = [(f, *_kept(costs[f])) for f in FRACTIONS if costs.get(f)]
        x, y, error = zip(*points)
        axes.errorbar(x, y, yerr=error, color=colour, linewidth=width, marker="o", markersize=4, capsize=2, label=name)
    axes.set_xlim(0.93, 0.37)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("FLOPs of the blocks, relative to dense")
    axes.set_ylabel("top-1 on held-out images, relative to dense")
    axes.set_title("DeiT-Tiny, pruned without retraining")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
