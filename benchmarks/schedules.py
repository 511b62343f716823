"""Schedules of token merging compared at equal FLOPs, without labels: which blocks merge, and how many tokens.

    python benchmarks/schedules.py --model NAME --checkpoint FILE --images FOLDER [--count 128]

Prints the divergence of predictions from the dense model (KL, mean over the images) for every schedule at each cost.
"allocated" gives each block its own share: the damage of merging in that block alone is measured for a few counts, and
tokens are added where they cost least damage for the FLOPs that they save, as if damages added up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from snapvit_export.allocation.tokens import SCHEDULES, merging_blocks
from snapvit_export.calibration.images import calibration_and_held_out, read_images
from snapvit_export.model.plan import Plan
from snapvit_export.progress import Silent
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.stats.schedules import Divergence

COSTS = (0.72, 0.60, 0.50, 0.40, 0.30)
SHARES = (0.06, 0.12, 0.25, 0.4)  # of the patches, merged in one block alone
STEP = 0.01  # of the tokens left, by which the allocation grows


def single_damages(model: Model, diverged: Divergence) -> dict[int, tuple[float, float]]:
    """Return for each block the line log damage = a + b log share, from merging in that block alone."""
    anatomy, found = model.anatomy, {}
    for i in merging_blocks(anatomy, Plan.dense(anatomy)):
        damages = []
        for share in SHARES:
            merged = [0] * len(anatomy.blocks)
            merged[i] = round(share * anatomy.patches)
            damages.append(max(1e-6, float(diverged(merged).mean())))
        slope, start = np.polyfit(np.log(SHARES), np.log(damages), 1)
        found[i] = (float(start), float(slope))
    return found


def allocated(model: Model, lines: dict[int, tuple[float, float]], cost: float) -> tuple[int, ...] | None:
    """Return the merges that add up to the least damage by these lines, one small step after the other."""
    anatomy, dense = model.anatomy, Plan.dense(model.anatomy)
    shares = dict.fromkeys(lines, 0.0)

    def merged(of: dict[int, float]) -> list[int]:
        counts, left = [0] * len(anatomy.blocks), anatomy.patches
        for i, share in of.items():
            counts[i] = min(left // 2, round(share * left))
            left -= counts[i]
        return counts

    def flops(of: dict[int, float]) -> float:
        return dense.with_tokens(merged(of)).flops_ratio(anatomy)

    def damage(i: int, share: float) -> float:
        return float(np.exp(lines[i][0] + lines[i][1] * np.log(share))) if share else 0.0

    while flops(shares) > cost:
        steps = []
        for i, share in shares.items():
            if share + STEP <= 0.5:
                saved = flops(shares) - flops({**shares, i: share + STEP})
                steps.append(((damage(i, share + STEP) - damage(i, share)) / max(saved, 1e-9), i))
        if not steps:
            return None
        shares[min(steps)[1]] += STEP
    return tuple(merged(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", required=True)
    parser.add_argument("--count", type=int, default=128)
    given = parser.parse_args()
    model = load_model(given.model, given.checkpoint)
    split = calibration_and_held_out(given.images, given.count, 0, 0)[:1]
    images = read_images(split, model.preprocessing, Silent())[0]
    diverged, dense = Divergence(model, images), Plan.dense(model.anatomy)
    lines = single_damages(model, diverged)
    print("| divergence at FLOPs of | " + " | ".join(f"{cost:.2f}" for cost in COSTS) + " | blocks that merge |")
    print("|---|" + "---|" * (len(COSTS) + 1))
    for name in (*SCHEDULES, "allocated"):
        cells, most = [], 0
        for cost in COSTS:
            of_shape = SCHEDULES.get(name)
            merged = of_shape.within(model.anatomy, dense, cost) if of_shape else allocated(model, lines, cost)
            if merged is None:
                cells.append("-")
                continue
            found = diverged(merged)
            most = max(most, sum(count > 0 for count in merged))
            cells.append(f"{found.mean():.3f} ± {found.std() / len(found) ** 0.5:.3f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {most} |", flush=True)


if __name__ == "__main__":
    main()
