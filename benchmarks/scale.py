"""How long ranking and exporting take, and how much memory, as models grow: docs/scale.md has the readings.

    python benchmarks/scale.py --images FOLDER --results DIR [--models small,base-2,base-3,base,large-2,...]
        [--count 16] [--processes 1,2] [--write docs]

Random weights at real shapes: time and memory depend on shapes alone. Each model is ranked and then exported at 0.7 of
the FLOPs with the default recipe, by two commands in new processes, one after the other, on all cores that there are.
Time is wall clock, by phase as the ranking and the manifest record it; memory is the largest resident set of the
command's process. `giant-2` is a ViT-G/14 of two blocks instead of 48: what a block costs is the difference to
`giant-3`. All its blocks together would need more memory than most machines have. How far this arithmetic can be
trusted is shown on `base` and `large`, which are measured whole too.

A search is shared by processes: `--processes 1,2` times the published recipe, its `--evaluations` on a ViT-S, by so
many processes of one thread each.

Rows are kept in DIR as they are found, and those already there are not measured again. `--write` puts the tables
between the markers of scale.md in that folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from results import Row, Rows, cpu_words, put_between, table

from snapvit_export.correction.moments import covariance_bytes
from snapvit_export.family.folder import read_family
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.timing import read_timings
from snapvit_export.runtimes.device import usable_cores

PAGE = "scale.md"
FLOPS = 0.7
COUNT = 16
EVALUATIONS = 32  # a generation of the published search is 19
CLI = "snapvit_export.cli"
MB = 1e6
SHORT = (2, 3)  # blocks of the models that others are computed from
WHOLE = {"base": 12, "large": 24, "giant": 48}  # their blocks
QUADRATIC = "sub-layers"  # the phase in which every sub-layer is left out in turn, and the rest of the model run


@dataclass(frozen=True)
class Sized:
    """A timm model, with fewer blocks where `depth` is given."""

    architecture: str
    depth: int | None = None

    @property
    def words(self) -> list[str]:
        return [] if self.depth is None else ["--model-arg", f"depth={self.depth}"]

    def save_random(self, path: Path) -> None:
        """Save random weights of its shape, made without a download, in a process whose memory is not measured."""
        code = (
            "import sys, timm, torch; from safetensors.torch import save_file; torch.manual_seed(0); "
            "name, path, depth = sys.argv[1:]; given = {} if depth == 'None' else {'depth': int(depth)}; "
            "save_file(timm.create_model(name, **given).state_dict(), path)"
        )
        subprocess.run([sys.executable, "-c", code, self.architecture, str(path), str(self.depth)], check=True)


MODELS = {
    "tiny": Sized("vit_tiny_patch16_224"),
    "small": Sized("vit_small_patch16_224"),
    "base": Sized("vit_base_patch16_224"),
    "base-2": Sized("vit_base_patch16_224", 2),
    "base-3": Sized("vit_base_patch16_224", 3),
    "large": Sized("vit_large_patch16_224"),
    "large-2": Sized("vit_large_patch16_224", 2),
    "large-3": Sized("vit_large_patch16_224", 3),
    "giant-2": Sized("vit_gigantic_patch14_224", 2),
    "giant-3": Sized("vit_gigantic_patch14_224", 3),
}


def watched(*words: str) -> tuple[float, int]:
    """Run a command in a new process; return its seconds and the largest memory that it held, in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", CLI, *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"snapvit {' '.join(words)}: exit code {process.returncode}")
    return time.perf_counter() - start, used.ru_maxrss * 1024


