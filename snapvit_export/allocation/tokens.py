"""Schedules of token merging: how many tokens each block merges to leave a fraction, or to save FLOPs. Light.

Tokens are matched by the keys of an attention, so a block without one merges nothing and the others merge more. Where
only the class token is read, nothing after the last attention depends on patches: that block merges nothing either.

A schedule is a shape: the blocks that merge, and how the counts, or the shares of the tokens that are left, go from the
first of them to the last. One number scales it. Which shape loses least is measured for each model, without labels, by
`schedule_choice`; docs/method.md has how they compare. Where nothing was measured, `DEFAULT` is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from ..errors import SnapvitError, UsageError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, Size, Value

HALVINGS = 40  # of the scale: finer than one token of a million


class Schedule(Value, frozen=True, kw_only=True):
    """The shape of a schedule.

    >>> SCHEDULES["every other, rising"].counts(anatomy, plan, fraction=0.5)
    """

    name: str
    first: Count = 0  # of the blocks that may merge, the first that does
    step: Size = 1  # and every so many after it
    of: Literal["counts", "shares"] = "shares"  # what is given: tokens, or the share of the tokens that are left
    growth: float = 0.0  # of counts or shares, from the first block to the last: by e to this power
    falls: bool = False  # instead, linearly to nothing

    def counts(self, anatomy: Anatomy, plan: Plan, fraction: float) -> tuple[int, ...]:
        """Return the tokens that each block of a Plan merges to leave this fraction of its patch tokens in the end.

        Blocks that the shape leaves out merge too if the others cannot merge enough.
        """
        check_tokens(fraction)
        patches = anatomy.patches_of(plan)
        wanted = max(1, round(fraction * patches))
        blocks = merging_blocks(anatomy, plan)
        for some in (blocks[self.first :: self.step], blocks):
            merged = self._scaled(len(plan.heads), some, patches, lambda merged: patches - sum(merged) <= wanted)
            if merged is not None:
                return _to_leave(wanted, merged, patches)
        least = -(-patches // 2 ** len(blocks))  # each block halves them at most
        raise SnapvitError(
            f"token fraction {fraction:g} is out of reach: {len(blocks)} blocks leave at least {least / patches:.4f}"
        )

    def within(self, anatomy: Anatomy, plan: Plan, flops: float) -> tuple[int, ...] | None:
        """Return the least merging with which the blocks need this fraction of the dense FLOPs; None: out of reach."""
        found = self.least(anatomy, plan, lambda merging: merging.flops_ratio(anatomy) <= flops)
        return None if found is None else found.merged

    def least(self, anatomy: Anatomy, plan: Plan, fits: Callable[[Plan], bool]) -> Plan | None:
        """Return a Plan's heads, neurons and grid with the least merging that fits; None: out of reach."""
        blocks = merging_blocks(anatomy, plan)[self.first :: self.step]
        merged = self._scaled(
            len(plan.heads), blocks, anatomy.patches_of(plan), lambda merged: fits(plan.with_tokens(merged, plan.grid))
        )
        return None if merged is None else plan.with_tokens(merged, plan.grid)

    def most(self, anatomy: Anatomy, plan: Plan) -> Plan:
        """Return a Plan's heads, neurons and grid with as much merging as the shape allows."""
        blocks = merging_blocks(anatomy, plan)[self.first :: self.step]
        patches = anatomy.patches_of(plan)
        return plan.with_tokens(self._at(float(patches), len(plan.heads), blocks, patches), plan.grid)

    def _scaled(
        self, depth: int, blocks: list[int], patches: int, enough: Callable[[list[int]], bool]
    ) -> list[int] | None:
        """Return the smallest scale of the shape that is enough."""
        low, high = 0.0, float(patches)
        if not enough(self._at(high, depth, blocks, patches)):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if enough(self._at(middle, depth, blocks, patches)) else (middle, high)
        return self._at(high, depth, blocks, patches)

    def _at(self, scale: float, depth: int, blocks: list[int], patches: int) -> list[int]:
        merged, left = [0] * depth, patches
        for n, i in enumerate(blocks):
            along = n / max(1, len(blocks) - 1)
            weight = (len(blocks) - n) / len(blocks) if self.falls else math.exp(self.growth * along)
            wanted = scale * weight * (left / patches if self.of == "shares" else 1.0)
            merged[i] = left // 2 if wanted >= left // 2 else int(wanted + 0.5)
            left -= merged[i]
        return merged


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="constant", of="counts"),
        Schedule(name="falling", of="counts", falls=True),
        Schedule(name="equal shares"),
        Schedule(name="every other", first=1, step=2),
        Schedule(name="every other, rising", first=1, step=2, growth=1.0),
        Schedule(name="every other, rising twice", first=1, step=2, growth=2.0),
        Schedule(name="every third", of="counts", first=3, step=3),
    )
}
DEFAULT = "every other, rising"


def check_tokens(fraction: float) -> None:
    """Refuse a number that is not a fraction of patch tokens to leave."""
    if not 0 < fraction <= 1:
        raise UsageError(f"token fraction {fraction:g} is not above 0 and at most 1, such as 0.5")


def merging_blocks(anatomy: Anatomy, plan: Plan) -> list[int]:
    """Return the blocks of a Plan in which a merge makes the model cheaper."""
    last = plan.last_attention if anatomy.reads_token else len(plan.heads)
    return [i for i, heads in enumerate(plan.heads) if heads and i < last]


def _to_leave(wanted: int, merged: list[int], patches: int) -> tuple[int, ...]:
    """Take back, from the last merging block on, what is merged beyond the wanted number: scales step over some."""
    over = wanted - (patches - sum(merged))
    for i in reversed(range(len(merged))):
        back = min(over, merged[i])
        merged[i], over = merged[i] - back, over - back
    return tuple(merged)
