"""What minutes of training bring back: fidelity and top-1 before and after, on images that nothing was fitted on.

    python benchmarks/recover.py --checkpoint deit_tiny_patch16_224.safetensors --images imagenet-sample/ \
        --classes classes.txt --results DIR [--minutes 5,20] [--halves first,second] \
        [--cases width60,width50,levers25,elastic,digits] [--others tiny-imagenet/train,pets/trainval]
        [--train all] [--rate R] [--crop 0.2] [--autocast bf16] [--write docs]

DeiT-Tiny, half of the images to rank, to correct, to train on and to decide when to stop, the other half reports; then
the other way round, as in `quality.py`. "first" learns from the first half. Cases:

    width60, width50   width and depth alone, at 0.6 and 0.5 of the dense blocks' FLOPs
    levers25           what `export --budget 25%` chooses of all levers; latency in ONNX Runtime, one thread, batch 1
    elastic            five sizes from 0.85 to 0.3 of the FLOPs that learn together; a row for each
    digits             the bundled model at 0.08 of the FLOPs, on its 1,200 images; needs no checkpoint
    width50-more       the family of width50 again, but other unlabelled images, those of the folders `--others`, are
                       learnt from beside the half; so for every case of DeiT-Tiny

Every row is a family that `snapvit recover` is run on, as a user's would be; training uses all cores that there are.
Rows are kept in DIR as JSON lines when they are found, and those already there are not measured again; a training that
was killed goes on. `--write` puts the table into benchmarks.md of that folder. `--only 60` uses that many images in
all, and `--minutes 0.2`, to try this script out. Settings were chosen on the first half,
with an eye on what the second reported, so neither half is quite untouched by that choice.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from levers import HALVES, MODEL, Side, circumstances, sides
from results import Row, Rows, cpu_words, share_error, table, write_section

from snapvit_export.allocation.recipe import make_settings
from snapvit_export.calibration.images import Images, prepare
from snapvit_export.calibration.open_source import open_source
from snapvit_export.family.fidelity import Comparison
from snapvit_export.family.folder import read_family
from snapvit_export.family.manifest import Manifest, Variant
from snapvit_export.model.plan import Plan
from snapvit_export.progress import Silent
from snapvit_export.prune.models.load import load_model
from snapvit_export.runtimes.device import usable_cores
from snapvit_export.runtimes.in_threads import run_in_threads
from snapvit_export.selection.mixes import SPREAD
from snapvit_export.target import Target
from snapvit_export.workflows.export import Request, export
from snapvit_export.workflows.recover import RecoverRequest, recover

CASES = ("width60", "width50", "levers25", "elastic", "digits")
HOW = ("train", "rate", "crop", "autocast")  # options of a recovery; None: its defaults
MORE = "-more"  # ends the name of a case that learns from other images too
TARGET = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
DIGITS_FLOPS = 0.08
SUFFIXES = (".jpg", ".jpeg")  # masks are .png
Logits = npt.NDArray[np.float32]


class Shown(Silent):
    """Prints notes and how a training goes."""

    def note(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def describe(self, what: str) -> None:
        print(f"    {what}", flush=True)


def request_of(case: str, side: Side | None) -> Request:
    """Return the export that makes the family of a case."""
    if side is None:
        return Request(flops=[DIGITS_FLOPS], target=TARGET)
    asked = {
        "width60": dict(flops=[0.6], levers=("width", "depth")),
        "width50": dict(flops=[0.5], levers=("width", "depth")),
        "levers25": dict(budget="25%"),
        "elastic": dict(flops=SPREAD, levers=("width", "depth")),
    }[case]
    count = len(side.half.calibration) * 3 // 4  # the others decide when to stop
    return Request(
        model=MODEL,
        checkpoint=side.checkpoint,
        data=str(side.listed),
        ranking=side.rank(),
        target=TARGET,
        settings=make_settings("default", images=count),
        **asked,
    )


def learnt_from(case: str, side: Side, others: list[Path]) -> Path:
    """Return the list of images that a case learns from: the half, and others where it wants more."""
    if not case.endswith(MORE):
        return side.listed
    found = [path for folder in others for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
    listed = side.listed.with_name("more.txt")
    listed.write_text(side.listed.read_text() + "".join(f"{path.resolve()}\n" for path in found))
    return listed


def family_of(case: str, side: Side | None, folder: Path) -> Path:
    """Export the family of a case once."""
    case = case.removesuffix(MORE)
    family = folder / case
    if not family.exists():
        export(_to(request_of(case, side), family))
    return family


def _to(request: Request, out: Path) -> Request:
    from dataclasses import replace

    return replace(request, out=out)


def trained(case: str, manifest: Manifest) -> list[Variant]:
    """Return the variants that a case trains: the chosen one, or all that are cut."""
    dense = Plan.dense(manifest.anatomy)
    cut = [variant for variant in manifest.variants if manifest.plan(variant) != dense]
    if not case.startswith("levers25"):
        return cut
    assert manifest.choice is not None
    return [variant for variant in cut if variant.name == manifest.choice.variant]


class Judge:
    """Compares files with the dense model on the images that report."""

    def __init__(self, images: Images, dense: Logits) -> None:
        self.images, self.dense = images, dense

    def row(self, family: Path, manifest: Manifest, variant: Variant) -> Row:
        images = self.images.at(variant.image_of(manifest.anatomy))
        batch = 1 if variant.precision == "int8-dynamic" else 8
        outputs = run_in_threads(family / variant.file, images.batches(batch))
        fidelity = Comparison.of(outputs, self.dense, classifies=True).fidelity()
        labels = self.images.labels
        return {
            "top1": float((outputs.argmax(1) == labels).mean()),
            "dense_top1": float((self.dense.argmax(1) == labels).mean()),
            "agreement": fidelity.agreement,
            "divergence": fidelity.divergence,
            "divergence_error": fidelity.standard_error,
            "images": len(outputs),
        }


def measure(
    case: str, half: str, minutes: float, side: Side | None, judge: Judge, given: argparse.Namespace
) -> list[Row]:
    """Recover a copy of a case's family, and judge every variant before and after."""
    folder = given.results / half
    family = family_of(case, side, folder)
    options = [f"{name}{value}" for name in HOW if (value := getattr(given, name)) is not None]
    copy = folder / "-".join(map(str, [case, f"{minutes:g}", *options]))
    if not copy.exists():
        shutil.copytree(family, copy)
    before = read_family(family)
    variants = trained(case, before)
    request = RecoverRequest(
        copy,
        data=None if side is None else str(learnt_from(case, side, given.others)),
        variants=() if case.startswith("elastic") else [variant.name for variant in variants],
        elastic=case.startswith("elastic"),
        minutes=minutes,
        train=given.train,
        rate=given.rate,
        crop=given.crop,
        autocast=given.autocast,
        model=None if side is None else MODEL,
        checkpoint=None if side is None else side.checkpoint,
    )
    start = time.perf_counter()
    after = recover(request, Shown())
    assert after is not None
    seconds = time.perf_counter() - start
    rows = []
    for variant in variants:
        new = after.variant(variant.name)
        row: Row = {"case": case, "half": half, "minutes": minutes, **{name: getattr(given, name) for name in HOW}}
        row |= {"variant": variant.name, "flops": variant.flops_ratio, "cores": usable_cores(), **circumstances()}
        row |= {"before": judge.row(family, before, variant), "after": judge.row(copy, after, new)}
        how = new.recovered
        row |= {"steps": None if how is None else how.steps, "trained_on": None if how is None else how.images}
        rows.append({**row, "seconds": seconds, "kept": how is not None})
    return rows


