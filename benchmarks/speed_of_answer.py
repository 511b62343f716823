"""How long an export takes, and what on: the README's command, DeiT-Tiny, and a ViT-B of random weights.

    python benchmarks/speed_of_answer.py --results DIR [--only bundled] [--checkpoint deit_tiny_patch16_224.safetensors
        --data imagenet-sample] [--write docs]

Wall clock of `snapvit export` from its start to its end in a new process, ranking and all, on all cores that there are;
the stages are those of its manifest. Rows are kept in DIR, and those already there are not measured again. `--images`
calibrates on fewer images, to try this script out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from budget import BUNDLED, checked
from results import Row, Rows, cpu_words, line, table, write_section

from snapvit_export.family.folder import read_family
from snapvit_export.runtimes.device import usable_cores

DEIT, VIT_B = "deit_tiny_patch16_224", "vit_base_patch16_224"
BUDGETS = {BUNDLED: "10ms", DEIT: "50%", VIT_B: "50%"}
WANTED = {BUNDLED: 75, DEIT: 180, VIT_B: 1500}  # seconds at most
IMAGES = 256
COLUMNS = ("model", "budget", "images", "took, s", "wanted, at most", "chosen", "decided", "where the time went, s")
INTRODUCTION = """\
`python benchmarks/speed_of_answer.py --checkpoint ... --data imagenet-sample`, {cores} cores, {cpu}. Wall clock of
`snapvit export` in a new process, with the ranking; ViT-B/16 has random weights."""


def random_weights(name: str, folder: Path) -> Path:
    """Save a model of random weights, made without a download."""
    import timm
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path = folder / f"{name}.safetensors"
    save_file(timm.create_model(name).state_dict(), path)
    return path


def measure(name: str, checkpoint: Path | None, data: str | None, images: int | None) -> Row:
    """Export one model, and return how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--budget", BUDGETS[name], "--out", str(Path(folder) / "family"), "-q"]
        if name != BUNDLED:
            weights = random_weights(name, Path(folder)) if name == VIT_B else checkpoint
            words += ["--model", name, "--checkpoint", str(weights), "--data", str(data)]
        count = images or (None if name == BUNDLED else IMAGES)
        words += [] if count is None else ["--images", str(count)]
        start = time.perf_counter()
        checked("export", *words)
        seconds = time.perf_counter() - start
        manifest = read_family(Path(folder) / "family")
    choice = manifest.choice
    assert choice is not None, "there was a budget"
    row: Row = {"model": name, "budget": BUDGETS[name], "images": count, "seconds": seconds, "cpu": cpu_words()}
    row |= {"cores": usable_cores(), "stages": manifest.seconds, "variant": choice.variant, "decided": choice.decided}
    return row | {"timed": len(choice.measurements)}


def cells(row: Row) -> list[str]:
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in row["stages"].items())
    images = "digits" if row["images"] is None else str(row["images"])
    took = [f"**{row['seconds']:.0f}**", str(WANTED[row["model"]])]
    return [row["model"], row["budget"], images, *took, row["variant"], "yes" if row["decided"] else "no", stages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", default=",".join(BUDGETS), help=f"some of {', '.join(BUDGETS)}")
    parser.add_argument("--checkpoint", type=Path, help=f"of {DEIT}")
    parser.add_argument("--data", help="images, for all but the bundled model")
    parser.add_argument("--images", type=int)
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    given = parser.parse_args()
    rows = Rows(given.results, "speed.jsonl", ("model",))
    print(f"{usable_cores()} cores, {cpu_words()}\n\n{table(COLUMNS, [])}", flush=True)
    for name in given.only.split(","):
        if name not in BUDGETS:
            parser.error(f"--only {name}: known are {', '.join(BUDGETS)}")
        if name != BUNDLED and given.data is None:
            parser.error(f"{name} needs --data")
        if name == DEIT and given.checkpoint is None:
            parser.error(f"{name} needs --checkpoint")
        if not rows.has(model=name):
            print(line(cells(rows.add(measure(name, given.checkpoint, given.data, given.images)))), flush=True)
    if given.write:
        found = rows.all()
        intro = INTRODUCTION.format(cores=found[0]["cores"], cpu=found[0]["cpu"])
        write_section(
            given.write, "speed", "Speed of the answer", f"{intro}\n\n{table(COLUMNS, [cells(row) for row in found])}"
        )


if __name__ == "__main__":
    main()
