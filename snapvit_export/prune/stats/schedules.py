"""The divergence of merging from the dense module, by which `allocation.schedule_choice` chooses a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...allocation.schedule_choice import IMAGES, ScheduleDamage, chosen, measure
from ...allocation.tokens import Schedule
from ...calibration.images import Images
from ...errors import SnapvitError
from ...progress import Progress, Silent
from ..models.load import Model
from ..models.tokens import with_tokens
from .free_cores import on_free_cores
from .output_divergence import OutputDivergence, default_divergence

BATCH = 16


class Divergence:
    """The divergence of merging from the dense model, image by image.

    >>> Divergence(model, images)((0, 4, 0, 0)).mean()
    """

    def __init__(self, model: Model, images: Images) -> None:
        self.model, self.images = model, images
        self._output = OutputDivergence(default_divergence(model), model, _embedding(model, images))

    def __call__(self, merged: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the divergence of each image when the blocks merge so many tokens, (N,)."""
        z = _embedding(with_tokens(self.model, merged), self.images)
        return self._output(z, slice(0, len(z))).numpy()


def measure_schedules(model: Model, images: Images, progress: Progress | None = None) -> list[ScheduleDamage]:
    """Return the damage of the schedules that reach all levels and are not far behind at the first, the least first.

    >>> best_schedule(measure_schedules(model, images)).name
    """
    if not len(images):
        raise SnapvitError("a schedule of merging is chosen by images. Give --data")
    return measure(model.anatomy, lambda: Divergence(model, images.first(IMAGES)), progress or Silent())


def choose_schedule(
    model: Model, images: Images, progress: Progress | None = None
) -> tuple[Schedule, Mapping[str, Any]]:
    """Return the schedule that suits a model, and the choice as it is recorded with what is made by it."""
    with on_free_cores():
        return chosen(measure_schedules(model, images, progress), progress or Silent())


@torch.no_grad()
def _embedding(model: Model, images: Images) -> Tensor:
    module: Any = model.module
    made = [
        module.forward_head(module.forward_features(torch.from_numpy(b)), pre_logits=True)
        for b in images.batches(BATCH)
    ]
    return torch.cat(made).float()
