"""Families for tests of the report: real values with random but plausible numbers, without torch and without files."""

from __future__ import annotations

import base64
import hashlib
import io

import msgspec
import numpy as np
from PIL import Image

from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.family.fidelity import Fidelity
from snapvit_export.family.manifest import (
    Alternative,
    Choice,
    DroppedPrecision,
    Manifest,
    MeasuredOn,
    Measurement,
    Variant,
)
from snapvit_export.family.validation import MergedImage, MergedPatches, MergeStep, Prediction, Sample, Validation
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.profile import Profile
from snapvit_export.runtimes.device import DeviceCard

DEPTH, HEADS, HIDDEN = 12, 6, 1536
DEVICE = DeviceCard(
    cpu="Imaginary CPU", cores=4, governor="performance", memory_bytes=8 << 30, system="Linux", runtime_version="1.23"
)
HOSTILE = "</script><img src=x onerror=alert(1)>"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_profile(ms: float, digest: str, rng: np.random.Generator, runs: int = 200) -> Profile:
    samples = ms * (1 + 0.02 * np.abs(rng.standard_normal(runs)) + 0.05 * rng.exponential(0.3, runs))
    p50, p90, p99 = (float(np.percentile(samples, at)) for at in (50, 90, 99))
    return Profile(
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        spread_ms=float(np.percentile(samples, 75) - np.percentile(samples, 25)),
        intervals_ms={name: (0.99 * at, 1.01 * at) for name, at in (("p50", p50), ("p90", p90), ("p99", p99))},
        cpu_ms=ms,
        samples_ms=tuple(round(float(sample), 4) for sample in samples),
        runs=runs,
        conditions=Conditions(noise=0.001, drift=0.0, waited=0.0, others=0.0),
        precision="fp32",
        batch=1,
        threads=1,
        sha256=digest,
        device=DEVICE,
    )


def make_evaluation(top1: float, source: str = "pictures") -> Evaluation:
    return Evaluation(
        source=source,
        images=500,
        top1=top1,
        agreement=min(1.0, top1 + 0.1),
        cosine=0.9 + top1 / 10,
        standard_errors={"top1": 0.01, "agreement": 0.008, "cosine": 0.001},
    )


