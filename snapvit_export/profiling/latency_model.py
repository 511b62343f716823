"""A latency model: so much for being there, so much for each head and each neuron. To propose with, never to claim.

    latency = fixed + sum over blocks of (heads x per head + neurons x per neuron)

Three numbers, fitted to a few nets that were timed side by side. Blocks of other shapes count by their FLOPs. Where
only the class token is read, the last block works for one token: its neurons are as good as free, and so are its heads
unless it makes keys and values of all tokens. Light: numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..anatomy import Anatomy
from ..costs import Costs, linear_costs
from ..plan import Plan
from ..values import Count, Value

KEYS_AND_VALUES = 0.5  # of a head's work
# Shares of heads and of neurons of the nets that are timed: apart from each other, so that both slopes show.
DESIGN = ((1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5), (0.75, 0.25), (0.2, 0.1))


class LatencyModel(Value, frozen=True, kw_only=True):
    """Milliseconds of a Plan on one target, and how wrong that is on nets that the fit did not see."""

    fixed_ms: float
    head_ms: tuple[float, ...]  # of one head, by block
    neuron_ms: tuple[float, ...]
    nets: Count  # that it was fitted to
    mean_error: float  # relative, each net by a fit without it
    most_error: float

    @property
    def is_sound(self) -> bool:
        """Whether both kinds cost something: noise can hide that, and then nothing of the kind would be cut."""
        return max(self.head_ms) > 0 and max(self.neuron_ms) > 0

    def costs(self, anatomy: Anatomy) -> Costs:
        """As the allocation wants it."""
        return linear_costs(anatomy, self.head_ms, self.neuron_ms, self.fixed_ms)

    def predict_ms(self, plan: Plan) -> float:
        """What a Plan should take."""
        heads = sum(n * ms for n, ms in zip(plan.heads, self.head_ms))
        return self.fixed_ms + heads + sum(n * ms for n, ms in zip(plan.neurons, self.neuron_ms))


def design(anatomy: Anatomy) -> list[Plan]:
    """Plans to time for a fit, the dense one first."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Plan] = {}
    for of_heads, of_neurons in DESIGN:
        heads = tuple(max(1, round(of_heads * n)) for n in anatomy.heads)
        neurons = tuple(max(1, round(of_neurons * n)) for n in anatomy.neurons)
        found[heads, neurons] = Plan(heads=heads, neurons=neurons)
    return list(found.values())


def fit(anatomy: Anatomy, measured: Sequence[tuple[Plan, float]], last_makes_keys: bool = False) -> LatencyModel:
    """The model of timed Plans, at least four of them.

    `last_makes_keys`: the last block makes keys and values of all tokens, though it answers for one.

    >>> fit(anatomy, [(plan, profile.cpu_ms) for plan, profile in timed])
    """
    if len(measured) < 4:
        raise ValueError(f"a latency model needs at least four nets, not {len(measured)}")
    head_units, neuron_units = _units(anatomy, last_makes_keys)
    features = np.array([_features(plan, head_units, neuron_units) for plan, _ in measured])  # (nets, 3)
    times = np.array([ms for _, ms in measured])
    fixed, per_head, per_neuron = _solve(features, times)
    errors = []
    for n in range(len(measured)):
        others = np.arange(len(measured)) != n
        guess = float(features[n] @ _solve(features[others], times[others]))
        errors.append(abs(guess / times[n] - 1))
    return LatencyModel(
        fixed_ms=float(fixed),
        head_ms=tuple(float(per_head * unit) for unit in head_units),
        neuron_ms=tuple(float(per_neuron * unit) for unit in neuron_units),
        nets=len(measured),
        mean_error=float(np.mean(errors)),
        most_error=float(np.max(errors)),
    )


def _units(anatomy: Anatomy, last_makes_keys: bool) -> tuple[list[float], list[float]]:
    """What one head and one neuron of each block count, relative to the first block's; 0 where they are free."""
    first = anatomy.flops_per_structure(anatomy.blocks[0])
    found = [[anatomy.flops_per_structure(block)[kind] / first[kind] for block in anatomy.blocks] for kind in (0, 1)]
    if anatomy.pooling == "token":
        found[0][-1] *= KEYS_AND_VALUES if last_makes_keys else 0.0
        found[1][-1] = 0.0
    return found[0], found[1]


def _features(plan: Plan, head_units: Sequence[float], neuron_units: Sequence[float]) -> list[float]:
    return [
        1.0,
        sum(n * unit for n, unit in zip(plan.heads, head_units)),
        sum(n * unit for n, unit in zip(plan.neurons, neuron_units)),
    ]


def _solve(features: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares of the relative errors; nothing costs less than nothing."""
    used = list(range(features.shape[1]))
    while True:
        weighted = features[:, used] / times[:, None]
        found = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            solution = np.zeros(features.shape[1])
            solution[used] = np.maximum(found, 0)
            return solution
        used.pop(int(np.argmin(found)))
