"""Memory of ten variants in one process beside that of one session, and what sharing costs in latency.

    python benchmarks/elastic_memory.py [--models vit_tiny_patch16_224,vit_base_patch16_224] [--seconds 5]

Models of timm with random weights, cut to ten sizes from dense to a sparsity of 0.8; `corrected` variants have matrices
of their own for proj and fc2, as an export gives them. Every line of the first table is a new process: memory is what
it holds more than before the first session was opened, after every variant has run: resident pages (RSS), and of these
the ones of no file. Latencies are of files in turns, packed and shared, medians and their ratio, also of CPU time; and
what a run takes before which all pages of its weights were given back.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from results import table

SPARSITIES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8]
# One session; ten that each pack their weights; ten that share a mapping, whose pages all stay; as `ElasticSession` has
# them, which keeps those of the latest variants; the same after a while in which one alone was in use.
LAYOUTS = ("one", "packed", "shared, all kept", "shared", "shared, one in use")
OPENVINO = ("openvino one", "openvino ten")  # of the portable flavour
ONE = "s30"


def write_variants(name: str, folder: Path, corrected: bool, flavour: str) -> None:
    """Write ten variants of a model with random weights; needs torch."""
    import timm
    import torch

    from snapvit_export.allocation.planner import Planner
    from snapvit_export.graph.format import GraphFormat
    from snapvit_export.graph.writer import GraphWriter
    from snapvit_export.model.plan import Plan
    from snapvit_export.model.ranking import Ranking
    from snapvit_export.prune.models.load import as_model
    from snapvit_export.prune.pack import blueprint

    torch.manual_seed(0)
    model = as_model(timm.create_model(name).eval())
    ranking = Ranking.flat(model.anatomy)
    made = blueprint(model, ranking)
    writer, format = GraphWriter(made, folder), GraphFormat(flavour)  # type: ignore[arg-type]
    planner = Planner(ranking, model.anatomy)
    for sparsity in SPARSITIES:
        plan = planner.sparsity(sparsity) if sparsity else Plan.dense(model.anatomy)
        own = _own(made, model.anatomy, plan) if corrected and sparsity else {}
        writer.write(f"s{100 * sparsity:02.0f}", plan, own, format=format)


def _own(made: Any, anatomy: Any, plan: Any) -> dict[str, Any]:
    """Matrices of a variant's own, a little different from those that it would share."""
    found = {}
    for i, block in enumerate(anatomy.blocks):
        for layer, rows in (("proj", plan.heads[i] * block.head_dim), ("fc2", plan.neurons[i])):
            whole = np.asarray(made.dense[f"blocks.{i}.{layer}.weight"])
            found[f"blocks.{i}.{layer}.weight"] = (whole[:rows] * np.float32(1.001)).copy()
    return found


def status() -> dict[str, int]:
    """Bytes that this process holds, after all that can be given back was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: 1024 * int(lines[key].split()[0]) for key in ("VmRSS", "RssAnon", "RssFile")}


def opened(folder: Path, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Open the variants of a folder in one of the layouts; return also the mapped files that each of them reads."""
    from snapvit_export.runtimes.ort import OrtSession
    from snapvit_export.serving.mapped_weights import MappedWeights
    from snapvit_export.storage.atomic import sha256

    paths = sorted(folder.glob("*.onnx"))
    paths = paths[:1] if layout in ("one", OPENVINO[0]) else paths
    if layout.startswith("openvino"):
        from snapvit_export.runtimes.openvino import OpenVinoSession

        return {path.stem: OpenVinoSession(path, 1) for path in paths}, {}
    if not layout.startswith("shared"):
        return {path.stem: OrtSession(path, 1) for path in paths}, {}
    weights = MappedWeights(folder, {path.name: sha256(path) for path in folder.glob("*.bin")})
    read = {path.stem: weights.of_graph(path) for path in paths}
    sessions = {path.stem: OrtSession(path, 1, weights=read[path.stem][0]) for path in paths}
    return sessions, {name: files for name, (_, files) in read.items()}


def image(size: int = 224) -> Any:
    return np.random.default_rng(0).standard_normal((1, 3, size, size)).astype(np.float32)


