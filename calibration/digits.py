"""The bundled images: scikit-learn's handwritten digits, which need no network.

1797 grey images of 8x8 pixels. The first 1297 are the training split (the bundled model learnt from them, and
calibration draws from them); the last 500 are held out and only ever report accuracy. The order is the dataset's
own, so the split is the same on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..errors import needs
from .source import Source

if TYPE_CHECKING:
    from PIL.Image import Image

BUNDLED = "digits"
HELD_OUT = 500
Split = Literal["train", "held-out"]


def load(split: Split) -> tuple[list[Image], list[int]]:
    """Return the images of one split as 8x8 RGB, and their labels 0..9."""
    with needs("the bundled digits", extra="prune"):
        from sklearn.datasets import load_digits
    from PIL import Image

    data = load_digits()
    grey = (data.images * (255 / 16)).round().astype("uint8")  # (1797, 8, 8), stored as 0..16
    part = slice(None, -HELD_OUT) if split == "train" else slice(-HELD_OUT, None)
    images = [Image.fromarray(pixels).convert("RGB") for pixels in grey[part]]
    return images, [int(label) for label in data.target[part]]


def digit_source(split: Split) -> Source:
    images, labels = load(split)
    return Source(
        BUNDLED,
        open=images.__getitem__,
        count=len(images),
        title=lambda i: f"{BUNDLED} {split} image {i}",
        labels=labels,
        classes=[str(digit) for digit in range(10)],
    )


def bundled_digits() -> Source:
    """Return the training split as a source, with the held-out split set aside in it."""
    return replace(digit_source("train"), held_out=digit_source("held-out"))
