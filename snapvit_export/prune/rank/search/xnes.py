"""xNES (Glasmachers et al., 2010): a natural evolution strategy that learns the full covariance of the problem.

| symbol | meaning                                  | shape  |
|--------|------------------------------------------|--------|
| m      | mean of the search distribution          | (D,)   |
| A      | its square root: x = m + A z             | (D, D) |
| z      | standard normal sample                   | (n, D) |
| u      | utilities by rank, summing to zero       | (n,)   |
| G      | sum_i u_i (z_i z_i^T - I)                | (D, D) |

m <- m + A sum_i u_i z_i and A <- A expm(eta/2 G): the matrix exponential, not an element-wise one, which could not
learn correlations. G is symmetric, so an eigendecomposition gives it exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .optimiser import Matrix, Vector, default_population, generator_state, restore_generator, utilities, worst_first


class XNES:
    """xNES as the released SnapViT code runs it, to the last bit.

    >>> es = XNES(np.ones(3), seed=42)
    >>> points = es.ask(); es.tell(points, [loss(x) for x in points])
    """

    def __init__(
        self, start: npt.ArrayLike, seed: int, population: int | None = None, covariance: Matrix | None = None
    ) -> None:
        # float32, as the released code keeps it: the mean is rounded after every update.
        self.mean = np.array(start, np.float32)
        d = len(self.mean)
        self.population = population or default_population(d)
        self.rate = 0.6 * (3 + np.log(d)) / (d * np.sqrt(d))
        self.A = np.eye(d) if covariance is None else np.linalg.cholesky(covariance)
        self.rng = _generator(seed)

    @property
    def start(self) -> Vector:
        return self.mean.astype(np.float64)

    def ask(self) -> Matrix:
        z = np.stack([self.rng.standard_normal(len(self.mean)) for _ in range(self.population)])  # (n, D)
        return self.mean + z @ self.A.T

    def tell(self, points: Matrix, losses: Vector) -> None:
        order = worst_first(losses)
        u = utilities(len(points))
        s = np.linalg.solve(self.A, (points[order] - self.mean).T).T  # (n, D), worst first
        G = np.einsum("n,nd,ne->de", u, s, s) - u.sum() * np.eye(len(self.mean))
        self.mean = (self.mean + self.A @ (u @ s)).astype(np.float32)
        self.A = self.A @ _expm(0.5 * self.rate * G)

    def factors(self, point: Vector) -> Vector:
        return point

    def state(self) -> dict[str, Any]:
        return {"mean": self.mean.copy(), "A": self.A.copy(), "rng": generator_state(self.rng)}

    def restore(self, state: dict[str, Any]) -> None:
        self.mean, self.A = np.array(state["mean"], np.float32), np.array(state["A"], np.float64)
        restore_generator(self.rng, state["rng"])

    def summary(self) -> dict[str, Any]:
        eigenvalues = np.linalg.eigvalsh(self.A @ self.A.T)
        return {
            "optimiser": "xnes",
            "covariance_eigenvalues": [float(eigenvalues[0]), float(np.median(eigenvalues)), float(eigenvalues[-1])],
        }


def _generator(seed: int) -> np.random.Generator:
    """Return the sampler's own generator: seeded by the second number of the seed's generator, as in pypop7."""
    seeds = np.random.default_rng(seed)
    seeds.integers(np.iinfo(np.int64).max)
    return np.random.default_rng(seeds.integers(np.iinfo(np.int64).max))


def _expm(symmetric: Matrix) -> Matrix:
    values, vectors = np.linalg.eigh(symmetric)
    return (vectors * np.exp(values)) @ vectors.T
