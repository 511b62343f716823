"""Segmentation by a linear layer on patch tokens, and its mean intersection over union. Light: numpy.

25 epochs of descent with momentum 0.9, rate 0.01 and a tenth of it after 20, as the SnapViT paper does it, in batches
of 16 images. The loss is the cross-entropy of every pixel with the logits of the patch that it lies in: the same as
that of a patch with the shares of the classes among its pixels, which is hundreds of times cheaper than upsampling the
logits in every step. Guesses are scored at full resolution, from logits upsampled bilinearly.

IoU of a class is over the pixels of all images together; classes that no mask shows are left out of the mean. The
standard error is by bootstrap over images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..calibration.masks import UNKNOWN, Masks
from ..errors import SnapvitError
from .features import Array
from .linear import Layer

EPOCHS, FALLS_AFTER = 25, 20
RATE, LOW_RATE = 0.01, 0.001
BATCH = 16  # images
RESAMPLES = 500  # of the bootstrap
Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Tally:
    """Pixels of each image by class: where guess and mask agree, in the mask, and in the guess."""

    both: Counts  # (N, K)
    masked: Counts  # (N, K)
    guessed: Counts  # (N, K)

    def miou(self) -> float:
        """Mean IoU of the classes that masks show."""
        return float(_miou(self.both.sum(0), self.masked.sum(0), self.guessed.sum(0)))

    def standard_error(self, seed: int = 0) -> float:
        """The spread of the mean IoU over resampled images."""
        images = len(self.both)
        if images < 2:
            return 0.0
        drawn = np.random.default_rng(seed).multinomial(images, np.full(images, 1 / images), RESAMPLES)  # (R, N)
        parts = (drawn @ part for part in (self.both, self.masked, self.guessed))
        return float(np.std(_miou(*parts), ddof=1))


def segment(
    train_tokens: Array,
    train_masks: Masks,
    test_tokens: Array,
    test_masks: Masks,
    classes: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Tally:
    """Learn from the training images and tally the test images.

    Tokens are (N, h, w, E), masks (N, H, W) with classes 0..K-1, or UNKNOWN where a pixel counts for none.
    """
    for tokens, masks in ((train_tokens, train_masks), (test_tokens, test_masks)):
        require_masks(len(tokens), masks)
    layer = fit_segmenter(train_tokens, train_masks, classes, seed, progress)
    return tally(scores_of(layer, test_tokens), test_masks, classes)


def require_masks(images: int, masks: Masks) -> None:
    """Refuse masks that are not one for each image, or that tell nothing."""
    if images != len(masks) or not (masks != UNKNOWN).any():
        raise SnapvitError("segmentation needs a mask for every image, and pixels that count. Change --ignore")


def fit_segmenter(
    tokens: Array, masks: Masks, classes: int, seed: int = 0, progress: Callable[[], None] = lambda: None
) -> Layer:
    """Train the layer on patches and the classes of their pixels."""
    shares = patch_shares(masks, tokens.shape[1:3], classes)  # (N, h*w, K)
    x = tokens.reshape(len(tokens), -1, tokens.shape[-1])  # (N, h*w, E)
    rng = np.random.default_rng(seed)
    layer = Layer(classes, x.shape[-1])
    for epoch in range(EPOCHS):
        order = rng.permutation(len(x))
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            wanted = shares[rows].reshape(-1, classes)  # (B*h*w, K)
            counts = wanted.any(1)  # patches without a known pixel have no part in the loss
            if counts.any():
                rate = RATE if epoch < FALLS_AFTER else LOW_RATE
                layer.step(x[rows].reshape(-1, x.shape[-1])[counts], wanted[counts], rate)
        progress()
    return layer


def patch_shares(masks: Masks, grid: tuple[int, ...], classes: int) -> Array:
    """Return the share of each class among the pixels of each patch; they sum to the known share: (N, h*w, K)."""
    tiles = _tiles(masks, grid)  # (N, h*w, pixels)
    counts = [np.count_nonzero(tiles == number, axis=2) for number in range(classes)]
    return (np.stack(counts, 2) / tiles.shape[2]).astype(np.float32)


def _tiles(masks: Masks, grid: tuple[int, ...]) -> Masks:
    (h, w), (ph, pw) = grid, (masks.shape[1] // grid[0], masks.shape[2] // grid[1])
    covered = masks[:, : h * ph, : w * pw].reshape(-1, h, ph, w, pw)
    return np.ascontiguousarray(covered.transpose(0, 1, 3, 2, 4)).reshape(len(masks), h * w, ph * pw)


def scores_of(layer: Layer, tokens: Array) -> Iterator[Array]:
    """Score the patches of each image by class: (h, w, K) each."""
    for token in tokens:
        yield token @ layer.weight.T + layer.bias


def tally(scores: Iterable[Array], masks: Masks, classes: int) -> Tally:
    """Tally images by the scores of their patches, (h, w, K) each, against their masks (N, H, W)."""
    return Tally(*map(np.stack, zip(*(_tallied(score, mask, classes) for score, mask in zip(scores, masks)))))


def together(tallies: Iterable[Tally]) -> Tally:
    """Return the tally of all images of several."""
    parts = list(tallies)
    return Tally(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("both", "masked", "guessed")))


def _tallied(scores: Array, mask: Masks, classes: int) -> tuple[Counts, Counts, Counts]:
    h, w = scores.shape[:2]
    mask = mask[: (mask.shape[0] // h) * h, : (mask.shape[1] // w) * w]  # the pixels that the patches cover
    known = mask != UNKNOWN
    guess, truth = upsampled(scores, mask.shape).argmax(2)[known], mask[known]
    return _counted(truth[guess == truth], classes), _counted(truth, classes), _counted(guess, classes)


def upsampled(scores: Array, size: tuple[int, ...]) -> Array:
    """Return scores of patches, (h, w, K), as those of pixels, (H, W, K)."""
    full = np.einsum("Hh,hwk->Hwk", upsampling(scores.shape[0], size[0]), scores, optimize=True)
    return np.einsum("Ww,Hwk->HWk", upsampling(scores.shape[1], size[1]), full, optimize=True)


def _counted(numbers: npt.NDArray[Any], classes: int) -> Counts:
    return np.bincount(numbers, minlength=classes).astype(np.float64)


@lru_cache(maxsize=8)
def upsampling(small: int, large: int) -> Array:
    """Bilinear interpolation along one axis, pixels taken at their centres, as a matrix (large, small)."""
    places = np.clip((np.arange(large) + 0.5) * small / large - 0.5, 0, small - 1)
    low = np.minimum(places.astype(int), max(small - 2, 0))
    part = places - low
    matrix = np.zeros((large, small), np.float32)
    matrix[np.arange(large), low] += 1 - part
    matrix[np.arange(large), np.minimum(low + 1, small - 1)] += part
    matrix.flags.writeable = False  # it is kept
    return matrix


def _miou(both: Counts, masked: Counts, guessed: Counts) -> npt.NDArray[np.float64]:
    """Mean IoU over the last axis, of the classes that are in the masks."""
    there = masked > 0
    iou = both / np.maximum(masked + guessed - both, 1)
    return np.asarray((iou * there).sum(-1) / np.maximum(there.sum(-1), 1))
