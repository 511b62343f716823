"""Comparison of a file's answers in its runtime with the reference answers of its graph in ONNX Runtime. Light: numpy.

There is one definition, that of the Jetson agent (`jetson_agent.compare`), which has neither numpy nor this package:
cosines of centred answers and the same best class, image by image. What is asked depends on the precision.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..runtimes import jetson_agent
from ..storage.json import Count, Ratio, Some, Value
from ..target import Precision

Cosine = Annotated[float, msgspec.Meta(ge=-1, le=1)]


class Compared(Value, frozen=True, kw_only=True):
    """How the answers of a file in its runtime compare with those of its graph in ONNX Runtime, on real images."""

    cosine: Cosine | None  # mean of all images; None: answers that are not finite numbers
    least_cosine: Cosine | None  # of one image: what is compared with `asked`
    asked: Cosine
    top1: Ratio | None = None  # share of the images with the same best class, near ties left out; None: no such images
    images: Some
    left_out: Count = 0  # images below `asked` of which less is asked, since rounding decides their merges
    passed: bool
    dense_cosine: Cosine | None = None  # mean of all images to the dense model in fp32; None: not looked at
    # What they were compared with: the same graph in ONNX Runtime; or, of files that only OpenVINO reads, the graph in
    # fp32 that they were made of, or the same file where it was exported.
    beside: Literal["graph", "fp32", "export"] = "graph"

    def __post_init__(self) -> None:
        if self.passed and not self._could_pass(self.asked):
            raise ValueError("its answers are said to agree, and its figures do not")

    def _could_pass(self, asked: float) -> bool:
        """Return True if the figures are those of answers that agree, where so much is asked."""
        least = min(asked, jetson_agent.LEAST_UNDECIDED) if self.left_out else asked
        return self.top1 in (None, 1.0) and self.least_cosine is not None and self.least_cosine >= least

    def as_asked_of(self, precision: Precision) -> Compared:
        """Return what this version says of the figures: an agent of another version may have asked for less.

        Of OpenVINO's own files the export has asked, beside another form of the graph.
        """
        asked = jetson_agent.least_cosine(precision)
        if self.asked >= asked or self.beside != "graph":
            return self
        return msgspec.structs.replace(self, asked=asked, passed=self.passed and self._could_pass(asked))

    @property
    def told(self) -> str:
        """What was found, with its figures."""
        return jetson_agent.told_of(msgspec.structs.asdict(self))


def compare(
    wanted: npt.ArrayLike,
    found: npt.ArrayLike,
    precision: Precision,
    scores: bool,
    undecided: npt.NDArray[np.bool_] | None = None,
) -> Compared:
    """Compare answers (images, features) with those that are wanted; `scores`: of classes, or else embeddings.

    `undecided`: images of which less is asked, since rounding decides which of their tokens are merged.

    >>> compare(dense_logits, dense_logits, "fp16", scores=True).passed
    True
    """
    asked = jetson_agent.least_cosine(precision)
    differ = [] if undecided is None else undecided.tolist()
    return Compared(**jetson_agent.compare(_rows(wanted), _rows(found), scores, asked, differ))


def to_dense(dense: npt.ArrayLike, found: npt.ArrayLike, scores: bool) -> float | None:
    """Return the mean cosine of answers to those of the dense model in fp32; None if they are not finite."""
    cosine = jetson_agent.compare(_rows(dense), _rows(found), scores, 1.0)["cosine"]
    return None if cosine is None else float(cosine)


def _rows(answers: npt.ArrayLike) -> list[list[float]]:
    return [row.tolist() for row in np.asarray(answers, np.float64)]
