"""Every peer beside us on the same axes, measured in one run: docs/peers.md, its table and its plot.

    python benchmarks/all_peers.py --checkpoint deit_tiny_patch16_224.safetensors --images imagenet-sample/ \
        --classes classes.txt --results DIR [--half first] [--contenders ours,ours-tokens,...] [--write docs]

DeiT-Tiny, ONNX Runtime, one thread, batch 1. Half of the images are all that anybody sees, with labels only where a
peer wants them; the other half reports. First every contender makes its files, which are kept in DIR with what is known
of them; ours are exported to budgets, as a user's would be. Then all files are timed in turns with our dense graph, in
some new processes, which is the latency that the page shows, and run on the images that report. So a contender that is
added later makes the timing of all be done again, and nothing else.

Peers that want an environment of their own get it by name; without it they are left out, and the page says so:

    python -m venv peer && peer/bin/pip install torch timm numpy safetensors onnx torch-pruning==1.6.1
    python -m venv modelopt && modelopt/bin/pip install 'nvidia-modelopt[onnx]'
    ... --torch-pruning-python peer/bin/python --modelopt-python modelopt/bin/python
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import levers_peers
import numpy as np
from levers import HALVES, MODEL, SETS, TARGET, Side, circumstances, peer_outputs, sides
from levers_peers import MatchesNothing, PeerFile, SkippedPeer, dense_graph, has_module
from peers_report import write_page
from results import Row, Rows
from side_by_side import ratios

from snapvit_export.allocation.recipe import make_settings
from snapvit_export.errors import BudgetNotMet
from snapvit_export.family.manifest import Manifest, Variant
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.progress import Silent
from snapvit_export.prune.pack import blueprint
from snapvit_export.report import variant_words
from snapvit_export.workflows.export import Request, export
from snapvit_export.workflows.recover import RecoverRequest, recover

SHARES = (0.7, 0.5, 0.35, 0.25)  # of the dense fp32 latency, that ours are exported to
PAIRS = ((0.15, 0.0), (0.25, 0.1), (0.35, 0.2), (0.45, 0.3))  # of the published method: nominal 10 to 40 %
MERGED = (4, 8, 13, 16)  # tokens in every block, as token merging is published
RECOVERED = (0.7, 0.5)  # of the latency by width and depth, trained back
RECOVER_MINUTES = 5.0
BEST_OF_TORCH_PRUNING = ("--normalizer", "none", "--head-share", "0.5", "--mean-hessian")  # of those tried on DeiT-Tiny
LISTED = "files.json"


@dataclass(frozen=True)
class Making:
    """Where a contender makes its files, and what it may see."""

    side: Side
    folder: Path
    given: argparse.Namespace


@dataclass(frozen=True)
class Made:
    """A file that a contender made; paths are relative to its folder."""

    title: str
    file: PeerFile
    side_pixels: int = 224
    note: str = ""


def _exported(making: Making, name: str, request: Request, pick: Callable[[Manifest], Sequence[Variant]]) -> list[Made]:
    """Export a family and take some of its variants, with where they lie."""
    family = making.folder / name
    manifest = export(replace(request, out=family))
    found = []
    for variant in pick(manifest):
        height, _ = variant.image_of(manifest.anatomy)
        file = PeerFile(family / variant.file, "onnxruntime", variant.precision)
        found.append(Made(variant.name, file, height, variant_words.levers(variant, manifest)))
    return found


def _request(making: Making) -> Request:
    side = making.side
    return Request(model=MODEL, checkpoint=side.checkpoint, data=str(side.listed), target=TARGET, ranking=side.rank())


def _chosen(manifest: Manifest) -> list[Variant]:
    assert manifest.choice is not None
    return [manifest.variant(manifest.choice.variant)]


def ours(making: Making, levers: str) -> list[Made]:
    """What `export --budget` chooses with these levers."""
    found = []
    for share in SHARES:
        request = replace(_request(making), budget=f"{100 * share:g}%", levers=SETS[levers])
        try:
            (made,) = _exported(making, f"{share:g}", request, _chosen)
        except BudgetNotMet:
            continue
        found.append(replace(made, title=f"{100 * share:g} %"))
    return found


def recovered(making: Making) -> list[Made]:
    """What `export --budget` chooses by width and depth, and what some minutes of training bring back."""
    side = making.side
    settings = make_settings("default", images=len(side.half.calibration) * 3 // 4)  # the others decide when to stop
    found = []
    for share in RECOVERED:
        levers = SETS["width+depth"]
        request = replace(_request(making), budget=f"{100 * share:g}%", levers=levers, settings=settings)
        (made,) = _exported(making, f"{share:g}", request, _chosen)
        learning = RecoverRequest(
            making.folder / f"{share:g}",
            data=str(side.listed),
            variants=[made.title],
            minutes=RECOVER_MINUTES,
            model=MODEL,
            checkpoint=side.checkpoint,
        )
        recover(learning, Silent())
        found.append(replace(made, title=f"{100 * share:g} %", note=f"{made.note}, trained"))
    return found


def released(making: Making, correction: str | None) -> list[Made]:
    """The published method: its own scores and search, its fixed pairs of ratios, in our graph."""
    settings = make_settings("snapvit", images=len(making.side.half.calibration), correction=correction)
    ranking = making.folder.parent / "released.safetensors"
    if not ranking.exists():
        making.side.half.released.save(ranking)
    request = replace(_request(making), ranking=ranking, pairs=PAIRS, settings=settings)
    cut = lambda manifest: [v for v in manifest.variants if v.name != manifest.dense]  # noqa: E731
    return _exported(making, "family", request, cut)


def merging(making: Making) -> list[Made]:
    """Token merging off the shelf: as many tokens in every block, nothing else, in our graph."""
    half = making.side.half
    anatomy = half.model.anatomy
    writer = GraphWriter(blueprint(half.model, Ranking.flat(anatomy)), making.folder)
    found = []
    for count in MERGED:
        plan = Plan.dense(anatomy).with_tokens((*[count] * (len(anatomy.blocks) - 1), 0))
        graph = writer.write(f"r{count}", plan, format=GraphFormat("ort")).graph
        found.append(Made(f"{count} in every block", PeerFile(graph)))
    return found


def modelopt(making: Making) -> list[Made]:
    """NVIDIA ModelOpt's int8 of our dense graph, by its own calibration on the same images."""
    python = making.given.modelopt_python
    if python is None or not has_module(python, "modelopt.onnx"):
        raise SkippedPeer("NVIDIA ModelOpt: no environment has it (--modelopt-python)")
    graph = dense_graph(making.side.half, making.folder, GraphFormat("portable", single_file=True))
    images = making.folder / "images.npy"
    np.save(images, np.concatenate(list(making.side.half.calibration.first(levers_peers.RANGING).batches(1))))
    out = making.folder / "int8.onnx"
    script = Path(__file__).parent / "peers" / "modelopt_int8.py"
    subprocess.run([python, str(script), str(graph), str(images), str(out)], check=True, stdout=subprocess.DEVNULL)
    return [Made("int8", PeerFile(out))]


