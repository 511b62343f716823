"""Schedules of token merging: how many tokens each block merges to leave a fraction of the patches. Light.

Tokens are matched by the keys of an attention, so a block without one merges nothing and the others merge more. Where
only the class token is read, nothing after the last attention depends on patches: that block merges nothing either.
"""

from __future__ import annotations

from ..errors import SnapvitError, UsageError
from ..model.anatomy import Anatomy
from ..model.plan import Plan


def check_tokens(fraction: float) -> None:
    """Refuse a number that is not a fraction of patch tokens to leave."""
    if not 0 < fraction <= 1:
        raise UsageError(f"token fraction {fraction:g} is not above 0 and at most 1, such as 0.5")


def merging_blocks(anatomy: Anatomy, plan: Plan) -> list[int]:
    """Return the blocks of a Plan in which a merge makes the model cheaper."""
    last = plan.last_attention if anatomy.reads_token else len(plan.heads)
    return [i for i, heads in enumerate(plan.heads) if heads and i < last]


def merge_schedule(anatomy: Anatomy, plan: Plan, fraction: float) -> tuple[int, ...]:
    """Return the tokens that each block of a Plan merges, so that this fraction of its patch tokens is left at the end.

    >>> merge_schedule(anatomy, Plan.dense(anatomy), 0.5)
    """
    check_tokens(fraction)
    patches, blocks = anatomy.patches_of(plan), merging_blocks(anatomy, plan)
    goal = max(1, round(fraction * patches))
    least = -(-patches // 2 ** len(blocks))  # each block halves them at most
    if goal < least:
        raise SnapvitError(
            f"token fraction {fraction:g} is out of reach: {len(blocks)} blocks leave at least {least / patches:.4f}"
        )
    merged = [0] * len(plan.heads)
    left = patches
    for after, i in zip(reversed(range(len(blocks))), blocks):
        share = -(-(left - goal) // (after + 1))  # rounded up: more is merged early
        merged[i] = min(left // 2, max(share, left - goal * 2**after))  # or as many as the blocks after it cannot
        left -= merged[i]
    return tuple(merged)
