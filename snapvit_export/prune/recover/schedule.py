"""The schedule of a training: AdamW whose step size rises at first and falls along a cosine to almost nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .settings import TrainingSettings

BETAS = (0.9, 0.99)  # the second is less than usual: runs are short, and its memory is a hundred steps
LEAST = 0.01  # of the largest step size, at the end


def step_size(settings: TrainingSettings, step: int) -> float:
    """Return the step size of a step, counted from 0.

    >>> step_size(TrainingSettings(steps=100, rate=1.0, warm_up=0.1), 9)
    1.0
    """
    rising = max(1, round(settings.warm_up * settings.steps))
    if step < rising:
        return settings.largest_rate * (step + 1) / rising
    done = (step - rising) / max(1, settings.steps - rising)
    return settings.largest_rate * (LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimiser(parameters: Mapping[str, Tensor], settings: TrainingSettings) -> torch.optim.AdamW:
    """Return AdamW over these parameters; weight decay is for matrices alone."""
    matrices = [tensor for tensor in parameters.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in parameters.values() if tensor.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], settings.largest_rate, BETAS)


def set_step_size(optimiser: torch.optim.Optimizer, size: float) -> None:
    """Let the next step have this size."""
    for group in optimiser.param_groups:
        group["lr"] = size
