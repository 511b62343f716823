"""Parity of exported files with the torch modules that they were cut from, on real images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..calibration.images import Images
from ..checks.gates import agreement
from ..evaluate.features import Split
from ..model.plan import Plan
from ..model.ranking import Ranking
from .models.extractor import TorchExtractor
from .models.load import Model, check_same_weights, load_model
from .models.read_anatomy import read_anatomy
from .models.slicing import shrink

MOST_IMAGES = 64


def parities(
    name: str,
    checkpoint: Path | None,
    arguments: Mapping[str, Any] | None,
    ranking_path: Path,
    plans: Mapping[str, Plan],
    images: Images,
    outputs: Mapping[str, Split],
) -> dict[str, float]:
    """Return the largest difference of each file's outputs to torch, in units of the largest output.

    `plans` are of variants without correction: torch has no other weights than the dense model's; and that merge no
    tokens: a tie decided otherwise is no difference, and only the gates of an export tell the two apart.
    """
    model, ranking = load_model(name, checkpoint, arguments), Ranking.load(ranking_path)
    check_same_weights(ranking, model, f"{ranking_path}: ")
    some, found = images.first(MOST_IMAGES), {}
    for variant, plan in plans.items():
        module = shrink(model.module, ranking, plan)
        anatomy = read_anatomy(module, name)
        extractor = TorchExtractor(Model(module, anatomy, model.description))
        features, logits = extractor.features(some.at(anatomy.image))
        exported = outputs[variant]
        output = exported.features if logits is None or exported.logits is None else exported.logits  # (N, E or C)
        found[variant] = agreement(features if logits is None else logits, output[: len(some)]).max_abs
    return found