def peer(making: Making, name: str) -> list[Made]:
    """A peer of `levers_peers`."""
    return [Made(title, file) for title, file in levers_peers.PEERS[name](making.side.half, making.folder).items()]


def torch_pruning(making: Making, options: Sequence[str]) -> list[Made]:
    """Torch-Pruning with its defaults, or with options of its own that did better on these images."""
    python = making.given.torch_pruning_python or sys.executable
    made = levers_peers.torch_pruning(making.side.half, making.folder, python, options)
    return [Made(title, file) for title, file in made.items()]


CONTENDERS: dict[str, tuple[str, Callable[[Making], list[Made]]]] = {
    "ours": ("snapvit, all levers", partial(ours, levers="all")),
    "ours-precision": ("snapvit, precision", partial(ours, levers="precision")),
    "ours-tokens": ("snapvit, tokens", partial(ours, levers="tokens")),
    "ours-width": ("snapvit, width and depth", partial(ours, levers="width+depth")),
    "ours-recovered": ("snapvit, width and depth, trained back", recovered),
    "released": ("SnapViT as released", partial(released, correction=None)),
    "released-corrected": ("SnapViT as released, with its correction", partial(released, correction="elastic")),
    "merging": ("token merging, as published", merging),
    "onnxruntime": ("ONNX Runtime int8", partial(peer, name="onnxruntime")),
    "nncf": ("OpenVINO, NNCF", partial(peer, name="nncf")),
    "modelopt": ("NVIDIA ModelOpt", modelopt),
    "torch-pruning": ("Torch-Pruning", partial(torch_pruning, options=())),
    "torch-pruning-best": ("Torch-Pruning, best settings", partial(torch_pruning, options=BEST_OF_TORCH_PRUNING)),
    "onnxsim": ("onnxsim", partial(peer, name="onnxsim")),
}
PACKAGES = {"onnxruntime": "onnxruntime", "nncf": "nncf", "onnxsim": "onnxsim", "modelopt": "nvidia-modelopt"}
PACKAGES |= dict.fromkeys(("torch-pruning", "torch-pruning-best"), "torch-pruning")


