"""Weights of the tokens in all statistics: tokens that the head reads count more, plentiful patches are subsampled.

The output of a model with a class token depends on that one token among two hundred; fitted to all equally, its layers
serve the patches. So the tokens that are read get a tenth of the weight in every block, and a fifth from the last
attention on, where nothing reads the others any more. A larger share overfits the few samples: on DeiT-Tiny a fifth in
the last block did better on other images than a half. In a model that pools its patches all tokens weigh the same.

Where there are many patches, each batch leaves a different part of them out: neighbouring patches are much alike, and
the products of a wide layer cost nearly as much as the forward pass itself.

A stream of merged tokens has fewer, and none of them has a place in the image any more: the tokens that are read keep
their share of the whole, and what is left out goes by the order in which tokens lie. Light: numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan

READ, READ_LAST = 0.1, 0.2  # share of the weight of the tokens that are read: before, and from the last attention on
PLENTY = 8  # tokens per column of the widest layer that must remain when patches are subsampled
SUBSAMPLE_STEPS = (2, 4)  # one patch token in so many is left out; the step that leaves out most comes first
BATCHES = 8  # at least so many, so that every patch counts in some of them
TOKENS = 4096  # per batch: enough that adding up float64 matrices costs little beside the products

Weights = npt.NDArray[np.float32]  # (T,)


def as_read(anatomy: Anatomy, plan: Plan | None = None) -> list[Weights | None]:
    """Return for each block the weights that suit the tokens which the model, cut to a Plan, reads; None: all alike."""
    read = anatomy.class_token + anatomy.distillation_token
    if not anatomy.reads_token or not read:
        return [None] * len(anatomy.blocks)
    last = (plan or Plan.dense(anatomy)).last_attention
    shares = [READ if i < last else READ_LAST for i in range(len(anatomy.blocks))]
    return [_with_share(anatomy.tokens, read, share) for share in shares]


def _with_share(tokens: int, read: int, share: float) -> Weights:
    weights = np.ones(tokens, np.float32)
    weights[:read] = max(1.0, share / (1 - share) * (tokens - read) / read)  # prefix tokens that are read come first
    return weights


def shortened(weights: Weights | None, anatomy: Anatomy, tokens: int) -> Weights | None:
    """Return the weights of a stream of merged tokens, in which the prefix keeps its share of the whole."""
    if weights is None or tokens == len(weights):
        return weights
    front, patches = weights[: anatomy.prefix], weights[anatomy.prefix :]
    if (patches != patches[0]).any():
        raise SnapvitError("merged tokens have no places, so weights of single patches cannot be given for them")
    left = tokens - anatomy.prefix
    return np.concatenate([front * np.float32(left / len(patches)), patches[:left]])


def batch_size(anatomy: Anatomy, images: int) -> int:
    """Return the number of images in one batch of the statistics."""
    return max(1, min(TOKENS // anatomy.tokens, -(-images // BATCHES)))


def subsample_step(anatomy: Anatomy, images: int, tokens: int | None = None) -> int:
    """Return the step of the subsampling: one patch token in so many is left out, none for 0.

    It is the step that leaves out most and still leaves plenty of tokens for the widest layer.
    """
    widest = max(max(block.hidden, block.heads * block.head_dim) for block in anatomy.blocks)
    for step in SUBSAMPLE_STEPS:
        if images * (tokens or anatomy.tokens) * (1 - 1 / step) >= PLENTY * widest:
            return step
    return 0


def counted(
    anatomy: Anatomy, images: int, batch: int, weights: Weights | None, tokens: int | None = None
) -> Weights | None:
    """Return the weights of the tokens in this batch, by its number; None weighs all the same, 0 leaves one out.

    `tokens`: of a stream in which some are merged.
    """
    tokens = tokens or anatomy.tokens
    step, weights = subsample_step(anatomy, images, tokens), shortened(weights, anatomy, tokens)
    if not step:
        return weights
    counts = np.ones(tokens, np.float32)
    patches = counts[anatomy.prefix :]
    number = np.arange(len(patches))
    if tokens == anatomy.tokens:
        columns = anatomy.grid[1]
        number = number // columns + number % columns  # diagonals: no column of the image is lost
    patches[(number + batch) % step == 0] = 0
    counts[: anatomy.prefix] = patches.mean()  # so that prefix and patch tokens keep their shares
    return counts if weights is None else counts * weights


def few_images(anatomy: Anatomy, images: int, weights: list[Weights | None]) -> str | None:
    """Return a note that more images are needed: with fewer tokens than columns a covariance is singular."""
    needed = 0
    for block, own in zip(anatomy.blocks, weights):
        used = anatomy.tokens if own is None else int((own > 0).sum())
        needed = max(needed, -(-max(block.hidden, block.heads * block.head_dim) // used))
    if images >= needed:
        return None
    return (
        f"{images} images have fewer tokens than the widest layer has columns, so damping decides much of the "
        f"correction. Give at least {needed} images, better ten times as many"
    )
