"""Fidelity to the dense model in fp32: how far the answers of another form of it are from its own. Light: numpy.

It needs no labels, only images that nothing was fitted on. Two numbers, image by image:

    divergence   KL(p || p') of the dense model's predictions p and the other's p', in nats. Where there is no
                 classifier, p is a softmax over the other images j of cos(z_i, z_j)/t, p' of cos(z'_i, z_j)/t: which
                 images are alike is what such a model is used for.
    agreement    1 if both give the same class; without a classifier, if both find the same nearest image.

Divergence decides: of two candidates it tells the better one with far fewer images. Agreement is what people read.
Candidates see the same images, so they are compared by their differences image by image (`is_worse`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..storage.json import NotNegative, Some, Value
from .evaluation import Fraction, MeasuredValues, mean, share

TEMPERATURE = 0.07  # t of the similarities, as customary in contrastive learning
LEAST_NEIGHBOURS = 3  # images that a model without a classifier is compared on
Floats = npt.NDArray[np.float64]


class NotFinite(SnapvitError):
    """Outputs that are not finite numbers: a model that lost everything, not a fault of ours."""


class Fidelity(Value, frozen=True, kw_only=True):
    """How near a variant's answers are to the dense model's in fp32, on images that nothing was fitted on."""

    by: Literal["predictions", "neighbours"]  # what is compared
    divergence: NotNegative  # KL in nats, mean of all images: what a choice compares
    standard_error: NotNegative
    agreement: Fraction  # share of the images with the same answer
    agreement_error: Annotated[float, msgspec.Meta(ge=0, le=2)]
    images: Some
    estimated: bool = False  # True: from a table of other variants of the model, not from this file


@dataclass(frozen=True, eq=False)
class Comparison:
    """A model beside the dense one, image by image."""

    by: Literal["predictions", "neighbours"]
    divergence: Floats  # (N,)
    agrees: npt.NDArray[np.bool_]  # (N,)

    @staticmethod
    def of(outputs: npt.ArrayLike, dense: npt.ArrayLike, classifies: bool) -> Comparison:
        """Compare logits (N, C), or embeddings (N, E) of at least three images.

        >>> Comparison.of(small_logits, dense_logits, classifies=True).divergence.mean()
        """
        a, b = _checked(outputs, dense)
        by: Literal["predictions", "neighbours"] = "predictions" if classifies else "neighbours"
        if not classifies:
            a, b = _similarities(a, b), _similarities(b, b)  # (N, N)
        student, teacher = _log_softmax(a), _log_softmax(b)
        diverged = (np.exp(teacher) * (teacher - student)).sum(1)
        return Comparison(by, np.maximum(diverged, 0.0), a.argmax(1) == b.argmax(1))

    def fidelity(self) -> Fidelity:
        """Summarise the images."""
        divergence, error = mean(self.divergence)
        agreement, agreement_error = share(self.agrees)
        return Fidelity(
            by=self.by,
            divergence=divergence,
            standard_error=error,
            agreement=agreement,
            agreement_error=agreement_error,
            images=len(self.divergence),
        )

    def joined(self, others: Comparison) -> Comparison:
        """Return these images and others. For predictions only: neighbours are sought among all images at once."""
        assert self.by == others.by == "predictions"
        both = np.concatenate([self.divergence, others.divergence]), np.concatenate([self.agrees, others.agrees])
        return Comparison(self.by, *both)


def is_worse(values: npt.ArrayLike, best: npt.ArrayLike, errors: float = 1.0) -> bool:
    """Return True if values are larger than those of the best by more than so many standard errors.

    Both are of the same images, (N,): what makes an image hard for both cancels in their difference.
    """
    difference, error = mean(np.asarray(values, np.float64) - np.asarray(best, np.float64))
    return difference > errors * error


def _similarities(z: Floats, dense: Floats) -> Floats:
    """Return the cosines of embeddings to the dense model's of all images, over the temperature; none to its own."""
    if len(dense) < LEAST_NEIGHBOURS:
        raise SnapvitError("a model without a classifier is compared by its neighbours, among three images at least")
    unit = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x in (z, dense)]
    similar = unit[0] @ unit[1].T / TEMPERATURE  # (N, N)
    np.fill_diagonal(similar, -1e4)  # an image is no neighbour of itself
    return similar


def _log_softmax(x: Floats) -> Floats:
    shifted = x - x.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def measures(outputs: npt.ArrayLike, dense: npt.ArrayLike, classifies: bool = True) -> MeasuredValues:
    """Measure cosine to the dense outputs and, for logits, agreement of predictions, with standard errors.

    >>> measures(small_logits, dense_logits)["agreement"]
    """
    found: MeasuredValues = {"cosine": mean(cosines(outputs, dense))}
    if classifies:
        found["agreement"] = share(agreeing(outputs, dense))
    return found


def cosines(outputs: npt.ArrayLike, dense: npt.ArrayLike) -> Floats:
    """Return the cosine of each image's output to the dense model's: (N,). An output of zeros has 0."""
    a, b = _checked(outputs, dense)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray(np.clip((a * b).sum(1) / np.maximum(lengths, 1e-30), -1, 1))


def agreeing(outputs: npt.ArrayLike, dense: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return for each image True if the dense model predicts the same class: (N,)."""
    a, b = _checked(outputs, dense)
    return np.asarray(a.argmax(1) == b.argmax(1))


def _checked(outputs: npt.ArrayLike, dense: npt.ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(outputs, np.float64), np.asarray(dense, np.float64)
    if a.shape != b.shape or a.ndim != 2 or not a.size:
        raise SnapvitError(f"outputs of shape {a.shape} cannot be compared with the dense model's {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise NotFinite("outputs that are not finite numbers cannot be compared. Check the model's precision")
    return a, b
