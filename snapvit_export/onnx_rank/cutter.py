"""Cuts a model by its tensors and factors alone, for `selection.variant_builder`. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..checks.gates import Streams
from ..correction.cholesky import WIDTHS_KEPT, Factors
from ..graph.writer import Blueprint
from ..model.plan import Plan

Layers = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class CutTensors:
    """The corrected layers of a Plan (`variant_builder.CutModel`); only its graphs can be run."""

    corrected: Layers

    @property
    def correction(self) -> str | None:
        """The name of the correction; None if nothing was corrected."""
        return "elastic" if self.corrected else None

    def layers(self) -> Layers:
        """Return the proj and fc2 that differ from the dense ones, in rank order."""
        return self.corrected

    def outputs(self, images: npt.NDArray[np.float32]) -> None:
        """Return None: both flavours of the graph are compared with each other."""

    def streams(self, images: npt.NDArray[np.float32]) -> Streams:
        """Return nothing, as there is no other form than the graphs."""
        return {}


@dataclass(frozen=True, eq=False)
class TensorCutter:
    """Cuts one model in rank order (`variant_builder.Cutter`); every cut is as good as its factors make it."""

    blueprint: Blueprint
    factors: Factors | None  # None: nothing is corrected
    _made: dict[tuple[tuple[int, ...], tuple[int, ...]], Layers] = field(default_factory=dict)

    def cut(self, plan: Plan, keep: bool) -> CutTensors:
        """Return the corrected layers of a Plan; the factors are of all tokens, also for a Plan that has fewer."""
        return CutTensors(self.probe_layers(plan) or {})

    def check(self, name: str, plan: Plan, images: npt.NDArray[np.float32]) -> None:
        """Do nothing: every Plan is a prefix of the same tensors, which the graph reads in place."""

    def probe_layers(self, plan: Plan) -> Layers | None:
        """Return the corrected layers of a Plan; None: nothing to correct. Those of a few widths are kept."""
        if self.factors is None or plan.with_tokens() == Plan.dense(self.blueprint.anatomy).with_tokens():
            return None
        width = plan.heads, plan.neurons
        if width not in self._made:
            if len(self._made) == WIDTHS_KEPT:
                del self._made[next(iter(self._made))]  # the oldest
            self._made[width] = self.factors.corrected_layers(plan, self.blueprint.dense)
        return self._made[width]
