"""Random crops of images, as trainings take them: share of the area, proportions, place. Light: numpy."""

from __future__ import annotations

import math

import numpy as np

Box = tuple[float, float, float, float]  # left, top, right, bottom
PROPORTIONS = (3 / 4, 4 / 3)  # of a crop
TRIES = 10  # to draw a crop that lies within the picture


def random_box(size: tuple[int, int], crop: tuple[float, float], rng: np.random.Generator) -> Box:
    """Draw a crop of a picture of that width and height: its share of the area, its proportions, its place."""
    width, height = size
    for _ in range(TRIES):
        area = rng.uniform(*crop) * width * height
        across = math.exp(rng.uniform(math.log(PROPORTIONS[0]), math.log(PROPORTIONS[1])))
        w, h = math.sqrt(area * across), math.sqrt(area / across)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
