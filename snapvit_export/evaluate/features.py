"""Features of a dataset: a model's embeddings and logits of its images, for several metrics, and their file. Light.

The file is safetensors: `train_features` float32 (N, E) and `train_targets` int64 (N,), the same for `valid` and
`test`, and if the model has a head `test_logits` float32 (N, C); only `test` must be there. Its metadata names the
weights, images and runtime that they come from, and the file is checksummed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..calibration.preprocessing import Preprocessing
from ..errors import FileFormatError, SnapvitError
from ..storage.checksummed import is_checksummed, load_checksummed, save_checksummed
from ..storage.json import Value, from_json, to_json

KIND = "snapvit-features"
SPLITS = ("train", "valid", "test")
Array = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64]


class MadeBy(Value, frozen=True, kw_only=True):
    """The inputs that features come from: the same inputs give the same features."""

    format_version: Literal[1] = 1
    model: str
    weights_sha256: str  # of the weights, or of the file that was run
    runtime: str
    preprocessing: Preprocessing
    images: dict[str, dict[str, str | int]]  # by split: their fingerprint
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Split:
    """Features of the images of one split, and their classes if known."""

    features: Array  # (N, E)
    targets: Targets | None = None  # (N,)
    logits: Array | None = None  # (N, C): only of the test split

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class Features:
    """Features of all splits.

    >>> Features.load("pets.safetensors").train.features.shape     # (N, E)
    """

    made_by: MadeBy | None  # None: a file of others does not tell
    test: Split
    train: Split | None = None
    valid: Split | None = None
    merge: bool | None = None  # what a file of the released SnapViT code says: learn from validation images too

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that there are, by name."""
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: split for name, split in named.items() if split is not None}

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers where no names are known."""
        if self.made_by is not None:
            return self.made_by.classes
        known = [split.targets.max() for split in self.splits.values() if split.targets is not None]
        return tuple(map(str, range(int(max(known, default=-1)) + 1)))

    def merge_train_valid(self) -> Features:
        """Merge training and validation split, for metrics that choose nothing by validation."""
        if self.train is None or self.valid is None:
            return self
        targets = None
        if self.train.targets is not None and self.valid.targets is not None:
            targets = np.concatenate([self.train.targets, self.valid.targets])
        both = Split(np.concatenate([self.train.features, self.valid.features]), targets)
        return replace(self, train=both, valid=None)

    def save(self, path: Path | str) -> None:
        """Write the features; the file appears whole or not at all."""
        if self.made_by is None:
            raise SnapvitError(f"{path}: would not tell which weights and images its features are of. Run the model")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, split in self.splits.items():
            parts = {"features": split.features, "targets": split.targets, "logits": split.logits}
            arrays |= {f"{name}_{kind}": part for kind, part in parts.items() if part is not None}
        save_checksummed(Path(path), KIND, arrays, to_json(self.made_by).decode())

    @staticmethod
    def load(path: Path | str) -> Features:
        """Read features and check version, names, shapes and hash before anything is used."""
        arrays, described = load_checksummed(Path(path), KIND)
        made_by = from_json(described, MadeBy, str(path))
        known = {f"{split}_{kind}" for split in SPLITS for kind in ("features", "targets")} | {"test_logits"}
        if strange := sorted(set(arrays) - known):
            raise FileFormatError(f"{path}: holds {strange[0]}, which does not belong to features. Make it again")
        if "test_features" not in arrays:
            raise FileFormatError(f"{path}: lacks test_features. Make it again")
        width = arrays["test_features"].shape[-1] if arrays["test_features"].ndim else 0
        test, train, valid = (
            _split(arrays, name, width, len(made_by.classes), str(path)) for name in ("test", "train", "valid")
        )
        assert test is not None
        return Features(made_by, test, train, valid)


def is_features(path: Path) -> bool:
    """Return True if a file holds features, by its header."""
    return is_checksummed(path, KIND)


def _split(arrays: Mapping[str, npt.NDArray[Any]], name: str, width: int, classes: int, where: str) -> Split | None:
    features, targets, logits = (arrays.get(f"{name}_{kind}") for kind in ("features", "targets", "logits"))
    if features is None:
        if targets is not None:
            raise FileFormatError(f"{where}: has {name}_targets without {name}_features. Make it again")
        return None
    _check_numbers(features, f"{where}: {name}_features")
    if features.shape[1] != width:
        raise FileFormatError(f"{where}: {name}_features has {features.shape[1]} columns, test_features {width}")
    if logits is not None:
        _check_numbers(logits, f"{where}: {name}_logits")
        if len(logits) != len(features):
            raise FileFormatError(f"{where}: {name}_logits has {len(logits)} rows for {len(features)} images")
    if targets is not None:
        if targets.dtype != np.int64 or targets.shape != (len(features),):
            found = f"{targets.dtype} of shape {targets.shape}"
            raise FileFormatError(f"{where}: {name}_targets are {found}, expected int64 of shape ({len(features)},)")
        if len(targets) and (targets.min() < 0 or targets.max() >= classes):
            raise FileFormatError(
                f"{where}: {name}_targets go from {targets.min()} to {targets.max()}: not its classes"
            )
    return Split(features, targets, logits)


def _check_numbers(array: npt.NDArray[Any], what: str) -> None:
    if array.dtype != np.float32 or array.ndim != 2 or not array.size:
        raise FileFormatError(f"{what} are {array.dtype} of shape {array.shape}, expected float32 (images, columns)")
    if not np.isfinite(array).all():
        raise FileFormatError(f"{what} hold {int((~np.isfinite(array)).sum())} values that are not finite numbers")
