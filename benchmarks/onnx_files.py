"""An ONNX file of another tool beside the same model from timm: the same Plan, what it keeps, and how long it takes.

    python benchmarks/onnx_files.py --checkpoint deit_tiny_patch16_224.safetensors --data imagenet-sample

Exports DeiT-Tiny to a file with the exporter of torch, and then runs `snapvit export --flops 0.7` twice, in new
processes: from timm with torch, and from the file without it. Prints the seconds of each stage, their ratio, and the
two variants.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import cpu_words, table
from torch_export import to_onnx

from snapvit_export.prune.models.load import load_model

NAME = "deit_tiny_patch16_224"


def exported(*words: str) -> tuple[dict, float]:
    """Run an export in a new process; return its manifest and the seconds that it took."""
    start = time.perf_counter()
    call = [sys.executable, "-m", "snapvit_export.cli", "export", *words, "--json", "-q"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return json.loads(done.stdout), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", default="128")
    parser.add_argument("--flops", default="0.7")
    given = parser.parse_args()
    asked = ("--data", given.data, "--images", given.images, "--flops", given.flops)
    with tempfile.TemporaryDirectory() as folder:
        model, path = load_model(NAME, given.checkpoint), Path(folder) / "vit.onnx"
        path.write_bytes(to_onnx(model.module, model.anatomy, {}))
        ways = {
            "timm, torch": ("--model", NAME, "--checkpoint", given.checkpoint),
            "ONNX file, without torch": ("--model", str(path), "--preprocessing", NAME),
        }
        rows, taken = [], {}
        for number, (way, words) in enumerate(ways.items()):
            manifest, taken[way] = exported(*words, *asked, "--out", str(Path(folder) / f"family{number}"))
            cut = manifest["variants"][1]
            kept = f"{sum(cut['heads'])} heads, {sum(cut['neurons'])} neurons, {cut['flops_ratio']:.3f}"
            agrees = f"{cut['fidelity']['agreement']:.3f} ± {cut['fidelity']['agreement_error']:.3f}"
            stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in manifest["seconds"].items())
            rows.append([way, kept, cut["correction"], agrees, f"{taken[way]:.0f}", stages])
    print(cpu_words() + "\n")
    print(table(("from", "keeps, of FLOPs", "correction", "same answer", "took, s", "of which"), rows))
    first, second = taken.values()
    print(f"\nThe file takes {second / first:.2f} of the time.")


if __name__ == "__main__":
    main()
