"""What each attention and each MLP of a model does to the stream, and what its loss does to the answer. Light.

A Ranking keeps these in its provenance under `sublayers`: files from before simply do not have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..errors import FileFormatError
from ..storage.json import Count, Value
from .plan import Part

KEY = "sublayers"
Factor = Annotated[float, msgspec.Meta(ge=0)]


class SubLayer(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One sub-layer f on the stream x."""

    block: Count
    part: Part
    divergence: float  # E |f(x)| / E |x + f(x)|: how much of the stream after it is its own
    turned: float  # E [1 - cos(x, x + f(x))]: how far it turns the stream
    damage: float  # how far the model's answers move when the mean of f takes the place of f; labels have no part in it
    onward: float | None = None  # the same for this attention and all later ones; where only the class token is read
    weight: Factor = 1.0  # that a search gave to its damage curve; its damage then counts so much too

    def weighted(self, by: float) -> SubLayer:
        """The same, as a search weights it."""
        return msgspec.structs.replace(self, weight=self.weight * by)


def read_sublayers(provenance: Mapping[str, Any], depth: int) -> tuple[SubLayer, ...] | None:
    """The sub-layers of a ranking in their order, two of each block; None if it does not know them."""
    if KEY not in provenance:
        return None
    try:
        found = msgspec.convert(provenance[KEY], tuple[SubLayer, ...])
    except msgspec.ValidationError as error:
        raise FileFormatError(f"the ranking's {KEY} are damaged: {error}") from error
    if [(s.block, s.part) for s in found] != [(i, part) for i in range(depth) for part in ("attention", "mlp")]:
        raise FileFormatError(f"the ranking's {KEY} are damaged: not an attention and an MLP of each of {depth} blocks")
    return found
