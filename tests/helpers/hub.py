"""Datasets in the layout of the Hugging Face hub, in folders where `datasets` looks before it asks the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CARD = """---
dataset_info:
  splits:
{splits}
---
"""


def pictures(count: int, seed: int = 0, side: int = 8) -> list[Image.Image]:
    """So many unlike pictures."""
    pixels = np.random.default_rng(seed).integers(0, 255, (count, side, side, 3), np.uint8)
    return [Image.fromarray(each) for each in pixels]


def pixels_of(source: Any) -> np.ndarray:
    """All pictures of a source whose pictures are of one size: (N, H, W, 3)."""
    return np.stack([np.asarray(source.open(i)) for i in range(source.count)])


def make_hub_set(
    package: Any,
    repository: str,
    splits: Mapping[str, int],
    label: str | None = "label",
    classes: Sequence[str] = ("cat", "dog"),
    columns: Mapping[str, list[Image.Image]] | None = None,
    files: int = 1,
    told_bytes: int | None = None,
) -> Path:
    """Write splits of so many pictures as parquet files below the current folder, the classes one after the other.

    `columns`: further ones of pictures; `files`: of each split; `told_bytes`: size of each split by the card.
    """
    folder = Path(repository)
    (folder / "data").mkdir(parents=True)
    features = {"image": package.Image()} | {name: package.Image() for name in columns or {}}
    if label is not None:
        features[label] = package.ClassLabel(names=list(classes))
    for seed, (split, count) in enumerate(splits.items()):
        data: dict[str, Any] = {"image": pictures(count, seed)} | dict(columns or {})
        if label is not None:
            data[label] = [i * len(classes) // count for i in range(count)]
        whole = package.Dataset.from_dict(data, features=package.Features(features))
        for part in range(files):
            path = folder / "data" / f"{split}-{part:05}-of-{files:05}.parquet"
            whole.shard(files, part, contiguous=True).to_parquet(path)
    if told_bytes is not None:
        told = [f"  - name: {name}\n    num_bytes: {told_bytes}\n    num_examples: {n}" for name, n in splits.items()]
        (folder / "README.md").write_text(CARD.format(splits="\n".join(told)))
    return folder
