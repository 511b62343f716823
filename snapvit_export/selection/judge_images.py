"""What compares candidates by images: those given on a device, or held out by an export. Light."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..calibration.images import Images, in_two_parts, read_images
from ..calibration.open_source import open_source
from ..errors import SnapvitError, UsageError
from ..evaluate.head import columns_for
from ..family.manifest import Manifest, Prefer
from ..model.anatomy import Anatomy
from ..progress import Progress
from ..target import Target
from .judge import BATCH, ImageJudge, run_in_threads

MOST_RACED, MOST_REPORTED = 96, 256
LEAST_IMAGES = 48  # for two parts; with fewer, both are all of them


def judge_by_images(
    data: str, manifest: Manifest, target: Target, reference: Callable[[], Path], prefer: Prefer, progress: Progress
) -> ImageJudge:
    """Return a judge by images of a source; `reference`: gives the graph of the dense model in fp32."""
    source = open_source(data)
    held_out = source.held_out or source  # what it sets aside was never calibrated on
    raced, reported = in_two_parts(held_out, (MOST_RACED, MOST_REPORTED), LEAST_IMAGES)
    read = read_images([raced] if raced is reported else [raced, reported], manifest.preprocessing, progress)
    takes_bytes = manifest.input.type == "uint8"

    def dense(images: Images) -> npt.NDArray[np.float32]:
        return run_in_threads(reference(), images.inputs(BATCH, takes_bytes))

    columns = columns_of(read[-1], manifest.anatomy, manifest.labels, prefer)
    return ImageJudge(
        manifest.anatomy, target, read[0], read[-1], dense, takes_bytes, columns, by_accuracy=prefer == "accuracy"
    )


def columns_of(images: Images, anatomy: Anatomy, labels: Sequence[str], prefer: Prefer) -> npt.NDArray[np.int64] | None:
    """Return the output of each class of labelled images; None if they have no labels, or of other classes."""
    columns = None
    if images.labels is not None and len(images) and anatomy.classes:
        with contextlib.suppress(SnapvitError):  # labels of other classes than the model's say nothing of it
            columns = columns_for(images.classes, anatomy.classes, labels)
    if columns is None and prefer == "accuracy":
        raise UsageError(
            "--prefer accuracy needs images with labels of the model's classes. Give some, or leave it out"
        )
    return columns
