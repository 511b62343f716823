"""Quality against measured latency: each lever alone, all together, and what others do, on DeiT-Tiny.

    python benchmarks/levers.py --checkpoint deit_tiny_patch16_224.safetensors --images imagenet-sample/ \
        --classes classes.txt --results DIR [--shares 0.7,0.5,0.35,0.25] [--halves first,second] \
        [--levers all,precision,tokens,width+depth] [--peers onnxruntime,nncf,torch-pruning,onnxsim,onnxsim-standard] \
        [--write docs]

ONNX Runtime, one thread, batch 1. Half of the images are all that an export sees, the other half reports top-1 and the
fidelity to the dense model; then the other way round: the split of `quality.py`. "first" calibrates on the first half.
For each share of the dense fp32 latency and each set of levers `export` chooses a file, as a user's would; a half is
ranked once. Latency is that of the manifest, pooled over all runs of the choice. A budget that a lever alone does not
reach is recorded as such. Peers are timed in turns with our dense graph, in some new processes.

Rows are kept in DIR as they are found, and those already there are not measured again. `--write` puts the table into
benchmarks.md of that folder and draws levers.svg and levers-fidelity.svg. `--levers none` or `--peers none` leaves
these out; `--only 40` uses that many images in all, to try this script out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from levers_peers import PEERS, Files, MatchesNothing, PeerFile, SkippedPeer, dense_graph, torch_pruning
from levers_report import write_report
from quality import CODE, Half, halves, read_named
from results import Row, Rows, cpu_words, has_vnni
from side_by_side import ratios

from snapvit_export.allocation.levers import LEVERS, Lever
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.calibration.images import Images, calibration_and_held_out, prepare
from snapvit_export.errors import BudgetNotMet
from snapvit_export.family.fidelity import Comparison
from snapvit_export.family.manifest import Manifest
from snapvit_export.graph.format import GraphFormat
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.rank.rank import rank
from snapvit_export.report import variant_words
from snapvit_export.runtimes.device import usable_cores
from snapvit_export.runtimes.session import open_session
from snapvit_export.selection.image_meter import LEAST_IMAGES, run_in_threads
from snapvit_export.storage.json import to_json
from snapvit_export.target import Target
from snapvit_export.workflows.export import Request, export
from snapvit_export.workflows.inputs import MOST_HELD_OUT

MODEL = "deit_tiny_patch16_224"
HALVES = {"first": 0, "second": 1}  # seeds of `quality.py`
SETS: dict[str, tuple[Lever, ...]] = {
    "all": LEVERS,
    "precision": ("precision",),
    "tokens": ("tokens",),
    "width+depth": ("width", "depth"),
}
SHARES = "0.7,0.5,0.35,0.25"
TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
PIXELS = 224  # of a peer's images
BATCH = 8  # where an image's outputs do not depend on the others
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Side:
    """One half: what an export may see, and what reports."""

    name: str
    half: Half
    checkpoint: Path
    listed: Path  # a list file of the images to calibrate on
    ranking: Path

    @staticmethod
    def of(name: str, model: Model, images: Images, paths: list[Path], given: argparse.Namespace) -> Side:
        """Split the images as `quality.py` does, and list those to calibrate on as a user would."""
        folder = given.results / name
        folder.mkdir(parents=True, exist_ok=True)
        half = halves(model, images, HALVES[name])
        numbers = halves(model, _numbered(images), HALVES[name]).calibration.labels
        assert numbers is not None
        listed = folder / "calibration.txt"
        listed.write_text("".join(f"{paths[number].resolve()}\n" for number in numbers))
        return Side(name, half, given.checkpoint, listed, folder / "ranking.safetensors")

    def rank(self) -> Path:
        """Rank once for all exports, on the images that these calibrate on."""
        if not self.ranking.exists():
            settings = make_settings("default")
            source, _ = calibration_and_held_out(
                str(self.listed), settings.images, settings.seed, MOST_HELD_OUT, LEAST_IMAGES
            )
            rank(self.half.model, prepare(source, self.half.model.preprocessing), settings).save(self.ranking)
        return self.ranking

    @cached_property
    def dense(self) -> Logits:
        """What the dense model says of the images that report."""
        with tempfile.TemporaryDirectory() as folder:
            graph = dense_graph(self.half, Path(folder), GraphFormat("ort"))
            return run_in_threads(graph, self.half.held_out.batches(BATCH))

    def judged(self, outputs: Logits) -> Row:
        """Top-1 and fidelity on the images that report."""
        labels = self.half.held_out.labels
        fidelity = Comparison.of(outputs, self.dense, classifies=True).fidelity()
        return {
            "top1": float((outputs.argmax(1) == labels).mean()),
            "dense_top1": float((self.dense.argmax(1) == labels).mean()),
            "images": len(outputs),
            "agreement": fidelity.agreement,
            "divergence": fidelity.divergence,
            "divergence_error": fidelity.standard_error,
        }


def _numbered(images: Images) -> Images:
    """The same images with their numbers as labels, to see which of them a split takes."""
    return Images(images.pixels[:, :1, :1], np.arange(len(images)), images.preprocessing, images.source)


def circumstances() -> Row:
    return {"cpu": cpu_words(), "vnni": has_vnni(), "code": CODE}


def measure(side: Side, share: float, name: str) -> Row:
    """Export to one budget with some levers, and meter the file that was chosen."""
    row: Row = {"half": side.name, "share": share, "levers": name, **circumstances()}
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            model=MODEL,
            checkpoint=side.checkpoint,
            data=str(side.listed),
            out=Path(folder) / "family",
            budget=f"{100 * share:g}%",
            target=TARGET,
            levers=SETS[name],
            ranking=side.rank(),
        )
        start = time.perf_counter()
        try:
            manifest = export(request)
        except BudgetNotMet as error:
            return {**row, "reached": False, "said": str(error), "seconds": time.perf_counter() - start}
        row |= {"reached": True, "seconds": time.perf_counter() - start, "stages": manifest.seconds}
        return row | described(manifest) | side.judged(outputs(manifest, request.out, side.half.held_out))


def described(manifest: Manifest) -> Row:
    """Return what a manifest says of its choice."""
    choice = manifest.choice
    assert choice is not None, "there was a budget"
    found = {m.variant: m for m in choice.measurements}
    mine, dense_ms = found[choice.variant], found[manifest.dense].latency_ms
    variant = manifest.variant(choice.variant)
    row: Row = {"variant": variant.name, "words": variant_words.levers(variant, manifest), "dense_ms": dense_ms}
    row |= {"latency": mine.latency_ms / dense_ms, "between": [ms / dense_ms for ms in mine.between_ms]}
    row |= {"decided": choice.decided, "doubt": choice.doubt, "precision": variant.precision}
    row |= {"dropped": {each.precision: each.ratio for each in choice.dropped}, "timed": len(choice.measurements)}
    return row | {"fidelity": None if mine.fidelity is None else _plain(mine.fidelity)}


def _plain(value: object) -> Any:
    return json.loads(to_json(value))


def outputs(manifest: Manifest, folder: Path, images: Images) -> Logits:
    """Run the chosen file over images of its own size; int8-dynamic one by one, as it is used."""
    assert manifest.choice is not None
    variant = manifest.variant(manifest.choice.variant)
    batch = 1 if variant.precision == "int8-dynamic" else BATCH
    return run_in_threads(folder / variant.file, images.at(variant.image_of(manifest.anatomy)).batches(batch))


def measure_peer(side: Side, name: str, seconds: float, rounds: int, python: str) -> list[Row]:
    """Time a peer's files in turns with our dense one, and meter them; raises SkippedPeer."""
    row: Row = {"half": side.name, "peer": name, **circumstances()}
    make = partial(torch_pruning, python=python) if name == "torch-pruning" else PEERS[name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            files: Files = make(side.half, Path(folder) / "made")
        except MatchesNothing as error:
            return [{**row, "title": name, "reached": False, "said": str(error)}]
        dense = PeerFile(dense_graph(side.half, Path(folder) / "dense", GraphFormat("ort")))
        times = ratios(
            {title: (str(f.path), f.runtime, f.precision, PIXELS) for title, f in {"dense": dense, **files}.items()},
            *("dense", seconds, rounds),
        )
        rows = []
        for title, file in files.items():
            middle, least, most = times[title]
            judged = side.judged(peer_outputs(file, side.half.held_out))
            rows.append({**row, "title": title, "reached": True, "latency": middle, "between": [least, most], **judged})
    return rows


def peer_outputs(file: PeerFile, images: Images) -> Logits:
    """Run a peer's file, one image at a time: some of them take one scale for a whole batch."""
    if file.runtime == "onnxruntime":
        return run_in_threads(file.path, images.batches(1))
    target = Target(runtime=file.runtime, precision=file.precision, batch=1, threads=usable_cores())
    with open_session(file.path, target) as session:
        return np.concatenate([session.run(image) for image in images.batches(1)])


def told(row: Row) -> str:
    """Return a row as one line of text."""
    what = f"{row['levers']} at {row['share']:g}" if "levers" in row else row["title"]
    if not row["reached"]:
        return f"{row['half']:6s} {what}: {row['said']}"
    kept = row["top1"] / row["dense_top1"]
    text = f"{row['half']:6s} {what}: {row['latency']:.3f} of dense, top-1 {row['top1']:.3f} ({kept:.3f} kept), "
    text += f"same answer {row['agreement']:.3f}"
    return f"{text}, {row['words']}, {row['seconds']:.0f} s" if "words" in row else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--classes", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--shares", default=SHARES)
    parser.add_argument("--halves", default=",".join(HALVES))
    parser.add_argument("--levers", default=",".join(SETS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--peer-python", default=None, help="Python that has Torch-Pruning; otherwise this one")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each peer's file in a round")
    parser.add_argument("--rounds", type=int, default=5, help="new processes that time the peers")
    parser.add_argument("--only", type=int, help="images in all, to try this out")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    given = parser.parse_args()
    sets, peers = (
        [] if text == "none" else [part.strip() for part in text.split(",")] for text in (given.levers, given.peers)
    )
    checked = (("--levers", sets, SETS), ("--peers", peers, PEERS), ("--halves", given.halves.split(","), HALVES))
    for what, names, known in checked:
        if unknown := [name for name in names if name not in known]:
            parser.error(f"{what} {unknown[0]}: known are {', '.join(known)}")
    ours = Rows(given.results, "levers.jsonl", ("half", "share", "levers"))
    theirs = Rows(given.results, "peers.jsonl", ("half", "peer"))
    if given.checkpoint is not None:
        run(given, ours, theirs, sets, peers)
    if given.write is not None:
        write_report(ours.all(), theirs.all(), given.write)


def sides(given: argparse.Namespace) -> Iterator[tuple[str, Side]]:
    """Yield the halves of DeiT-Tiny's images, as asked for."""
    model = load_model(MODEL, given.checkpoint)
    images, paths = read_named(model, given.images, given.classes), sorted(given.images.glob("*.jpg"))
    if given.only is not None:
        images, paths = images.first(given.only), paths[: given.only]
    for name in given.halves.split(","):
        yield name, Side.of(name, model, images, paths, given)


def run(given: argparse.Namespace, ours: Rows, theirs: Rows, sets: list[str], peers: list[str]) -> None:
    """Measure what is not there yet."""
    print(cpu_words(), flush=True)
    for name, side in sides(given):
        for levers in sets:
            for share in map(float, given.shares.split(",")):
                if not ours.has(half=name, share=share, levers=levers):
                    print(told(ours.add(measure(side, share, levers))), flush=True)
        for peer in peers:
            if theirs.has(half=name, peer=peer):
                continue
            try:
                rows = measure_peer(side, peer, given.seconds, given.rounds, given.peer_python or sys.executable)
            except SkippedPeer as skipped:
                print(f"{name:6s} skipped, {skipped}", flush=True)
                continue
            for row in rows:
                print(told(theirs.add(row)), flush=True)


if __name__ == "__main__":
    main()
