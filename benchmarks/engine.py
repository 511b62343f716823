"""The pruning engine on a real model, each figure a ratio of two things done side by side in one run, on one thread.

    python benchmarks/engine.py --checkpoint deit_tiny.safetensors --data images/ [--images 64] [--evaluations 38]

1. Scores: two views that stand for twelve, against all twelve; and that the scores are the same.
2. Fitness: sliced tensors in one function, against masking the dense model; and that the values are the same.
3. Racing: evaluations per second with and without, and what it does to the winner.
4. Memory: what evaluating candidates adds, against the size of the weights.

CPU time of this thread, not wall time: on shared machines only that repeats. Prints Markdown.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import SEARCH_PAIRS, Settings
from snapvit_export.calibration.images import Images, calibration_and_held_out, prepare
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.scores import Scores
from snapvit_export.prune.blocks.timm_blocks import blocks_of, scored_neuron_weight
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.rank.criteria.losses import self_supervised_losses
from snapvit_export.prune.rank.criteria.views import DISTINCT_WEIGHTS, Views, make_views
from snapvit_export.prune.rank.rank import rank, starting_factors
from snapvit_export.prune.rank.search.candidate_runner import CHUNK
from snapvit_export.prune.rank.search.fitness import Fitness
from snapvit_export.prune.rank.search.loop import search
from snapvit_export.prune.rank.search.xnes import XNES


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def views(model: Model, images: Images, rounds: int = 3) -> None:
    """Gradients from 2 views with weights and from the 12 that they stand for."""
    batch = torch.from_numpy(next(images.batches(4)))
    paired = make_views(batch, "paired", torch.Generator().manual_seed(0))
    twelve = Views(paired.images[[0, 0] + [1] * 10], DISTINCT_WEIGHTS)
    weights = [scored_neuron_weight(block.mlp).tensor for block in blocks_of(model.module)]

    def gradients(crops: Views) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self_supervised_losses(model.module, crops).mean(), weights))

    few, many = gradients(paired), gradients(twelve)
    off = max(
        float((a.square().mean(1) - b.square().mean(1)).norm() / b.square().mean(1).norm()) for a, b in zip(few, many)
    )
    seconds = {"paired": [], "twelve": []}
    for _ in range(rounds):
        seconds["paired"].append(cpu_seconds(lambda: gradients(paired)))
        seconds["twelve"].append(cpu_seconds(lambda: gradients(twelve)))
    a, b = min(seconds["paired"]), min(seconds["twelve"])
    print("\n### Scores\n\n| views | CPU s / image | ratio | scores differ by |\n|---|---|---|---|")
    print(f"| twelve | {b / 4:.3f} | 1 | |\n| paired | {a / 4:.3f} | **{b / a:.2f}x faster** | {off:.1e} |")


def fitness(model: Model, scores: Scores, images: Images, rounds: int = 3) -> None:
    """One evaluation by each engine, against masking, for each pair of the search."""
    subset = Images(images.pixels[:24], None, images.preprocessing, images.source)
    engines = {name: Fitness(model, scores, subset, pca=16, engine=name) for name in ("torch", "onnxruntime")}
    factors = np.ones(scores.factors)
    ranking = Ranking(scores.heads, scores.neurons)
    planner = Planner(ranking, model.anatomy)
    batches = [torch.from_numpy(batch) for batch in subset.batches(8)]
    print("\n### Fitness\n\n| pair | masking, CPU s | torch | onnxruntime | values differ by |\n|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    for pair in SEARCH_PAIRS:
        plan = planner.pair(*pair)

        def mask(plan=plan) -> torch.Tensor:
            with torch.no_grad(), masked(model.module, ranking, plan) as m:
                return torch.cat([m.forward_head(m.forward_features(b), pre_logits=True) for b in batches])

        first = engines["torch"]
        reference = (
            1 - torch.nn.functional.cosine_similarity(first.projection(mask()), first.teacher, dim=1).mean().item()
        )
        seconds: dict[str, list[float]] = {"mask": [], **{name: [] for name in engines}}
        for engine in engines.values():
            engine.pairs = (pair,)
        off = max(abs(engine(factors) - reference) for engine in engines.values())
        for _ in range(rounds):
            seconds["mask"].append(cpu_seconds(mask))
            for name, engine in engines.items():
                seconds[name].append(cpu_seconds(lambda engine=engine: engine(factors)))
        for name in engines:
            ratios[name].append(min(seconds["mask"]) / min(seconds[name]))
        figures = " | ".join(f"{ratios[name][-1]:.2f}x" for name in engines)
        print(f"| {pair[0]}:{pair[1]} | {min(seconds['mask']):.2f} | {figures} | {off:.1e} |")
    means = " | ".join(f"**{np.mean(ratios[name]):.2f}x**" for name in engines)
    print(f"| mean | | {means} | |")


def racing(model: Model, scores: Scores, images: Images, evaluations: int) -> None:
    """The same search twice."""
    made = Fitness(model, scores, images, pca=min(32, len(images)))
    print("\n### Racing\n\n| | evaluations / CPU s | images per evaluation | best fitness |\n|---|---|---|---|")
    for name, on in (("all images", False), ("racing", True)):
        optimiser = XNES(starting_factors(scores), seed=42)
        start = time.process_time()
        found = search(made, optimiser, evaluations, racing=on)
        rate = found.evaluations / (time.process_time() - start)
        print(f"| {name} | {rate:.3f} | {found.images_seen / (found.evaluations + 1):.1f} | {found.best_loss:.5f} |")


def memory(model: Model, scores: Scores, images: Images) -> None:
    """Peak resident memory of preparing a search and evaluating candidates, beyond the cached inputs of all images."""
    factors = starting_factors(scores)
    few = Images(images.pixels[:CHUNK], None, images.preprocessing, images.source)
    Fitness(model, scores, few, pca=1)(factors)  # loads the libraries, which is not what is measured
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (Linux)
    before = _status("VmRSS")
    made = Fitness(model, scores, images, pca=min(32, len(images)))
    for seed in range(4):
        made(np.random.default_rng(seed).normal(factors, 0.3))
    cached = sum(tensor.nbytes for tensor in (*made.tokens, *made.first))
    grown = _status("VmHWM") - before - cached
    anatomy = model.anatomy
    weights = 4 * anatomy.params()
    widest = max(max(b.hidden, 3 * b.heads * b.head_dim) for b in anatomy.blocks)
    heads = max(anatomy.heads)
    activations = 4 * CHUNK * (anatomy.tokens * (3 * anatomy.embed_dim + 2 * widest) + 2 * heads * anatomy.tokens**2)
    limit = 1.5 * weights + activations
    print("\n### Memory\n\n| weights MB | activations of one chunk MB | limit MB | peak growth MB |\n|---|---|---|---|")
    print(f"| {weights / 1e6:.1f} | {activations / 1e6:.1f} | {limit / 1e6:.1f} | **{grown / 1e6:.1f}** |")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--evaluations", type=int, default=38)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(args.model, args.checkpoint)
    source, _ = calibration_and_held_out(args.data, args.images, seed=0, most_held_out=0)
    images = prepare(source, model.preprocessing)
    views(model, images)
    ranking = rank(model, images, Settings())
    scores = Scores(ranking.head_scores, ranking.neuron_scores)
    fitness(model, scores, images)
    memory(model, scores, images)
    if args.evaluations:
        racing(model, scores, images, args.evaluations)


if __name__ == "__main__":
    main()
