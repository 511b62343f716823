"""Views of a batch for the self-supervised loss: random crops of the model's own input, resized back to its size.

Two global crops cover 25-100 % of the image, ten local ones 5-25 %. The released code draws one box for both globals
and one for all locals of a batch, so that its twelve views are two distinct images and its 22 loss terms are two with
weights 2 and 20. `paired` is exactly that, at a sixth of the cost; `distinct` is what the paper's text says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GLOBAL_VIEWS, LOCAL_VIEWS = 2, 10
GLOBAL_SCALE, LOCAL_SCALE = (0.25, 1.0), (0.05, 0.25)  # of the image's area
ASPECT = (3 / 4, 4 / 3)
ViewMode = Literal["paired", "distinct"]
# Twelve students for each of two teachers, skipping a view against itself: 2*2 - 2 terms of the global image, 2*10 of
# the local one.
PAIRED_WEIGHTS = torch.tensor([[2.0, 20.0]])
DISTINCT_WEIGHTS = torch.ones(GLOBAL_VIEWS, GLOBAL_VIEWS + LOCAL_VIEWS).fill_diagonal_(0)


@dataclass(frozen=True)
class Views:
    """Crops of one batch, and the weight of each pair of a teacher and a student view in the loss."""

    images: Tensor  # (V, B, 3, H, W)
    weights: Tensor  # (teachers, V): the first views are also the teachers


def make_views(batch: Tensor, mode: ViewMode, generator: torch.Generator) -> Views:
    """Crop a batch (B, 3, H, W) at random; the same generator state gives the same crops."""
    if mode == "paired":
        images = torch.stack([_crop(batch, scale, generator) for scale in (GLOBAL_SCALE, LOCAL_SCALE)])
        return Views(images, PAIRED_WEIGHTS)
    scales = [GLOBAL_SCALE] * GLOBAL_VIEWS + [LOCAL_SCALE] * LOCAL_VIEWS
    images = torch.stack([_crop(batch, scale, generator) for scale in scales])
    return Views(images, DISTINCT_WEIGHTS)


def _crop(batch: Tensor, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    height, width = batch.shape[-2:]
    top, left, high, wide = _box(height, width, scale, generator)
    crop = batch[..., top : top + high, left : left + wide]
    return F.interpolate(crop, size=(height, width), mode="bilinear", antialias=True, align_corners=False)


def _box(height: int, width: int, scale: tuple[float, float], generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return a random box of the wanted area and aspect; after ten that do not fit, the largest centred one."""
    for _ in range(10):
        area = height * width * _uniform(*scale, generator)
        aspect = math.exp(_uniform(math.log(ASPECT[0]), math.log(ASPECT[1]), generator))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            top = int(torch.randint(height - high + 1, (1,), generator=generator))
            left = int(torch.randint(width - wide + 1, (1,), generator=generator))
            return top, left, high, wide
    high, wide = min(height, round(width / ASPECT[0])), min(width, round(height * ASPECT[1]))
    return (height - high) // 2, (width - wide) // 2, high, wide


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand(1, generator=generator))
