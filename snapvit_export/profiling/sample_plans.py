"""Sample configurations: the few Plans that a latency model is fitted to, apart enough to tell its numbers. Light."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ..allocation.tokens import merging_blocks
from ..model.anatomy import Anatomy
from ..model.plan import Plan

# Shares of heads and of neurons: apart from each other, so that both slopes show.
SHARES = ((1, 1), (1, 0.5), (0.5, 1), (0.5, 0.5), (0.75, 0.25), (0.2, 0.1))
PARTS = ((1, 0.1), (0.2, 1))  # nearly all attention, nearly all MLP
NARROW = 0.05  # of the neurons: as narrow as an MLP becomes


def sample_plans(anatomy: Anatomy, removable: bool = False, tokens: bool = False) -> list[Plan]:
    """Return sample configurations for a fit, the dense one first.

    `removable`: some lack sub-layers, if possible. `tokens`: some merge tokens, take smaller images, or both.
    """
    found = dict.fromkeys(_with_shares(anatomy, *shares) for shares in SHARES)
    if removable:
        found |= dict.fromkeys(_lacking(anatomy))
    if tokens:
        found |= dict.fromkeys(_with_fewer_tokens(anatomy))
    return list(found)


def with_least_heads(anatomy: Anatomy, plans: Sequence[Plan], least: int) -> list[Plan]:
    """Return the Plans with at least so many heads in every attention, as far as the model has them.

    A device that computes fewer heads in another way would be described by samples of what is never made for it.
    """
    more = (tuple(kept and min(have, max(kept, least)) for kept, have in zip(p.heads, anatomy.heads)) for p in plans)
    return list(dict.fromkeys(msgspec.structs.replace(plan, heads=heads) for plan, heads in zip(plans, more)))


def held_out_plans(anatomy: Anatomy) -> list[Plan]:
    """Return configurations to try a fit with tokens on, in the middle of what is asked for.

    Samples at the ends are needed one and all, so a fit without one of them tells nothing of how good the whole is.
    """
    most, some, few = (_with_shares(anatomy, *shares) for shares in ((0.9, 0.7), (0.7, 0.8), (0.6, 0.5)))
    smaller = _grid(anatomy, 3 / 4)
    return [
        _merging(anatomy, most, 0.4),
        some.with_tokens(grid=smaller),
        _merging(anatomy, some.with_tokens(grid=smaller), 0.5, every=2),
        _merging(anatomy, few, 0.6, every=3),
    ]


def _with_shares(anatomy: Anatomy, of_heads: float, of_neurons: float) -> Plan:
    return Plan(
        heads=tuple(min(n, max(1, round(of_heads * n))) for n in anatomy.heads),
        neurons=tuple(min(n, max(1, round(of_neurons * n))) for n in anatomy.neurons),
        merged=anatomy.merges,
    )


def _lacking(anatomy: Anatomy) -> list[Plan]:
    """Plans that lack sub-layers, which show what one costs for being there."""
    last = Plan.dense(anatomy).last_attention
    if len(anatomy.blocks) <= 2 or last < 0:
        return []
    least = _with_shares(anatomy, 0, 0)
    none = (0,) * len(anatomy.blocks)
    one = (*none[:last], least.heads[last], *none[last + 1 :])
    half = tuple(n if i % 2 or i == last else 0 for i, n in enumerate(anatomy.heads))
    return [
        Plan(heads=one, neurons=none),  # as little as can be
        Plan(heads=least.heads, neurons=none),
        Plan(heads=one, neurons=_with_shares(anatomy, 0, NARROW).neurons),
        Plan(heads=half, neurons=_with_shares(anatomy, 0, 0.25).neurons),
    ]


def _with_fewer_tokens(anatomy: Anatomy) -> list[Plan]:
    """Plans that take smaller images or merge, at the ends of what there is: there every number shows.

    Heads are told by Plans of few neurons, neurons by Plans of few heads, and what neither has by Plans of few of both.
    Smaller images tell what goes with tokens from what goes with their pairs, and from weights. A merge of one token in
    every block is all cost and no gain; merges in few blocks leave the embedding its patches. The last two are what is
    usually asked for.
    """
    narrow, wide = _with_shares(anatomy, *SHARES[-1]), _with_shares(anatomy, *SHARES[0])
    attention, mlp = (_with_shares(anatomy, *shares).with_tokens(grid=_grid(anatomy, 1 / 4)) for shares in PARTS)
    return [
        narrow.with_tokens(grid=_grid(anatomy, 1 / 4)),
        wide.with_tokens(grid=_grid(anatomy, 1 / 4)),
        _merging(anatomy, narrow, 0),
        _merging(anatomy, narrow, 0.7, every=3),
        _merging(anatomy, attention, 0.7),
        _merging(anatomy, mlp, 0.7, every=3),
        wide.with_tokens(grid=_grid(anatomy, 1 / 2)),
        _merging(anatomy, wide, 0.5),
    ]


def _grid(anatomy: Anatomy, share: float) -> tuple[int, int]:
    """Return a grid with about this share of the patches."""
    rows, columns = (max(1, round(side * math.sqrt(share))) for side in anatomy.grid)
    return rows, columns


def _merging(anatomy: Anatomy, plan: Plan, share: float, every: int = 1) -> Plan:
    """Return a Plan with equal merges of this share of its patches in all, in every so many blocks; at least of one."""
    plan = plan.with_tokens(grid=plan.grid)
    blocks = merging_blocks(anatomy, plan)[::every]
    left = anatomy.patches_of(plan)
    each = max(1, round(share * left / max(1, len(blocks))))
    merged = [0] * len(plan.heads)
    for i in blocks:
        merged[i] = min(each, left // 2)
        left -= merged[i]
    return plan.with_tokens(merged, plan.grid)