def make(name: str, making: Making) -> Row:
    """Let a contender make its files; return what is known of them, or why there are none."""
    title, makes = CONTENDERS[name]
    row: Row = {"contender": name, "title": title, "half": making.side.name, **circumstances()}
    row["version"] = _version(name, making.given)
    start = time.perf_counter()
    scratch = making.folder.with_name(f".{name}")
    for left in (scratch, making.folder):
        shutil.rmtree(left, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        made = makes(replace(making, folder=scratch))
    except (SkippedPeer, MatchesNothing) as why:
        return {**row, "files": [], "said": str(why), "skipped": isinstance(why, SkippedPeer)}
    if not made:
        return {**row, "files": [], "said": "none of its budgets was reached"}
    files = [
        {
            "title": each.title,
            "path": str(each.file.path.relative_to(scratch)),
            "runtime": each.file.runtime,
            "precision": each.file.precision,
            "pixels": each.side_pixels,
            "note": each.note,
        }
        for each in made
    ]
    scratch.rename(making.folder)
    return {**row, "files": files, "seconds": time.perf_counter() - start}


def _version(name: str, given: argparse.Namespace) -> str | None:
    """Return the version of a contender's package, in the environment that has it."""
    if name not in PACKAGES:
        return None
    own = {"nvidia-modelopt": given.modelopt_python, "torch-pruning": given.torch_pruning_python}
    python = own.get(PACKAGES[name]) or sys.executable
    code = f"from importlib.metadata import version; print(version({PACKAGES[name]!r}))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:  # there is no such Python
        return None
    return done.stdout.strip() or None


def measure(made: Sequence[Row], side: Side, folder: Path, seconds: float, rounds: int) -> list[Row]:
    """Time all files in turns with our dense graph, and run them on the images that report."""
    files = {
        (row["contender"], each["title"]): (folder / row["contender"] / each["path"], each)
        for row in made
        for each in row["files"]
    }
    with tempfile.TemporaryDirectory() as scratch:
        dense = dense_graph(side.half, Path(scratch), GraphFormat("ort"))
        listed = {
            f"{contender}\t{title}": (str(path), each["runtime"], each["precision"], each["pixels"])
            for (contender, title), (path, each) in files.items()
        }
        times = ratios({"dense": (str(dense), "onnxruntime", "fp32", 224), **listed}, "dense", seconds, rounds)
    rows = []
    for (contender, title), (path, each) in files.items():
        middle, least, most = times[f"{contender}\t{title}"]
        images = side.half.held_out.at((each["pixels"], each["pixels"]))
        judged = side.judged(peer_outputs(PeerFile(path, each["runtime"], each["precision"]), images))
        name = next(row["title"] for row in made if row["contender"] == contender)
        rows.append(
            {
                **{"contender": contender, "series": name, "title": title, "note": each["note"], "half": side.name},
                **{"latency": middle, "between": [least, most], **judged, **circumstances()},
            }
        )
        print(f"{name}, {title}: {middle:.3f}, kept {judged['top1'] / judged['dense_top1']:.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--classes", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--half", dest="halves", default="first", choices=tuple(HALVES))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--torch-pruning-python")
    parser.add_argument("--modelopt-python")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each file in a round")
    parser.add_argument("--rounds", type=int, default=7, help="new processes that time all files")
    parser.add_argument("--only", type=int, help="images in all, to try this out: 60 or more")
    parser.add_argument("--write", type=Path, help="folder of the docs")
    given = parser.parse_args()
    wanted = given.contenders.split(",")
    if unknown := [name for name in wanted if name not in CONTENDERS]:
        parser.error(f"--contenders {unknown[0]}: known are {', '.join(CONTENDERS)}")
    measured = given.results / "measured.json"
    if given.checkpoint is not None:
        ((name, side),) = sides(given)
        folder = given.results / name / "made"
        made, left_out = Rows(given.results, "made.jsonl", ("contender", "half")), []
        side.rank()  # once for all: what each took is without it
        for contender in wanted:
            if not made.has(contender=contender, half=name):
                print(f"making {contender}", flush=True)
                row = make(contender, Making(side, folder / contender, given))
                if row.get("skipped"):  # another time it may be there
                    left_out.append(row)
                else:
                    made.add(row)
                print(row.get("said", f"{len(row['files'])} files in {row.get('seconds', 0):.0f} s"), flush=True)
        rows = [row for row in made.all() if row["half"] == name] + left_out
        stamp = hashlib.sha256(json.dumps([rows, given.seconds, given.rounds]).encode()).hexdigest()
        if not measured.exists() or json.loads(measured.read_text())["stamp"] != stamp:
            found = measure(rows, side, folder, given.seconds, given.rounds)
            measured.write_text(json.dumps({"stamp": stamp, "rounds": given.rounds, "made": rows, "rows": found}))
    if given.write is not None:
        kept = json.loads(measured.read_text())
        write_page(kept["rows"], kept["made"], given.write, kept["rounds"])


if __name__ == "__main__":
    main()
