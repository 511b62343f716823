"""Is a budget kept, and is nothing denser possible? The choice on this machine, looked at again by other means.

    snapvit export --model deit_tiny_patch16_224 --checkpoint deit_tiny_patch16_224.safetensors --data imagenet-sample \
        --sparsity 0.5 --out family
    snapvit pack --model deit_tiny_patch16_224 --checkpoint deit_tiny_patch16_224.safetensors --data imagenet-sample \
        --ranking family/ranking.safetensors --out elastic
    python benchmarks/budget.py family elastic [--budgets 80%,70%,60%,50%,40%] [--hogs 2]

A budget of 80% here is 0.8 of what the dense model took in a new process a moment before, given in milliseconds; with
`--relative` it is given as it stands. For every budget `snapvit choose --elastic` picks a variant. Then

1. a new process times the chosen file for five seconds, in turns with the dense one: is it within the budget?
2. every candidate of the whole grid, one hundredth apart, is built and timed by CPU time in turns with the dense one,
   once for all budgets: how many FLOPs has the densest that fits, and how many of them does the chosen one keep?

With `--hogs N` the same choice is made once more beside N processes that only compute: it must end within one step of
the other, or say that it cannot decide. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from snapvit_export.budget import Budget
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import BudgetNotMet
from snapvit_export.family.folder import read_family
from snapvit_export.family.manifest import Choice, Limits, Manifest, MeasuredOn
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.profiling.timer import File, Timer
from snapvit_export.progress import Silent
from snapvit_export.runtimes import ort
from snapvit_export.runtimes.device import this_device
from snapvit_export.selection.on_device import TimingOptions, choose_in_family, noise
from snapvit_export.storage.atomic import sha256
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
GROUP = 8  # candidates that are timed in turns, with the dense one


def chosen(family: Path, elastic: Path, budget: str, folder: Path) -> Manifest:
    copy = shutil.copytree(family, folder / "family")
    return choose_in_family(copy, Budget.parse(budget), Limits(), TimingOptions(threads=1, batch=1), Silent(), elastic)


def again(folder: Path, name: str) -> tuple[float, tuple[float, float], float]:
    """The latency of a variant in a new process, between what it lies, and the dense one's."""
    call = [sys.executable, "-m", "snapvit_export.cli", "profile", str(folder), "--json", "-q", "--seconds", "5"]
    told = subprocess.run([*call, "--out", str(folder / "again.json")], check=True, capture_output=True, text=True)
    (folder / "again.json").unlink()
    profiles = json.loads(told.stdout)["profiles"]
    return profiles[name]["p50_ms"], tuple(profiles[name]["intervals_ms"]["p50"]), profiles["dense"]["p50_ms"]


def exhaustive(grid: dict[str, Plan], packed: Elastic, manifest: Manifest, folder: Path) -> dict[str, float]:
    """Every candidate's CPU time, relative to the dense one's in the same turns."""
    emitter = GraphWriter(Blueprint.of(packed), folder)
    timer = Timer(TARGET, this_device(ort.version()), noise(manifest, 1))
    paths = {name: emitter.write(name, plan, format=GraphFormat("ort")).graph for name, plan in grid.items()}
    files = {name: File(path, sha256(path)) for name, path in paths.items()}
    names, found = [name for name in grid if name != "dense"], {"dense": 1.0}
    for start in range(0, len(names), GROUP):
        part = ["dense", *names[start : start + GROUP]]
        profiles = timer.time({name: files[name] for name in part}, seconds=1.0)
        found |= {name: profiles[name].cpu_ms / profiles["dense"].cpu_ms for name in part}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", type=Path)
    parser.add_argument("elastic", type=Path)
    parser.add_argument("--budgets", default="80%,70%,60%,50%,40%")
    parser.add_argument("--hogs", type=int, default=0)
    parser.add_argument("--relative", action="store_true")
    args = parser.parse_args()
    packed, manifest = Elastic.load(args.elastic), read_family(args.family)
    device = MeasuredOn.of(TARGET, this_device(ort.version())).device
    print(f"{manifest.model} on {device.cpu}, one thread, ONNX Runtime {device.runtime_version}\n")
    print("| budget | ms | chosen | ms by the choice | decided | in a new process | within | files timed "
          "| model off by | FLOPs of the best of the grid | kept |"
          + (" beside others | verdict |" if args.hogs else ""))  # fmt: skip
    print("|---" * (13 if args.hogs else 11) + "|")
    times: dict[str, float] = {}
    for share in args.budgets.split(","):
        with tempfile.TemporaryDirectory() as folder:
            budget = share
            if not args.relative:
                budget = f"{Budget.parse(share).to_ms(again(args.family, 'dense')[2], 1):.4f}ms"
            choice = chosen(args.family, args.elastic, budget, Path(folder)).choice
            assert choice is not None
            assert choice.model is not None, "the dense model fitted"
            ms, (low, high), dense_again = again(Path(folder) / "family", choice.variant)
            if not times:
                grid = packed.planner.steps_of(choice.model.costs(packed.anatomy))
                (Path(folder) / "grid").mkdir()
                times = exhaustive(grid, packed, manifest, Path(folder) / "grid")
        found = {m.variant: m for m in choice.measurements}
        fitting = [name for name in grid if times[name] * found["dense"].latency_ms <= choice.budget_ms]
        best = max(packed.anatomy.flops(grid[name]) for name in fitting)
        new = len(choice.measurements) - len(manifest.variants) + choice.model.nets
        allowed = Budget.parse(share).to_ms(dense_again, 1) if args.relative else choice.budget_ms
        within = "yes" if ms <= allowed else "interval" if low <= allowed else "no"
        mine = found[choice.variant]
        cells = [share, f"{choice.budget_ms:.2f}", choice.variant]
        cells += ["{:.2f} ({:.2f} to {:.2f})".format(mine.latency_ms, *mine.between_ms)]
        cells += ["yes" if choice.decided else "no", f"{ms:.2f} ({low:.2f} to {high:.2f})", within, str(new)]
        cells += [f"{100 * choice.model.mean_error:.1f} %", f"{best / packed.anatomy.flops():.3f}"]
        cells += [f"**{mine.flops / best:.3f}**"]
        if args.hogs:
            cells += beside(args, choice)
        print("| " + " | ".join(cells) + " |", flush=True)


def beside(args: argparse.Namespace, quiet: Choice) -> list[str]:
    """The choice of the same milliseconds while others compute."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.hogs)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = chosen(args.family, args.elastic, f"{quiet.budget_ms:.4f}ms", Path(folder)).choice
    except BudgetNotMet:
        return ["none", "**says that nothing fits**"]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert found is not None
    steps = abs(_percent(found.variant) - _percent(quiet.variant))
    verdict = "within a step" if steps <= 1 else "says so" if not found.decided else f"**{steps} steps off**"
    return [found.variant, verdict]


def _percent(name: str) -> int:
    return 100 if name == "dense" else int(name.removeprefix("t").partition("-")[0]) if name != "sparsest" else 0


if __name__ == "__main__":
    main()
