"""Which levers a choice on a device may use, and what each of them may do there. Light.

New variants are cut from an Elastic folder. Heads, neurons and sub-layers always may be: the planner itself says what
they cost. Tokens and precision only where something tells what a candidate loses.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..allocation.levers import Lever, in_order
from ..allocation.planner import Planner
from ..elastic.folder import Elastic
from ..errors import UsageError
from ..family.manifest import Prefer
from ..progress import Progress
from ..target import Precision, Target, faster_than
from .elastic_builder import WITHOUT_IMAGES
from .measure_table import can_resize
from .options import Options
from .space import grids_for


def usable_levers(
    packed: Elastic, target: Target, asked: Sequence[Lever] | None, has_images: bool, progress: Progress
) -> tuple[Lever, ...]:
    """Return the levers that new variants may use: those that were asked for, or all that are possible here."""
    possible: list[Lever] = ["width"]
    if not packed.ranking.protection.sublayers:
        possible.append("depth")
    measurable = has_images or packed.fidelity is not None
    if measurable:
        possible.append("tokens")
        if faster_here(target):
            possible.append("precision")
    if asked is None:
        if not measurable:
            progress.note(
                f"{packed.folder} has no fidelity table, so only heads, neurons and sub-layers are cut. "
                "Give --data FOLDER with images, or pack the model again"
            )
        return in_order(possible)
    for lever in in_order(asked):
        if lever not in possible:
            raise UsageError(f"--levers {lever}: {_why_not(lever, measurable, target)}")
    return in_order(asked)


def _why_not(lever: Lever, measurable: bool, target: Target) -> str:
    if lever == "depth":
        return "the packed ranking keeps all attentions and MLPs. Leave it out, or rank with --depth"
    if lever == "precision" and not faster_here(target):
        return f"no other precision can be made here from {target.precision} for {target.runtime}. Leave it out"
    assert not measurable
    return "the Elastic folder has no fidelity table. Give --data FOLDER with images, or pack the model again"


def faster_here(target: Target) -> tuple[Precision, ...]:
    """Return the precisions that new variants may have beside the family's own."""
    return tuple(p for p in faster_than(target.precision, target.runtime) if p in WITHOUT_IMAGES)


def planner_for(packed: Elastic, levers: Sequence[Lever]) -> Planner:
    """Return the Planner of Plans that use some levers: what a lever would cut is protected without it."""
    own = packed.planner
    sublayers = own.protection.sublayers or "depth" not in levers
    protection = msgspec.structs.replace(own.protection, sublayers=sublayers)
    if "width" not in levers:  # what is not removed whole stays whole
        protection = protection.of_whole_parts
    return Planner(packed.ranking, packed.anatomy, protection, own.multiple, own.corrected)


def options_for(packed: Elastic, target: Target, levers: tuple[Lever, ...], prefer: Prefer, by_table: bool) -> Options:
    """Return what a selection of new variants may do with each lever."""
    grids = grids_for(packed.anatomy) if can_resize(packed) else [None]
    if by_table and packed.fidelity is not None:  # none that is far from all that were measured
        least = min(rows * columns for rows, columns in packed.fidelity.grids)
        grids = [grid for grid in grids if grid is None or grid[0] * grid[1] >= least]
    return Options(
        levers=levers,
        precisions=faster_here(target) if "precision" in levers else (),
        grids=grids,
        schedule=packed.merging,
        prefer=prefer,
    )
