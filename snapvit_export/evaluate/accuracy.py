"""Top-1 accuracy of an exported file on labelled images, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..values import Count, Value

Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
BATCH = 16


class Evaluation(Value, frozen=True, kw_only=True):
    """Accuracy on images that took no part in calibration."""

    top1: Fraction
    standard_error: Fraction
    images: Count
    source: str


Run = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]


def top1(run: Run, images: Images, as_bytes: bool = False) -> Evaluation:
    """Classify every image with `run`, which takes them normalised or as bytes, and compare with the labels."""
    if images.labels is None or not len(images):
        raise ValueError("accuracy needs labelled images")
    guesses = np.concatenate([run(batch).argmax(1) for batch in images.inputs(BATCH, as_bytes)])  # (N,)
    share = float((guesses == images.labels).mean())
    error = math.sqrt(share * (1 - share) / len(images))
    return Evaluation(top1=share, standard_error=error, images=len(images), source=images.source)
