"""Cuts a model for `selection.variant_builder` as it was recovered: trained modules of some Plans, or nested ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import nn

from ...model.plan import Plan
from ..build import CutModule, ModuleCutter
from ..pack import own_weights


@dataclass(frozen=True, eq=False)
class Trained:
    """A module that was trained, and the one that it began as."""

    module: nn.Module
    start: nn.Module
    correction: str | None  # of the start


@dataclass(frozen=True, eq=False)
class TrainedModule(CutModule):
    """A cut module that was trained (`variant_builder.CutModel`)."""

    start: nn.Module

    def layers(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return all tensors that differ from the dense ones, in rank order."""
        return own_weights(self.module, self.start, self.ranking, self.plan, self.dense.dense)


@dataclass(frozen=True, eq=False)
class RecoveredCutter(ModuleCutter):
    """Gives the trained modules of the Plans that have one; `nested`: all others as they have learnt together."""

    trained: Mapping[Plan, Trained] = field(default_factory=dict)
    nested: bool = False

    def cut(self, plan: Plan, keep: bool) -> CutModule:
        """Return the module of a Plan, trained if it was."""
        if plan in self.trained:
            found = self.trained[plan]
            given = (found.module, found.correction, self.corrector.ranking, plan, self.blueprint)
            return TrainedModule(*given, found.start)
        return super().cut(plan, keep and not self.nested)  # nested ones are corrected from factors, as they learnt
