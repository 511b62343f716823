"""Runs a model over the images of a split, chunk by chunk, and keeps what it gives; what was run before is not again.

An interrupted run of a large split goes on from its parts: files beside the one that features are kept in, each with
the features of some thousand images and the hashes of their pixels. A chunk of images is read and hashed in any case,
and run only if no part has it. The parts are removed when the features are complete.

    imagenet.safetensors.train-00003.part
"""

from __future__ import annotations

import hashlib
from glob import escape
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..calibration.streamed import StreamedImages
from ..errors import FileFormatError, SnapvitError
from ..progress import Progress
from ..storage.checksummed import is_checksummed, load_checksummed, save_checksummed
from ..storage.json import Value, from_json, to_json
from .features import Array, MadeBy, Split

KIND = "snapvit-feature-part"
CHUNK = 256  # images that are decoded at a time, about: a whole number of the model's batches
CHUNKS_OF_A_PART = 8
ImageSplit: TypeAlias = Images | StreamedImages


class FeatureModel(Protocol):
    """Runs a model over images: the part of an `evaluator.Extractor` that is needed here."""

    @property
    def name(self) -> str: ...

    @property
    def batch(self) -> int: ...  # images that are run together

    def features(self, images: Images, progress: Progress) -> tuple[Array, Array | None]: ...


def chunk_of(batch: int) -> int:
    """Return how many images to decode at a time: batches are the same as if all images were there at once."""
    return batch * max(1, CHUNK // batch)


class _PartInfo(Value, frozen=True, kw_only=True):
    """What a part was made from."""

    made_by: MadeBy
    split: str
    number: int
    pixels: tuple[str, ...]  # hash of each chunk


class FeatureParts:
    """The parts of one split's features; without a goal there are none, and nothing is written."""

    def __init__(self, goal: Path | None, made_by: MadeBy, split: str) -> None:
        self._goal, self._made_by, self._split = goal, made_by, split
        self._at = -1  # number of the part whose chunks are known
        self._known: dict[str, tuple[Array, Array | None]] = {}  # of that part: by hash of the pixels
        self._new: list[tuple[str, Array, Array | None]] = []  # since the last part that is whole
        self.reused = 0  # images

    def find(self, chunk: int, pixels: str) -> tuple[Array, Array | None] | None:
        """Return the features of a chunk if an earlier run has left them."""
        number = chunk // CHUNKS_OF_A_PART
        if number != self._at:
            self._at, self._known = number, self._load(number)
        found = self._known.get(pixels)
        self.reused += 0 if found is None else len(found[0])
        return found

    def add(self, chunk: int, pixels: str, features: Array, logits: Array | None) -> None:
        """Keep the features of a chunk; every few chunks become a file."""
        if self._goal is None:
            return
        self._new.append((pixels, features, logits))
        if (chunk + 1) % CHUNKS_OF_A_PART == 0:
            if any(hashed not in self._known for hashed, _, _ in self._new):
                self._save(chunk // CHUNKS_OF_A_PART)
            self._new = []

    def remove(self) -> None:
        """Remove the files of all parts."""
        if self._goal is not None:
            for path in self._goal.parent.glob(f"{escape(self._goal.name)}.{self._split}-*.part"):
                if is_checksummed(path, KIND):
                    path.unlink()

    def _path(self, number: int) -> Path | None:
        if self._goal is None:
            return None
        return self._goal.with_name(f"{self._goal.name}.{self._split}-{number:05}.part")

    def _save(self, number: int) -> None:
        path = self._path(number)
        assert path is not None
        if path.exists() and not is_checksummed(path, KIND):
            raise SnapvitError(f"{path}: is there already, and a part of features would take its place. Move it away")
        hashes, features, logits = zip(*self._new)
        info = _PartInfo(made_by=self._made_by, split=self._split, number=number, pixels=tuple(hashes))
        arrays: dict[str, npt.NDArray[Any]] = {f"features.{i}": part for i, part in enumerate(features)}
        arrays |= {f"logits.{i}": part for i, part in enumerate(logits) if part is not None}
        save_checksummed(path, KIND, arrays, to_json(info).decode())

    def _load(self, number: int) -> dict[str, tuple[Array, Array | None]]:
        """Read a part that this very model has made; a damaged one or one of others counts for nothing."""
        path = self._path(number)
        if path is None or not is_checksummed(path, KIND):
            return {}
        try:
            arrays, described = load_checksummed(path, KIND)
            info = from_json(described, _PartInfo, str(path))
        except FileFormatError:
            return {}
        if info.made_by != self._made_by or info.split != self._split:
            return {}
        return {
            hashed: (arrays[f"features.{i}"], arrays.get(f"logits.{i}"))
            for i, hashed in enumerate(info.pixels)
            if f"features.{i}" in arrays
        }


def extract(
    model: FeatureModel, images: ImageSplit, parts: FeatureParts, with_logits: bool, progress: Progress
) -> Split:
    """Run a model over the images of a split; return features, classes and, if asked, logits."""
    features, logits = _Rows(images.most), _Rows(images.most)
    labels: list[npt.NDArray[np.int64]] = []
    for number, chunk in enumerate(images.chunks(chunk_of(model.batch))):
        pixels = hashlib.sha256(np.ascontiguousarray(chunk.pixels).data).hexdigest()
        found = parts.find(number, pixels)
        if found is None:
            found = _run(model, chunk, with_logits, progress)
        else:
            progress.advance(len(chunk))
        parts.add(number, pixels, *found)
        features.append(found[0])
        if found[1] is not None:
            logits.append(found[1])
        if chunk.labels is not None:
            labels.append(chunk.labels)
    if parts.reused:
        progress.note(f"{parts.reused} images were run before, and are not run again")
    return Split(features.rows, np.concatenate(labels) if labels else None, logits.rows if len(logits) else None)


def _run(model: FeatureModel, chunk: Images, with_logits: bool, progress: Progress) -> tuple[Array, Array | None]:
    features, logits = model.features(chunk, progress)
    if not np.isfinite(features).all():
        raise SnapvitError(f"{model.name}: gives features that are not finite numbers. Check its weights")
    return features, logits if with_logits else None


class _Rows:
    """Rows that arrive in parts, in one array of which no second copy is made."""

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._array: Array | None = None

    def __len__(self) -> int:
        return self._count

    def append(self, part: Array) -> None:
        if self._array is None:
            self._array = np.empty((self._most, part.shape[1]), np.float32)
        self._array[self._count : self._count + len(part)] = part
        self._count += len(part)

    @property
    def rows(self) -> Array:
        return np.zeros((0, 0), np.float32) if self._array is None else self._array[: self._count]
