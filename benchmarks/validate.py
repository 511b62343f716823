"""Validating a family against evaluating each of its variants by itself, as a ratio in one run.

    python benchmarks/validate.py FAMILY --data DIR [--by head,knn,linear] [--images 500]

From scratch means what a person would do without `validate`: for every variant and every metric, read the
images, run the file, evaluate. `validate` reads each image once and runs each file once. Latencies are
those of the manifest in both, so that only the evaluation is compared.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from snapvit_export.calibration.dataset import open_dataset
from snapvit_export.evaluate.evaluator import EvalOptions, Evaluator
from snapvit_export.evaluate.exported_model import open_exported, read_info
from snapvit_export.family.folder import read_family
from snapvit_export.progress import Silent
from snapvit_export.target import Target
from snapvit_export.workflows.validate import ValidateRequest, validate


def from_scratch(family: Path, data: str, metrics: tuple[str, ...], images: int | None) -> tuple[int, dict[str, float]]:
    """Return the number of images decoded, and the first measure of every variant."""
    manifest = read_family(family)
    on = manifest.target
    target = Target(runtime=on.runtime, precision=on.precision, batch=on.batch, threads=on.threads)
    decoded, found = 0, {}
    for variant in manifest.variants:
        for metric in metrics:
            info, _ = read_info(family / variant.file)
            with open_exported(family / variant.file, target, info) as exported:
                options = EvalOptions(by=(metric,), images=images)  # type: ignore[arg-type]
                evaluator = Evaluator.prepare(exported, open_dataset(data), options, Silent(), streamed=False)
                evaluation = evaluator.evaluate(exported)
            decoded += sum(map(len, evaluator.images.values()))
            found[f"{variant.name} {metric}"] = evaluation.value(evaluation.measures[0]) or 0.0
    return decoded, found


def together(family: Path, data: str, metrics: tuple[str, ...], images: int | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(family, Path(scratch) / "family"))
        options = EvalOptions(by=metrics, images=images)  # type: ignore[arg-type]
        manifest = validate(ValidateRequest(copy, data, options), Silent())
    names = {"head": "top1", "knn": "knn", "linear": "linear"}
    return {
        f"{v.name} {metric}": v.evaluation.value(names[metric]) or 0.0  # type: ignore[union-attr, arg-type]
        for v in manifest.variants
        for metric in metrics
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--by", default="head,knn,linear")
    parser.add_argument("--images", type=int, help="Of each split at most.")
    given = parser.parse_args()
    metrics = tuple(given.by.split(","))
    began = time.perf_counter()
    one = together(given.family, given.data, metrics, given.images)
    middle = time.perf_counter()
    decoded, other = from_scratch(given.family, given.data, metrics, given.images)
    end = time.perf_counter()
    worst = max(abs(one[name] - other[name]) for name in one)
    variants = len(one) // len(metrics)
    print(f"{variants} variants, {', '.join(metrics)}; figures differ by at most {worst:.4f}")
    print(f"together {middle - began:.1f} s, from scratch {end - middle:.1f} s ({decoded} pictures decoded): ", end="")
    print(f"ratio {(end - middle) / (middle - began):.2f}")


if __name__ == "__main__":
    main()
