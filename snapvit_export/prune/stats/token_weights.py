"""Weights of the tokens in all statistics (`correction.token_weights`), as tensors, and those that a caller gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...correction import token_weights as light
from ...correction.token_weights import batch_size as batch_size
from ...correction.token_weights import subsample_step as subsample_step
from ...errors import SnapvitError
from ...model.anatomy import Anatomy
from ...model.plan import Plan

TokenWeights = Sequence[Tensor | None]  # per block (T,): the weight of each token; None: all the same


def as_read(anatomy: Anatomy, plan: Plan | None = None) -> list[Tensor | None]:
    """Return the weights that suit the tokens which the model, cut to a Plan, reads in the end."""
    return [_tensor(weights) for weights in light.as_read(anatomy, plan)]


def checked_weights(anatomy: Anatomy, weights: TokenWeights | None, plan: Plan | None = None) -> list[Tensor | None]:
    """Return one entry per block, in float32, `as_read` if none were given; refuse weights that do not fit."""
    depth, tokens = len(anatomy.blocks), anatomy.tokens
    if weights is None:
        return as_read(anatomy, plan)
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


def shortened(weights: Tensor | None, anatomy: Anatomy, tokens: int) -> Tensor | None:
    """Return the weights of a stream of merged tokens, in which the prefix keeps its share of the whole."""
    return _tensor(light.shortened(_array(weights), anatomy, tokens))


def counted(
    anatomy: Anatomy, images: int, batch: int, weights: Tensor | None, tokens: int | None = None
) -> Tensor | None:
    """Return the weights of the tokens in this batch, by its number; None weighs all the same, 0 leaves one out."""
    return _tensor(light.counted(anatomy, images, batch, _array(weights), tokens))


def _array(weights: Tensor | None) -> light.Weights | None:
    return None if weights is None else weights.numpy()


def _tensor(weights: light.Weights | None) -> Tensor | None:
    return None if weights is None else torch.from_numpy(weights)
