"""Runtimes side by side on this CPU: ONNX Runtime and OpenVINO, in float32 and in int8, dense and pruned.

    python benchmarks/runtimes.py --checkpoint deit_tiny_patch16_224.safetensors --images imagenet-sample/ \
        [--model deit_tiny_patch16_224] [--sparsity 0.5] [--threads 1] [--seconds 5] [--random vit_base_patch16_224]

Each file is opened as `snapvit` opens it for its target, and all of them take turns: CPU time of one image (20th
percentile) and wall clock (median), also as ratios to the dense model in float32 in ONNX Runtime. Faithfulness on 64
images that took no part in calibration (32 others did): the least and the mean cosine of the outputs to float32 of the
same variant, and how often both name the same class. int8 is ours in ONNX Runtime and made by NNCF in OpenVINO, in the
linear layers of the blocks in both. `--random` adds a model with random weights: latency alone. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from graph import make_model
from precision import RANGING, REPORTING, faithfulness

from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.calibration.images import Images, calibration_and_held_out, prepare
from snapvit_export.checks.quantisation import calibrate
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import GraphWriter, WrittenGraph
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.sampling import time_together
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.pack import blueprint, corrected_layers
from snapvit_export.prune.rank.rank import rank
from snapvit_export.runtimes.device import this_device
from snapvit_export.runtimes.openvino_nncf import quantise
from snapvit_export.runtimes.session import Session, open_session, version_of
from snapvit_export.target import Precision, Runtime, Target

Batches = Sequence[npt.NDArray[np.float32]]
Way = tuple[Runtime, Precision]
BASE: Way = ("onnxruntime", "fp32")
INT8: tuple[Precision, ...] = ("int8-dynamic", "int8-static")
TITLES: dict[Way, str] = {
    BASE: "ONNX Runtime fp32",
    ("onnxruntime", "int8-dynamic"): "ONNX Runtime int8-dynamic",
    ("onnxruntime", "int8-static"): "ONNX Runtime int8-static",
    ("openvino", "fp32"): "OpenVINO fp32",
    ("openvino", "int8-static"): "OpenVINO int8 by NNCF",
}


def variants(model: Model, images: Images | None, sparsity: float) -> dict[str, tuple[Ranking, Plan, dict]]:
    """Dense, and pruned by the default recipe; without images only dense."""
    if images is None:
        return {"dense": (Ranking.flat(model.anatomy), Plan.dense(model.anatomy), {})}
    ranking = rank(model, images, make_settings("default"))
    plan = Planner(ranking, model.anatomy, ranking.protection).sparsity(sparsity)
    dense = blueprint(model, ranking).dense
    made = corrected_layers(refit(model, ranking, plan, images), ranking, plan, dense)
    return {"dense": (ranking, Plan.dense(model.anatomy), {}), f"s{100 * sparsity:g}": (ranking, plan, made)}


def files(model: Model, ranking: Ranking, plan: Plan, made: dict, batches: Batches, folder: Path) -> dict[Way, Path]:
    """One variant in all its forms."""
    drawn = blueprint(model, ranking)

    def write(precision: GraphPrecision, format: GraphFormat) -> WrittenGraph:
        place = folder / precision.precision
        place.mkdir(parents=True, exist_ok=True)
        return GraphWriter(drawn, place, precision=precision.precision).write(
            format.flavour, plan, made, format=format, precision=precision
        )

    portable = write(GraphPrecision(), GraphFormat())
    found: dict[Way, Path] = {
        ("openvino", "fp32"): portable.graph,
        BASE: write(GraphPrecision(), GraphFormat("ort")).graph,
    }
    for precision in INT8:
        calibrated = calibrate(precision, portable, batches)
        found["onnxruntime", precision] = write(calibrated, GraphFormat("ort")).graph
    start = time.perf_counter()
    found["openvino", "int8-static"], _ = quantise(portable.graph, folder / "int8", batches, 2)
    print(f"<!-- {model.name}: NNCF took {time.perf_counter() - start:.1f} s for {len(batches)} images -->")
    return {way: found[way] for way in TITLES}


def outputs(session: Session, batches: Batches) -> npt.NDArray[np.float64]:
    return np.concatenate([session.run(batch) for batch in batches]).astype(np.float64)


def measure(
    model: Model, fit: Images | None, batches: Batches, held_out: Batches, sparsity: float, threads: int, seconds: float
) -> None:
    image, faithful = batches[0], {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        calls = {}
        for title, (ranking, plan, made) in variants(model, fit, sparsity).items():
            wanted = None
            for way, path in files(model, ranking, plan, made, batches, Path(folder) / title).items():
                target = Target(runtime=way[0], precision=way[1], batch=1, threads=threads)
                session = opened.enter_context(open_session(path, target))
                got = outputs(session, held_out)
                wanted = got if wanted is None else wanted
                faithful[title, way] = faithfulness(wanted, got) if fit is not None else " | | "
                calls[title, way] = partial(session.run, image)
        taken = time_together(calls, seconds)
    base = taken["dense", BASE]
    print(f"\n{model.name}, threads: {threads}\n")
    print("| variant | runtime and precision | CPU ms | / ORT fp32 | wall ms | / ORT fp32 | least cosine | mean cosine "
          "| same class |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for (title, way), samples in taken.items():
        cpu, wall = samples.quiet_cpu_ms, samples.percentile(50)
        cells = [title, TITLES[way], f"{cpu:.2f}", f"**{cpu / base.quiet_cpu_ms:.3f}**", f"{wall:.2f}"]
        print(f"| {' | '.join(cells)} | {wall / base.percentile(50):.3f} | {faithful[title, way]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", required=True)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--random", nargs="*", default=[])
    args = parser.parse_args()
    versions = ", ".join(
        f"{name} {version_of(runtime)}" for name, runtime in (("ONNX Runtime", "onnxruntime"), ("OpenVINO", "openvino"))
    )
    print(f"{this_device(versions).cpu}: {versions}\n")
    model = load_model(args.model, args.checkpoint)
    fit, held_out = (
        prepare(part, model.preprocessing) for part in calibration_and_held_out(args.images, 256, 0, REPORTING)
    )
    batches = list(fit.first(RANGING).batches(1))
    measure(model, fit, batches, list(held_out.batches(1)), args.sparsity, args.threads, args.seconds)
    for name in args.random:
        measure(make_model(name), None, batches[:2], batches[:1], 0.0, args.threads, args.seconds)


if __name__ == "__main__":
    main()
