"""Which schedule of merging suits a model: the output divergence of each at equal FLOPs, without labels. Light.

Every schedule of `tokens` merges until the blocks need each of `LEVELS` of the dense FLOPs; the same images go through
all of them and through the dense model. Schedules that are far behind at the middle level are not measured at the
others. The winner has the least divergence, averaged over the levels by ratios, so that none of them decides alone. Of
schedules that the images cannot tell apart from it, within one standard error of the differences between them image by
image, the one that merges in the fewest blocks is taken: every merge costs time that FLOPs do not show.

Damages of single blocks do not add up: an allocation from them was behind the plain shapes (docs/method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..progress import Progress
from .tokens import DEFAULT, SCHEDULES, Schedule

LEVELS = (0.72, 0.6, 0.5)  # of the dense blocks' FLOPs: where merging alone is worth having
FIRST = 0.6  # the level that is measured first
FAR = 1.5  # times the least divergence there: no schedule was seen to make up for that at the other levels
IMAGES = 32
Floats = npt.NDArray[np.float64]
Diverged = Callable[[Sequence[int]], Floats]  # tokens merged in each block -> divergence of every image, (N,)


@dataclass(frozen=True)
class ScheduleDamage:
    """The divergence of one schedule, image by image, at every level."""

    schedule: Schedule
    merged: tuple[tuple[int, ...], ...]  # tokens merged in each block, by level
    divergence: Floats  # (levels, N)

    @property
    def damage(self) -> float:
        """The mean divergence, averaged over the levels by ratios."""
        return float(np.exp(np.log(np.maximum(self.divergence.mean(1), 1e-12)).mean()))

    @property
    def merges(self) -> int:
        """The number of blocks that merge."""
        return max(sum(count > 0 for count in merged) for merged in self.merged)


def measure(anatomy: Anatomy, diverged: Callable[[], Diverged], progress: Progress) -> list[ScheduleDamage]:
    """Return the damage of the schedules that reach all levels and are not far behind at the first, the least first.

    `diverged` is called once, and only if some schedule reaches them.
    """
    dense = Plan.dense(anatomy)
    within = {
        name: {level: schedule.within(anatomy, dense, level) for level in LEVELS}
        for name, schedule in SCHEDULES.items()
    }
    wanted = {
        name: {level: merged for level, merged in by_level.items() if merged is not None}
        for name, by_level in within.items()
        if None not in by_level.values()
    }
    if not wanted:
        return []
    of = diverged()

    def measured(names: Sequence[str], level: float) -> dict[str, Floats]:
        progress.phase(f"measuring schedules of merging at {level:g} of the FLOPs", len(names))
        rows = {}
        for name in names:
            rows[name] = of(wanted[name][level])
            progress.advance()
        return rows

    found = {FIRST: measured(list(wanted), FIRST)}
    near = _near(found[FIRST])
    found |= {level: measured(near, level) for level in LEVELS if level != FIRST}
    damages = [
        ScheduleDamage(SCHEDULES[n], tuple(wanted[n].values()), np.array([found[level][n] for level in LEVELS]))
        for n in near
    ]
    return sorted(damages, key=lambda each: each.damage)


def best_schedule(found: Sequence[ScheduleDamage]) -> Schedule:
    """Return the schedule with the least damage, or one that merges in fewer blocks and cannot be told from it."""
    best = found[0]
    alike = [each for each in found if _same(each.divergence, best.divergence)]
    return min(alike, key=lambda each: (each.merges, each.damage)).schedule


def chosen(found: Sequence[ScheduleDamage], progress: Progress) -> tuple[Schedule, Mapping[str, Any]]:
    """Return the schedule that suits a model, and the choice as it is recorded with what is made by it."""
    if not found:
        progress.note(f"too few blocks or patches to compare schedules of merging: '{DEFAULT}' is taken")
        return SCHEDULES[DEFAULT], {"name": DEFAULT}
    best = best_schedule(found)
    return best, {"name": best.name, "divergence": {each.schedule.name: round(each.damage, 6) for each in found}}


def _same(a: Floats, b: Floats) -> bool:
    """Return True if one is not worse than the other by more than a standard error, relative to the level's mean."""
    differences = ((a - b) / np.maximum(b.mean(1, keepdims=True), 1e-12)).mean(0)  # (N,)
    return bool(differences.mean() <= differences.std() / max(1, len(differences)) ** 0.5)


def _near(diverged: Mapping[str, Floats]) -> list[str]:
    """Return the schedules that are not far behind the best, or cannot be told from it."""
    best = min(diverged.values(), key=lambda row: float(row.mean()))
    return [name for name, row in diverged.items() if row.mean() <= FAR * best.mean() or _same(row[None], best[None])]
