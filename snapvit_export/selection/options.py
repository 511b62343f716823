"""What a selection may do: the levers, and what each of them allows here. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..allocation.levers import PUBLISHED, Lever
from ..allocation.tokens import DEFAULT, SCHEDULES, Schedule
from ..family.manifest import Prefer
from ..target import Precision
from .space import Grid


@dataclass(frozen=True)
class Options:
    """The levers of a selection, and the values that they may take."""

    levers: tuple[Lever, ...] = PUBLISHED
    precisions: tuple[Precision, ...] = ()  # beside the family's own
    grids: Sequence[Grid] = (None,)
    schedule: Schedule = SCHEDULES[DEFAULT]  # how tokens are merged
    prefer: Prefer = "fidelity"
    strict: bool = False  # True: refuse what may fit but does not surely
