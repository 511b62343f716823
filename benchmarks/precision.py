"""Fewer bits: latency, size and faithfulness of fp16 and int8 graphs, dense and pruned, and of ORT's quantiser.

    python benchmarks/precision.py --checkpoint deit_tiny_patch16_224.safetensors --images imagenet-sample/ \
        [--model deit_tiny_patch16_224] [--flops 0.7] [--rounds 30] [--random vit_base_patch16_224]

Latency in ONNX Runtime on one thread: CPU time of one image, all graphs in turns, 20th percentile, as a ratio to the
dense float32 graph of the same flavour. Faithfulness on 64 images that took no part in calibration (32 others did): the
least and the mean cosine of the outputs to float32 of the same variant, and how often both name the same class. int8
weights in four ways (`graph/precision.py`), of which the first is what is written:

    pairs      neighbours add up within 16 bits: the same on every CPU
    full       8 bits to their ends: cut off on CPUs without int8 dot products
    7 bits     every weight up to 64: the same on every CPU
    unsigned   full as uint8 with a zero point of 128: the same on every CPU, by other kernels

`quantize_dynamic` and `quantize_static` are ONNX Runtime's own, on our dense portable graph (linear layers only, per
channel). `--random` adds a model with random weights: latency alone. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from graph import latencies, make_model
from onnx import TensorProto, load, numpy_helper

from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.calibration.images import Images, calibration_and_held_out, prepare
from snapvit_export.checks.quantisation import calibrate
from snapvit_export.graph import precision as graph_precision
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.pack import blueprint, corrected_layers
from snapvit_export.prune.rank.rank import rank
from snapvit_export.runtimes.ort import OrtSession

FEWER = ("fp16", "int8-dynamic", "int8-static")
WAYS = ("", " full", " 7 bits", " unsigned")  # of int8 weights; the first is what is written
RANGING, REPORTING = 32, 64


def outputs(path: Path, images: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float64]:
    with OrtSession(path, 1) as session:
        return np.concatenate([session.run(batch) for batch in images]).astype(np.float64)


def faithfulness(reference: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> str:
    norms = np.linalg.norm(reference, axis=1) * np.linalg.norm(other, axis=1)
    cosine = (reference * other).sum(1) / norms
    same = (reference.argmax(1) == other.argmax(1)).mean()
    return f"{cosine.min():.5f} | {cosine.mean():.5f} | {100 * same:.0f} %"


def size_mb(path: Path) -> float:
    return path.stat().st_size / 1e6


def emit(
    drawn: Blueprint, place: Path, plan: Plan, made: dict, numerics: GraphPrecision, way: str
) -> tuple[Path, float]:
    """A graph with its int8 weights in one of the `WAYS`, and its size in MB."""
    with mock.patch.object(graph_precision, "LARGEST", 64 if way == " 7 bits" else graph_precision.LARGEST):
        emitter = GraphWriter(drawn, place, precision=numerics.precision, sum_bits=32 if way else 16)
        written = emitter.write("ort", plan, made, format=GraphFormat("ort"), precision=numerics)
    size = written.size_bytes / 1e6
    if way == " unsigned":
        unsigned(written.graph)
    return written.graph, size


def unsigned(path: Path) -> None:
    """Turn the int8 weights of a graph into uint8 with a zero point of 128, in place and inside of it."""
    model = load(path)
    signed = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT8}
    for tensor in model.graph.initializer:  # weights, and zero points of them
        if tensor.name in signed:
            moved = (numpy_helper.to_array(tensor).astype(np.int16) + 128).astype(np.uint8)
            tensor.CopyFrom(numpy_helper.from_array(moved, tensor.name))
    model.graph.initializer.append(numpy_helper.from_array(np.array(128, np.uint8), "middle"))
    for node in model.graph.node:
        if node.op_type == "MatMulInteger":
            node.input.append("middle")
    path.write_bytes(model.SerializeToString())


class Feed:
    """Calibration batches in the form that ONNX Runtime's quantiser asks for."""

    def __init__(self, batches: Sequence[npt.NDArray[np.float32]]) -> None:
        self.left = [image[None] for batch in batches for image in batch]

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        return {"images": self.left.pop()} if self.left else None


