"""How a Factor lies in `correction.bin`: every width is a prefix there too. Light: numpy.

The lower triangle of L is packed row after row, so the first k(k+1)/2 numbers are the leading block that a width of k
needs; W L is stored transposed, (d, E), so that its first k columns are the first k rows.

Everything is float32, computed with in float64. On DeiT-Tiny (all 24 layers, 128 images, 1/3, 2/3 and 9/10 kept) the
corrected weights then differ from a direct float64 least-squares solve by at most 1.5e-7 of their Frobenius norm with
the default damping, 2.1e-7 with a tenth of it; float64 would be twice the size, and its result is rounded to float32
(2.6e-8) anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..correction.cholesky import Factor
from ..correction.moments import Array
from ..storage.mapped import Array as Stored
from ..storage.mapped import DataType

STORED: DataType = "float32"
PARTS = ("mean", "lower", "projected", "constant", "gain")


def pack_factor(factor: Factor) -> dict[str, Array]:
    """The arrays of one layer by the names of PARTS."""
    d = len(factor.mean)
    lower = np.empty(d * (d + 1) // 2)
    for row in range(d):
        lower[row * (row + 1) // 2 : (row + 1) * (row + 2) // 2] = factor.lower[row, : row + 1]
    parts = (factor.mean, lower, factor.projected.T, factor.constant, factor.gain)
    return dict(zip(PARTS, parts))


def leading_factor(stored: Mapping[str, Stored], unit: int, keep: int) -> Factor:
    """The Factor of the best `keep` structures alone: all that correcting to that width reads."""
    k = keep * unit
    lower = np.zeros((k, k))
    for row in range(k):
        lower[row, : row + 1] = stored["lower"][row * (row + 1) // 2 : (row + 1) * (row + 2) // 2]
    mean, constant, gain = (stored[part].astype(np.float64) for part in ("mean", "constant", "gain"))
    projected = np.array(
        stored["projected"][:k].T, np.float64, order="C"
    )  # (E, k): rows, as the solver goes along them
    return Factor(unit, mean[:k], lower, projected, constant, gain)