def make_manifest(
    count: int = 7,
    *,
    seed: int = 0,
    speed: float = 1.0,
    precision: str = "fp32",
    names: dict[int, str] | None = None,
    choice: bool = True,
    timed: bool = True,
    evaluated: bool = True,
    recipe: dict | None = None,
) -> Manifest:
    """A dense model and `count` - 1 pruned ones; the third is chosen, if there are as many."""
    rng = np.random.default_rng(seed)
    block = Block(heads=HEADS, head_dim=64, hidden=HIDDEN)
    anatomy = Anatomy(
        family="vit",
        embed_dim=384,
        blocks=(block,) * DEPTH,
        image=(224, 224),
        patch=(16, 16),
        positions=197,
        classes=1000,
    )
    variants, measurements = [], []
    for i in range(count):
        sparsity = 0.7 * i / max(count - 1, 1)
        name = (names or {}).get(i, "dense" if i == 0 else f"s{100 * sparsity:.3g}")
        keep = np.clip(1 - sparsity * rng.uniform(0.6, 1.4, DEPTH), 0.1, 1)
        heads = tuple(max(1, round(HEADS * share)) for share in keep)
        neurons = tuple(max(1, int(HIDDEN * share)) for share in keep)
        ms = speed * 24 * (1 - 0.85 * sparsity) * rng.uniform(0.998, 1.002)
        profile = make_profile(ms, sha(name), rng) if timed else None
        evaluation = make_evaluation(0.8 - 0.5 * sparsity**3 + rng.uniform(-0.01, 0.01)) if evaluated else None
        common = dict(
            sparsity=sparsity,
            params=int(22e6 * (1 - sparsity)),
            flops=int(9e9 * (1 - sparsity)),
            size_bytes=int(88e6 * (1 - sparsity)),
        )
        variants.append(
            Variant(
                name=name,
                file=f"v{i}.onnx",
                heads=heads,
                neurons=neurons,
                flops_ratio=1 - sparsity,
                sha256=sha(name),
                precision=precision,
                parity=4e-7,
                profile=profile,
                evaluation=evaluation,
                **common,
            )
        )
        if profile is not None:
            low, high = 0.99 * profile.p50_ms, 1.01 * profile.p50_ms
            measured = dict(latency_ms=profile.p50_ms, between_ms=(low, high), fits=i >= 2, correction="refit")
            found = Measurement(variant=name, profile=profile, evaluation=evaluation, **measured, **common)
            measurements.append(found)
    chosen = None
    if choice and timed and count >= 3:
        budget = 1.0005 * measurements[2].between_ms[1]
        chosen = Choice(
            variant=variants[2].name,
            budget_ms=budget,
            next_denser=variants[1].name,
            decided=True,
            measurements=tuple(measurements),
        )
    return Manifest(
        model="imaginary-vit",
        anatomy=anatomy,
        preprocessing=Preprocessing(input_size=(3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0),
        recipe={
            "name": "default",
            "data": {"source": "pictures", "images": 256, "sha256": sha("data")},
            **(recipe or {}),
        },
        target=MeasuredOn(runtime="onnxruntime", precision=precision, batch=1, threads=1, device=DEVICE),
        variants=tuple(variants),
        dense=variants[0].name,
        choice=chosen,
    )


def make_fidelity(divergence: float, agreement: float, by: str = "predictions", **changes: object) -> Fidelity:
    error = max(0.2 * divergence, 1e-4)
    found = dict(divergence=divergence, standard_error=error, agreement=agreement, agreement_error=0.006, images=128)
    return Fidelity(**{"by": by, **found, **changes})


MIXED = {  # name: precision, tokens left, pixels, sparsity, sub-layers removed, ms, divergence, agreement, levers
    "dense": ("fp32", 197, 224, 0.0, 0, 24.1, None, None, ()),
    "int8": ("int8-dynamic", 197, 224, 0.0, 0, 14.2, 0.0031, 0.992, ("precision",)),
    "int8-r112-w88": ("int8-dynamic", 112, 224, 0.12, 0, 10.21, 0.011, 0.986, ("precision", "tokens", "width")),
    "int8-r112-w85": ("int8-dynamic", 112, 224, 0.15, 0, 9.79, 0.012, 0.984, ("precision", "tokens", "width")),
    "int8-192": ("int8-dynamic", 129, 192, 0.0, 2, 9.71, 0.019, 0.977, ("precision", "tokens", "depth")),
    "r48": ("fp32", 48, 224, 0.0, 0, 9.83, 0.061, 0.945, ("tokens",)),
    "w52": ("fp32", 197, 224, 0.48, 0, 9.69, 0.52, 0.791, ("width",)),
}


def make_mixed(*, labelled: bool = False, by: str = "predictions", kept: int = 4, **changes: object) -> Manifest:
    """A family whose choice used every lever: the first `kept` candidates are files; `changes` are of the choice."""
    rng = np.random.default_rng(2)
    found = make_manifest(1)
    variants, measurements, fidelities = [], [], {}
    for i, (name, row) in enumerate(MIXED.items()):
        precision, left, pixels, sparsity, removed, ms, divergence, agreement, levers = row
        begin = (pixels // 16) ** 2 + 1
        tokens = tuple(begin - (begin - left) * (block + 1) // DEPTH for block in range(DEPTH))
        profile = make_profile(ms * 1.05, sha(name), rng)  # of the last run alone, which no table may show
        fidelity = None if divergence is None or agreement is None else make_fidelity(divergence, agreement, by)
        fidelities[name] = fidelity
        common = dict(
            sparsity=sparsity,
            params=int(22e6 * (1 - sparsity)),
            flops=int(9e9 * (1 - sparsity) * left / 197),
            size_bytes=int(88e6 * (1 - sparsity) / (1 if precision == "fp32" else 4)),
            evaluation=make_evaluation(0.8 - 0.01 * i) if labelled else None,
            fidelity=fidelity,
            precision=precision,
            tokens=tokens,
            image_size=(pixels, pixels),
        )
        between = (0.981 * ms, 1.014 * ms)
        measurements.append(
            Measurement(
                variant=name,
                latency_ms=ms,
                between_ms=between,
                profile=profile,
                fits=between[1] <= 10,
                removed=removed,
                levers=levers,
                **common,
            )
        )
        variants.append(
            Variant(
                name=name,
                file=f"{name}.onnx",
                heads=(HEADS,) * DEPTH,
                neurons=tuple(0 if block < removed else int(HIDDEN * (1 - sparsity)) for block in range(DEPTH)),
                flops_ratio=common["flops"] / 9e9,
                sha256=sha(name),
                profile=profile,
                **common,
            )
        )
    alternatives = tuple(
        Alternative(
            lever=m.levers[0], **{f: getattr(m, f) for f in ("variant", "latency_ms", "between_ms", "fidelity")}
        )
        for m in measurements
        if m.variant in ("r48", "w52")
    )
    choice = dict(
        variant="int8-r112-w85",
        budget_ms=10.0,
        next_denser="int8-r112-w88",
        decided=True,
        measurements=tuple(measurements),
        levers=("precision", "tokens", "width", "depth"),
        prefer="fidelity",
        alternatives=alternatives,
        dropped=(DroppedPrecision(precision="fp16", ratio=1.07, reason="not faster here"),),
    )
    return msgspec.structs.replace(
        found,
        variants=tuple(variants[:kept]),
        choice=Choice(**{**choice, **changes}),
        seconds={
            "ranking": 14.2,
            "latency model": 11.0,
            "candidates": 12.4,
            "building": 7.9,
            "timing": 15.3,
            "other": 0.2,
        },
    )


def make_search(generations: int = 12) -> dict:
    best = [0.8 * 0.93**i for i in range(generations)]
    return {
        "start_fitness": 0.85,
        "best_fitness": best[-1],
        "history": [
            {"evaluations": 10 * (i + 1), "best": value, "mean": value * 1.2, "least": value}
            for i, value in enumerate(best)
        ],
    }


def make_rounds() -> dict:
    """What a ranking says that was made in three rounds of cutting and recovering, the last beyond the limit."""
    lost = [{"divergence": 0.1 * n, "agreement": 1 - 0.05 * n, "top1": 0.9 - 0.04 * n} for n in range(7)]
    return {
        "before_rounds": lost[0],
        "rounds": [
            {
                "flops": 1 - 0.1 * n,
                "gflops": 2.5 - 0.25 * n,
                "params": 5_700_000 - 500_000 * n,
                "before": lost[2 * n],
                "after": lost[n],
                "steps": 30,
                "kept": n < 3,
            }
            for n in (1, 2, 3)
        ],
    }


def make_sublayers() -> list[dict]:
    rng = np.random.default_rng(3)
    return [
        {"block": block, "part": part, **dict(zip(("divergence", "turned", "damage"), map(float, rng.random(3))))}
        for block in range(DEPTH)
        for part in ("attention", "mlp")
    ]


def make_validation(
    manifest: Manifest, count: int = 6, label: str = "seven", title: str = "pictures/{}.png"
) -> Validation:
    """Samples that the dense model gets right and some of the others get wrong."""
    rng = np.random.default_rng(5)
    samples = []
    for i in range(count):
        image = Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).resize((96, 96))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        said = {
            variant.name: Prediction(label="another" if (i + k) % 5 == 4 else label, probability=0.9 - 0.05 * k / 10)
            for k, variant in enumerate(manifest.variants)
        }
        picture = base64.b64encode(buffer.getvalue()).decode()
        samples.append(Sample(title=title.format(i), picture=picture, label=label, predictions=said))
    return Validation(
        source="pictures", images=500, sha256=sha("pixels"), runtime="onnxruntime", seconds=12.0, samples=tuple(samples)
    )


def make_merging_validation(manifest: Manifest, title: str = "pictures/0.png", **changes: object) -> Validation:
    """Two images that a variant merges; `changes` of what is told of the variant."""
    found = make_validation(manifest, count=1)
    picture = found.samples[0].picture
    steps = tuple(MergeStep(block=block, tokens=tokens, picture=picture) for block, tokens in ((3, 143), (7, 99)))
    images = (MergedImage(title=title, picture=picture, steps=steps),) * 2
    told = MergedPatches(**{"variant": manifest.variants[1].name, "images": images, **changes})
    return msgspec.structs.replace(found, merged=(told,))
