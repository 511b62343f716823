"""Our graphs against the standard export: latency, how long a variant takes to make, what opening it costs.

    python benchmarks/graph.py [--models vit_tiny_patch16_224 vit_base_patch16_224] [--rounds 16]

1. Latency in ONNX Runtime on one thread: CPU time, the graphs in turns, 20th percentile, as a ratio to
   torch.onnx.export (tracing, opset 17). Weights are random: only shapes matter.
2. Making a variant at half the sparsity: our emitter from a blueprint in memory, against the standard export of the
   sliced module.
3. Opening it: seconds and private memory of a session, with and without prepacked weights, in a new process each:
   the median of ten sessions that are all kept open.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import timm
import torch
from torch_export import to_onnx

from snapvit_export.allocation.planner import Planner
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.load import Model, ModelDescription
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint


def make_model(name: str) -> Model:
    torch.manual_seed(0)
    module = timm.create_model(name).eval()
    pre = Preprocessing(input_size=(3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3)
    return Model(
        module,
        read_anatomy(module, name),
        ModelDescription(name=name, architecture=name, kwargs={}, preprocessing=pre),
    )


def session(path: Path, prepack: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def latencies(paths: dict[str, Path], batch: int, rounds: int) -> dict[str, float]:
    """CPU seconds of one run, the 20th percentile of many, taken in turns."""
    images = np.random.default_rng(0).standard_normal((batch, 3, 224, 224)).astype(np.float32)
    opened = {name: session(path) for name, path in paths.items()}
    samples: dict[str, list[float]] = {name: [] for name in paths}
    for number in range(rounds + 2):
        for name, each in opened.items():
            start = time.process_time()
            each.run(None, {each.get_inputs()[0].name: images})
            if number >= 2:  # the first two warm up
                samples[name].append(time.process_time() - start)
    return {name: float(np.percentile(taken, 20)) for name, taken in samples.items()}


def seconds(work: Callable[[], object], rounds: int = 3) -> float:
    best = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        best.append(time.perf_counter() - start)
    return min(best)


def private_mb() -> float:
    """Memory that only this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def open_ten_times(path: Path, prepack: bool) -> None:
    before, held, took = private_mb(), [], []
    for _ in range(10):
        took.append(seconds(lambda: held.append(session(path, prepack)), 1))
    print(f"{1e3 * float(np.median(took)):.0f} | {(private_mb() - before) / 10:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["vit_tiny_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--open", type=Path, help="only open this graph ten times")
    parser.add_argument("--prepack", choices=["yes", "no"], default="yes")
    args = parser.parse_args()
    if args.open:
        return open_ten_times(args.open, args.prepack == "yes")
    speed, making, opening = [], [], []
    for name in args.models:
        model = make_model(name)
        ranking = Ranking.flat(model.anatomy)
        plan = Planner(ranking, model.anatomy).sparsity(0.5)
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            (here / "standard.onnx").write_bytes(to_onnx(model.module, model.anatomy, {}))
            emitter = GraphWriter(blueprint(model, ranking), here)
            paths = {"standard": here / "standard.onnx"}
            for flavour in ("portable", "ort"):
                paths[flavour] = emitter.write(flavour, Plan.dense(model.anatomy), format=GraphFormat(flavour)).graph
            for batch in (1, 8) if "tiny" in name else (1,):
                found = latencies(paths, batch, args.rounds)
                ratios = " | ".join(f"**{found[f] / found['standard']:.3f}**" for f in ("portable", "ort"))
                speed.append(f"| {name} | {batch} | {1e3 * found['standard']:.1f} | {ratios} |")
            ours = seconds(lambda e=emitter, p=plan: e.write("cut", p))
            sliced = shrink(model.module, ranking, plan)
            theirs = seconds(lambda s=sliced, a=model.anatomy.with_counts(plan): to_onnx(s, a, {}), 1)
            making.append(f"| {name} | {1e3 * ours:.0f} | {1e3 * theirs:.0f} | {theirs / ours:.0f}x |")
            for prepack in ("yes", "no"):
                command = [sys.executable, __file__, "--open", str(paths["ort"]), "--prepack", prepack]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
                opening.append(f"| {name} | {prepack} | {told} |")
    print("\n| model | batch | standard, CPU ms | portable / standard | ort / standard |\n|---|---|---|---|---|")
    print("\n".join(speed))
    print("\n| model | emitted, ms | standard export, ms | ratio |\n|---|---|---|---|")
    print("\n".join(making))
    print("\n| model | prepacked | opening, ms | private MB a session |\n|---|---|---|---|")
    print("\n".join(opening))


if __name__ == "__main__":
    main()
