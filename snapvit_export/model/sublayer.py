"""Measured effect of each sub-layer on the residual stream, and of its removal on the output. Light.

A sub-layer is the attention or the MLP of a block. A Ranking keeps these values in its provenance under `sublayers`;
older files do not have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import FileFormatError
from ..storage.json import Count, Finite, NotNegative, Value
from .plan import Part

KEY = "sublayers"
IMAGES = 64  # to measure them on: enough to distinguish the damage of sub-layers


class SubLayer(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One sub-layer f on the residual stream x."""

    block: Count
    part: Part
    divergence: Finite  # E |f(x)| / E |x + f(x)|: its share of the stream after it
    turned: Finite  # E [1 - cos(x, x + f(x))]: by how much it rotates the stream
    damage: Finite  # output divergence of the model with the mean of f in the place of f; no labels needed
    onward: Finite | None = None  # the same for this attention and all later ones; only if the class token is read
    weight: NotNegative = 1.0  # of its damage curve, given by a search; its damage counts by the same factor

    def weighted(self, by: float) -> SubLayer:
        """Return the same sub-layer with its weight times `by`."""
        return msgspec.structs.replace(self, weight=self.weight * by)


def read_sublayers(provenance: Mapping[str, Any], depth: int) -> tuple[SubLayer, ...] | None:
    """Return the sub-layers of a ranking in their order, two of each block; None if the ranking has none."""
    if KEY not in provenance:
        return None
    try:
        found = msgspec.convert(provenance[KEY], tuple[SubLayer, ...])
    except msgspec.ValidationError as error:
        raise FileFormatError(f"the ranking's {KEY} are damaged: {error}") from error
    if [(s.block, s.part) for s in found] != [(i, part) for i in range(depth) for part in ("attention", "mlp")]:
        raise FileFormatError(f"the ranking's {KEY} are damaged: not an attention and an MLP of each of {depth} blocks")
    return found
