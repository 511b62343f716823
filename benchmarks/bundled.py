"""Speed-up of pruned variants over the dense model in ONNX Runtime, timed side by side in one run.

    python benchmarks/bundled.py [--model bundled] [--checkpoint FILE] [--threads 1]

Scores do not matter here, only shapes: plans follow a random ranking. Prints a Markdown table: the FLOPs that remain,
and the latency that remains, as ratios to dense.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch_export import to_onnx

from snapvit_export.allocation.planner import Planner
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.sampling import time_together
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.runtimes.ort import OrtSession


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model = load_model(args.model, args.checkpoint)
    anatomy, rng = model.anatomy, np.random.default_rng(0)
    ranking = Ranking(tuple(rng.random(n) for n in anatomy.heads), tuple(rng.random(n) for n in anatomy.neurons))
    planner = Planner(ranking, anatomy)
    plans = {0.0: Plan.dense(anatomy)} | {s: planner.sparsity(s) for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)}
    image = rng.standard_normal((1, anatomy.channels, *anatomy.image)).astype(np.float32)

    def runner(plan: Plan):
        small = shrink(model.module, ranking, plan)
        session = OrtSession(to_onnx(small, anatomy.with_counts(plan), {}), args.threads)
        return lambda: session.run(image)

    samples = time_together({str(s): runner(plan) for s, plan in plans.items()})
    dense_ms = np.median(samples["0.0"])
    print("| sparsity | FLOPs of the model / dense | latency / dense | median ms |\n|---|---|---|---|")
    for sparsity, plan in plans.items():
        ms, flops = np.median(samples[str(sparsity)]), anatomy.flops(plan) / anatomy.flops()
        print(f"| {sparsity:.1f} | {flops:.3f} | {ms / dense_ms:.3f} | {ms:.2f} |")


if __name__ == "__main__":
    main()
