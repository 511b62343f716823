"""Separable NES in log space: factors are exp(x), so they stay positive and a step is a ratio.

One step size per dimension instead of a covariance: with hundreds of factors and a few hundred evaluations there is
not enough to learn a matrix from, but enough to learn scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .optimiser import Matrix, Vector, default_population, generator_state, restore_generator, utilities, worst_first

SIGMA = 0.3  # first step: factors move by some 35 %


class LogSNES:
    """sNES over the logarithm of the factors.

    >>> es = LogSNES(np.ones(3), seed=0)
    >>> points = es.ask(); es.tell(points, [loss(es.factors(x)) for x in points])
    """

    def __init__(self, start: npt.ArrayLike, seed: int, population: int | None = None, sigma: float = SIGMA) -> None:
        self.mean = np.log(np.abs(np.asarray(start, np.float64)))
        d = len(self.mean)
        self.population = population or default_population(d)
        self.sigma = np.full(d, sigma)
        self.rate = (3 + np.log(d)) / (5 * np.sqrt(d))
        self.rng = np.random.default_rng(seed)

    @property
    def start(self) -> Vector:
        return self.mean.copy()

    def ask(self) -> Matrix:
        return self.mean + self.sigma * self.rng.standard_normal((self.population, len(self.mean)))  # (n, D)

    def tell(self, points: Matrix, losses: Vector) -> None:
        u = utilities(len(points))
        s = (points[worst_first(losses)] - self.mean) / self.sigma  # (n, D), worst first
        self.mean = self.mean + self.sigma * (u @ s)
        self.sigma = self.sigma * np.exp(0.5 * self.rate * (u @ (s**2 - 1)))

    def factors(self, point: Vector) -> Vector:
        return np.exp(point)

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean.copy(), "sigma": self.sigma.copy(), "rng": generator_state(self.rng)}

    def restore(self, state: dict[str, Any]) -> None:
        self.mean, self.sigma = np.array(state["mean"], np.float64), np.array(state["sigma"], np.float64)
        restore_generator(self.rng, state["rng"])

    def summary(self) -> dict[str, Any]:
        low, middle, high = np.percentile(self.sigma, [0, 50, 100])
        return {"optimiser": "snes-log", "sigma": [float(low), float(middle), float(high)]}
