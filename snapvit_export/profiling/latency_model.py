"""A latency model, linear in heads and neurons, to propose Plans with; reported latencies are measured. Light.

    latency = fixed + sum over blocks of (heads x per head + neurons x per neuron)
                    + sum over blocks of (per attention, if it has any head) + (per MLP, if it has any neuron)

Three numbers, or five, fitted to a few sample configurations that were timed side by side. The constant cost of an
attention or an MLP (its norm, its calls, its addition to the stream) shows only in samples that lack some, and best in
narrow ones: without such samples it is a part of `fixed`. Blocks of other shapes count by their FLOPs. Where only the
class token is read, blocks compute one token from the last attention on: their neurons are nearly free, and so are the
heads of that attention but for what it makes of all tokens: keys and values, or all that goes before its proj.

Where some of the samples have fewer tokens, six more numbers say how all of these go with tokens, and what a merge
costs (`token_costs`). At any given tokens the model is linear in heads and neurons still, as the allocation needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ..allocation.costs import Costs, CostsByLast, linear_costs
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, NotNegative, Ratio, Value
from .nonnegative import nonnegative_least_squares
from .token_costs import TokenCosts, merge_shares

KEYS_AND_VALUES = 0.5  # of a head's work
ALL_BUT_PROJ = 0.75  # queries too
THERE = 0.5  # of an attention's constant cost, where it computes one token: its norm runs over all
# The numbers of a fit, each in milliseconds: always, where samples lack sub-layers, and where some have fewer tokens.
WIDTH = ("fixed", "head", "neuron")
DEPTH = ("attention", "mlp")
TOKENS = ("weights", "pair", "token", "patch", "merge", "merge stream")


class LatencyModel(Value, frozen=True, kw_only=True):
    """Milliseconds of a Plan on one target, and the error on configurations that the fit did not see."""

    fixed_ms: NotNegative
    head_ms: tuple[NotNegative, ...]  # of one head, by block
    neuron_ms: tuple[NotNegative, ...]
    attention_ms: tuple[
        NotNegative, ...
    ] = ()  # constant cost of an attention, by block; empty: unknown, so in `fixed_ms`
    mlp_ms: tuple[NotNegative, ...] = ()
    last_head: Ratio | None = None  # share of a head's cost in the last attention; None: all tokens are read to the end
    tokens: TokenCosts | None = None  # None: fitted to samples with all tokens, so it tells nothing of others
    nets: Count  # sample configurations that it was fitted to
    mean_error: NotNegative  # relative: on held-out configurations where tokens count, else each by a fit without it
    most_error: NotNegative

    def __post_init__(self) -> None:
        of_tokens = () if self.tokens is None else self.tokens.by_block
        blocks = {len(costs) for costs in (self.head_ms, self.neuron_ms, *of_tokens)}
        there = {len(costs) for costs in (self.attention_ms, self.mlp_ms)}
        if blocks == {0} or len(blocks) > 1 or len(there) > 1 or not there <= {0, *blocks}:
            raise ValueError("the costs of a latency model are not of the same blocks")

    @property
    def is_sound(self) -> bool:
        """True if both kinds cost something: noise can hide that, and then nothing of the kind would be cut."""
        return max(self.head_ms) > 0 and max(self.neuron_ms) > 0

    def costs(self, anatomy: Anatomy, plan: Plan | None = None) -> Costs | CostsByLast:
        """Return the costs of heads and neurons as the allocation takes them.

        `plan`: one whose merges and grid are taken; without it the model's own. Its merges need the attentions that
        they are in, so a merge costs what it costs for as long as that attention is there.
        """
        fixed_ms, each = self._with_tokens_of(plan or Plan.dense(anatomy))
        if self.last_head is None:
            return _summed(anatomy, fixed_ms, each)
        cases = [_shortened(each, last, self.last_head) for last in range(len(anatomy.blocks))]
        return CostsByLast(tuple(_summed(anatomy, fixed_ms, case) for case in cases))

    def predict_ms(self, plan: Plan) -> float:
        """Return the predicted milliseconds of a Plan."""
        fixed_ms, each = self._with_tokens_of(plan)
        return fixed_ms + sum(_counted(plan, each, self.last_head))

    def _with_tokens_of(self, plan: Plan) -> tuple[float, Sequence[Sequence[float]]]:
        """Return the fixed part, and the costs of a head, a neuron, an attention and an MLP by block."""
        own = [self.head_ms, self.neuron_ms, self.attention_ms, self.mlp_ms]
        if self.tokens is not None:
            return self.tokens.fixed(self.fixed_ms, plan), self.tokens.each(own, plan)
        if plan.changes_tokens:
            raise ValueError("this latency model was fitted to samples with all tokens: it tells nothing of others")
        return self.fixed_ms, own


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


def fit(
    anatomy: Anatomy,
    measured: Sequence[tuple[Plan, float]],
    last_head: float = 0.0,
    held_out: Sequence[tuple[Plan, float]] = (),
) -> LatencyModel:
    """Fit the model to timed Plans (`sample_plans`), at least four of them.

    `last_head`: the share of a head's work that the last attention does for all tokens, though only one is read: none,
    `KEYS_AND_VALUES`, or `ALL_BUT_PROJ`, as the graph has it. `held_out`: timed Plans that are not fitted and tell the
    error instead; without any, each sample is predicted by a fit without it.

    >>> latency = fit(anatomy, [(plan, profile.cpu_ms) for plan, profile in timed])
    """
    if len(measured) < 4:
        raise ValueError(f"a latency model needs at least four sample configurations, not {len(measured)}")
    plans, times = [plan for plan, _ in measured], np.array([ms for _, ms in measured])
    share = last_head if anatomy.reads_token else None
    names = list(WIDTH)
    if any(len(plan.removed) > len(Plan.dense(anatomy).removed) for plan in plans):
        names += DEPTH
    if any(plan.changes_tokens for plan in plans):
        names += TOKENS
    # The model is linear in its numbers: what each of them adds to a latency is the model with that number alone.
    alone = [_model(anatomy, {name: float(name == one) for name in names}, share) for one in names]
    features = np.array([[model.predict_ms(plan) for model in alone] for plan in plans])
    found = _model(anatomy, dict(zip(names, map(float, _solve(features, times)))), share)
    errors = [abs(found.predict_ms(plan) / ms - 1) for plan, ms in held_out] or _without_each(features, times)
    mean, most = float(np.mean(errors)), float(np.max(errors))
    return msgspec.structs.replace(found, nets=len(plans), mean_error=mean, most_error=most)


def _without_each(features: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> list[float]:
    """Return the relative error of each configuration by a fit without it."""
    errors = []
    for n in range(len(times)):
        others = np.arange(len(times)) != n
        guess = float(features[n] @ _solve(features[others], times[others]))
        errors.append(abs(guess / times[n] - 1))
    return errors


def _model(anatomy: Anatomy, numbers: Mapping[str, float], last_head: float | None) -> LatencyModel:
    """Return the model with these numbers, those of a head and a neuron being of the first block."""
    heads, neurons = _units(anatomy)
    blocks = range(len(anatomy.blocks))
    per_token = numbers.get("token", 0.0) * anatomy.tokens
    there = [(numbers.get(name, 0.0) + per_token,) * len(blocks) for name in DEPTH]
    e, norm, weights = anatomy.embed_dim, anatomy.norm, numbers.get("weights", 0.0)
    first = anatomy.blocks[0].params_per_head(e, norm)
    read = [
        [weights * block.params_per_head(e, norm) / first for block in anatomy.blocks],
        [weights * block.params_per_neuron(e, norm) / first for block in anatomy.blocks],
    ]
    tokens = None
    if "pair" in numbers:
        matching, sums = merge_shares(anatomy)
        tokens = TokenCosts(
            prefix=anatomy.prefix,
            patches=anatomy.patches,
            head_weight_ms=tuple(read[0]),
            neuron_weight_ms=tuple(read[1]),
            pair_ms=tuple(numbers["pair"] * heads[i] for i in blocks),
            token_ms=numbers["token"],
            patch_ms=numbers["patch"],
            merge_ms=numbers["merge"],
            merge_stream_ms=numbers["merge stream"],
            merge_key_ms=tuple(numbers["merge stream"] * block.head_dim / e for block in anatomy.blocks),
            match_ms=tuple(numbers["head"] * matching[i] for i in blocks),
            sum_ms=numbers["head"] * sums,
        )
    known = "attention" in numbers or tokens is not None
    return LatencyModel(
        fixed_ms=numbers["fixed"] + numbers.get("patch", 0.0) * anatomy.patches,
        head_ms=tuple((numbers["head"] + numbers.get("pair", 0.0)) * heads[i] + read[0][i] for i in blocks),
        neuron_ms=tuple(numbers["neuron"] * neurons[i] + read[1][i] for i in blocks),
        attention_ms=there[0] if known else (),
        mlp_ms=there[1] if known else (),
        last_head=last_head,
        tokens=tokens,
        nets=0,
        mean_error=0.0,
        most_error=0.0,
    )


def _units(anatomy: Anatomy) -> list[list[float]]:
    """Return the weights of a head and of a neuron of each block, relative to the first block's, all tokens there."""
    each = anatomy.structure_flops(Plan.dense(anatomy).with_tokens())
    return [[flops[kind] / each[0][kind] for flops in each] for kind in (0, 1)]


def _solve(features: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Solve least squares of the relative errors, without negative costs."""
    return nonnegative_least_squares(features / times[:, None], np.ones(len(times)))
