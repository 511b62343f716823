"""Observe a model: one pass over the images gives the mean and covariance of every proj and fc2 input.

Memory does not grow with the number of images: a layer's input is added to its sums while the pass goes on, and
forgotten. What is kept is one float64 matrix per layer, which correction needs anyway.

The products of a wide layer cost nearly as much as the forward pass itself. Where there are many more tokens than
columns, one patch token in four is passed over, another one in each batch: neighbouring patches say much the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.images import Images
from ..correction.statistics import Statistics
from ..errors import SnapvitError
from ..progress import Progress, Silent
from .checks import check_device, weights_fingerprint
from .load import Model
from .parts import blocks_of
from .running_moments import RunningMoments

PLENTY = 16  # tokens per column of the widest layer, from which on some may be passed over
SKIPPED = 4  # one patch token in so many
TOKENS = 4096  # per batch: enough that adding up float64 matrices costs little beside the products
TokenWeights = Sequence[Tensor | None]  # per block (T,): how much each token counts; None: all alike


def observe(
    model: Model,
    images: Images,
    progress: Progress | None = None,
    device: str = "cpu",
    token_weights: TokenWeights | None = None,
) -> Statistics:
    """Take the statistics of the dense model over all tokens of all images.

    `token_weights` says which tokens matter: in the last block of a model that reads only its class token, one that is
    1 for that token and 0 for the others makes correction fit what is read.

    >>> statistics = observe(load_model(), images)
    """
    check_device(device)
    if not len(images):
        raise SnapvitError("statistics need images. Give --data")
    progress = progress or Silent()
    weights = checked_weights(model, token_weights)
    warn_of_few(model, len(images), weights, progress)
    progress.phase("observing the dense model", len(images))
    sums = running_sums(model.module)
    module: Any = model.module.to(device)
    try:
        with torch.no_grad():
            for number, batch in enumerate(images.batches(batch_size(model))):
                with _added_to(sums, module, _counted(model, len(images), number, weights, device)):
                    module.forward_features(torch.from_numpy(batch).to(device))
                progress.advance(len(batch))
    finally:
        module.to("cpu")
    proj, fc2 = (tuple(layer.result() for layer in kind) for kind in zip(*sums))
    made_from = {
        "model": model.name,
        "weights_sha256": weights_fingerprint(module),
        "data": images.fingerprint,
        "skips_tokens": _plenty(model, len(images)),
    }
    return Statistics(proj, fc2, len(images), made_from)


def batch_size(model: Model) -> int:
    """Images of one batch."""
    return max(1, TOKENS // model.anatomy.tokens)


def running_sums(module: nn.Module) -> list[tuple[RunningMoments, RunningMoments]]:
    """Empty sums for the proj and fc2 of every block."""
    return [
        (
            RunningMoments(f"blocks.{i}.attn.proj", block.attn.proj.in_features),
            RunningMoments(f"blocks.{i}.mlp.fc2", block.mlp.fc2.in_features),
        )
        for i, block in enumerate(blocks_of(module))
    ]


def checked_weights(model: Model, weights: TokenWeights | None) -> list[Tensor | None]:
    """One entry per block, in float32; refuse what does not fit the model."""
    depth, tokens = len(model.anatomy.blocks), model.anatomy.tokens
    if weights is None:
        return [None] * depth
    if len(weights) != depth:
        raise SnapvitError(f"token weights for {len(weights)} blocks were given, the model has {depth}")
    for i, given in enumerate(weights):
        if given is None:
            continue
        if given.shape != (tokens,):
            raise SnapvitError(f"block {i}: token weights of shape {tuple(given.shape)}, the model has {tokens} tokens")
        if not torch.isfinite(given).all() or (given < 0).any() or not (given > 0).any():
            raise SnapvitError(f"block {i}: token weights must be finite, none negative and at least one above zero")
    return [None if given is None else given.float() for given in weights]


def _plenty(model: Model, images: int) -> bool:
    """Whether there are so many tokens that some may be passed over."""
    widest = max(max(block.hidden, block.heads * block.head_dim) for block in model.anatomy.blocks)
    return images * model.anatomy.tokens >= PLENTY * widest


def _counted(
    model: Model, images: int, number: int, weights: Sequence[Tensor | None], device: str
) -> list[Tensor | None]:
    """The weights of the tokens in this batch; None counts all. Where there are plenty, some count nothing."""
    anatomy = model.anatomy
    if not _plenty(model, images):
        return [None if own is None else own.to(device) for own in weights]
    counts = torch.ones(anatomy.tokens)
    patches = counts[anatomy.tokens - anatomy.patches :]
    patches[number % SKIPPED :: SKIPPED] = 0
    counts[: anatomy.tokens - anatomy.patches] = patches.mean()  # so that class and patch tokens keep their shares
    return [(counts if own is None else counts * own).to(device) for own in weights]


@contextmanager
def _added_to(
    sums: Sequence[tuple[RunningMoments, RunningMoments]], module: nn.Module, weights: Sequence[Tensor | None]
) -> Iterator[None]:
    """Within the block, what goes into proj and fc2 is added to the sums."""
    hooks = []
    try:
        for block, pair, own in zip(blocks_of(module), sums, weights):
            for linear, layer in zip((block.attn.proj, block.mlp.fc2), pair):
                hooks.append(linear.register_forward_pre_hook(_adder(layer, own)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adder(layer: RunningMoments, weights: Tensor | None) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
        layer.add(inputs[0], weights)

    return hook


def warn_of_few(model: Model, images: int, weights: Sequence[Tensor | None], progress: Progress) -> None:
    """With fewer tokens than columns a covariance is singular: damping keeps it usable, images would make it good."""
    needed = 0
    for block, own in zip(model.anatomy.blocks, weights):
        used = model.anatomy.tokens if own is None else int((own > 0).sum())
        needed = max(needed, -(-max(block.hidden, block.heads * block.head_dim) // used))
    if images < needed:
        progress.note(
            f"{images} images have fewer tokens than the widest layer has columns, so damping decides much of the "
            f"correction. Give at least {needed} images, better ten times as many"
        )
