"""In-context segmentation: patches take the classes of the nearest patches of other images, and nothing is trained.

As HummingBird does it (Balažević et al., 2023): a bank holds patches of the training images, scaled to length one, with
the shares of the classes among their pixels. A patch to be segmented takes the mean of those of its 30 nearest,
weighted by a softmax of their cosines at temperature 0.02. These shares are upsampled bilinearly; the largest wins.
The search is exact. Of more patches than the bank may hold, equally many of each image are drawn by seed. Light: numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..calibration.masks import Masks
from ..errors import SnapvitError
from .features import Array
from .linear import softmax
from .neighbours import nearest, unit
from .segmentation import patch_shares

NEIGHBOURS = 30
TEMPERATURE = 0.02


@dataclass(frozen=True, eq=False)
class Bank:
    """Patches with their classes."""

    features: Array  # (M, E), of length one
    shares: Array  # (M, K), which sum to one

    def __len__(self) -> int:
        return len(self.features)


def fill_bank(chunks: Iterable[tuple[Array, Masks]], classes: int, images: int, most: int, seed: int = 0) -> Bank:
    """Fill a bank with at most `most` patches of `images` images; chunks are tokens (n, h, w, E) and their masks.

    Patches without a known pixel are left out.
    """
    rng = np.random.default_rng(seed)
    each = max(1, most // images)
    features, shares = [], []
    left = most
    for tokens, masks in chunks:
        known = patch_shares(masks, tokens.shape[1:3], classes)  # (n, h*w, K)
        for token, share in zip(tokens.reshape(len(tokens), -1, tokens.shape[-1]), known):
            rows = np.flatnonzero(share.any(1))
            if len(rows) > each:
                rows = np.sort(rng.choice(rows, each, replace=False))
            rows = rows[:left]
            left -= len(rows)
            features.append(unit(token[rows]))
            shares.append(share[rows] / share[rows].sum(1, keepdims=True))
    bank = Bank(np.concatenate(features), np.concatenate(shares))
    if len(bank) < NEIGHBOURS:
        raise SnapvitError(
            f"{len(bank)} patches with known classes are too few: {NEIGHBOURS} vote. Give more --data or --bank-patches"
        )
    return bank


def shares_in_context(
    bank: Bank, tokens: Array, progress: Callable[[int], None] = lambda count: None
) -> Iterator[Array]:
    """Give the patches of each image the classes of their neighbours: (h, w, K) each."""
    count, h, w, width = tokens.shape
    rows, cosines = nearest(bank.features, tokens.reshape(-1, width), NEIGHBOURS, progress)
    weights = softmax((cosines / TEMPERATURE).astype(np.float32))  # (N*h*w, 30)
    for image in range(count):
        part = slice(image * h * w, (image + 1) * h * w)
        found = np.einsum("pn,pnk->pk", weights[part], bank.shares[rows[part]])
        yield found.reshape(h, w, -1)
