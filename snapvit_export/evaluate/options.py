"""Options of an evaluation: the metrics, and what they need; and what the command line writes for them. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..calibration.masks import UNKNOWN
from ..errors import UsageError

Metric = Literal["head", "knn", "linear", "segment", "in-context"]
METRICS: tuple[Metric, ...] = get_args(Metric)
OF_TOKENS: tuple[Metric, ...] = ("segment", "in-context")  # read patch tokens and masks
OF_FEATURES: tuple[Metric, ...] = ("head", "knn", "linear")  # read embeddings or logits, and labels
Segmenter = Literal["quick", "paper"]
BANK_PATCHES = 1_960_000  # of in-context segmentation, as published: 10,000 images of 14x14 patches


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation: the metrics, and what they need."""

    by: Sequence[Metric] | None = None  # None: head if the classes match, and knn if there are training images
    classes: Path | None = None  # names of the head's outputs
    features: Path | None = None  # file to keep them in, and to reuse them from if weights and images are the same
    images: int | None = None  # of each split at most
    seed: int = 0
    ignore: Sequence[int] = (UNKNOWN,)  # values in masks that count for no class
    merge: bool | None = None  # learn from validation images too; None: k-NN does, a probe only chooses by them
    segmenter: Segmenter = "quick"
    bank_patches: int = BANK_PATCHES


def check_options(options: EvalOptions) -> None:
    """Refuse settings that would change nothing."""
    by = options.by
    if options.classes is not None and by is not None and "head" not in by:
        raise UsageError("--classes names the outputs of the head, which is not evaluated. Add head to --by")
    if options.features is not None and by is not None and not set(by) & set(OF_FEATURES):
        raise UsageError(f"--features keeps embeddings, and --by {','.join(by)} needs none. Leave --features out")


def refuse_token_metrics(options: EvalOptions, what: str) -> None:
    """Refuse metrics of patch tokens where a command has none."""
    if found := [metric for metric in OF_TOKENS if metric in (options.by or ())]:
        raise UsageError(what.format(f"--by {found[0]}"))


def parse_metrics(text: str | None) -> tuple[Metric, ...] | None:
    """Read `knn,linear`; None for the default."""
    if text is None:
        return None
    wanted = [part.strip() for part in text.split(",")]
    if unknown := [part for part in wanted if part not in METRICS]:
        raise UsageError(f"--by '{unknown[0]}' is not a metric. Known: {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in wanted)


def parse_ignored(text: str) -> tuple[int, ...]:
    """Read `255,3`: values in masks."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) <= UNKNOWN for part in parts):
        raise UsageError(f"--ignore '{text}' is not understood. Write values of masks, 0 to {UNKNOWN}, like 255,3")
    return tuple(int(part) for part in parts)


def parse_segmenter(text: str) -> Segmenter:
    """Read the name of a way to segment."""
    known: dict[str, Segmenter] = {name: name for name in get_args(Segmenter)}
    if text not in known:
        raise UsageError(f"--segmenter '{text}' is not known. Known: {', '.join(known)}")
    return known[text]
