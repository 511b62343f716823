"""Observe a model: one pass over the images gives the mean and covariance of every proj and fc2 input.

Memory does not grow with the number of images: a layer's input is added to its sums during the pass and dropped. What
is kept is one float64 matrix per layer, which correction needs anyway. For the largest models these alone are more than
most machines have (docs/scale.md), which is said before the pass. `token_weights` decides how much each token counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...correction.moments import Moments, Statistics, check_memory
from ...correction.token_weights import few_images
from ...errors import SnapvitError
from ...model.plan import Part
from ...progress import Progress, Silent
from ..blocks.timm_blocks import PARTS, blocks_of, output_of
from ..models.load import Model, check_device
from .moments import RunningMoments
from .token_weights import TokenWeights, batch_size, checked_weights, counted, subsample_step


class Inputs(Protocol):
    """What statistics are taken of: `Images`, or inputs that are ready for the model (`loader.ReadyImages`)."""

    def __len__(self) -> int: ...

    def batches(self, size: int) -> Iterator[npt.NDArray[np.float32]]: ...

    @property
    def fingerprint(self) -> dict[str, str | int]: ...


EMPTY = Moments(0.0, np.zeros(0), np.zeros((0, 0)))  # of a removed layer


def observe(
    model: Model,
    images: Inputs,
    progress: Progress | None = None,
    device: str = "cpu",
    token_weights: TokenWeights | None = None,
    warn: bool = True,
) -> Statistics:
    """Take the statistics of the dense model over all images; tokens count `as_read` unless weights are given.

    Of a model that merges tokens (`models.tokens.with_tokens`) they are those of the merged ones. The moments of
    sub-layers that were removed from the model are empty.

    >>> statistics = observe(model, images)
    """
    check_device(device)
    if not len(images):
        raise SnapvitError("statistics need images. Give --data")
    progress = progress or Silent()
    check_memory(model.anatomy, model.name)
    weights = checked_weights(model.anatomy, token_weights)
    if warn:
        warn_of_few(model, len(images), weights, progress)
    progress.phase("observing the dense model", len(images))
    sums = running_sums(model.module)
    module: Any = model.module.to(device)
    try:
        with torch.no_grad():
            for number, batch in enumerate(images.batches(batch_size(model.anatomy, len(images)))):
                counts = [
                    [counted(model.anatomy, len(images), number, own, tokens) for tokens in lengths]
                    for own, lengths in zip(weights, model.anatomy.lengths())
                ]
                with _added_to(sums, module, counts):
                    module.forward_features(torch.from_numpy(batch).to(device))
                progress.advance(len(batch))
    finally:
        module.to("cpu")
    proj, fc2 = (tuple(EMPTY if layer is None else layer.result() for layer in kind) for kind in zip(*sums))
    made_from = {
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "data": images.fingerprint,
        "passed_over": subsample_step(model.anatomy, len(images)),
    }
    return Statistics(proj, fc2, len(images), made_from)


def running_sums(module: nn.Module) -> list[tuple[RunningMoments | None, RunningMoments | None]]:
    """Return empty sums for the proj and fc2 of every block; None for what was removed."""
    return [
        (_sums(block, "attention", f"blocks.{i}.attn.proj"), _sums(block, "mlp", f"blocks.{i}.mlp.fc2"))
        for i, block in enumerate(blocks_of(module))
    ]


def _sums(block: Any, part: Part, name: str) -> RunningMoments | None:
    linear = output_of(block, part)
    return None if linear is None else RunningMoments(name, linear.in_features)


@contextmanager
def _added_to(
    sums: Sequence[tuple[RunningMoments | None, RunningMoments | None]],
    module: nn.Module,
    weights: Sequence[Sequence[Tensor | None]],
) -> Iterator[None]:
    """Within the context, the inputs of proj and fc2 are added to the sums, each with the weights of its tokens."""
    hooks = []
    try:
        for block, pair, own in zip(blocks_of(module), sums, weights):
            for part, layer, counts in zip(PARTS, pair, own):
                linear = output_of(block, part)
                if linear is not None and layer is not None:
                    hooks.append(linear.register_forward_pre_hook(_adder(layer, counts)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adder(layer: RunningMoments, weights: Tensor | None) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor]) -> None:
        layer.add(inputs[0], weights)

    return hook


def warn_of_few(model: Model, images: int, weights: Sequence[Tensor | None], progress: Progress) -> None:
    """Note that more images are needed, where they are too few."""
    note = few_images(model.anatomy, images, [None if own is None else own.numpy() for own in weights])
    if note is not None:
        progress.note(note)
