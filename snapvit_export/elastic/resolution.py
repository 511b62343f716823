"""The tensors of a model that depend on the resolution of its images, at that of a Plan. Light: numpy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..errors import SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.positions import resample
from .format import Wiring

Tensors = dict[str, npt.NDArray[np.float32]]


def at_resolution(
    dense: Mapping[str, npt.NDArray[np.float32]], anatomy: Anatomy, wiring: Wiring, plan: Plan
) -> Tensors:
    """Return positions and rotary tables, by canonical name, of a Plan with a grid of its own; otherwise nothing."""
    if plan.grid is None or plan.grid == anatomy.grid:
        return {}
    found: Tensors = {}
    if anatomy.positions:
        found["positions"] = resample(dense["positions"], anatomy.grid, plan.grid)
    if anatomy.rope != "none":
        if wiring.rotary is UNSET:
            height, width = anatomy.image
            raise SnapvitError(
                f"how its rotary tables are made is not known, so this model takes images of {height} x {width} alone. "
                "Pack it again if the folder is an old one"
            )
        tables = wiring.rotary.tables(plan.grid, anatomy.blocks[0].head_dim, wiring.rotate_half)
        found["rope.sin"], found["rope.cos"] = tables
    return found
