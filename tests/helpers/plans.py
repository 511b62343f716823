"""Anatomies without a model, and Plans that differ from block to block."""

from __future__ import annotations

import numpy as np

from snapvit_export.allocation.knapsack import Allocator
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Plan


def anatomy_of(heads: list[int], hidden: list[int]) -> Anatomy:
    """An anatomy of those heads and neurons per block."""
    blocks = tuple(Block(heads=h, head_dim=8, hidden=n) for h, n in zip(heads, hidden))
    return Anatomy(family="vit", embed_dim=32, blocks=blocks, image=(32, 32), patch=(8, 8), positions=17, classes=3)


def uneven_plan(anatomy: Anatomy) -> Plan:
    """Another width in every one of three blocks."""
    return Plan(heads=(1, 4, 3), neurons=(anatomy.neurons[0] // 2, 7, anatomy.neurons[2]))


def half_plan(anatomy: Anatomy) -> Plan:
    """Half of everything."""
    return Plan(heads=tuple(n // 2 for n in anatomy.heads), neurons=tuple(n // 2 for n in anatomy.neurons))


def plan_without(anatomy: Anatomy, attention: set[int], mlps: set[int]) -> Plan:
    """Whole sub-layers gone in those blocks, and half of the other neurons."""
    heads = tuple(0 if i in attention else n for i, n in enumerate(anatomy.heads))
    return Plan(heads=heads, neurons=tuple(0 if i in mlps else max(1, n // 2) for i, n in enumerate(anatomy.neurons)))


def along_line(allocator: Allocator, budget: float) -> Plan:
    """The densest Plan of the greedy line that costs at most `budget`: one of the answers that `within` looks at."""
    allocator._check_reach(budget)
    return allocator._plan(allocator._line_picks(budget))


def line(allocator: Allocator) -> list[Plan]:
    """The Plans of the greedy line from dense to the sparsest; each lacks one option that the one before has."""
    picks = np.zeros(len(allocator._options), np.int64)
    plans = [allocator._plan(picks)]
    for sublayer in allocator._steps:
        picks[sublayer] += 1
        plans.append(allocator._plan(picks))
    return plans[::-1]
