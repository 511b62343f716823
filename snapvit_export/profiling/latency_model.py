"""A latency model, linear in heads and neurons, to propose Plans with; reported latencies are measured. Light.

    latency = fixed + sum over blocks of (heads x per head + neurons x per neuron)
                    + sum over blocks of (per attention, if it has any head) + (per MLP, if it has any neuron)

Three numbers, or five, fitted to a few sample configurations that were timed side by side. The constant cost of an
attention or an MLP (its norm, its calls, its addition to the stream) shows only in samples that lack some, and best in
narrow ones: without such samples it is a part of `fixed`. Blocks of other shapes count by their FLOPs. Where only the
class token is read, blocks compute one token from the last attention on: their neurons are nearly free, and so are the
heads of that attention unless it makes keys and values of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..allocation.costs import Costs, CostsByLast, linear_costs
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, Ratio, Value

KEYS_AND_VALUES = 0.5  # of a head's work
# Shares of heads and of neurons of the sample configurations: apart from each other, so that both slopes show.
SHARES = ((1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5), (0.75, 0.25), (0.2, 0.1))
NARROW = 0.05  # of the neurons: as narrow as an MLP becomes
THERE = 0.5  # of an attention's constant cost, where it computes one token: its norm runs over all


class LatencyModel(Value, frozen=True, kw_only=True):
    """Milliseconds of a Plan on one target, and the error on configurations that the fit did not see."""

    fixed_ms: float
    head_ms: tuple[float, ...]  # of one head, by block
    neuron_ms: tuple[float, ...]
    attention_ms: tuple[float, ...] = ()  # constant cost of an attention, by block; empty: unknown, so in `fixed_ms`
    mlp_ms: tuple[float, ...] = ()
    last_head: Ratio | None = None  # share of a head's cost in the last attention; None: all tokens are read to the end
    nets: Count  # sample configurations that it was fitted to
    mean_error: float  # relative, each configuration by a fit without it
    most_error: float

    @property
    def is_sound(self) -> bool:
        """True if both kinds cost something: noise can hide that, and then nothing of the kind would be cut."""
        return max(self.head_ms) > 0 and max(self.neuron_ms) > 0

    def costs(self, anatomy: Anatomy) -> Costs | CostsByLast:
        """Return the costs as the allocation takes them."""
        each = [self.head_ms, self.neuron_ms, self.attention_ms, self.mlp_ms]
        if self.last_head is None:
            return _summed(anatomy, self.fixed_ms, each)
        cases = [_shortened(each, last, self.last_head) for last in range(len(anatomy.blocks))]
        return CostsByLast(tuple(_summed(anatomy, self.fixed_ms, case) for case in cases))

    def predict_ms(self, plan: Plan) -> float:
        """Return the predicted milliseconds of a Plan."""
        each = [self.head_ms, self.neuron_ms, self.attention_ms, self.mlp_ms]
        return self.fixed_ms + sum(_counted(plan, each, self.last_head))


def _summed(anatomy: Anatomy, fixed_ms: float, each: Sequence[Sequence[float]]) -> Costs:
    heads, neurons, attention, mlp = each
    return linear_costs(anatomy, heads, neurons, fixed_ms, attention or 0.0, mlp or 0.0)


def _shortened(each: Sequence[Sequence[float]], last: int, last_head: float) -> list[list[float]]:
    """Return the costs where block `last` has the last attention: from there on only tokens that are read count."""
    shares = last_head, 0.0, THERE, 0.0
    return [[ms if i < last else ms * share for i, ms in enumerate(values)] for values, share in zip(each, shares)]


def _counted(plan: Plan, each: Sequence[Sequence[float]], last_head: float | None) -> list[float]:
    """Return the sums of heads, neurons, attentions and MLPs of a Plan, each weighted by its block."""
    if last_head is not None:
        each = _shortened(each, plan.last_attention, last_head)
    there = [[int(kept > 0) for kept in counts] for counts in (plan.heads, plan.neurons)]
    return [
        sum(kept * unit for kept, unit in zip(counts, units))
        for counts, units in zip((plan.heads, plan.neurons, *there), each)
    ]


def sample_plans(anatomy: Anatomy, removable: bool = False) -> list[Plan]:
    """Return sample configurations for a fit, the dense one first; `removable`: some lack sub-layers, if possible."""
    found = dict.fromkeys(_with_shares(anatomy, *shares) for shares in SHARES)
    last = Plan.dense(anatomy).last_attention
    if removable and len(anatomy.blocks) > 2 and last >= 0:
        least = _with_shares(anatomy, 0, 0)
        none = (0,) * len(anatomy.blocks)
        one = (*none[:last], least.heads[last], *none[last + 1 :])
        half = tuple(n if i % 2 or i == last else 0 for i, n in enumerate(anatomy.heads))
        found |= dict.fromkeys(
            [
                Plan(heads=one, neurons=none),  # as little as can be
                Plan(heads=least.heads, neurons=none),
                Plan(heads=one, neurons=_with_shares(anatomy, 0, NARROW).neurons),
                Plan(heads=half, neurons=_with_shares(anatomy, 0, 0.25).neurons),
            ]
        )
    return list(found)


def _with_shares(anatomy: Anatomy, of_heads: float, of_neurons: float) -> Plan:
    return Plan(
        heads=tuple(min(n, max(1, round(of_heads * n))) for n in anatomy.heads),
        neurons=tuple(min(n, max(1, round(of_neurons * n))) for n in anatomy.neurons),
    )


def fit(anatomy: Anatomy, measured: Sequence[tuple[Plan, float]], last_makes_keys: bool = False) -> LatencyModel:
    """Fit the model to timed Plans, at least four of them.

    `last_makes_keys`: the last attention makes keys and values of all tokens, though it computes one.

    >>> latency = fit(anatomy, [(plan, profile.cpu_ms) for plan, profile in timed])
    """
    if len(measured) < 4:
        raise ValueError(f"a latency model needs at least four sample configurations, not {len(measured)}")
    units = _units(anatomy)
    lacking = any(len(plan.removed) > len(Plan.dense(anatomy).removed) for plan, _ in measured)
    last_head = (KEYS_AND_VALUES if last_makes_keys else 0.0) if anatomy.reads_token else None
    features = np.array([[1.0, *_counted(plan, units, last_head)] for plan, _ in measured])[:, : 5 if lacking else 3]
    times = np.array([ms for _, ms in measured])
    fixed, per_head, per_neuron, *there = _solve(features, times)
    errors = []
    for n in range(len(measured)):
        others = np.arange(len(measured)) != n
        guess = float(features[n] @ _solve(features[others], times[others]))
        errors.append(abs(guess / times[n] - 1))
    return LatencyModel(
        fixed_ms=float(fixed),
        head_ms=tuple(float(per_head * unit) for unit in units[0]),
        neuron_ms=tuple(float(per_neuron * unit) for unit in units[1]),
        attention_ms=tuple(float(there[0] * unit) for unit in units[2]) if lacking else (),
        mlp_ms=tuple(float(there[1] * unit) for unit in units[3]) if lacking else (),
        last_head=last_head,
        nets=len(measured),
        mean_error=float(np.mean(errors)),
        most_error=float(np.max(errors)),
    )


def _units(anatomy: Anatomy) -> list[list[float]]:
    """Return the weights of a head, a neuron, an attention and an MLP of each block, relative to the first block's."""
    each = anatomy.structure_flops()
    found = [[flops[kind] / each[0][kind] for flops in each] for kind in (0, 1)]
    return [*found, *[[1.0] * len(anatomy.blocks)] * 2]


def _solve(features: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Solve least squares of the relative errors, without negative costs."""
    used = list(range(features.shape[1]))
    while True:
        weighted = features[:, used] / times[:, None]
        found = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            solution = np.zeros(features.shape[1])
            solution[used] = np.maximum(found, 0)
            return solution
        used.pop(int(np.argmin(found)))
