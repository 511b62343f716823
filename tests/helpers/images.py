"""Noise as pictures: in files, as Images of a model's size, and as arrays that are already normalised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from snapvit_export.calibration.images import Images
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.prune.models.load import Model

HALF = Preprocessing(input_size=(3, 64, 64), mean=(0.5,) * 3, std=(0.5,) * 3)  # what the models of `small` take


def make_image_folder(folder: Path, count: int = 60) -> Path:
    """Noisy pictures in five classes."""
    rng = np.random.default_rng(0)
    for i in range(count):
        path = folder / f"class{i % 5}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(path)
    return folder


def pictures(count: int, seed: int = 0) -> Images:
    """Images for the tiny model."""
    pixels = np.random.default_rng(seed).integers(0, 255, (count, 32, 32, 3), np.uint8)
    return Images(pixels, None, Preprocessing(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3), "noise")


def some_images(count: int = 6, seed: int = 0) -> Images:
    """Images for the models of `small`."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 64, 64, 3), np.uint8)
    return Images(pixels, None, HALF, "noise")


def noise(model: Model, count: int = 48) -> Images:
    """Images for that model."""
    _, *size = model.preprocessing.input_size
    pixels = np.random.default_rng(0).integers(0, 255, (count, *size, 3), np.uint8)
    return Images(pixels, None, model.preprocessing, "noise")


def inputs_of(images: Images) -> torch.Tensor:
    """All of them as one batch."""
    return torch.from_numpy(next(images.batches(len(images))))


def noise_arrays(anatomy: Anatomy, count: int, seed: int = 0) -> np.ndarray:
    """Inputs of a graph: (count, 3, H, W) in float32."""
    return np.random.default_rng(seed).standard_normal((count, 3, *anatomy.image)).astype(np.float32)
