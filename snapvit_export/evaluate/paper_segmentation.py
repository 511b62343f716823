"""Segmentation as the SnapViT paper trains it: a 1x1 convolution on patch tokens of random crops. Light: numpy.

25 epochs of descent with momentum 0.9, rate 0.01 and a tenth of it after 20, weight decay 1e-4, batches of 128 images.
Every epoch sees other crops, of 0.8 to 1.0 of the area and mirrored half of the time, so the model runs on every image
25 times. The loss is the mean cross-entropy of the known pixels with logits that are upsampled bilinearly. The epoch
whose mean IoU on the validation images is best is kept. The layer starts at zero: the problem has one minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ..calibration.crops import random_box
from ..calibration.decode import as_rgb
from ..calibration.images import Images
from ..calibration.masks import UNKNOWN, Masks, open_mask
from ..calibration.preprocessing import Preprocessing
from ..calibration.source import Source, decoded_once
from .features import Array
from .linear import Layer, softmax
from .segmentation import EPOCHS, FALLS_AFTER, LOW_RATE, RATE, scores_of, tally, upsampled, upsampling

DECAY = 1e-4
BATCH = 128  # images
CROP = (0.8, 1.0)  # of the area
Numbers = npt.NDArray[np.uint8]
Tokens = Callable[[Images], Array]  # from images to their patch tokens, (N, h, w, E)


def fit_as_published(
    run: Tokens,
    source: Source,
    numbers: Numbers,
    preprocessing: Preprocessing,
    valid_tokens: Array,
    valid_masks: Masks,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
    epochs: int = EPOCHS,
    batch: int = BATCH,
) -> Layer:
    """Train the layer on crops of readable images that have masks; `numbers`: the class of each value of a mask."""
    classes = int(np.count_nonzero(np.unique(numbers) != UNKNOWN))
    kept, rng = decoded_once(source), np.random.default_rng(seed)
    layer, best, best_miou = Layer(classes, valid_tokens.shape[-1], DECAY), None, -1.0
    for epoch in range(epochs):
        order = rng.permutation(source.count)
        for start in range(0, len(order), batch):
            images, masks = _crops(kept, order[start : start + batch], preprocessing, rng)
            if (numbers[masks] != UNKNOWN).any():
                step(layer, run(images), numbers[masks], RATE if epoch < FALLS_AFTER else LOW_RATE)
            progress()
        miou = tally(scores_of(layer, valid_tokens), valid_masks, classes).miou()
        if miou > best_miou:
            best, best_miou = layer.copy(), miou
    assert best is not None
    return best


def step(layer: Layer, tokens: Array, masks: Masks, rate: float) -> None:
    """One step down the mean cross-entropy of the known pixels: tokens (B, h, w, E), masks (B, H, W)."""
    weight, bias = np.zeros_like(layer.weight), np.zeros_like(layer.bias)
    known = np.float32(np.count_nonzero(masks != UNKNOWN))
    for token, mask, scores in zip(tokens, masks, scores_of(layer, tokens)):  # the pixels of one image at a time
        off = _pull(scores, mask) / known  # (h, w, K)
        weight += np.tensordot(off, token, ((0, 1), (0, 1)))
        bias += off.sum((0, 1))
    layer.descend(weight, bias, rate)


def _pull(scores: Array, mask: npt.NDArray[np.uint8]) -> Array:
    """The gradient of the summed cross-entropy of known pixels with respect to the scores of patches: (h, w, K)."""
    off = softmax(upsampled(scores, mask.shape))  # (H, W, K)
    rows, columns = np.nonzero(mask != UNKNOWN)
    off[rows, columns, mask[rows, columns]] -= 1
    off[mask == UNKNOWN] = 0
    (h, w), (height, width) = scores.shape[:2], mask.shape
    narrow = np.einsum("Ww,HWk->Hwk", upsampling(w, width), off, optimize=True)
    return np.einsum("Hh,Hwk->hwk", upsampling(h, height), narrow, optimize=True)


def _crops(
    source: Source, rows: Sequence[int] | npt.NDArray[np.int64], preprocessing: Preprocessing, rng: np.random.Generator
) -> tuple[Images, Masks]:
    """Cut a random part out of each image and its mask, the same of both, in the model's size."""
    found = [_crop(source, int(row), preprocessing, rng) for row in rows]
    pixels, masks = (np.stack(part) for part in zip(*found))
    return Images(pixels, None, preprocessing, source.name), masks


def _crop(
    source: Source, row: int, preprocessing: Preprocessing, rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    from PIL.Image import Resampling

    height, width = preprocessing.input_size[1:]
    image = source.open(row)
    mask = open_mask(source, row, image.size)
    box, flips = random_box(image.size, CROP, rng), bool(rng.random() < 0.5)
    kind = Resampling[preprocessing.interpolation.upper()]
    cut = np.asarray(as_rgb(image).resize((width, height), kind, box))
    labels = np.asarray(mask.resize((width, height), Resampling.NEAREST, box))
    return (cut[:, ::-1], labels[:, ::-1]) if flips else (cut, labels)