def memory_in(folder: Path, layout: str) -> dict[str, int]:
    """Open, run everything twice, and return the memory that this took."""
    import onnx
    import onnxruntime

    assert onnx, onnxruntime.InferenceSession  # loaded before: their own size is not the question
    from snapvit_export.serving.mapped_weights import keep_in_memory
    from snapvit_export.storage.atomic import sha256

    for path in folder.glob("*.bin"):
        sha256(path)
    given, before = image(), status()
    sessions, files = opened(folder, layout)
    latest: list[str] = []
    for name in [*sessions, *sessions]:
        sessions[name].run(given)
        latest = [name, *(other for other in latest if other != name)]
        if layout == "shared":
            keep_in_memory(files, latest)
    if "in use" in layout:
        keep_in_memory(files, [])
        sessions[ONE].run(given)
    after = status()
    return {key: after[key] - before[key] for key in after}


def latencies(folder: Path, seconds: float) -> dict[str, dict[str, float]]:
    """Medians of each variant in turns: packed, shared, and shared after all of its pages were given back."""
    from snapvit_export.profiling.sampling import time_together
    from snapvit_export.serving.mapped_weights import keep_in_memory

    (packed, _), (shared, files), given = opened(folder, "packed"), opened(folder, "shared"), image()

    def run_anew(name: str) -> Any:
        keep_in_memory(files, [])
        return shared[name].run(given)

    found = {}
    for name in packed:
        calls = {"packed": partial(packed[name].run, given), "shared": partial(shared[name].run, given)}
        calls["anew"] = partial(run_anew, name)
        samples = time_together(calls, seconds)
        found[name] = {layout: taken.percentile(50) for layout, taken in samples.items()}
        found[name] |= {f"{layout} cpu": taken.quiet_cpu_ms for layout, taken in samples.items()}
    return found


def in_new_process(*words: object) -> Any:
    done = subprocess.run([sys.executable, __file__, *map(str, words)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_openvino(name: str) -> dict[str, dict[str, int]]:
    """Memory in OpenVINO, which packs what each session needs, of the flavour that it reads."""
    with tempfile.TemporaryDirectory() as scratch:
        in_new_process("--part", "write", name, scratch, "plain", "portable")
        return {layout: in_new_process("--part", "memory", scratch, layout) for layout in OPENVINO}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vit_tiny_patch16_224,vit_base_patch16_224")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each variant, for latencies; 0: none")
    parser.add_argument("--part", nargs="+", help="used by itself, in new processes")
    given = parser.parse_args()
    if given.part:
        what, *rest = given.part
        if what == "write":
            write_variants(rest[0], Path(rest[1]), rest[2] == "corrected", rest[3])
            print("{}")
        elif what == "memory":
            print(json.dumps(memory_in(Path(rest[0]), rest[1])))
        else:
            print(json.dumps(latencies(Path(rest[0]), given.seconds)))
        return
    rows, timed = [], []
    for name in given.models.split(","):
        for kind in ("plain", "corrected"):
            with tempfile.TemporaryDirectory() as scratch:
                in_new_process("--part", "write", name, scratch, kind, "ort")
                weights = sum(path.stat().st_size for path in Path(scratch).glob("*.bin"))
                taken = {layout: in_new_process("--part", "memory", scratch, layout) for layout in LAYOUTS}
                if kind == "plain":
                    taken |= in_openvino(name)
                for layout, found in taken.items():
                    times = found["VmRSS"] / taken["openvino one" if layout in OPENVINO else "one"]["VmRSS"]
                    cells = [f"{found[key] / 1e6:.0f}" for key in ("VmRSS", "RssAnon", "RssFile")]
                    rows.append([name, kind, f"{weights / 1e6:.0f}", layout, *cells, f"{times:.2f}"])
                    print(rows[-1], file=sys.stderr, flush=True)
                if kind == "plain" and given.seconds:
                    found = in_new_process("--seconds", given.seconds, "--part", "latency", scratch)
                    for variant, ms in found.items():
                        pairs = (("shared", "packed"), ("shared cpu", "packed cpu"), ("anew", "shared"))
                        ratios = [f"{ms[one] / ms[other]:.3f}" for one, other in pairs]
                        timed.append([name, variant, f"{ms['packed']:.2f}", f"{ms['shared']:.2f}", *ratios])
    columns = [
        "model",
        "variants",
        "weight files, MB",
        "sessions",
        "RSS, MB",
        "of no file",
        "of files",
        "to one session",
    ]
    print(table(columns, rows), end="\n\n")
    print(
        table(
            ["model", "variant", "packed, ms", "shared, ms", "ratio", "of CPU time", "pages given back / shared"], timed
        )
    )


if __name__ == "__main__":
    main()
