"""An ONNX file of another tool as a model that can be cut: recognised, with its preprocessing, and compared. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..calibration.preprocessing import Preprocessing
from ..calibration.presets import Asked, distinct_normalisations, preprocessing_for
from ..errors import SnapvitError, UsageError
from ..evaluate.head import columns_for
from ..family.class_names import read_labels
from ..family.evaluation import mean
from ..graph.writer import Blueprint, GraphWriter
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.in_threads import run_in_threads
from ..storage.temporary import scratch_folder

GATE_IMAGES = 8
LABELLED_IMAGES = 128  # that tell if other means and deviations suit a file better
BATCH = 8
CLEARLY = 3.0  # standard errors

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
        """True if nothing was given that other models say themselves."""
        return replace(self, classes=None) == OnnxOptions()


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


def require_same(model: OnnxModel, images: Images, progress: Progress, ranked: Blueprint | None = None) -> None:
    """Require that our dense graph and the file itself agree on real images, before anything else is done.

    `ranked`: the same model with heads and neurons in rank order, from which all variants are made.
    """
    from ..onnx_import.gate import require_same_as_original

    found = model.found if ranked is None else replace(model.found, dense=dict(ranked.dense))
    progress.phase(f"comparing our dense graph with {model.path.name}")
    agreed = require_same_as_original(found, model.path, next(images.first(GATE_IMAGES).batches(GATE_IMAGES)))
    if ranked is None:
        progress.note(f"our dense graph and {model.path.name} differ by {agreed.max_abs:.1e} of the largest output")


def warn_of_preprocessing(model: OnnxModel, images: Images, progress: Progress) -> None:
    """Note that other means and deviations suit a file better, where labels tell: nothing in the file says it."""
    blueprint, few = model.blueprint, images.first(LABELLED_IMAGES)
    if few.labels is None or not blueprint.anatomy.classes:
        return
    try:
        columns = columns_for(few.classes, blueprint.anatomy.classes, blueprint.labels)
    except SnapvitError:  # labels of other classes tell nothing
        return
    with scratch_folder() as folder:
        graph = GraphWriter(blueprint, folder).write("dense", Plan.dense(blueprint.anatomy)).graph

        def right(preprocessing: Preprocessing) -> npt.NDArray[np.bool_]:
            outputs = run_in_threads(graph, replace(few, preprocessing=preprocessing).batches(BATCH))
            return np.asarray(outputs[:, columns].argmax(1) == few.labels)

        given = right(few.preprocessing)
        for name, preset in distinct_normalisations().items():
            other = right(msgspec.structs.replace(few.preprocessing, mean=preset.mean, std=preset.std))
            more, error = mean(other.astype(np.float64) - given)
            if more > CLEARLY * error and more > 0:
                progress.note(
                    f"with the mean and deviation of {name} the file is right for {other.mean():.0%} of {len(few)} "
                    f"images, with those given for {given.mean():.0%}. Is the preprocessing right?"
                )
                return


def _labels(path: Path | None, classes: int) -> tuple[str, ...]:
    """Read the names of all classes; none without a file."""
    if path is None:
        return ()
    names = read_labels(path)
    if len(names) != classes:
        raise SnapvitError(f"{path}: names {len(names)} classes, the model has {classes}. Write a line for each")
    return names
