"""Least squares without negative answers, by the active sets of Lawson and Hanson (1974, chapter 23). Light: numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
NO_GAIN = 1e-10  # relative: a slope as small as this is rounding
SMALLEST = np.finfo(np.float64).tiny  # instead of a division by zero


def nonnegative_least_squares(matrix: npt.NDArray[np.float64], wanted: Vector) -> Vector:
    """Return the x >= 0 that brings `matrix` x closest to `wanted`: one more number is let go while that helps.

    >>> nonnegative_least_squares(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 1.0]))    # unbounded: (3, -1)
    array([1.5, 0. ])
    """
    scale = np.linalg.norm(matrix, axis=0)  # the answer must not depend on the units of a column
    columns = matrix / np.where(scale > 0, scale, 1)
    x, free = np.zeros(columns.shape[1]), np.zeros(columns.shape[1], bool)
    for _ in range(3 * len(x)):  # as many as its authors allow; it needs about one for each number
        slope = columns.T @ (wanted - columns @ x)
        slope[free] = 0
        if slope.max() <= NO_GAIN * np.linalg.norm(wanted):
            break
        free[int(slope.argmax())] = True
        x = _towards(columns, wanted, x, free)
    return x / np.where(scale > 0, scale, 1)


def _towards(columns: npt.NDArray[np.float64], wanted: Vector, x: Vector, free: npt.NDArray[np.bool_]) -> Vector:
    """Go from `x` to the best answer of the free numbers; where one would turn negative on the way, it ends at 0."""
    while True:
        best = np.zeros(len(x))
        best[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
        below = free & (best <= 0)
        if not below.any():
            return best
        x = x + np.min(x[below] / np.maximum(x[below] - best[below], SMALLEST)) * (best - x)
        free &= x > NO_GAIN * x.max()  # changes the caller's too: the next step starts from there
        x[~free] = 0
