"""Measures the fidelity of candidates on images that nothing was fitted on, as the target runs each file. Light.

The images are in two parts. One is for the race: many candidates are looked at, and the best of them looks better there
than it is. The other is for the fidelity that is reported, and that decides among the few finalists. Where there are
too few images for two parts, both are the same.

Outputs do not depend on the number of cores, so all of them work. An int8-dynamic graph takes one scale for its whole
batch, so it runs with the batch of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.dataset import open_to_report
from ..calibration.hub import Sample
from ..calibration.images import Images, evenly, in_two_parts, read_images
from ..errors import SnapvitError, UsageError
from ..evaluate.head import columns_for
from ..family.evaluation import Evaluation, share
from ..family.fidelity import Comparison
from ..family.manifest import Manifest, Prefer
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..runtimes.in_threads import run_in_threads
from ..runtimes.session import open_session
from ..target import ON_CPU, Precision, Target, in_precision
from .candidates import BuiltVariant, Losses, Probe
from .point import Point

MOST_RACED, MOST_REPORTED = 96, 256
ENOUGH = 384  # images: every third of them is raced on, the others are reported
LEAST_IMAGES = 48  # for two parts; with fewer, both are all of them
NAME_FOLDERS = "Name the folders of images as the model's classes"
FEW = 32  # images for a first look
BATCH = 8
REFERENCE = ".reference"  # the name of the dense graph in fp32 that others are compared with
TIE = 1e-3  # of the divergence is added to wrong answers: candidates that are right as often are told apart by it
Outputs = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]


class ImageMeter:
    """Compares files with the dense model by held-out images."""

    needs_probes = True

    def __init__(
        self,
        anatomy: Anatomy,
        target: Target,
        race: Images,
        reported: Images,
        dense: Callable[[Images], Outputs],
        takes_bytes: bool = False,
        columns: npt.NDArray[np.int64] | None = None,
        by_accuracy: bool = False,
        runs_target: bool = True,
    ) -> None:
        """`dense`: the outputs of the dense model in fp32. `columns`: the output of each class of the labels, if any.

        `by_accuracy`: losses are wrong answers. `runs_target`: False if the target's runtime cannot run here.
        """
        self.anatomy, self.target, self.race, self.reported = anatomy, target, race, reported
        self.takes_bytes, self.columns, self.by_accuracy = takes_bytes, columns, by_accuracy
        self.runs_target = runs_target
        self.damage: dict[Precision, float] = {}  # of the dense model in a precision: added where a probe is in fp32
        self.more_wrong: dict[Precision, float] = {}  # likewise: wrong answers beyond those of the dense model in fp32
        of_race = cache(lambda: dense(race))
        of_reported = of_race if race is reported else cache(lambda: dense(reported))
        self._dense = lambda is_race: of_race() if is_race else of_reported()

    def losses(self, probe: Probe | None, point: Point, few: bool) -> Floats:
        """Return the losses of a candidate on the images of the race, or on the first few of them."""
        assert probe is not None
        rows = evenly(range(len(self.race)), FEW) if few else range(len(self.race))
        images = self.race.only(rows) if few else self.race
        inputs = images.at(self.anatomy.image_of(point.plan))
        if self.target.runtime not in ON_CPU and probe.precision == "fp32":  # an engine of each would take too long
            outputs = self._in_threads(probe.path, inputs)
        else:
            outputs = self._outputs(probe.path, probe.precision, inputs)
        wanted = self._dense(True)[list(rows)]
        same = probe.precision == point.precision
        found = self._compared(outputs, wanted).divergence + (0.0 if same else self.damage.get(point.precision, 0.0))
        if not self.by_accuracy:
            return found
        return self._wrong(outputs, images) + TIE * found + (0.0 if same else self.more_wrong.get(point.precision, 0.0))

    def measured(self, built: BuiltVariant) -> BuiltVariant:
        """Return a variant with its fidelity on the reported images, and its accuracy where labels suit."""
        images = self.reported.at(self.anatomy.image_of(built.plan))
        is_reference = built.precision == "fp32" and built.plan == Plan.dense(self.anatomy)
        outputs = self._dense(False) if is_reference else self._outputs(built.path, built.precision, images)
        compared, evaluation, wrong = self._compared(outputs, self._dense(False)), built.evaluation, None
        if built.plan == Plan.dense(self.anatomy):
            self.damage[built.precision] = float(compared.divergence.mean())
        if self.columns is not None:
            wrong = self._wrong(outputs, images)
            if built.plan == Plan.dense(self.anatomy):
                self.more_wrong[built.precision] = float((wrong - self._wrong(self._dense(False), images)).mean())
            value, error = share(wrong == 0)
            evaluation = Evaluation(
                top1=value, standard_errors={"top1": error}, images=len(images), source=images.source
            )
        losses = Losses(compared.divergence, wrong)
        return replace(built, fidelity=compared.fidelity(), losses=losses, evaluation=evaluation)

    def _compared(self, outputs: Outputs, dense: Outputs) -> Comparison:
        return Comparison.of(outputs, dense, classifies=self.anatomy.classes > 1)

    def _wrong(self, outputs: Outputs, images: Images) -> Floats:
        assert self.columns is not None
        assert images.labels is not None
        return np.asarray(outputs[:, self.columns].argmax(1) != images.labels, np.float64)

    def _in_threads(self, path: Path, images: Images, batch: int = BATCH) -> Outputs:
        return run_in_threads(path, images.inputs(batch, self.takes_bytes))

    def _outputs(self, path: Path, precision: Precision, images: Images) -> Outputs:
        batch = self.target.batch if precision == "int8-dynamic" else BATCH
        target = in_precision(self.target, precision)
        if not self.runs_target or target.runtime == "onnxruntime":
            return self._in_threads(path, images, batch)
        if target.runtime in ON_CPU:
            target = msgspec.structs.replace(target, threads=usable_cores())
        with open_session(path, target) as session:
            return np.concatenate([session.run(inputs) for inputs in images.inputs(batch, self.takes_bytes)])


def meter_of_images(
    data: str, manifest: Manifest, target: Target, reference: Callable[[], Path], prefer: Prefer, progress: Progress
) -> ImageMeter:
    """Return a meter by images of a source; `reference`: gives the graph of the dense model in fp32."""
    held_out = open_to_report(data, Sample(ENOUGH, seed=0))  # what a source sets aside was never calibrated on
    raced, reported = in_two_parts(held_out, (MOST_RACED, MOST_REPORTED), LEAST_IMAGES)
    read = read_images([raced] if raced is reported else [raced, reported], manifest.preprocessing, progress)
    takes_bytes = manifest.input.type == "uint8"

    def dense(images: Images) -> npt.NDArray[np.float32]:
        return run_in_threads(reference(), images.inputs(BATCH, takes_bytes))

    columns = columns_of(read[-1], manifest.anatomy, manifest.labels, prefer, progress)
    return ImageMeter(
        manifest.anatomy, target, read[0], read[-1], dense, takes_bytes, columns, by_accuracy=prefer == "accuracy"
    )


def columns_of(
    images: Images, anatomy: Anatomy, labels: Sequence[str], prefer: Prefer, progress: Progress
) -> npt.NDArray[np.int64] | None:
    """Return the output of each class of labelled images; None, and a note why, where accuracy cannot be measured."""
    try:
        if not anatomy.classes:
            raise SnapvitError("the model has no classes")
        if not len(images):
            raise SnapvitError("no image is left to measure it on")
        if images.labels is None:
            raise SnapvitError(f"{images.source} has no labels, such as one sub-folder for each class")
        return columns_for(images.classes, anatomy.classes, labels, advice=NAME_FOLDERS)
    except SnapvitError as error:
        if prefer == "accuracy":
            raise UsageError(f"--prefer accuracy needs images with labels of the model's classes: {error}") from error
        progress.note(f"no accuracy is measured, only fidelity: {error}")
        return None
