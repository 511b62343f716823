"""Writes variants of an export for torch too, so that timm (and `transformers`, where it can) loads them without us."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..family.layout import TORCH
from ..progress import Progress
from ..selection.candidates import BuiltVariant

if TYPE_CHECKING:
    from .prepared import PreparedModel


def save_torch(family: Path, prepared: PreparedModel, variants: Mapping[str, BuiltVariant], progress: Progress) -> None:
    """Write every variant, as it was cut and corrected, to a folder of its name; weights are those before int8."""
    from ..prune.build import ModuleCutter
    from ..prune.models.torch_folder import save_for_torch

    cutter = prepared.cutter
    assert isinstance(cutter, ModuleCutter)
    described = msgspec.structs.replace(cutter.model.description, labels=prepared.labels)
    for name, built in variants.items():
        progress.phase(f"writing {name} for torch")
        save_for_torch(cutter.cut(built.plan, built.kept).module, described, family / TORCH / name)
