"""Label-free ranking of heads and neurons: how strongly the self-supervised loss pulls at their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..calibration.images import Images
from ..ranking import Ranking
from .criteria import Batch, make_criterion
from .load import Model
from .views import ViewMode

BATCH = 16  # images, as in the released code; the sum over batches makes the score depend on it


def rank_by_gradients(
    model: Model,
    images: Images,
    seed: int = 0,
    views: ViewMode = "paired",
    on_batch: Callable[[int], None] = lambda done: None,
) -> Ranking:
    """Score all structures on `images` without labels; `on_batch` hears how many images are done.

    >>> ranking = rank_by_gradients(model, images, seed=0)
    """
    criterion = make_criterion("self-supervised", views=views, seed=seed)
    sums: list[Tensor] = []
    for number, pixels in enumerate(images.batches(BATCH)):
        added = criterion.contribution(model.module, Batch(torch.from_numpy(pixels), None, number))
        sums = [total + new for total, new in zip(sums, added)] if sums else added
        on_batch(number * BATCH + len(pixels))
    scores = criterion.finish(model.module, sums, len(images))
    how = {**criterion.settings, "batch": BATCH, "data": images.fingerprint, "torch": str(torch.__version__)}
    return Ranking(scores.heads, scores.neurons, model.name, model.anatomy, how)