def measure(name: str, images: Path, count: int) -> Row:
    """Rank and export one model."""
    sized = MODELS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        weights, ranking, family = folder / "weights.safetensors", folder / "ranking.safetensors", folder / "family"
        sized.save_random(weights)
        given = ["--checkpoint", str(weights), *sized.words, "--data", str(images), "--images", str(count), "--quiet"]
        ranked = watched("rank", sized.architecture, "--out", str(ranking), *given)
        asked = ["--ranking", str(ranking), "--flops", str(FLOPS), "--levers", "width,depth", "--precision", "fp32"]
        exported = watched("export", "--model", sized.architecture, "--out", str(family), *asked, *given)
        found, manifest = Ranking.load(ranking), read_family(family)
    return {
        **{"model": name, "architecture": sized.architecture, "blocks": len(found.anatomy.blocks), "images": count},
        **{"params": found.anatomy.params(), "flops": found.anatomy.flops()},
        **{"covariance_bytes": covariance_bytes(found.anatomy), "cores": usable_cores(), "cpu": cpu_words()},
        **{"rank_seconds": ranked[0], "rank_bytes": ranked[1]},
        **{"rank_phases": read_timings(found.provenance)[0].seconds},
        **{"export_seconds": exported[0], "export_bytes": exported[1], "export_phases": dict(manifest.seconds)},
    }


