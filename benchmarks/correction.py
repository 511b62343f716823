"""What correction costs: observing against a plain forward pass, and correcting one Plan without torch.

    python benchmarks/correction.py [--models vit_tiny_patch16_224 vit_base_patch16_224] [--rounds 5]

1. Observe: CPU time of the statistics of every proj and fc2 input, against the forward pass alone over the same
   batches, on one thread, in turns. Weights are random: only shapes matter. A few batches stand for the usual 256
   images: they are as large, and as many tokens are passed over, as there.
2. Correct: seconds from factors in memory to the weights of one Plan of ViT-B at half width, in a process of its own
   where torch cannot be imported, on two threads.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

IMAGES = 256  # of the default recipe


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def observing(names: list[str], rounds: int, batches: int) -> None:
    """Sums of one pass, with and without statistics."""
    import timm
    import torch

    from snapvit_export.calibration.images import Images
    from snapvit_export.calibration.preprocessing import Preprocessing
    from snapvit_export.prune.models.load import Model, ModelDescription
    from snapvit_export.prune.models.read_anatomy import read_anatomy
    from snapvit_export.prune.stats import token_weights as tokens
    from snapvit_export.prune.stats.observe import observe

    torch.set_num_threads(1)
    plenty, tokens.BATCHES = tokens.PLENTY, 1
    print("\n### Observe\n\n| model | images | forward, CPU s | observe | ratio: median | least | most |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        torch.manual_seed(0)
        module = timm.create_model(name).eval()
        pre = Preprocessing(input_size=(3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3)
        described = ModelDescription(name=name, architecture=name, kwargs={}, preprocessing=pre)
        model = Model(module, read_anatomy(module, name), described)
        size = tokens.TOKENS // model.anatomy.tokens
        tokens.PLENTY = plenty * batches * size / IMAGES
        pixels = np.random.default_rng(0).integers(0, 255, (batches * size, 224, 224, 3), np.uint8)
        images = Images(pixels, None, pre, "noise")

        @torch.no_grad()
        def forward(module=module, images=images, size=size) -> None:
            for batch in images.batches(size):
                module.forward_features(torch.from_numpy(batch))

        forward()  # the first pass also allocates
        pairs = [(cpu_seconds(forward), cpu_seconds(lambda m=model, i=images: observe(m, i))) for _ in range(rounds)]
        ratios = sorted(seen / plain for plain, seen in pairs)
        plain, seen = (np.median(column) for column in zip(*pairs))
        print(
            f"| {name} | {len(images)} | {plain:.2f} | {seen:.2f} | **{np.median(ratios):.2f}** | "
            f"{ratios[0]:.2f} | {ratios[-1]:.2f} |"
        )


def correcting(rounds: int, depth: int = 12, embed: int = 768, hidden: int = 3072, head: int = 64) -> None:
    """All blocks of one Plan, from factors in memory. Called in a process without torch."""
    from snapvit_export.correction.cholesky import Factor, make_factor
    from snapvit_export.correction.moments import Moments

    rng = np.random.default_rng(0)

    def factor(width: int, unit: int) -> Factor:
        x = rng.standard_normal((width + 100, width)) + rng.standard_normal((width + 100, 1))
        moments = Moments(len(x), x.mean(0), np.cov(x.T, bias=True))
        return make_factor(rng.standard_normal((embed, width)), moments, rng.permutation(width // unit), unit)

    def again(made: Factor) -> Factor:  # memory of its own, as every block has
        return Factor(made.unit, made.mean, made.lower.copy(), made.projected.copy(), made.constant, made.layer_scale)

    proj, fc2 = factor(embed, head), factor(hidden, 1)
    layers = [again(made) for _ in range(depth) for made in (proj, fc2)]
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for layer in layers:
            layer.corrected(layer.structures // 2)
        seconds.append(time.perf_counter() - start)
    assert "torch" not in sys.modules or sys.modules["torch"] is None
    gigabytes = sum(layer.lower.nbytes + layer.projected.nbytes for layer in layers) / 1e9
    print("\n### Correct one Plan of ViT-B, half of the heads and neurons, without torch\n")
    print("| threads | factors GB | seconds: median | least | most |\n|---|---|---|---|---|")
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "all")
    print(f"| {threads} | {gigabytes:.2f} | **{np.median(seconds):.2f}** | {min(seconds):.2f} | {max(seconds):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["vit_tiny_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--without-torch", action="store_true", help="only the second table, in this process")
    args = parser.parse_args()
    if args.without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # importing it now fails
        return correcting(args.rounds)
    if args.models:
        observing(args.models, args.rounds, args.batches)
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "2")
    command = [sys.executable, __file__, "--without-torch", "--rounds", str(args.rounds)]
    subprocess.run(command, check=True, env={**os.environ, **threads})


if __name__ == "__main__":
    main()
