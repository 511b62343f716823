"""Losses per image whose gradients score the weights: self-supervised, or the cross-entropy of labels.

| symbol | meaning                                             | shape        |
|--------|-----------------------------------------------------|--------------|
| z      | pre-logits embedding of a view, L2-normalised       | (V, B, E)    |
| p      | softmax of a teacher view's z over features, frozen | (t, B, E)    |
| w      | weight of a pair of teacher and student view        | (t, V)       |

Self-supervised: sum over pairs of w times the cross-entropy of p against log-softmax of z; the teacher is the model
itself. An image's loss never depends on its neighbours in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....errors import SnapvitError
from .base import Batch, Need
from .views import ViewMode, Views, make_views


class Loss(Protocol):
    """A loss per image of a batch: (B,)."""

    @property
    def needs(self) -> Need: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor: ...


@dataclass(frozen=True)
class SelfSupervised:
    """Agreement between random crops of the same image."""

    views: ViewMode = "paired"
    seed: int = 0
    needs: ClassVar[Need] = "images"

    @property
    def settings(self) -> dict[str, Any]:
        return {"views": self.views, "seed": self.seed}

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        crops = make_views(batch.images, self.views, batch_generator(self.seed, batch.number))
        return self_supervised_losses(module, crops)


@dataclass(frozen=True)
class CrossEntropy:
    """The model's own classifier against the labels."""

    needs: ClassVar[Need] = "labels"

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        classes = _classes(module)
        labels = _known_labels(batch, classes)
        return _finite(F.cross_entropy(module(batch.images), labels, reduction="none"), "cross-entropy")


def self_supervised_losses(module: nn.Module, views: Views) -> Tensor:
    """Return the weighted sum of cross-entropies between teacher and student views of each image: (B,)."""
    count, batch = views.images.shape[:2]
    z = F.normalize(embed(module, views.images.flatten(0, 1)), dim=-1).unflatten(0, (count, batch))  # (V, B, E)
    p = z[: len(views.weights)].detach().softmax(-1)  # (t, B, E)
    terms = -torch.einsum("tbe,vbe->tvb", p, z.log_softmax(-1))  # (t, V, B)
    return _finite((views.weights.to(terms)[..., None] * terms).sum((0, 1)), "self-supervised")


def embed(module: Any, images: Tensor) -> Tensor:
    """Return the pre-logits embedding: (B, E)."""
    return module.forward_head(module.forward_features(images), pre_logits=True)


def batch_generator(seed: int, number: int) -> torch.Generator:
    """Return the random generator of one batch: the same wherever and whenever that batch is computed."""
    state = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def _classes(module: Any) -> int:
    if isinstance(module.head, nn.Identity):
        raise SnapvitError("this model has no classifier, so cross-entropy cannot score it. Use self-supervised")
    return module.head.out_features


def _known_labels(batch: Batch, classes: int) -> Tensor:
    if batch.labels is None:
        raise SnapvitError(
            "cross-entropy needs labels. Give images in one sub-folder per class, or use self-supervised"
        )
    low, high = int(batch.labels.min()), int(batch.labels.max())
    if low < 0 or high >= classes:
        raise SnapvitError(f"the labels go from {low} to {high}, but this model has {classes} classes")
    return batch.labels


def _finite(losses: Tensor, name: str) -> Tensor:
    if not torch.isfinite(losses).all():
        raise SnapvitError(f"the {name} loss is not a finite number. Are the weights of this model whole?")
    return losses
