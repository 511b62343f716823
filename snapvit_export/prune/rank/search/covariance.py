"""The covariance that a search starts with: computed by CKA, or from a file that an earlier ranking kept.

Checksummed safetensors (`covariance`, float64, (D, D)) with a description of the model and the images that it was made
from. A file of others is refused by naming what differs, or replaced where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ....calibration.images import Images
from ....errors import FileFormatError, SnapvitError
from ....progress import Progress
from ....storage.checksummed import load_checksummed, save_checksummed
from ....storage.json import Value, from_json, to_json
from ...models.load import Model
from ...stats.single_thread import single_thread
from ..distributed import Processes
from .cka import cka_covariance
from .optimiser import Matrix

KIND = "snapvit-cka"


@dataclass(frozen=True)
class CkaInputs:
    """What the first covariance of xNES is computed from, and the file that keeps it."""

    images: Images  # of which as many are used as the settings say
    file: Path | None = None
    replaces: bool = False  # a file of another model or of other images


class FirstCovariance:
    """The covariance of a model on the first of these images, the same in all processes."""

    def __init__(self, model: Model, inputs: CkaInputs, most: int, processes: Processes) -> None:
        self.model, self.inputs, self.processes = model, inputs, processes
        self.images = inputs.images.first(most)
        self._known: Matrix | None = None

    def look(self) -> None:
        """Read the file, if there is one; one of another model or of other images is refused."""
        if (file := self.inputs.file) is not None:
            described = describe(self.model, self.images)
            self._known = self._from_first(lambda: load_cka(file, described, self.inputs.replaces))

    def matrix(self, progress: Progress) -> Matrix:
        """Return the covariance that was read, or compute it in the first process and write the file."""
        if self._known is not None:
            progress.note(f"the first covariance is that of {self.inputs.file}")
            return self._known
        progress.phase("comparing structures (CKA)")
        found = self._from_first(self._computed)
        assert found is not None
        return found

    def _computed(self) -> Matrix:
        with single_thread():
            covariance = cka_covariance(self.model, self.images, len(self.images), self.processes.device)
        if self.inputs.file is not None:
            save_cka(self.inputs.file, covariance, describe(self.model, self.images))
        return covariance

    def _from_first(self, make: Callable[[], Matrix | None]) -> Matrix | None:
        """Return the matrix that the first process makes, in all processes."""

        def packed() -> list[Any] | None:
            made = make()
            return None if made is None else [len(made), np.asarray(made, np.float64).tobytes()]

        found = self.processes.from_first(packed)
        return None if found is None else np.frombuffer(found[1]).reshape(found[0], -1)


class CkaDescription(Value, frozen=True, kw_only=True):
    """All that decides a covariance."""

    format_version: Literal[1] = 1
    model: str
    weights_sha256: str
    images: int
    pixels_sha256: str
    mlps: int
    heads: tuple[int, ...]  # of each block


def describe(model: Model, images: Images) -> CkaDescription:
    """Return the description of the covariance of a model on these images."""
    return CkaDescription(
        model=model.name,
        weights_sha256=model.weights_sha256,
        images=len(images),
        pixels_sha256=str(images.fingerprint["sha256"]),
        mlps=len(model.anatomy.blocks),
        heads=model.anatomy.heads,
    )


def save_cka(path: Path, covariance: Matrix, described: CkaDescription) -> None:
    """Write the file; it appears whole or not at all."""
    save_checksummed(path, KIND, {"covariance": covariance}, to_json(described).decode())


def load_cka(path: Path, wanted: CkaDescription, replaces: bool = False) -> Matrix | None:
    """Return the covariance of a file; None if there is none, or `replaces` one that was made from something else."""
    if not path.exists():
        return None
    try:
        arrays, text = load_checksummed(path, KIND)
        covariance = _checked(path, arrays, wanted, from_json(text, CkaDescription, str(path)))
    except SnapvitError:
        if replaces:
            return None
        raise
    return covariance


def _checked(path: Path, arrays: dict[str, Any], wanted: CkaDescription, found: CkaDescription) -> Matrix:
    names = [name for name in CkaDescription.__struct_fields__ if getattr(found, name) != getattr(wanted, name)]
    if names:
        raise SnapvitError(
            f"{path}: a covariance of another model or other images ({names[0]} differs). Choose another --cka-file, "
            "or give --force to replace it"
        )
    covariance = arrays.get("covariance")
    size = wanted.mlps + sum(wanted.heads)
    if covariance is None or covariance.shape != (size, size) or covariance.dtype != np.float64:
        raise FileFormatError(f"{path}: damaged: not a covariance of {size} structures in float64")
    if not (np.isfinite(covariance).all() and (covariance == covariance.T).all()):
        raise FileFormatError(f"{path}: damaged: not symmetric")
    if np.linalg.eigvalsh(covariance)[0] <= 0:
        raise FileFormatError(f"{path}: damaged: not positive definite")
    return np.asarray(covariance)
