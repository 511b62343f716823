"""Which schedule of merging suits a model: the output divergence of each at equal FLOPs, measured without labels.

Every schedule of `allocation.tokens` merges until the blocks need each of `LEVELS` of the dense FLOPs; the same images
go through all of them and through the dense model. Schedules that are far behind at the middle level are not measured
at the others. The winner has the least divergence, averaged over the levels by ratios, so that none of them decides
alone. Of schedules that the images cannot tell apart from it, within one standard
error of the differences between them image by image, the one that merges in the fewest blocks is taken: every merge
costs time that FLOPs do not show.

Damages of single blocks do not add up: an allocation from them was behind the plain shapes (docs/method.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...allocation.tokens import DEFAULT, SCHEDULES, Schedule
from ...calibration.images import Images
from ...errors import SnapvitError
from ...model.plan import Plan
from ...progress import Progress, Silent
from ..models.load import Model
from ..models.tokens import with_tokens
from .free_cores import on_free_cores
from .output_divergence import OutputDivergence, default_divergence

LEVELS = (0.72, 0.6, 0.5)  # of the dense blocks' FLOPs: where merging alone is worth having
FIRST = 0.6  # the level that is measured first
FAR = 1.5  # times the least divergence there: no schedule was seen to make up for that at the other levels
IMAGES = 32
BATCH = 16


@dataclass(frozen=True)
class ScheduleDamage:
    """The divergence of one schedule, image by image, at every level."""

    schedule: Schedule
    merged: tuple[tuple[int, ...], ...]  # tokens merged in each block, by level
    divergence: npt.NDArray[np.float64]  # (levels, N)

    @property
    def damage(self) -> float:
        """The mean divergence, averaged over the levels by ratios."""
        return float(np.exp(np.log(np.maximum(self.divergence.mean(1), 1e-12)).mean()))

    @property
    def merges(self) -> int:
        """The number of blocks that merge."""
        return max(sum(count > 0 for count in merged) for merged in self.merged)


class Divergence:
    """The divergence of merging from the dense model, image by image.

    >>> Divergence(model, images)((0, 4, 0, 0)).mean()
    """

    def __init__(self, model: Model, images: Images) -> None:
        self.model, self.images = model, images
        self._output = OutputDivergence(default_divergence(model), model, _embedding(model, images))

    def __call__(self, merged: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the divergence of each image when the blocks merge so many tokens, (N,)."""
        z = _embedding(with_tokens(self.model, merged), self.images)
        return self._output(z, slice(0, len(z))).numpy()


def measure_schedules(model: Model, images: Images, progress: Progress | None = None) -> list[ScheduleDamage]:
    """Return the damage of the schedules that reach all levels and are not far behind at the first, the least first.

    >>> best_schedule(measure_schedules(model, images)).name
    """
    if not len(images):
        raise SnapvitError("a schedule of merging is chosen by images. Give --data")
    images, progress = images.first(IMAGES), progress or Silent()
    dense = Plan.dense(model.anatomy)
    within = {
        name: {level: schedule.within(model.anatomy, dense, level) for level in LEVELS}
        for name, schedule in SCHEDULES.items()
    }
    wanted = {
        name: {level: merged for level, merged in by_level.items() if merged is not None}
        for name, by_level in within.items()
        if None not in by_level.values()
    }
    if not wanted:
        return []
    diverged = Divergence(model, images)

    def measured(names: Sequence[str], level: float) -> dict[str, npt.NDArray[np.float64]]:
        progress.phase(f"measuring schedules of merging at {level:g} of the FLOPs", len(names))
        rows = {}
        for name in names:
            rows[name] = diverged(wanted[name][level])
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


def best_schedule(found: list[ScheduleDamage]) -> Schedule:
    """Return the schedule with the least damage, or one that merges in fewer blocks and cannot be told from it."""
    best = found[0]
    alike = [each for each in found if _same(each.divergence, best.divergence)]
    return min(alike, key=lambda each: (each.merges, each.damage)).schedule


def choose_schedule(
    model: Model, images: Images, progress: Progress | None = None
) -> tuple[Schedule, Mapping[str, Any]]:
    """Return the schedule that suits a model, and the choice as it is recorded with what is made by it."""
    progress = progress or Silent()
    with on_free_cores():
        found = measure_schedules(model, images, progress)
    if not found:
        progress.note(f"too few blocks or patches to compare schedules of merging: '{DEFAULT}' is taken")
        return SCHEDULES[DEFAULT], {"name": DEFAULT}
    chosen = best_schedule(found)
    return chosen, {"name": chosen.name, "divergence": {each.schedule.name: round(each.damage, 6) for each in found}}


def _same(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> bool:
    """Return True if one is not worse than the other by more than a standard error, relative to the level's mean."""
    differences = ((a - b) / np.maximum(b.mean(1, keepdims=True), 1e-12)).mean(0)  # (N,)
    return bool(differences.mean() <= differences.std() / max(1, len(differences)) ** 0.5)


def _near(diverged: Mapping[str, npt.NDArray[np.float64]]) -> list[str]:
    """Return the schedules that are not far behind the best, or cannot be told from it."""
    best = min(diverged.values(), key=lambda row: float(row.mean()))
    return [name for name, row in diverged.items() if row.mean() <= FAR * best.mean() or _same(row[None], best[None])]


@torch.no_grad()
def _embedding(model: Model, images: Images) -> Tensor:
    module: Any = model.module
    made = [
        module.forward_head(module.forward_features(torch.from_numpy(b)), pre_logits=True)
        for b in images.batches(BATCH)
    ]
    return torch.cat(made).float()