def measure_search(processes: int, images: Path, count: int) -> Row:
    """Time the published recipe by so many processes of one thread."""
    sized = MODELS["small"]
    with tempfile.TemporaryDirectory() as scratch:
        weights, ranking = Path(scratch) / "weights.safetensors", Path(scratch) / "ranking.safetensors"
        sized.save_random(weights)
        call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", CLI, "rank"]
        call += [sized.architecture, "--checkpoint", str(weights), "--recipe", "paper", "--out", str(ranking)]
        call += ["--evaluations", str(EVALUATIONS), "--data", str(images), "--images", str(count), "--quiet"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(call, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, **quiet)
        if done.returncode:
            raise SystemExit(done.stderr)
        (timing,) = read_timings(Ranking.load(ranking).provenance)
    row = {"model": f"search-{processes}", "processes": timing.processes, "threads": timing.threads, "images": count}
    return {**row, "evaluations": EVALUATIONS, "seconds": timing.seconds, "cpu": cpu_words(), "cores": usable_cores()}


def searches(rows: list[Row]) -> str:
    """Return the table of searches by several processes."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    lines = [
        [f"{row['processes']} x {row['threads']} thread", *(f"{row['seconds'].get(name, 0.0):.1f}" for name in names)]
        for row in rows
    ]
    return table(("processes", *names), lines)


def phases(rows: list[Row], of: str) -> str:
    """Return the table of the phases of one command."""
    names = list(dict.fromkeys(name for row in rows for name in row[f"{of}_phases"]))
    lines = [
        [
            f"{row['architecture']}, {row['blocks']} blocks",
            f"{row[f'{of}_seconds']:.0f}",
            *(f"{row[f'{of}_phases'].get(name, 0.0):.1f}" for name in names),
        ]
        for row in rows
    ]
    return table(("model", "in all, s", *names), lines)


def sizes(rows: list[Row]) -> str:
    """Return the table of what each model is and of the memory that it took."""
    lines = [
        [
            f"{row['architecture']}, {row['blocks']} blocks",
            f"{row['params'] / 1e6:.1f}",
            f"{row['flops'] / 1e9:.1f}",
            f"{4 * row['params'] / MB:.0f}",
            f"{row['covariance_bytes'] / MB:.0f}",
            f"**{row['rank_bytes'] / MB:.0f}**",
            f"**{row['export_bytes'] / MB:.0f}**",
        ]
        for row in rows
    ]
    columns = ("model", "parameters, M", "GFLOPs", "weights, MB", "covariances, MB", "rank, MB", "export, MB")
    return table(columns, lines)


def at_blocks(two: float, three: float, blocks: int, quadratic: bool = False) -> float:
    """Return what so many blocks take, from what two and three take.

    >>> at_blocks(10.0, 13.0, 48)
    148.0
    """
    if quadratic:
        return three * rests(blocks) / rests(SHORT[1])
    return two + (blocks - SHORT[0]) * max(0.0, three - two)


def rests(blocks: int) -> float:
    """Return how many blocks are run to leave out each attention and each MLP in turn, from there to the end."""
    return blocks**2 - blocks / 2


def computed(two: Row, three: Row, blocks: int) -> Row:
    """Return the row that a model of so many blocks would have."""
    row: Row = {"architecture": two["architecture"], "blocks": blocks}
    for of in ("rank", "export"):
        found = {
            name: at_blocks(two[f"{of}_phases"].get(name, 0.0), seconds, blocks, name == QUADRATIC)
            for name, seconds in three[f"{of}_phases"].items()
        }
        outside = [each[f"{of}_seconds"] - sum(each[f"{of}_phases"].values()) for each in (two, three)]
        row |= {f"{of}_phases": found, f"{of}_seconds": sum(found.values()) + at_blocks(*outside, blocks)}
        row[f"{of}_bytes"] = at_blocks(two[f"{of}_bytes"], three[f"{of}_bytes"], blocks)
    return row


def arithmetic(rows: list[Row]) -> str:
    """Return the table of what whole models take by two and three of their blocks, beside what was measured."""
    by_name = {row["model"]: row for row in rows}
    lines = []
    for name, blocks in WHOLE.items():
        short = [by_name.get(f"{name}-{count}") for count in SHORT]
        if short[0] is None or short[1] is None:
            continue
        found = [("computed", computed(short[0], short[1], blocks))]
        found += [("measured", by_name[name])] if name in by_name else []
        for how, row in found:
            phases = row["rank_phases"]
            lines.append(
                [
                    *(f"{row['architecture']}, {blocks} blocks, {how}", f"{row['rank_seconds']:.0f}"),
                    *(f"{phases.get(name, 0.0):.0f}" for name in ("statistics", "ordering", QUADRATIC)),
                    *(f"{row['export_seconds']:.0f}", f"{row['rank_bytes'] / 1e9:.1f}"),
                    f"{row['export_bytes'] / 1e9:.1f}",
                ]
            )
    columns = ("model", "rank, s", "statistics", "ordering", QUADRATIC, "export, s", "rank, GB", "export, GB")
    return table(columns, lines)


def write(every: list[Row], docs: Path) -> None:
    """Put the tables into the page."""
    rows = [row for row in every if "processes" not in row]
    shared = [row for row in every if "processes" in row]
    if not rows:
        raise SystemExit("no model was measured yet. Give --models some")
    first = rows[0]
    words = (
        f"`python benchmarks/scale.py --images imagenet-sample --count {first['images']}`, {first['cpu']}, "
        f"{first['cores']} cores, {first['images']} images, random weights. Memory is the largest resident set of the "
        "command, torch and all (1 MB = 10^6 bytes)."
    )
    rank = f"Seconds of `snapvit rank`, by phase:\n\n{phases(rows, 'rank')}"
    export = f"Seconds of `snapvit export --flops {FLOPS} --levers width,depth` with that ranking:\n\n"
    parts = [words, sizes(rows), rank, export + phases(rows, "export")]
    parts.append(
        "Whole models by arithmetic: each further block adds the difference between two and three to every phase and "
        "to the memory; sub-layers grow as L^2 - L/2, since each is left out in turn and the rest run:\n\n"
        + arithmetic(rows)
    )
    if shared:
        how = f"`rank --recipe paper --evaluations {EVALUATIONS}` of a ViT-S on {shared[0]['images']} images"
        parts.append(f"Seconds of {how}, by torchrun:\n\n{searches(shared)}")
    put_between(docs / PAGE, "scale", "\n\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument(
        "--models",
        default="small,base-2,base-3,base,large-2,large-3,large,giant-2,giant-3",
        help=f"some of {', '.join(MODELS)}",
    )
    parser.add_argument("--count", type=int, default=COUNT, help="images to calibrate on")
    parser.add_argument("--processes", default="1,2", help="that share a search")
    parser.add_argument("--search-images", type=int, default=192)
    parser.add_argument("--write", type=Path, help="folder of the docs")
    given = parser.parse_args()
    rows = Rows(given.results, "scale.jsonl", ("model", "images"))
    for name in given.models.split(","):
        if name not in MODELS:
            parser.error(f"--models {name}: known are {', '.join(MODELS)}")
        if not rows.has(model=name, images=given.count):
            print(rows.add(measure(name, given.images, given.count)), flush=True)
    for processes in map(int, filter(None, given.processes.split(","))):
        if not rows.has(model=f"search-{processes}", images=given.search_images):
            print(rows.add(measure_search(processes, given.images, given.search_images)), flush=True)
    if given.write:
        write(rows.all(), given.write)


if __name__ == "__main__":
    main()