def quantised_by_ort(graph: Path, folder: Path, batches: Sequence[npt.NDArray[np.float32]]) -> dict[str, Path]:
    """Its own dynamic and static quantiser on a graph with its weights inside."""
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    layers = ["MatMul", "Gemm"]
    for name in ("quantize_dynamic", "quantize_static"):
        start = time.perf_counter()
        out = folder / f"{name}.onnx"
        if name == "quantize_dynamic":
            quantize_dynamic(graph, out, op_types_to_quantize=layers, per_channel=True, weight_type=QuantType.QInt8)
        else:
            quantize_static(
                graph,
                out,
                Feed(batches),
                op_types_to_quantize=layers,
                per_channel=True,
                weight_type=QuantType.QInt8,
                activation_type=QuantType.QUInt8,
                extra_options={"MatMulConstBOnly": True},
            )
        print(f"<!-- {name}: {time.perf_counter() - start:.1f} s -->")
    return {name: folder / f"{name}.onnx" for name in ("quantize_dynamic", "quantize_static")}


def variants(model: Model, images: Images | None, fraction: float) -> dict[str, tuple[Ranking, Plan, dict]]:
    """Dense, and pruned by the default recipe; without images by no recipe at all."""
    if images is None:
        ranking = Ranking.flat(model.anatomy)
        return {
            "dense": (ranking, Plan.dense(model.anatomy), {}),
            f"flops{100 * fraction:g}": (ranking, Planner(ranking, model.anatomy).flops(fraction), {}),
        }
    ranking = rank(model, images, make_settings("default"))
    plan = Planner(ranking, model.anatomy, ranking.protection).flops(fraction)
    dense = blueprint(model, ranking).dense
    made = corrected_layers(refit(model, ranking, plan, images), ranking, plan, dense)
    return {"dense": (ranking, Plan.dense(model.anatomy), {}), f"flops{100 * fraction:g}": (ranking, plan, made)}


def measure(model: Model, fit: Images | None, batches, held_out, fraction: float, rounds: int) -> None:
    paths: dict[str, Path] = {}
    sizes: dict[str, float] = {}
    faithful: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for title, (ranking, plan, made) in variants(model, fit, fraction).items():
            drawn = blueprint(model, ranking)
            exact = here / f"{title}-fp32"
            exact.mkdir()
            portable = GraphWriter(drawn, exact).write("portable", plan, made)
            kept = GraphWriter(drawn, exact).write("ort", plan, made, format=GraphFormat("ort"))
            paths[f"{title} fp32"], sizes[f"{title} fp32"] = kept.graph, kept.size_bytes / 1e6
            wanted = outputs(portable.graph, held_out)
            for precision, way in product(FEWER, WAYS):
                if way and precision == "fp16":
                    continue
                name = f"{title} {precision}{way}"
                place = here / name
                place.mkdir()
                numerics = calibrate(precision, portable, batches)
                paths[name], sizes[name] = emit(drawn, place, plan, made, numerics, way)
                faithful[name] = faithfulness(wanted, outputs(paths[name], held_out))
            if title == "dense" and fit is not None:
                alone = GraphWriter(drawn, here).write("alone", plan, format=GraphFormat(single_file=True)).graph
                for name, path in quantised_by_ort(alone, here, batches).items():
                    paths[f"dense {name}"], sizes[f"dense {name}"] = path, size_mb(path)
                    faithful[f"dense {name}"] = faithfulness(wanted, outputs(path, held_out))
        found = latencies(paths, 1, rounds)
    base = found["dense fp32"]
    print(f"\n{model.name}, ONNX Runtime {ort.__version__}; dense fp32 takes {1e3 * base:.1f} CPU ms\n")
    print("| graph | latency / dense fp32 | MB | least cosine | mean cosine | same class |\n|---|---|---|---|---|---|")
    for name in paths:
        told = faithful.get(name, "1 | 1 | 100 %") if fit is not None else " | | "
        print(f"| {name} | **{found[name] / base:.3f}** | {sizes[name]:.1f} | {told} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", required=True)
    parser.add_argument("--flops", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--random", nargs="*", default=[])
    args = parser.parse_args()
    model = load_model(args.model, args.checkpoint)
    fit, held_out = (
        prepare(part, model.preprocessing) for part in calibration_and_held_out(args.images, 256, 0, REPORTING)
    )
    batches = list(fit.first(RANGING).batches(1))
    measure(model, fit, batches, list(held_out.batches(16)), args.flops, args.rounds)
    for name in args.random:
        measure(make_model(name), None, batches[:1], batches[:1], args.flops, max(6, args.rounds // 3))


if __name__ == "__main__":
    main()
