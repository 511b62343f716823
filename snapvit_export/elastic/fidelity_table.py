"""The fidelity of some Plans of a model, measured when it was packed, for devices that have no images. Light.

Three axes, each from the dense model on: grids of patches, widths and tokens left by merging. Every combination was
measured, with the corrected weights that a device gets, in fp32. `selection.table_meter` reads between them.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Literal

import msgspec

from ..storage.json import NotNegative, Ratio, Size, Some, Value


class MeasuredFidelity(Value, frozen=True, kw_only=True):
    """How near the answers of one Plan are to the dense model's; the words are those of `family.fidelity`."""

    divergence: NotNegative
    standard_error: NotNegative
    agreement: Ratio
    agreement_error: Annotated[float, msgspec.Meta(ge=0, le=2)]


class FidelityTable(Value, frozen=True, kw_only=True):
    """Measured Plans along three axes, and the dense model in int8."""

    by: Literal["predictions", "neighbours"]
    images: Some
    source: str  # of the images
    grids: tuple[tuple[Size, Size], ...]  # of patches, the model's own first
    widths: tuple[Ratio, ...]  # FLOPs of a Plan with all tokens, as a fraction of the dense model's: 1 first
    tokens: tuple[Ratio, ...]  # of the patch tokens, those that merging leaves: 1 first
    values: tuple[MeasuredFidelity, ...]  # of grids x widths x tokens, the last running fastest
    int8_dynamic: MeasuredFidelity  # of the dense model in that precision

    def __post_init__(self) -> None:
        patches = [rows * columns for rows, columns in self.grids]
        for name, axis in (("grids", patches), ("widths", self.widths), ("tokens", self.tokens)):
            if not axis or any(after >= before for before, after in pairwise(axis)):
                raise ValueError(f"{name} of a fidelity table must fall")
        if self.widths[0] != 1 or self.tokens[0] != 1:
            raise ValueError("a fidelity table begins with the dense model")
        if len(self.values) != prod(self.shape):
            raise ValueError(f"a fidelity table of {self.shape} has {len(self.values)} values")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Lengths of the axes."""
        return len(self.grids), len(self.widths), len(self.tokens)
