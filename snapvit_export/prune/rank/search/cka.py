"""A first covariance for xNES: linear CKA between the activations of every pair of structures.

| symbol | meaning                                                             | shape  |
|--------|---------------------------------------------------------------------|--------|
| X_s    | centred activations of structure s at the class token, N images     | (N, w) |
| K_s    | X_s X_s^T, as one vector                                            | (N*N,) |
| C      | C_st = <K_s, K_t> / |K_s| |K_t|: linear CKA, a correlation matrix   | (D, D) |

The structures are the MLPs (fc1 outputs) in block order, then the heads (their inputs to proj), as the factors are.
All K together take D*N*N numbers (8 GB for a ViT-B and 2500 images), so they are made and multiplied some rows at a
time.
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

MOST_IMAGES = 256  # unless others are asked for: the work grows with the square
AT_ONCE = 2**25  # numbers of the K that are held at a time
BATCH = 16
FLOOR = 1e-4  # smallest eigenvalue kept, relative to the largest


def cka_covariance(model: Model, images: Images, most: int = MOST_IMAGES, device: torch.device | str = "cpu") -> Matrix:
    """Return the CKA matrix of all structures, made positive definite with ones on its diagonal: (D, D)."""
    model.module.to(device)
    try:
        activations = _activations(model, images.first(most), torch.device(device))
    finally:
        model.module.to("cpu")
    products = _products(activations)  # (D, D)
    lengths = np.sqrt(np.diag(products))
    lengths[lengths == 0] = 1  # of a structure that never changes: it is like nothing else
    return nearest_correlation(products / lengths[:, None] / lengths[None, :])


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


def _products(activations: list[np.ndarray]) -> Matrix:
    """Return <K_s, K_t> of all pairs of structures: (D, D)."""
    count, structures = len(activations[0]), len(activations)
    step = max(1, AT_ONCE // (structures * count))
    total = np.zeros((structures, structures))
    for start in range(0, count, step):
        rows = slice(start, start + step)
        centred = (x.astype(np.float64) - x.mean(0, dtype=np.float64) for x in activations)
        parts = np.stack([(x[rows] @ x.T).ravel() for x in centred])  # (D, rows*N)
        total += parts @ parts.T
    return total


def _activations(model: Model, images: Images, device: torch.device) -> list[np.ndarray]:
    """Return class-token activations (the mean over tokens without one), MLPs first, then heads: each (N, width)."""
    blocks = blocks_of(model.module)
    mlps: list[list[Tensor]] = [[] for _ in blocks]
    heads: list[list[Tensor]] = [[] for _ in blocks]
    with torch.no_grad(), _recording(blocks, mlps, heads, model.anatomy.class_token):
        for batch in images.batches(BATCH):
            model.module(torch.from_numpy(batch).to(device))
    nothing = np.zeros((len(images), 1), np.float32)  # of a removed MLP, whose factor changes nothing
    whole = [torch.cat(parts).numpy() if parts else nothing for parts in mlps]
    for parts, block in zip(heads, blocks):
        if block.attn is None:
            continue
        columns = torch.cat(parts).unflatten(1, (-1, block.attn.head_dim))  # (N, heads, head_dim)
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
