"""A family to predict with, from Python. Light: numpy, pillow and the runtime.

    family = load_family("snapvit-family")
    family.chosen.predict("cat.jpg")[0]      # Prediction(label="tabby", probability=0.71)

Images go through the preprocessing of the variant's own size; a session is opened at the first call and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..calibration.decode import open_image
from ..errors import SnapvitError, UsageError
from ..runtimes.session import Session, open_session, with_cores_here
from .class_names import class_name
from .folder import read_family
from .manifest import Manifest, Variant

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

    Image = str | Path | PillowImage | npt.NDArray[np.uint8]  # a file, an image, or (H, W, 3) bytes


class Prediction(NamedTuple):
    """A class, and how sure the model is of it."""

    label: str
    probability: float


@dataclass(frozen=True, eq=False)
class LoadedVariant:
    """A variant that can be run."""

    folder: Path
    manifest: Manifest
    variant: Variant

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def path(self) -> Path:
        """The file that is run; the chosen one also lies in the folder as one that runs alone."""
        return self.folder / self.variant.file

    @cached_property
    def session(self) -> Session:
        """The file, opened in the runtime and precision that it was timed in, with its threads if there are cores."""
        return open_session(self.path, with_cores_here(self.manifest.target_of(self.variant)))

    def prepare(self, image: Image) -> npt.NDArray[Any]:
        """Return one image as the file takes it."""
        return prepared(self.manifest, self.variant, image)

    def run(self, *images: Image) -> npt.NDArray[np.float32]:
        """Return the outputs of some images: class scores, or the embedding of a model without classes, (N, C)."""
        if not images:
            raise UsageError("there is nothing to run. Give at least one image")
        size = self.manifest.target.batch  # int8-dynamic has one scale for a batch: the answers are those of its own
        parts = [images[start : start + size] for start in range(0, len(images), size)]
        return np.concatenate([self.session.run(np.concatenate([*map(self.prepare, part)])) for part in parts])

    def predict(self, image: Image, top: int = 5) -> list[Prediction]:
        """Return the most likely classes of an image, the likeliest first."""
        return likeliest(self.manifest, self.run(image)[0], top)


class Family:
    """The variants of a family folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.manifest = Path(folder), read_family(folder)
        self._loaded = {v.name: LoadedVariant(self.folder, self.manifest, v) for v in self.manifest.variants}

    def __getitem__(self, name: str) -> LoadedVariant:
        """Return the variant of that name."""
        if name not in self._loaded:
            raise UsageError(f"{self.folder}: no variant is called '{name}'. Known: {', '.join(self._loaded)}")
        return self._loaded[name]

    def __iter__(self) -> Any:
        return iter(self._loaded.values())

    @property
    def chosen(self) -> LoadedVariant:
        """The variant that was chosen for the budget."""
        if self.manifest.choice is None:
            raise SnapvitError(f"{self.folder}: has no choice. Run snapvit choose with a --budget first")
        return self[self.manifest.choice.variant]

    @property
    def dense(self) -> LoadedVariant:
        """The variant that cuts nothing."""
        return self[self.manifest.dense]


def load_family(folder: Path | str) -> Family:
    """Read a family folder, check its files, and return its variants to run.

    >>> load_family("snapvit-family").dense.predict("path/to/images/class0/0.png")[0].label
    """
    return Family(folder)


def prepared(manifest: Manifest, variant: Variant, image: Image) -> npt.NDArray[Any]:
    """Return one image as the file of a variant takes it, (1, ...)."""
    steps = manifest.preprocessing_of(variant)
    pixels = steps.pixels(decoded(image))[None]  # (1, H, W, 3)
    return pixels if manifest.input.type == "uint8" else steps.normalise(pixels)


def likeliest(manifest: Manifest, scores: npt.NDArray[np.float32], top: int = 5) -> list[Prediction]:
    """Return the classes with the largest of these scores (C,), the likeliest first."""
    if not manifest.anatomy.classes:
        raise SnapvitError(f"{manifest.model} has no classes. `run` gives its embedding")
    exact = scores.astype(np.float64)
    chance = np.exp(exact - exact.max())
    chance /= chance.sum()
    labels = [class_name(label) for label in manifest.labels]
    best = np.argsort(-chance, kind="stable")[:top]
    return [Prediction(labels[i] if labels else f"class {i}", float(chance[i])) for i in best]


def decoded(image: Image) -> PillowImage:
    """Return an image in any of its forms as Pillow has it."""
    from PIL import Image as Pillow

    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise UsageError(f"an array of {image.dtype} {image.shape} is no image. Give bytes of (H, W, 3), RGB")
        return Pillow.fromarray(image)
    return open_image(image) if isinstance(image, str | Path) else image
