"""What a ranking in rounds that recover says of them: size, and what was lost before and after training. Light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..storage.json import Count, NotNegative, Positive, Value
from .anatomy import Anatomy

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
MOST = 1000  # rounds


class Lost(Value, frozen=True, kw_only=True):
    """How near a model is to the dense one, on images that nothing was fitted to; None where outputs are no numbers."""

    divergence: NotNegative | None
    agreement: Share | None
    top1: Share | None  # None also where labels are not known


class RoundStep(msgspec.Struct, frozen=True, kw_only=True):
    """One round, of which the record in a ranking has more."""

    flops: Share
    gflops: Positive
    params: Count
    before: Lost  # its training
    after: Lost
    kept: bool


class RecoveredRounds(Value, frozen=True, kw_only=True):
    """All rounds, and the dense model before them."""

    dense: RoundStep
    steps: Annotated[tuple[RoundStep, ...], msgspec.Meta(min_length=1, max_length=MOST)]

    @staticmethod
    def of(provenance: Mapping[str, Any], anatomy: Anatomy | None) -> RecoveredRounds | None:
        """Return the rounds of a ranking; None if it was made otherwise, or what it says is of another form."""
        if anatomy is None or not {"before_rounds", "rounds"} <= set(provenance):
            return None
        try:
            whole = msgspec.convert(provenance["before_rounds"], Lost)
            steps = msgspec.convert(provenance["rounds"], tuple[RoundStep, ...])
        except msgspec.ValidationError:
            return None
        if not 0 < len(steps) <= MOST:
            return None
        dense = RoundStep(
            flops=1.0, gflops=anatomy.flops() / 1e9, params=anatomy.params(), before=whole, after=whole, kept=True
        )
        return RecoveredRounds(dense=dense, steps=steps)
