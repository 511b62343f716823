"""Top-1 accuracy of an exported file on labelled images, with its standard error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..family.evaluation import Evaluation, share

BATCH = 16

Run = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]


def top1(run: Run, images: Images, as_bytes: bool = False) -> Evaluation:
    """Classify every image with `run`, which takes them normalised or as bytes, and compare with the labels."""
    if images.labels is None or not len(images):
        raise ValueError("accuracy needs labelled images")
    guesses = np.concatenate([run(batch).argmax(1) for batch in images.inputs(BATCH, as_bytes)])  # (N,)
    value, error = share(guesses == images.labels)
    return Evaluation(top1=value, standard_errors={"top1": error}, images=len(images), source=images.source)
