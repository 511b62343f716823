"""A latency model: so much for being there, so much for each head and each neuron. To propose with, never to claim.

    latency = fixed + sum over blocks of (heads x per head + neurons x per neuron)
                    + sum over blocks of (per attention, if it has any head) + (per MLP, if it has any neuron)

Three numbers, or five, fitted to a few nets that were timed side by side. What an attention or an MLP costs for being
there (its norm, its calls, its addition to the stream) shows only in nets that lack some: without such nets it is a
part of what is fixed. Blocks of other shapes count by their FLOPs. Where only the class token is read, the last block
works for one token: its neurons are as good as free, and so are its heads unless it makes keys and values of all
tokens. Light: numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..anatomy import Anatomy
from ..costs import Costs, linear_costs
from ..plan import Part, Plan
from ..values import Count, Value

KEYS_AND_VALUES = 0.5  # of a head's work
# Shares of heads and of neurons of the nets that are timed: apart from each other, so that both slopes show.
DESIGN = ((1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5), (0.75, 0.25), (0.2, 0.1))
# Nets that lack the attention or the MLP of every second block, and shares of what the others keep.
LACKING: tuple[tuple[Part, float, float], ...] = (("attention", 1, 0.5), ("mlp", 0.5, 1), ("attention", 0.5, 0.25))


class LatencyModel(Value, frozen=True, kw_only=True):
    """Milliseconds of a Plan on one target, and how wrong that is on nets that the fit did not see."""

    fixed_ms: float
    head_ms: tuple[float, ...]  # of one head, by block
    neuron_ms: tuple[float, ...]
    attention_ms: tuple[float, ...] = ()  # of an attention for being there, by block; none: not known, so in `fixed_ms`
    mlp_ms: tuple[float, ...] = ()
    nets: Count  # that it was fitted to
    mean_error: float  # relative, each net by a fit without it
    most_error: float

    @property
    def is_sound(self) -> bool:
        """Whether both kinds cost something: noise can hide that, and then nothing of the kind would be cut."""
        return max(self.head_ms) > 0 and max(self.neuron_ms) > 0

    def costs(self, anatomy: Anatomy) -> Costs:
        """As the allocation wants it."""
        there = self.attention_ms or 0.0, self.mlp_ms or 0.0
        return linear_costs(anatomy, self.head_ms, self.neuron_ms, self.fixed_ms, *there)

    def predict_ms(self, plan: Plan) -> float:
        """What a Plan should take."""
        heads = sum(n * ms for n, ms in zip(plan.heads, self.head_ms))
        there = sum(ms for n, ms in zip(plan.heads, self.attention_ms) if n)
        there += sum(ms for n, ms in zip(plan.neurons, self.mlp_ms) if n)
        return self.fixed_ms + there + heads + sum(n * ms for n, ms in zip(plan.neurons, self.neuron_ms))


def design(anatomy: Anatomy, lacking: bool = False) -> list[Plan]:
    """Plans to time for a fit, the dense one first; `lacking`: also some without sub-layers, where there are enough."""
    found = dict.fromkeys(_with_shares(anatomy, *shares) for shares in DESIGN)
    for part, *shares in LACKING if lacking and len(anatomy.blocks) > 2 else ():
        plan = _with_shares(anatomy, *shares)
        counts = {"attention": plan.heads, "mlp": plan.neurons}
        last = len(anatomy.blocks) - 1
        counts[part] = tuple(0 if i % 2 and i < last else n for i, n in enumerate(counts[part]))
        found[Plan(heads=counts["attention"], neurons=counts["mlp"])] = None
    return list(found)


def _with_shares(anatomy: Anatomy, of_heads: float, of_neurons: float) -> Plan:
    return Plan(
        heads=tuple(max(1, round(of_heads * n)) for n in anatomy.heads),
        neurons=tuple(max(1, round(of_neurons * n)) for n in anatomy.neurons),
    )


def fit(anatomy: Anatomy, measured: Sequence[tuple[Plan, float]], last_makes_keys: bool = False) -> LatencyModel:
    """The model of timed Plans, at least four of them.

    `last_makes_keys`: the last block makes keys and values of all tokens, though it answers for one.

    >>> fit(anatomy, [(plan, profile.cpu_ms) for plan, profile in timed])
    """
    if len(measured) < 4:
        raise ValueError(f"a latency model needs at least four nets, not {len(measured)}")
    head_units, neuron_units = _units(anatomy, last_makes_keys)
    of_attention, of_mlp = _units_of_being_there(anatomy)
    lacking = any(plan.removed for plan, _ in measured)
    units = (head_units, neuron_units, *((of_attention, of_mlp) if lacking else ()))
    features = np.array([_features(plan, *units) for plan, _ in measured])  # (nets, 3 or 5)
    times = np.array([ms for _, ms in measured])
    fixed, per_head, per_neuron, *there = _solve(features, times)
    errors = []
    for n in range(len(measured)):
        others = np.arange(len(measured)) != n
        guess = float(features[n] @ _solve(features[others], times[others]))
        errors.append(abs(guess / times[n] - 1))
    return LatencyModel(
        fixed_ms=float(fixed),
        head_ms=tuple(float(per_head * unit) for unit in head_units),
        neuron_ms=tuple(float(per_neuron * unit) for unit in neuron_units),
        attention_ms=tuple(float(there[0] * unit) for unit in of_attention) if lacking else (),
        mlp_ms=tuple(float(there[1] * unit) for unit in of_mlp) if lacking else (),
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


def _units_of_being_there(anatomy: Anatomy) -> tuple[list[float], list[float]]:
    """What the attention and the MLP of each block count beside their structures; that of one token is free."""
    found = [1.0] * len(anatomy.blocks), [1.0] * len(anatomy.blocks)
    if anatomy.pooling == "token":
        found[0][-1], found[1][-1] = KEYS_AND_VALUES, 0.0  # the norm before the last attention sees all tokens
    return found


def _features(
    plan: Plan, head_units: Sequence[float], neuron_units: Sequence[float], *there: Sequence[float]
) -> list[float]:
    counted = [
        1.0,
        sum(n * unit for n, unit in zip(plan.heads, head_units)),
        sum(n * unit for n, unit in zip(plan.neurons, neuron_units)),
    ]
    return counted + [
        sum(unit for n, unit in zip(counts, units) if n) for counts, units in zip((plan.heads, plan.neurons), there)
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
