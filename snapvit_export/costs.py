"""Costs: what heads and neurons cost in FLOPs, parameters or measured time, added up over the blocks. Light: numpy.

A cost is a fixed part plus one number per sub-layer, read from a table of its width. So the cost of a Plan is a sum,
and `allocate` can minimise the damage under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import SnapvitError

if TYPE_CHECKING:
    from .anatomy import Anatomy
    from .plan import Plan

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Costs:
    """The cost of every head count and every width of each block; tables never fall, and may have steps.

    >>> Costs(heads=[[0, 1.1, 2.3]], neurons=[[0, 0.5, 0.5, 0.9]], fixed=3.0).of(plan)
    """

    heads: tuple[Table, ...]  # per block (H+1,): the attention with 0, 1, ... H heads
    neurons: tuple[Table, ...]  # per block (n+1,): the MLP with 0, 1, ... n neurons
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for kind in ("heads", "neurons"):
            tables = tuple(np.array(table, np.float64) for table in getattr(self, kind))
            for i, table in enumerate(tables):
                if table.ndim != 1 or len(table) < 2 or not np.isfinite(table).all() or (np.diff(table) < 0).any():
                    raise SnapvitError(f"block {i}: the costs of {kind} must be finite numbers that never fall")
            object.__setattr__(self, kind, tables)
        if not self.heads or len(self.heads) != len(self.neurons) or not np.isfinite(self.fixed):
            raise SnapvitError("costs need tables of heads and of neurons for the same blocks, and a finite fixed part")

    def of(self, plan: Plan) -> float:
        """The cost of a Plan, exact where all costs are whole numbers."""
        attention = sum(float(table[k]) for table, k in zip(self.heads, plan.heads))
        return self.fixed + attention + sum(float(table[n]) for table, n in zip(self.neurons, plan.neurons))


def linear_costs(
    anatomy: Anatomy, per_head: float | Sequence[float], per_neuron: float | Sequence[float], fixed: float = 0.0
) -> Costs:
    """So much for each head and for each neuron, everywhere or block by block: as a latency model is fitted."""
    depth = len(anatomy.blocks)
    each_head, each_neuron = np.broadcast_to(per_head, depth), np.broadcast_to(per_neuron, depth)
    heads = tuple(np.arange(n + 1) * each for n, each in zip(anatomy.heads, each_head))
    neurons = tuple(np.arange(n + 1) * each for n, each in zip(anatomy.neurons, each_neuron))
    return Costs(heads, neurons, fixed)


def flops_costs(anatomy: Anatomy) -> Costs:
    """FLOPs of the blocks: `Anatomy.block_flops` of any Plan."""
    heads, neurons = zip(*(anatomy.flops_per_structure(block) for block in anatomy.blocks))
    return linear_costs(anatomy, heads, neurons)


def prunable_costs(anatomy: Anatomy) -> Costs:
    """Parameters of heads and neurons: `Anatomy.prunable_params` of any Plan, what sparsity is a fraction of."""
    e, norm = anatomy.embed_dim, anatomy.norm
    heads = [block.params_per_head(e, norm) for block in anatomy.blocks]
    return linear_costs(anatomy, heads, [block.params_per_neuron(e, norm) for block in anatomy.blocks])


def params_costs(anatomy: Anatomy) -> Costs:
    """Parameters of the whole model: `Anatomy.params` of any Plan."""
    prunable = prunable_costs(anatomy)
    return Costs(prunable.heads, prunable.neurons, anatomy.params() - anatomy.prunable_params())
