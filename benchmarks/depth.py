"""Does depth pay? Accuracy at equal measured latency, with and without whole sub-layers removed, side by side.

    python benchmarks/depth.py --checkpoint deit_tiny.safetensors --images imagenet-sample/ --classes classes.txt \
        [--budgets 0.7,0.6,0.5,0.4,0.3] [--ends 0.7,1,1.5] [--seeds 0,1]

Half of the images calibrate, the others report, as in quality.py. A latency model is fitted to nets timed here
(ONNX Runtime, one thread, batch 1), some of which lack sub-layers. For every budget, a share of the dense latency, it
allocates heads and neurons alone, and heads, neurons and sub-layers together, where the end of a damage curve counts as
often as `--ends` says. Every Plan is refitted on the calibration images, exported, judged by top-1 in ONNX Runtime, and
in the end all files of a budget are timed in turns with the dense one, by CPU time. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from quality import Half, halves, read_named

from snapvit_export.allocation import depth as allocation_depth
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate.exported_model import top1
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.latency_model import LatencyModel, fit
from snapvit_export.profiling.sample_plans import sample_plans
from snapvit_export.profiling.timer import File, Timer
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.pack import blueprint, corrected_layers
from snapvit_export.prune.rank.rank import rank
from snapvit_export.runtimes import ort
from snapvit_export.runtimes.device import this_device, usable_cores
from snapvit_export.storage.atomic import sha256
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
ORT = GraphFormat("ort")
WIDTH = "width alone"


@dataclass(frozen=True)
class Found:
    """One Plan made real."""

    plan: Plan
    path: Path
    top1: float


def fitted(emitter: GraphWriter, timer: Timer, anatomy) -> LatencyModel:  # type: ignore[no-untyped-def]
    plans = {f"fit{n}": plan for n, plan in enumerate(sample_plans(anatomy, removable=True))}
    files = {name: emitter.write(name, plan, format=ORT).graph for name, plan in plans.items()}
    profiles = timer.time({name: File(path, sha256(path)) for name, path in files.items()}, 2.0)
    return fit(anatomy, [(plans[name], profile.cpu_ms or 0.0) for name, profile in profiles.items()])


def plans_for(ranking: Ranking, half: Half, model: LatencyModel, budgets: list[float], ends: list[float]):  # type: ignore[no-untyped-def]
    """(budget, way) → the Plan with the least damage, or None if the way does not reach the budget."""
    anatomy, costs = half.model.anatomy, model.costs(half.model.anatomy)
    found: dict[tuple[float, str], Plan | None] = {}
    for way, end in [(WIDTH, None), *((f"depth, end x {end:g}", end) for end in ends)]:
        allocation_depth.WHOLE = 1.0 if end is None else end
        planner = Planner(ranking, anatomy, Protection(sublayers=end is None), corrected=True)
        for budget in budgets:
            try:
                found[budget, way] = planner.within(costs, budget * costs.of(Plan.dense(anatomy)))
            except SnapvitError:  # out of reach
                found[budget, way] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--classes", type=Path, required=True)
    parser.add_argument("--budgets", default="0.7,0.6,0.5,0.4,0.3")
    parser.add_argument("--ends", default="0.7,1,1.5")
    parser.add_argument("--seeds", default="0,1")
    given = parser.parse_args()
    budgets, ends = ([float(part) for part in text.split(",")] for text in (given.budgets, given.ends))
    whole = allocation_depth.WHOLE
    model = load_model("deit_tiny_patch16_224", given.checkpoint)
    images = read_named(model, given.images, given.classes)
    noise = np.random.default_rng(0).standard_normal((1, 3, *model.anatomy.image)).astype(np.float32)
    timer = Timer(TARGET, this_device(ort.version()), noise)
    print("| half | budget | way | removed | cpu / dense | FLOPs | top-1 | dense |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in map(int, given.seeds.split(",")):
            half = halves(model, images, seed)
            ranking = rank(model, half.calibration, make_settings("default"))
            emitter = GraphWriter(blueprint(model, ranking), Path(scratch) / str(seed))
            emitter.folder.mkdir()
            latency = fitted(emitter, timer, model.anatomy)
            dense = emitter.write("dense", Plan.dense(model.anatomy), format=ORT).graph
            with ort.OrtSession(dense, usable_cores()) as session:
                reference = top1(session.run, half.held_out).top1 or 0.0
            wanted = plans_for(ranking, half, latency, budgets, ends)
            made: dict[Plan, Found] = {}
            for plan in dict.fromkeys(plan for plan in wanted.values() if plan is not None):
                module = refit(model, ranking, plan, half.calibration)
                corrected = corrected_layers(module, ranking, plan, emitter.blueprint.dense)
                path = emitter.write(f"v{len(made)}", plan, corrected, format=ORT).graph
                with ort.OrtSession(path, usable_cores()) as session:
                    made[plan] = Found(plan, path, top1(session.run, half.held_out).top1 or 0.0)
            for budget in budgets:
                for way in [way for (b, way), plan in wanted.items() if b == budget and plan is None]:
                    print(f"| {seed} | {budget:g} | {way} | out of reach | | | | {reference:.3f} |", flush=True)
                ways = [way for (b, way), plan in wanted.items() if b == budget and plan is not None]
                files = {"dense": File(dense, sha256(dense))}
                files |= {w: File(made[wanted[budget, w]].path, sha256(made[wanted[budget, w]].path)) for w in ways}
                profiles = timer.time(files, 2.0)
                for way in ways:
                    found = made[wanted[budget, way]]
                    ratio = (profiles[way].cpu_ms or 0.0) / (profiles["dense"].cpu_ms or 1.0)
                    gone = ", ".join(f"{part[:4]} {i}" for i, part in found.plan.removed) or "none"
                    share = found.plan.flops_ratio(model.anatomy)
                    print(
                        f"| {seed} | {budget:g} | {way} | {gone} | {ratio:.3f} | {share:.3f} | {found.top1:.3f} "
                        f"| {reference:.3f} |",
                        flush=True,
                    )
            there = f"{1000 * latency.attention_ms[1]:.0f} us an attention, {1000 * latency.mlp_ms[1]:.0f} us an MLP"
            per = f"{1000 * latency.head_ms[1]:.0f} us a head, {1000 * latency.neuron_ms[1]:.2f} us a neuron"
            print(f"\nhalf {seed}: {there} for being there; {per}; fixed {latency.fixed_ms:.2f} ms\n", flush=True)
    allocation_depth.WHOLE = whole


if __name__ == "__main__":
    main()
