"""Label-free scores of heads and neurons: how strongly the self-supervised loss pulls at their weights.

| symbol | meaning                                              | shape        |
|--------|------------------------------------------------------|--------------|
| z      | pre-logits embedding of a view, L2-normalised        | (B, E)       |
| p      | softmax of a teacher view's z over features, frozen  | (B, E)       |
| G      | sum over batches of the batch-mean gradient          | as the weight|

Loss: cross-entropy of p against log-softmax of each student view's z; the teacher is the model itself. The score of a
neuron is the mean of G^2 over its row of fc1 (of the gate in a gated MLP), that of a head over its value rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..calibration.images import Images
from ..errors import SnapvitError
from ..ranking import Ranking
from .load import Model
from .parts import blocks_of, scored_head_weight, scored_neuron_weight
from .views import ViewMode, Views, make_views

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
    generator = torch.Generator().manual_seed(seed)
    done = 0

    def all_views() -> Iterable[Views]:
        nonlocal done
        for batch in images.batches(BATCH):
            yield make_views(torch.from_numpy(batch), views, generator)
            done += len(batch)
            on_batch(done)

    neuron_grads, head_grads = summed_gradients(model.module, all_views())
    blocks = blocks_of(model.module)
    heads = [head_scores(grad, block.attn).numpy() for grad, block in zip(head_grads, blocks)]
    neurons = [neuron_scores(grad, block.mlp).numpy() for grad, block in zip(neuron_grads, blocks)]
    provenance = {
        "criterion": "self-supervised",
        "views": views,
        "reduction": "summed",
        "batch": BATCH,
        "seed": seed,
        "data": images.fingerprint,
        "torch": str(torch.__version__),
    }
    return Ranking(tuple(heads), tuple(neurons), model.name, model.anatomy, provenance)


def summed_gradients(module: nn.Module, batches: Iterable[Views]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the scored weights of every block, summed over batches: (neurons', heads')."""
    blocks = blocks_of(module)
    weights = [scored_neuron_weight(block.mlp).tensor for block in blocks]
    weights += [scored_head_weight(block.attn).tensor for block in blocks]
    sums = [torch.zeros_like(weight) for weight in weights]
    for views in batches:
        loss = self_supervised_loss(module, views)
        if not torch.isfinite(loss):
            raise SnapvitError("the self-supervised loss is not a finite number. Are the weights of this model whole?")
        for total, gradient in zip(sums, torch.autograd.grad(loss, weights)):
            total += gradient
    return sums[: len(blocks)], sums[len(blocks) :]


def self_supervised_loss(module: nn.Module, views: Views) -> Tensor:
    """The weighted sum of cross-entropies between teacher and student views, averaged over the batch."""
    count, batch = views.images.shape[:2]
    z = F.normalize(embed(module, views.images.flatten(0, 1)), dim=-1).unflatten(0, (count, batch))  # (V, B, E)
    teachers = z[: len(views.weights)].detach().softmax(-1)  # (teachers, B, E)
    terms = -torch.einsum("tbe,vbe->tvb", teachers, z.log_softmax(-1))  # (teachers, V, B)
    return (views.weights[..., None] * terms).sum((0, 1)).mean()


def embed(module: Any, images: Tensor) -> Tensor:
    """The pre-logits embedding: (B, E)."""
    return module.forward_head(module.forward_features(images), pre_logits=True)


def neuron_scores(gradient: Tensor, mlp: Any) -> Tensor:
    """Mean squared gradient over each neuron's row: (hidden,)."""
    share = scored_neuron_weight(mlp)
    return gradient.unflatten(0, (share.sections, -1))[0].square().mean(1)


def head_scores(gradient: Tensor, attn: Any) -> Tensor:
    """Mean squared gradient over each head's value rows: (heads,)."""
    share = scored_head_weight(attn)
    values = gradient.unflatten(0, (share.sections, -1))[-1]  # (heads*head_dim, E)
    return values.unflatten(0, (-1, share.unit)).square().mean((1, 2))
