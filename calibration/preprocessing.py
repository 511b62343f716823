"""A model's own preprocessing, without torch: the same pixels on the workstation and on the device.

Does with Pillow and numpy what timm's evaluation transform does with torchvision (a test holds them equal): resize,
centre crop, scale to 0..1, normalise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from ..storage.json import Size, Value
from .decode import as_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

Channel = Annotated[float, msgspec.Meta(ge=-10, le=10)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=10)]
FAR_MORE = 16  # times the pixels that are kept: a strip of 12 to 1; timm resizes everything and then crops


class Preprocessing(Value, frozen=True, kw_only=True):
    """The steps from a decoded image to a model's input."""

    input_size: tuple[Size, Size, Size]  # channels, height, width
    interpolation: Literal["bilinear", "bicubic", "nearest", "lanczos", "box", "hamming"] = "bicubic"
    crop_pct: Annotated[float, msgspec.Meta(ge=0.01, le=1)] = 0.875
    crop_mode: Literal["center", "squash"] = "center"
    mean: tuple[Channel, Channel, Channel]
    std: tuple[Positive, Positive, Positive]
    # Half of an odd number of pixels around a crop: `transformers` rounds it down, timm to an even number.
    margin: Literal["down"] | UnsetType = UNSET

    def at(self, image: tuple[int, int]) -> Preprocessing:
        """Return the same steps for images of another height and width."""
        return msgspec.structs.replace(self, input_size=(self.input_size[0], *image))

    def pixels(self, image: Image) -> npt.NDArray[np.uint8]:
        """Resize and crop: uint8 (H, W, 3)."""
        return np.asarray(self._placed(as_rgb(image), self.interpolation))

    def mask(self, mask: Image) -> npt.NDArray[np.uint8]:
        """Resize and crop a mask as its image, without mixing classes: uint8 (H, W)."""
        return np.asarray(self._placed(mask, "nearest"))

    def _placed(self, image: Image, interpolation: str) -> Image:
        from PIL import Image as PIL

        height, width = self.input_size[1:]
        scaled = (math.floor(height / self.crop_pct), math.floor(width / self.crop_pct))
        size = scaled if self.crop_mode == "squash" else _covering(image.size, scaled)
        kind = PIL.Resampling[interpolation.upper()]
        half = math.floor if self.margin == "down" else round
        top, left = half((size[0] - height) / 2), half((size[1] - width) / 2)
        if size[0] * size[1] > FAR_MORE * height * width:  # only what is kept is resized: equal but for rounding
            down, across = image.height / size[0], image.width / size[1]
            right, bottom = min((left + width) * across, image.width), min((top + height) * down, image.height)
            box = (left * across, top * down, right, bottom)
            return image.resize((width, height), kind, box)
        image = image.resize((size[1], size[0]), kind)
        return image.crop((left, top, left + width, top + height))

    def normalise(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Turn uint8 (N, H, W, 3) into the model's input, float32 (N, 3, H, W)."""
        scaled = pixels.astype(np.float32) / np.float32(255)
        normal = (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(normal.transpose(0, 3, 1, 2))


def _covering(size: tuple[int, int], goal: tuple[int, int]) -> tuple[int, int]:
    """Height and width with the image's own proportions that just cover `goal`; `size` is (width, height)."""
    width, height = size
    if goal[0] * width <= goal[1] * height:  # the width is the tighter side
        return int(goal[1] * height / width), goal[1]
    return goal[0], int(goal[0] * width / height)


def crop_share(kept: tuple[int, int], resized: tuple[int, int]) -> float | None:
    """Return the fraction of the resized sides that a crop keeps, such that dividing by it gives exactly those sides.

    None if height and width have no such fraction in common.

    >>> math.floor(224 / crop_share((224, 224), (400, 400)))
    400
    """
    for nearly in (0.0, 0.25, 0.5):  # a division can come out a little below the whole number that it should give
        fraction = min(1.0, kept[0] / (resized[0] + nearly))
        if all(math.floor(side / fraction) == whole for side, whole in zip(kept, resized)):
            return fraction
    return None
