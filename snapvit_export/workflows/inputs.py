"""Inputs that several commands share: the bundled model, sources of images, and checkpoints of a long ranking."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..allocation.follow_model import follow_model
from ..allocation.recipe import Settings
from ..calibration.digits import BUNDLED as BUNDLED_IMAGES
from ..errors import Interrupted, SnapvitError, UsageError, needs
from ..family.class_names import read_labels
from ..progress import Progress
from ..storage.checksummed import is_checksummed

if TYPE_CHECKING:
    from ..prune.models.catalogue import CatalogueEntry
    from ..prune.models.load import Model

BUNDLED_MODEL = "bundled"
BUNDLED_NAME = "digits-vit"  # what manifests call it
MOST_HELD_OUT = 500  # images that accuracy is reported on


class ImageRequest(Protocol):
    """A request that names a model and perhaps images."""

    @property
    def model(self) -> str: ...

    @property
    def data(self) -> str | Sequence[str] | None: ...


def is_onnx(model: str) -> bool:
    """Return True if a model is named by an ONNX file, which needs no torch."""
    return Path(model).suffix.lower() == ".onnx"


def refuse_device(device: str, model: str) -> None:
    """Refuse a device for a model that is a graph: torch has no part in what is done with it."""
    if device != "cpu":
        raise UsageError(f"--device is where torch computes, and {model} needs no torch. Leave it out")


class ModelRequest(Protocol):
    """A request that names a model in torch."""

    @property
    def model(self) -> str: ...

    @property
    def checkpoint(self) -> Path | None: ...

    @property
    def model_arguments(self) -> Mapping[str, Any] | None: ...


def data_of(request: ImageRequest) -> str | Sequence[str]:
    """Return the sources of a request's images."""
    if request.data is not None:
        return request.data
    if request.model != BUNDLED_MODEL:
        raise UsageError(f"{request.model} needs images to calibrate on. Give --data FOLDER")
    return BUNDLED_IMAGES


def load_model_of(request: ModelRequest, progress: Progress, classes: Path | None = None) -> Model:
    """Load the model of a request, and tell what its user should know of it; a file may name its classes."""
    from ..prune.models.class_names import with_labels
    from ..prune.models.load import load_model

    progress.phase(f"loading {request.model}")
    model = load_model(request.model, request.checkpoint, request.model_arguments)
    for note in model.notes:
        progress.note(f"{model.name}: {note}")
    return model if classes is None else with_labels(model, read_labels(classes), str(classes))


def settings_for(settings: Settings, model: Model, progress: Progress) -> Settings:
    """Return the settings that a recipe has for this model, and tell where they are others than for most."""
    found = follow_model(settings, model.name, model.description.architecture, model.anatomy)
    if found != settings:
        progress.note(
            f"{model.name}: recipe {found.recipe} has {found.evaluations} evaluations on {len(found.pairs)} pairs and "
            f"damping {found.damping} for such models"
        )
    return found


def list_models(pattern: str = "*") -> list[CatalogueEntry]:
    """Return the supported models whose name or family matches."""
    with needs("listing models", extra="prune"):
        from ..prune.models.catalogue import catalogue

    found = list(catalogue(pattern))
    if not found:
        raise SnapvitError(f"no model matches '{pattern}'. See: snapvit models")
    return found


def checkpoint_of(out: Path) -> Path:
    """Return the path where a long ranking keeps its state: beside its output."""
    return out.parent / f"{out.name}.checkpoint"


def refuse_foreign_checkpoint(out: Path) -> None:
    """Refuse, before any work, a file of somebody else where a long ranking in torch would keep its state."""
    from ..prune.rank.checkpoint import KIND

    path = checkpoint_of(out)
    if os.path.lexists(path) and not (path.is_file() and is_checksummed(path, KIND)):
        raise SnapvitError(f"{path}: is there already, and not a checkpoint that snapvit made. Choose another --out")


def refuse_own_folder(out: Path) -> None:
    """Refuse to replace the folder that the user stands in."""
    if Path.cwd().is_relative_to(out.resolve()):
        raise SnapvitError(f"{out}: you are inside that folder. Choose another --out")


@contextmanager
def resumable(checkpoint: Path) -> Iterator[None]:
    """Tell a user who interrupts a ranking that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if not checkpoint.exists():
            raise
        raise Interrupted(f"interrupted. {checkpoint} is whole: run the same command again to continue") from None
