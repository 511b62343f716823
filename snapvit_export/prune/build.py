"""Cuts a model in torch for `selection.variant_builder`: a module of every Plan, corrected, and its gate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..checks.gates import Streams, first_difference, require_equal
from ..checks.merging import Matches
from ..graph.writer import Blueprint
from ..model.plan import Plan
from ..model.ranking import Ranking
from .blocks.merging import outputs_and_matches
from .blocks.timm_blocks import block_outputs
from .correct.policy import Corrector
from .models.load import Model
from .models.masking import masked
from .models.slicing import shrink
from .pack import blueprint, corrected_layers

Pixels = npt.NDArray[np.float32]  # (B, 3, H, W), normalised


@dataclass(frozen=True, eq=False)
class CutModule:
    """A cut and corrected module (`variant_builder.CutModel`)."""

    module: nn.Module
    correction: str | None
    ranking: Ranking
    plan: Plan
    dense: Blueprint

    def layers(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the proj and fc2 that differ from the dense ones, in rank order."""
        return corrected_layers(self.module, self.ranking, self.plan, self.dense.dense)

    def outputs(self, images: Pixels) -> tuple[npt.NDArray[np.float32], dict[int, Matches]]:
        """Return what the module says of images, and the merges."""
        return outputs_and_matches(self.module, torch.from_numpy(images))

    def streams(self, images: Pixels) -> Streams:
        """Return the output of each block."""
        return block_outputs(self.module, torch.from_numpy(images))


@dataclass(frozen=True, eq=False)
class ModuleCutter:
    """Cuts one model by its corrector (`variant_builder.Cutter`)."""

    model: Model
    corrector: Corrector

    @cached_property
    def blueprint(self) -> Blueprint:
        """The dense model in rank order."""
        return blueprint(self.model, self.corrector.ranking)

    def cut(self, plan: Plan, keep: bool) -> CutModule:
        """Return the corrected module of a Plan; `keep`: by the chosen correction, not as a probe."""
        module, correction = self.corrector.kept(plan) if keep else self.corrector.probe(plan)
        return CutModule(module, correction, self.corrector.ranking, plan, self.blueprint)

    def check(self, name: str, plan: Plan, images: Pixels) -> None:
        """Require that masked and sliced modules agree; what tokens do is compared with the graph."""
        batch, ranking, widths = torch.from_numpy(images), self.corrector.ranking, plan.with_tokens()
        sliced = shrink(self.model.module, ranking, widths)
        with torch.no_grad(), masked(self.model.module, ranking, widths) as dense:
            require_equal(
                f"{name}: masked and sliced",
                dense(batch).numpy(),
                sliced(batch).numpy(),
                where=lambda: first_difference(block_outputs(dense, batch), block_outputs(sliced, batch)),
            )

    def probe_layers(self, plan: Plan) -> dict[str, npt.NDArray[np.float32]] | None:
        """Return the corrected layers of a probe for its graph; None: nothing to correct."""
        return self.corrector.probe_layers(plan, self.blueprint.dense)
