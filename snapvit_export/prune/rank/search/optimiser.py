"""The ask/tell interface: an optimiser proposes candidates; the caller evaluates them and owns loop and checkpoint.

`ask` draws a population, `tell` takes it back with its losses and learns. All state is a few arrays and the state of a
private random generator, so that it can be saved and restored bit for bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]


class Optimiser(Protocol):
    """Minimises; `factors` turns a point into what is evaluated (the identity, or exp for a log-space search)."""

    population: int

    def ask(self) -> Matrix: ...  # (population, D)

    def tell(self, points: Matrix, losses: Vector) -> None: ...

    def factors(self, point: Vector) -> Vector: ...

    @property
    def start(self) -> Vector: ...  # the point to evaluate first

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def summary(self) -> dict[str, Any]: ...  # of what was learnt about the shape of the problem


def default_population(dimensions: int) -> int:
    """Return 4 + int(3 ln D), as customary for natural evolution strategies."""
    return 4 + int(3 * np.log(dimensions))


def utilities(population: int) -> Vector:
    """Return the weight of each rank in an update, worst first: the worse half alike, rising to the best, sum zero."""
    ranks = np.arange(population)
    weights = np.maximum(0, np.log(population / 2 + 1) - np.log(population - ranks))
    return weights / weights.sum() - 1 / population


def worst_first(losses: Vector) -> npt.NDArray[np.intp]:
    """Return the order that `utilities` expects; equal losses keep the order in which they were drawn.

    A loss that is not a number is worse than any number.
    """
    losses = np.asarray(losses, np.float64)
    return np.argsort(-np.where(np.isnan(losses), np.inf, losses), kind="stable")


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """Return the generator's state as JSON: its integers exceed 64 bits, so they are written as text."""
    state = rng.bit_generator.state
    return {**state, "state": {name: str(value) for name, value in state["state"].items()}}


def restore_generator(rng: np.random.Generator, state: dict[str, Any]) -> None:
    rng.bit_generator.state = {**state, "state": {name: int(value) for name, value in state["state"].items()}}
