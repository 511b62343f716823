"""Costs of heads and neurons in FLOPs, parameters or measured time, added up over the blocks. Light: numpy.

A cost is a fixed part plus one number per sub-layer, read from a table by its width. So the cost of a Plan is a sum,
and `knapsack` can minimise the damage under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..model.plan import Plan

if TYPE_CHECKING:
    from ..model.anatomy import Anatomy

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Costs:
    """The cost of every head count and every width of each block; tables never fall, and may have steps.

    >>> Costs(heads=[[0, 1.1, 2.3]], neurons=[[0, 0.5, 0.5, 0.9]], fixed=3.0).of(Plan(heads=(1,), neurons=(3,)))
    5.0
    """

    heads: tuple[Table, ...]  # per block (H+1,): the attention with 0, 1, ... H heads
    neurons: tuple[Table, ...]  # per block (n+1,): the MLP with 0, 1, ... n neurons
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for kind in ("heads", "neurons"):
            tables = tuple(np.array(table, np.float64) for table in getattr(self, kind))
            for i, table in enumerate(tables):
                if table.ndim != 1 or not len(table) or not np.isfinite(table).all() or (np.diff(table) < 0).any():
                    raise SnapvitError(f"block {i}: the costs of {kind} must be finite numbers that never fall")
            object.__setattr__(self, kind, tables)
        if not self.heads or len(self.heads) != len(self.neurons) or not np.isfinite(self.fixed):
            raise SnapvitError("costs need tables of heads and of neurons for the same blocks, and a finite fixed part")

    def of(self, plan: Plan) -> float:
        """Return the cost of a Plan, exact where all costs are whole numbers."""
        attention = sum(float(table[k]) for table, k in zip(self.heads, plan.heads))
        return self.fixed + attention + sum(float(table[n]) for table, n in zip(self.neurons, plan.neurons))


@dataclass(frozen=True, eq=False)
class CostsByLast:
    """Costs that depend on which attention is the last one: after it, only the tokens that are read are computed.

    What other blocks cost then depends on the Plan as a whole, so there is one table for each case.
    """

    cases: tuple[Costs, ...]  # by the block of the last attention

    def of(self, plan: Plan) -> float:
        """Return the cost of a Plan."""
        return self.cases[max(plan.last_attention, 0)].of(plan)


PerBlock = float | Sequence[float]  # the same everywhere, or block by block


def linear_costs(
    anatomy: Anatomy,
    per_head: PerBlock,
    per_neuron: PerBlock,
    fixed: float = 0.0,
    per_attention: PerBlock = 0.0,
    per_mlp: PerBlock = 0.0,
) -> Costs:
    """Return costs that are linear in heads and neurons, plus a constant for each attention and MLP that is present."""
    heads = _tables(anatomy.heads, per_head, per_attention)
    return Costs(heads, _tables(anatomy.neurons, per_neuron, per_mlp), fixed)


def _tables(sizes: Sequence[int], each: PerBlock, constant: PerBlock) -> tuple[Table, ...]:
    """Return the cost of 0, 1, ... all structures of every block: 0, or the constant plus the cost of each."""
    rows = zip(sizes, np.broadcast_to(each, len(sizes)), np.broadcast_to(constant, len(sizes)))
    return tuple(np.arange(n + 1) * one + np.where(np.arange(n + 1) > 0, there, 0) for n, one, there in rows)


def flops_costs(anatomy: Anatomy, tokens: Plan | None = None) -> Costs:
    """Return the FLOPs of the blocks: `Anatomy.block_flops` of any Plan with the tokens of this one."""
    heads, neurons = zip(*anatomy.structure_flops(tokens))
    return linear_costs(anatomy, heads, neurons)


def prunable_costs(anatomy: Anatomy, tokens: Plan | None = None) -> Costs:
    """Return the parameters of heads and neurons: `Anatomy.prunable_params` of any Plan, whatever its tokens."""
    e, norm = anatomy.embed_dim, anatomy.norm
    heads = [block.params_per_head(e, norm) for block in anatomy.blocks]
    return linear_costs(anatomy, heads, [block.params_per_neuron(e, norm) for block in anatomy.blocks])


def params_costs(anatomy: Anatomy, tokens: Plan | None = None) -> Costs:
    """Return the parameters of the whole model: `Anatomy.params` of any Plan with the grid of this one."""
    e, norm = anatomy.embed_dim, anatomy.norm
    attention = [block.params_of_attention(e, norm) for block in anatomy.blocks]
    mlp = [block.params_of_mlp(e, norm) for block in anatomy.blocks]
    heads = [block.params_per_head(e, norm) for block in anatomy.blocks]
    neurons = [block.params_per_neuron(e, norm) for block in anatomy.blocks]
    there = sum(a * (b.heads > 0) + m * (b.hidden > 0) for a, m, b in zip(attention, mlp, anatomy.blocks))
    whole = Plan.dense(anatomy).with_tokens(grid=tokens.grid if tokens else None)  # a smaller grid has fewer positions
    fixed = anatomy.params(whole) - anatomy.prunable_params() - there
    return linear_costs(anatomy, heads, neurons, fixed, attention, mlp)
