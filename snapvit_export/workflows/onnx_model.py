"""An ONNX file of another tool as a model that can be cut: recognised, with its preprocessing, and compared. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..calibration.images import Images
from ..calibration.presets import Asked, preprocessing_for
from ..errors import SnapvitError, UsageError
from ..evaluate.head import read_names
from ..graph.writer import Blueprint
from ..progress import Progress

GATE_IMAGES = 8

if TYPE_CHECKING:
    from ..onnx_import.recognise import Recognised


@dataclass(frozen=True)
class OnnxOptions:
    """What an ONNX file does not say itself."""

    output: str | None = None  # that is meant, where there are several
    preprocessing: str | None = None  # a model whose preprocessing is known, or a preprocessor_config.json
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    resize: str | None = None  # as `calibration.presets` reads it
    classes: Path | None = None  # names of the outputs, line by line

    @property
    def is_empty(self) -> bool:
        """True if nothing was given."""
        return self == OnnxOptions()


def refuse_without_onnx(options: OnnxOptions, model: str) -> None:
    """Refuse options of ONNX files for a model that says all of it itself."""
    if not options.is_empty:
        raise UsageError(
            f"{model} has its own preprocessing and output. Leave --preprocessing, --mean, --std, --resize and "
            "--output out: they are for ONNX files"
        )


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """An ONNX file of another tool, and the model that was recognised in it."""

    path: Path
    found: Recognised
    blueprint: Blueprint  # heads and neurons in the file's own order


def load_onnx(model: str, options: OnnxOptions, progress: Progress) -> OnnxModel:
    """Read an ONNX file; what cannot be cut is refused by the first node that does not fit."""
    from ..onnx_import.recognise import recognise

    path = Path(model)
    progress.phase(f"recognising {path.name}")
    found = recognise(path, options.output)
    for note in found.notes:
        progress.note(note)
    asked = Asked(options.preprocessing, options.mean, options.std, options.resize)
    blueprint = Blueprint(
        model=path.stem,
        anatomy=found.anatomy,
        wiring=found.wiring,
        preprocessing=preprocessing_for(path.name, found.anatomy.image, asked),
        labels=_labels(options.classes, found.anatomy.classes),
        dense=found.dense,
    )
    return OnnxModel(path, found, blueprint)


def require_same(model: OnnxModel, images: Images, progress: Progress) -> None:
    """Require that our dense graph and the file itself agree on real images, before anything else is done."""
    from ..onnx_import.gate import require_same_as_original

    progress.phase(f"comparing our dense graph with {model.path.name}")
    agreed = require_same_as_original(model.found, model.path, next(images.first(GATE_IMAGES).batches(GATE_IMAGES)))
    progress.note(f"our dense graph and {model.path.name} differ by {agreed.max_abs:.1e} of the largest output")


def _labels(path: Path | None, classes: int) -> tuple[str, ...]:
    """Read the names of all classes; none without a file."""
    if path is None:
        return ()
    names = read_names(path)
    if len(names) != classes:
        raise SnapvitError(f"{path}: names {len(names)} classes, the model has {classes}. Write a line for each")
    return names
