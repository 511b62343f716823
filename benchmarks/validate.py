"""Validating a family against evaluating each of its variants by itself, as a ratio in one run.

    python benchmarks/validate.py FAMILY --data DIR [--by head,knn,linear] [--images 500]

From scratch means what a person would do without `validate`: for every variant and every way of judging, read the
images, run the file, judge. `validate` reads each image once and runs each file once. Latencies are
those of the manifest in both, so that only the judging is compared.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from snapvit_export.calibration.dataset import open_data_set
from snapvit_export.evaluate.evaluator import EvalOptions, Evaluator
from snapvit_export.evaluate.exported_model import about_file, opened
from snapvit_export.family.folder import read_family
from snapvit_export.progress import Silent
from snapvit_export.target import Target
from snapvit_export.workflows.validate import ValidateRequest, validate


def from_scratch(family: Path, data: str, ways: tuple[str, ...], images: int | None) -> tuple[int, dict[str, float]]:
    """How many pictures were decoded, and the first measure of every variant."""
    manifest = read_family(family)
    on = manifest.target
    target = Target(runtime=on.runtime, precision=on.precision, batch=on.batch, threads=on.threads)
    decoded, found = 0, {}
    for variant in manifest.variants:
        for way in ways:
            about, _ = about_file(family / variant.file)
            with opened(family / variant.file, target, about) as artefact:
                how = EvalOptions(by=(way,), images=images)  # type: ignore[arg-type]
                evaluator = Evaluator.set(artefact, open_data_set(data), how, Silent())
                evaluation = evaluator.judge(artefact)
            decoded += sum(map(len, evaluator.images.values()))
            found[f"{variant.name} {way}"] = evaluation.value(evaluation.measures[0]) or 0.0
    return decoded, found


def together(family: Path, data: str, ways: tuple[str, ...], images: int | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(family, Path(scratch) / "family"))
        how = EvalOptions(by=ways, images=images)  # type: ignore[arg-type]
        manifest = validate(ValidateRequest(copy, data, how), Silent())
    names = {"head": "top1", "knn": "knn", "linear": "linear"}
    return {
        f"{v.name} {way}": v.evaluation.value(names[way]) or 0.0  # type: ignore[union-attr, arg-type]
        for v in manifest.variants
        for way in ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--by", default="head,knn,linear")
    parser.add_argument("--images", type=int, help="Of each split at most.")
    given = parser.parse_args()
    ways = tuple(given.by.split(","))
    began = time.perf_counter()
    one = together(given.family, given.data, ways, given.images)
    middle = time.perf_counter()
    decoded, other = from_scratch(given.family, given.data, ways, given.images)
    end = time.perf_counter()
    worst = max(abs(one[name] - other[name]) for name in one)
    variants = len(one) // len(ways)
    print(f"{variants} variants, {', '.join(ways)}; figures differ by at most {worst:.4f}")
    print(f"together {middle - began:.1f} s, from scratch {end - middle:.1f} s ({decoded} pictures decoded): ", end="")
    print(f"ratio {(end - middle) / (middle - began):.2f}")


if __name__ == "__main__":
    main()
