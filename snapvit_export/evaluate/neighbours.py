"""The exact nearest neighbours by cosine, in memory that does not grow with the bank. Light: numpy.

    x   queries    (Q, E), rows of length one
    y   bank       (M, E), rows of length one
    s   cosines    (Q, M), of which a block at a time exists

Blocks of s are products in float32, fast but rounded. Each query keeps the SPARE best beyond its k, and their cosines
are computed again in float64, by which the k are chosen; of equally near rows the first. Rounding could hide a
neighbour only behind as many others that are equally near to its last digits, as copies of one image are, or all images
of a model that tells nothing apart. That is noticed, and such queries are compared with the whole bank in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError

QUERIES = 1024  # at a time
BANK = 16384  # rows at a time: with QUERIES a block of 64 MB
DOUBTFUL = 512  # queries at a time that are compared in float64: again 64 MB
DIGITS = 12  # of cosines in float64: what agrees so far is equal, whatever the order of a sum
GATHERED = 64  # queries whose neighbours are gathered at a time
SPARE = 28  # further rows by float32 whose cosines are computed again
ROUNDING = 1e-5  # of a cosine in float32, well above what sums of thousands of terms show

Array = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Matrix = npt.NDArray[Any]
Cosines = npt.NDArray[np.float64]


def nearest(
    bank: npt.ArrayLike,
    queries: npt.ArrayLike,
    k: int,
    progress: Callable[[int], None] = lambda count: None,
    block: tuple[int, int] = (QUERIES, BANK),
) -> tuple[Rows, Cosines]:
    """Return the k nearest rows of the bank to each query, nearest first, and their cosines: (Q, k) each.

    `block`: how many queries and rows of the bank are compared at a time; the answer does not depend on it.
    """
    y, x = np.asarray(bank), np.asarray(queries)
    if not 1 <= k <= len(y):
        raise SnapvitError(f"{k} neighbours cannot be found among {len(y)} training images. Give --data more")
    rows, cosines = np.empty((len(x), k), np.int64), np.empty((len(x), k))
    for start in range(0, len(x), block[0]):
        part = slice(start, start + block[0])
        rows[part], cosines[part] = _nearest(y, x[part], k, block[1])
        progress(len(rows[part]))
    return rows, cosines


def unit(features: npt.ArrayLike, kind: type[np.floating[Any]] = np.float32) -> Matrix:
    """Return rows scaled to length one; rows of zeros stay."""
    x = np.asarray(features, np.float64)
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12), kind)


def _nearest(bank: Matrix, queries: Matrix, k: int, block: int) -> tuple[Rows, Cosines]:
    kept = min(k + SPARE, len(bank))
    rows, found = _candidates(bank, unit(queries), kept, block)
    exact = unit(queries, np.float64)
    cosines = _cosines(bank, rows, exact)
    order = np.lexsort((rows, -cosines))[:, :k]  # best first, of equals the first row
    rows, cosines = np.take_along_axis(rows, order, 1), np.take_along_axis(cosines, order, 1)
    if kept < len(bank):
        hidden = found.min(1) > cosines[:, -1] - 2 * ROUNDING  # the best that were not kept may be as near
        doubtful = np.flatnonzero(hidden)
        for start in range(0, len(doubtful), DOUBTFUL):
            part = doubtful[start : start + DOUBTFUL]
            rows[part], cosines[part] = _by_all(bank, exact[part], k, block)
    return rows, cosines


def _candidates(bank: Matrix, queries: Matrix, kept: int, block: int) -> tuple[Rows, Array]:
    """Return the best rows of the bank by products in float32, in any order: (Q, kept)."""
    rows = np.zeros((len(queries), 0), np.int64)
    best = np.zeros((len(queries), 0), np.float32)
    for start in range(0, len(bank), block):
        s = queries @ unit(bank[start : start + block]).T  # (Q, block)
        places, values = _better(s, best.min(1) if best.shape[1] == kept else None)
        rows = np.concatenate([rows, start + places], 1)
        best = np.concatenate([best, values], 1)
        if best.shape[1] > kept:
            chosen = np.argpartition(-best, kept - 1, axis=1)[:, :kept]
            rows, best = np.take_along_axis(rows, chosen, 1), np.take_along_axis(best, chosen, 1)
    return rows, best


def _better(s: Matrix, least: Matrix | None) -> tuple[Rows, Matrix]:
    """Return places and values above `least` of their row, filled up with -inf: (Q, as many as any row has)."""
    if least is None:
        return np.broadcast_to(np.arange(s.shape[1]), s.shape), s
    query, place = np.nonzero(s > least[:, None])
    counts = np.bincount(query, minlength=len(s))
    column = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.zeros((len(s), int(counts.max(initial=0))), np.int64)
    values = np.full(places.shape, -np.inf, s.dtype)
    places[query, column], values[query, column] = place, s[query, place]
    return places, values


def _cosines(bank: Matrix, rows: Rows, queries: Matrix) -> Cosines:
    """Return cosines of queries of length one with rows of the bank, in float64: (Q, kept)."""
    found = np.empty(rows.shape)
    for start in range(0, len(rows), GATHERED):
        part = slice(start, start + GATHERED)
        chosen = unit(bank[rows[part].reshape(-1)], np.float64).reshape(*rows[part].shape, -1)  # (q, kept, E)
        found[part] = np.einsum("qke,qe->qk", chosen, queries[part], optimize=True)
    return np.round(found, DIGITS)


def _by_all(bank: Matrix, queries: Matrix, k: int, block: int) -> tuple[Rows, Cosines]:
    """Return the k nearest rows by the whole bank in float64, nearest first: (Q, k) each."""
    rows, cosines = np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0))
    for start in range(0, len(bank), block):
        s = np.round(queries @ unit(bank[start : start + block], np.float64).T, DIGITS)  # (Q, block)
        places, values = _better(s, cosines[:, -1] if cosines.shape[1] == k else None)
        rows, cosines = np.concatenate([rows, start + places], 1), np.concatenate([cosines, values], 1)
        order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]  # rows rise among equals
        rows, cosines = np.take_along_axis(rows, order, 1), np.take_along_axis(cosines, order, 1)
    return rows, cosines
