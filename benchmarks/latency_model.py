"""How far is the latency model off on Plans that it has not seen? Heads, neurons, merges and resolution at random.

    python benchmarks/latency_model.py [--models vit_tiny_patch16_224 vit_base_patch16_224] [--held-out 16]
        [--seconds 2] [--threads 1] [--depth] [--save folder]

A model is fitted, as a choice does it, to sample configurations that are timed in turns (ONNX Runtime, batch 1; CPU
time on one thread, else the median). Then held-out Plans are drawn: heads and neurons of every block around a share of
the model's, tokens merged by equal, falling or few-block schedules, images of other sizes; with --depth some lack
sub-layers. They are timed in the same turns; those that memory does not hold in turns with the dense one, and by their
ratio to it, so that drift of the machine does not count as an error. Weights are random: only shapes matter. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from graph import make_model

from snapvit_export.allocation.tokens import merging_blocks
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.forward import can_reorder
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.latency_model import KEYS_AND_VALUES, LatencyModel, fit
from snapvit_export.profiling.profile import Profile
from snapvit_export.profiling.sample_plans import held_out_plans, sample_plans
from snapvit_export.profiling.timer import File, Timer
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes import ort
from snapvit_export.runtimes.device import this_device
from snapvit_export.storage.atomic import sha256
from snapvit_export.storage.json import to_json
from snapvit_export.target import Target

ORT = GraphFormat("ort")
MEMORY = 4 * 10**9  # bytes of weights that are open at once
LEAST = 24  # files that are timed in turns: more than a choice has samples


def random_plan(anatomy: Anatomy, random: np.random.Generator, depth: bool) -> Plan:
    """Return a Plan that is unlike the samples: other widths in every block, and tokens by a schedule of some kind."""
    heads, neurons = (
        [int(np.clip(round(n * random.normal(share, 0.15)), max(1, n // 5), n)) for n in counts]
        for counts, share in zip((anatomy.heads, anatomy.neurons), random.uniform(0.4, 1, 2))
    )
    if depth:
        for i in random.choice(len(heads) - 1, random.integers(0, 4), replace=False):
            (heads if random.random() < 0.5 else neurons)[int(i)] = 0
    plan = Plan(heads=tuple(heads), neurons=tuple(neurons))
    side = int(random.integers(anatomy.grid[0] // 2, anatomy.grid[0]))
    grid = None if random.random() < 0.5 else (side, side)
    plan = plan.with_tokens(grid=grid)
    return plan.with_tokens(random_merges(anatomy, plan, random), grid) if random.random() < 0.75 else plan


def random_merges(anatomy: Anatomy, plan: Plan, random: np.random.Generator) -> list[int]:
    """Return merges that leave a quarter or more of the patches: equal, falling, or in a few blocks."""
    blocks = merging_blocks(anatomy, plan)
    if random.random() < 0.4:
        blocks = sorted(random.choice(blocks, min(len(blocks), int(random.integers(2, 6))), replace=False))
    falls = np.linspace(1, random.choice([1.0, 0.0]), len(blocks) + 1)[:-1]
    left = anatomy.patches_of(plan)
    each = falls / falls.sum() * left * random.uniform(0.2, 0.75)
    merged = [0] * len(plan.heads)
    for i, count in zip(blocks, each):
        merged[int(i)] = min(round(count), left // 2)
        left -= merged[int(i)]
    return merged


class Bench:
    """Writes and times the Plans of one model."""

    def __init__(self, name: str, folder: Path, threads: int, seconds: float) -> None:
        model = make_model(name)
        self.anatomy, self.seconds, self.threads = model.anatomy, seconds, threads
        self.writer = GraphWriter(blueprint(model, Ranking.flat(model.anatomy)), folder)
        noise = np.random.default_rng(0).standard_normal((1, 3, *model.anatomy.image)).astype(np.float32)
        target = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=threads)
        self.timer = Timer(target, this_device(ort.version()), noise)

    def time(self, plans: list[Plan]) -> list[float]:
        """Return the milliseconds of Plans that are timed in turns."""
        files = {}
        for n, plan in enumerate(plans):
            path = self.writer.write(f"p{n}", plan, format=ORT).graph
            files[f"p{n}"] = File(path, sha256(path), self.anatomy.image_of(plan))
        return [self.ms(profile) for profile in self.timer.time(files, self.seconds).values()]

    def ms(self, profile: Profile) -> float:
        """Return what a choice fits to."""
        return profile.cpu_ms if self.threads == 1 and profile.cpu_ms is not None else profile.p50_ms

    def run(self, depth: bool, plans: list[Plan]) -> tuple[LatencyModel, list[tuple[Plan, float]], list[float]]:
        """Return a model that is fitted to samples, these, and the milliseconds of other Plans in the same turns.

        Where memory does not hold all of them, the rest is timed in more turns with the dense one, and by their ratio.
        """
        samples, unseen = sample_plans(self.anatomy, removable=depth, tokens=True), held_out_plans(self.anatomy)
        together = [*samples, *unseen, *plans[: self.most - len(samples) - len(unseen)]]
        times = self.time(together)
        while len(times) < len(samples) + len(unseen) + len(plans):
            start = len(times) - len(samples) - len(unseen)
            dense, *others = self.time([samples[0], *plans[start : start + self.most - 1]])
            times += [ms / dense * times[0] for ms in others]
        measured, held_out = list(zip(samples, times)), list(zip(unseen, times[len(samples) :]))
        reorders = can_reorder(self.anatomy, Plan.dense(self.anatomy).last_attention, GraphPrecision())
        model = fit(self.anatomy, measured, 0.0 if reorders else KEYS_AND_VALUES, held_out)
        return model, measured, times[len(samples) + len(unseen) :]

    @property
    def most(self) -> int:
        """How many sessions fit into memory; those of a choice must."""
        return max(LEAST, MEMORY // (4 * self.anatomy.params()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["vit_tiny_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--held-out", type=int, default=16, help="Plans to predict")
    parser.add_argument("--seconds", type=float, default=2.0, help="of every file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", action="store_true", help="some Plans lack sub-layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="folder for what was measured, as JSON")
    args = parser.parse_args()
    print("| model | samples | error that a choice tells | held out | mean error | largest | mean error of FLOPs |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(name, Path(folder), args.threads, args.seconds)
            random = np.random.default_rng(args.seed)
            plans = [random_plan(bench.anatomy, random, args.depth) for _ in range(args.held_out)]
            model, samples, found = bench.run(args.depth, plans)
        times, dense_ms = np.array(found), samples[0][1]
        errors = np.abs(np.array([model.predict_ms(plan) for plan in plans]) / times - 1)
        flops, dense = [bench.anatomy.flops(plan) for plan in plans], bench.anatomy.flops()
        by_flops = np.abs(np.array(flops) / dense * dense_ms / times - 1)
        print(
            f"| {name} | {model.nets} | {100 * model.mean_error:.1f} % / {100 * model.most_error:.1f} % | {len(plans)} "
            f"| **{100 * errors.mean():.1f} %** | {100 * errors.max():.1f} % | {100 * by_flops.mean():.1f} % |",
            flush=True,
        )
        if args.save:
            kept = {"samples": samples, "held_out": list(zip(plans, map(float, times))), "model": model}
            args.save.mkdir(parents=True, exist_ok=True)
            (args.save / f"{name}.json").write_bytes(to_json(kept))


if __name__ == "__main__":
    main()
