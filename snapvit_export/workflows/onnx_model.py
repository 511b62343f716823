"""An ONNX file of another tool as a model that can be cut: recognised, with its preprocessing, and compared. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..calibration.images import Images
from ..calibration.presets import Asked, preprocessing_for
from ..errors import SnapvitError, UsageError
from ..family.class_names import read_labels
from ..graph.writer import Blueprint
from ..progress import Progress

GATE_IMAGES = 8


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
        """True if nothing was given that other models say themselves."""
        return replace(self, classes=None) == OnnxOptions()


def refuse_without_onnx(options: OnnxOptions, model: str) -> None:
    """Refuse options of ONNX files for a model that says all of it itself."""
    if not options.is_empty:
        raise UsageError(
            f"{model} has its own preprocessing and output. Leave --preprocessing, --mean, --std, --resize and "
            "--output out: they are for ONNX files"
        )


def load_onnx(model: str, options: OnnxOptions, progress: Progress) -> Blueprint:
    """Read an ONNX file; what cannot be cut is refused by the first node that does not fit."""
    from ..onnx_import.recognise import recognise

    path = Path(model)
    progress.phase(f"recognising {path.name}")
    found = recognise(path, options.output)
    for note in found.notes:
        progress.note(note)
    asked = Asked(options.preprocessing, options.mean, options.std, options.resize)
    labels = _labels(options.classes, found.anatomy.classes)
    return Blueprint(
        model=path.stem,
        anatomy=found.anatomy,
        wiring=found.wiring,
        preprocessing=preprocessing_for(path.name, found.anatomy.image, asked),
        labels=labels,
        dense=found.dense,
    )


def require_same(model: Blueprint, path: str, options: OnnxOptions, images: Images, progress: Progress) -> None:
    """Require that our dense graph and the file itself agree on real images, before anything else is done."""
    from ..onnx_import.gate import require_same_as_original

    progress.phase("comparing our dense graph with the file")
    require_same_as_original(model, Path(path), next(images.first(GATE_IMAGES).batches(GATE_IMAGES)), options.output)


def _labels(path: Path | None, classes: int) -> tuple[str, ...]:
    """Read the names of all classes; none without a file."""
    if path is None:
        return ()
    names = read_labels(path)
    if len(names) != classes:
        raise SnapvitError(f"{path}: names {len(names)} classes, the model has {classes}. Write a line for each")
    return names
