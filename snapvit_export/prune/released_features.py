"""Features in the files of the released SnapViT code, `.pt`: read without executing anything, and written.

    {"train": {"features": (N, E), "targets": (N,)}, "valid": {...}, "test": {...}, "merge_train_valid": bool}

The flag is true where the validation images were drawn from the training images, a fifth of them: k-NN and the final
probe then learn from both. The files name neither model nor images, so nothing is reused from them for another run.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..calibration.source import MOST_CLASSES
from ..errors import FileFormatError, SnapvitError
from ..evaluate.features import SPLITS, Features, Split
from ..evaluate.linear import set_aside
from ..storage.atomic import write_atomically
from .released_files import load_released

MERGE = "merge_train_valid"


def read_released_features(path: Path) -> Features:
    """Read a file of features of the released code.

    >>> read_released_features(Path("pets.pt")).train.features.shape     # (N, E)
    """
    loaded = load_released(path, "file of features")
    if strange := sorted(str(name) for name in set(loaded) - {*SPLITS, MERGE}):
        raise FileFormatError(f"{path}: holds {strange[0]}, which does not belong to features. Make it again")
    if "test" not in loaded:
        raise FileFormatError(f"{path}: not a file of features of the released SnapViT code (test is missing)")
    merge = loaded.get(MERGE)
    if not isinstance(merge, (bool, type(None))):
        raise FileFormatError(f"{path}: {MERGE} is neither true nor false")
    splits = {name: _split(loaded[name], f"{path}: {name}") for name in SPLITS if name in loaded}
    width = splits["test"].features.shape[1]
    for name, split in splits.items():
        if split.features.shape[1] != width:
            raise FileFormatError(f"{path}: {name} has {split.features.shape[1]} columns, test {width}")
    return Features(None, splits["test"], splits.get("train"), splits.get("valid"), merge)


def write_released_features(features: Features, path: Path, seed: int = 0) -> None:
    """Write features as the released code does; without validation images, a fifth of the training ones."""
    train, valid, merge = features.train, features.valid, bool(features.merge)
    if train is None or train.targets is None or features.test.targets is None:
        raise SnapvitError(f"{path}: such a file has labelled training and test images. Give --data with both")
    if valid is None:
        merge = True
        train, valid = set_aside(train, seed)
    found: dict[str, Any] = {
        name: {"features": torch.from_numpy(split.features), "targets": torch.from_numpy(split.targets)}
        for name, split in zip(SPLITS, (train, valid, features.test))
    }
    data = io.BytesIO()
    torch.save({**found, MERGE: merge}, data)
    write_atomically(path, data.getvalue())


def _split(found: Any, what: str) -> Split:
    if not isinstance(found, Mapping) or set(found) != {"features", "targets"}:
        raise FileFormatError(f"{what} does not have features and targets. Make it again")
    features, targets = _plain(found["features"], f"{what}: features"), _plain(found["targets"], f"{what}: targets")
    if not features.is_floating_point() or features.ndim != 2 or not features.numel():
        kind = f"{str(features.dtype).removeprefix('torch.')} of shape {tuple(features.shape)}"
        raise FileFormatError(f"{what}: features are {kind}, expected numbers (images, columns)")
    if targets.is_floating_point() or targets.is_complex() or tuple(targets.shape) != (len(features),):
        raise FileFormatError(f"{what}: targets are not one class for each of {len(features)} images")
    x, y = features.float().contiguous().numpy(), targets.long().contiguous().numpy()
    if not np.isfinite(x).all():
        raise FileFormatError(f"{what}: features hold {int((~np.isfinite(x)).sum())} values that are not finite")
    if y.min() < 0 or y.max() >= MOST_CLASSES:
        raise FileFormatError(f"{what}: targets go from {y.min()} to {y.max()}: no class numbers")
    return Split(x, y)


def _plain(tensor: Any, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise FileFormatError(f"{what} are not a plain tensor")
    if tensor.is_quantized:
        raise FileFormatError(f"{what} are quantised. Save them as float32")
    return tensor.detach()