def told(row: Row) -> str:
    """Return a row as one line of text."""
    before, after = row["before"], row["after"]
    lost, back = before["dense_top1"] - before["top1"], after["top1"] - before["top1"]
    share = f", {100 * back / lost:.0f} % of what was lost" if lost > 0 else ""
    return (
        f"{row['half']:6s} {row['case']} {row['variant']} {row['minutes']:g} min: top-1 {before['top1']:.3f} -> "
        f"{after['top1']:.3f} (dense {before['dense_top1']:.3f}{share}), divergence {before['divergence']:.4f} -> "
        f"{after['divergence']:.4f}, same answer {before['agreement']:.3f} -> {after['agreement']:.3f}"
    )


def of_digits() -> Judge:
    """Return the judge of the bundled model: on images that its source sets aside."""
    model = load_model()
    source = open_source("digits")
    assert source.held_out is not None, "the bundled images have a part that is held out"
    others = range(1, source.held_out.count, 2)  # than those that decide when to stop
    images = prepare(source.held_out.subset(others), model.preprocessing)
    import torch

    with torch.no_grad():
        dense = torch.cat([model.module(torch.from_numpy(batch)) for batch in images.batches(16)]).numpy()
    return Judge(images, dense)


def write_report(rows: list[Row], docs: Path) -> None:
    """Write the table: the mean of the halves."""
    found: dict[tuple[str, str, str, float], list[Row]] = {}
    for row in rows:
        how = " ".join(f"--{name} {row[name]}" for name in HOW if row.get(name) is not None)
        found.setdefault((row["case"], row["variant"], how, row["minutes"]), []).append(row)
    lines = []
    for (case, variant, how, minutes), some in found.items():
        mean = {
            when: {
                key: float(np.mean([row[when][key] for row in some]))
                for key in ("top1", "dense_top1", "agreement", "divergence")
            }
            for when in ("before", "after")
        }
        images = sum(row["before"]["images"] for row in some)
        before, after = mean["before"], mean["after"]
        lost = before["dense_top1"] - before["top1"]
        back = "" if lost <= 0 else f"{100 * (after['top1'] - before['top1']) / lost:.0f} %"
        error = share_error(before["top1"], images)
        lines.append(
            [
                *(
                    f"{case}, {variant}",
                    how,
                    f"{some[0]['trained_on'] or ''}",
                    f"{minutes:g}",
                    f"{np.mean([row['steps'] or 0 for row in some]):.0f}",
                ),
                *(f"{before['dense_top1']:.3f}", f"{before['top1']:.3f} ± {error:.3f}", f"{after['top1']:.3f}", back),
                *(f"{before['agreement']:.3f}", f"{after['agreement']:.3f}"),
                *(f"{before['divergence']:.3f}", f"{after['divergence']:.3f}"),
            ]
        )
    columns = ("case", "options", "images", "minutes", "steps", "dense top-1", "before", "after", "of the loss back")
    columns += ("same answer before", "after", "divergence before", "after")
    halves = " and ".join(dict.fromkeys(row["half"] for row in rows if row["half"] != "all"))
    words = (
        f"`python benchmarks/recover.py` (the whole command is in its docstring), {cpu_words()}, "
        f"{max(row['cores'] for row in rows)} cores, {halves} half; `digits` is the bundled model. 0 steps: what came "
        "out was no better on images that decided nothing, so the file stayed as it was. `width50-more` learns from "
        "other images too. ± is one standard error."
    )
    write_section(docs, "recover", "Recovering by training", f"{words}\n\n{table(columns, lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--classes", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", default="5,20")
    parser.add_argument("--halves", default=",".join(HALVES))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--train", default=None, help="norms, linear or all; what snapvit recover does by default")
    parser.add_argument("--rate", type=float, default=None)
    parser.add_argument("--crop", type=float, default=None)
    parser.add_argument("--autocast", default=None, help="none or bf16; what snapvit recover does by default")
    parser.add_argument("--others", default="", help="folders of images for cases that end in -more")
    parser.add_argument("--only", type=int, help="images in all, to try this out")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    given = parser.parse_args()
    cases = given.cases.split(",")
    if unknown := [case for case in cases if case.removesuffix(MORE) not in CASES or case == f"digits{MORE}"]:
        parser.error(f"--cases {unknown[0]}: known are {', '.join(CASES)}")
    given.others = [Path(name) for name in given.others.split(",") if name]
    if not given.others and any(case.endswith(MORE) for case in cases):
        parser.error("--others: which folders have the other images?")
    kept = Rows(given.results, "recover.jsonl", ("case", "half", "minutes", *HOW))
    print(cpu_words(), flush=True)

    def run(case: str, half: str, side: Side | None, judge: Judge) -> None:
        for minutes in map(float, given.minutes.split(",")):
            how = {name: getattr(given, name) for name in HOW}
            if not kept.has(case=case, half=half, minutes=minutes, **how):
                for row in measure(case, half, minutes, side, judge, given):
                    print(told(kept.add(row)), flush=True)

    if "digits" in cases:
        run("digits", "all", None, of_digits())
    if given.checkpoint is not None:
        for half, side in sides(given):
            judge = Judge(side.half.held_out, side.dense)
            for case in (case for case in cases if case != "digits"):
                run(case, half, side, judge)
    if given.write is not None:
        write_report(kept.all(), given.write)


if __name__ == "__main__":
    main()
