"""Quantiles of Student's t distribution, for means of few values. Light: numpy.

With t = sqrt(f) tan(a), where f are the degrees of freedom, the density of t becomes cos(a)^(f - 1) on the half circle,
which is smooth and bounded for every f >= 1. So its integral is a plain sum, and no special function is needed.
"""

from __future__ import annotations

import math

import numpy as np

ANGLES = 4097  # the sum of trapezia is then exact to a ten thousandth of the quantile
MOST_FREEDOM = 1000.0  # beyond, the quantile is the normal distribution's but for a thousandth


def t_quantile(share: float, freedom: float) -> float:
    """Return the value that Student's t exceeds with probability 1 - `share`, for `share` from 0.5 up to 0.99.

    >>> round(t_quantile(0.95, 2), 3)
    2.92
    """
    assert 0.5 <= share <= 0.99
    assert freedom >= 1
    f = min(freedom, MOST_FREEDOM)
    angles = np.linspace(0, math.pi / 2, ANGLES)
    density = np.cos(angles) ** (f - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])  # integral from 0, in no unit
    return math.sqrt(f) * math.tan(float(np.interp(2 * share - 1, below / below[-1], angles)))
