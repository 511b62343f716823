"""A first covariance for xNES: linear CKA between the activations of every pair of structures.

| symbol | meaning                                                             | shape  |
|--------|---------------------------------------------------------------------|--------|
| X_s    | centred activations of structure s at the class token, N images     | (N, w) |
| K_s    | X_s X_s^T, as one vector of unit length                             | (N*N,) |
| C      | C_st = <K_s, K_t>: linear CKA, a correlation matrix by construction | (D, D) |

The structures are the MLPs (fc1 outputs) in block order, then the heads (their inputs to proj), as the factors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....calibration.images import Images
from ...blocks.timm_blocks import blocks_of, inputs_of
from ...models.load import Model
from .optimiser import Matrix

MOST_IMAGES = 256  # the Gram matrices grow with the square
BATCH = 16
FLOOR = 1e-4  # smallest eigenvalue kept, relative to the largest


def cka_covariance(model: Model, images: Images) -> Matrix:
    """Return the CKA matrix of all structures, made positive definite with ones on its diagonal: (D, D)."""
    grams = np.stack([_gram(x) for x in _activations(model, images)])  # (D, N*N)
    return nearest_correlation(grams @ grams.T)


def nearest_correlation(matrix: Matrix, rounds: int = 50) -> Matrix:
    """Lift small eigenvalues and reset the diagonal, in turn, until both hold."""
    c = (matrix + matrix.T) / 2
    for _ in range(rounds):
        values, vectors = np.linalg.eigh(c)
        if values[0] >= 0.99 * FLOOR * values[-1]:
            break
        c = (vectors * np.maximum(values, FLOOR * values[-1])) @ vectors.T
        scale = 1 / np.sqrt(np.diag(c))
        c = c * scale[:, None] * scale[None, :]
    return (c + c.T) / 2


def _gram(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(0)
    gram = (centred @ centred.T).ravel()
    length = np.linalg.norm(gram)
    return gram / length if length > 0 else gram


def _activations(model: Model, images: Images) -> list[np.ndarray]:
    """Return class-token activations (the mean over tokens without one), MLPs first, then heads: each (N, width)."""
    blocks = blocks_of(model.module)
    mlps: list[list[Tensor]] = [[] for _ in blocks]
    heads: list[list[Tensor]] = [[] for _ in blocks]
    with torch.no_grad(), _recording(blocks, mlps, heads, model.anatomy.class_token):
        for number, batch in enumerate(images.batches(BATCH)):
            if number * BATCH >= MOST_IMAGES:
                break
            model.module(torch.from_numpy(batch))
    seen = min(len(images), -(-MOST_IMAGES // BATCH) * BATCH)
    nothing = np.zeros((seen, 1))  # of a removed MLP: it has a factor all the same, which changes nothing
    whole = [torch.cat(parts).double().numpy() if parts else nothing for parts in mlps]
    for parts, block in zip(heads, blocks):
        if block.attn is None:
            continue
        columns = torch.cat(parts).double().unflatten(1, (-1, block.attn.head_dim))  # (N, heads, head_dim)
        whole += [columns[:, i].numpy() for i in range(columns.shape[1])]
    return whole


@contextmanager
def _recording(blocks: list[Any], mlps: list[list[Tensor]], heads: list[list[Tensor]], token: bool) -> Iterator[None]:
    def picked(x: Tensor) -> Tensor:
        return (x[:, 0] if token else x.mean(1)).cpu()

    hooks = []
    for block, mlp, head in zip(blocks, mlps, heads):
        if block.mlp is not None:
            first = inputs_of(block.mlp)[0][0]
            hooks.append(first.register_forward_hook(lambda _m, _i, out, kept=mlp: kept.append(picked(out))))
        if block.attn is not None:
            hooks.append(block.attn.proj.register_forward_pre_hook(lambda _m, i, kept=head: kept.append(picked(i[0]))))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
