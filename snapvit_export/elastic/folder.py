"""Elastic: one folder that holds the weights of every Plan, corrected or not. Light: numpy.

    elastic.json           anatomy, preprocessing, labels, wiring, and the index of the two buffers
    ranking.safetensors    the ranking, whole
    weights.bin            every tensor in rank order: a Plan's weights are prefixes of it
    correction.bin         optional: the factors that correct proj and fc2 at any width

`weights.bin` is mapped, not read, so a Plan costs no memory but for the layers that are corrected. All of it is hashed
when the folder is opened; the factors of a layer are hashed when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..allocation.planner import Planner
from ..allocation.tokens import DEFAULT, SCHEDULES, Schedule
from ..correction.cholesky import Factor
from ..errors import FileFormatError, SnapvitError
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..model.ranking import Ranking
from ..model.tensor_names import factor_shapes, stored_shapes, weight_shapes
from ..storage.atomic import inside, sha256
from ..storage.mapped import Array, Tensor, check_hash, map_buffer
from .fidelity_table import FidelityTable
from .format import CORRECTION, ELASTIC, PARTS, STORED, Description, leading_factor, read_description
from .resolution import at_resolution

OutputLayer = Literal["proj", "fc2"]
Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Elastic:
    """A model in rank order.

    >>> elastic = Elastic.load("elastic")
    >>> elastic.weights(elastic.planner.sparsity(0.3), corrected=False)["blocks.0.fc2.weight"]    # (neurons kept, E)
    """

    folder: Path
    description: Description
    ranking: Ranking
    tensors: Mapping[str, Tensor]  # where each tensor lies in `weights.bin`
    dense: Mapping[str, npt.NDArray[np.float32]]  # all of it, in rank order
    factors: Mapping[str, Array] = field(default_factory=dict)  # the arrays of `correction.bin`
    _checked: set[str] = field(default_factory=set)  # layers whose factors were hashed

    @staticmethod
    def load(folder: Path | str) -> Elastic:
        """Open a folder; version, names, sizes, bounds, alignment, overlaps and hashes are checked before use."""
        folder = Path(folder)
        description = read_description(folder)
        ranking = _ranking(folder, description)
        weights, correction = description.weights, description.correction
        dense = map_buffer(folder, weights, stored_shapes(description.anatomy), "float32", ELASTIC)
        tensors = {tensor.name: tensor for tensor in weights.tensors}
        factors = {}
        if correction is not None:
            factors = map_buffer(folder, correction.buffer, factor_shapes(description.anatomy), STORED, ELASTIC)
            if correction.order_sha256 != ranking.order_sha256:
                raise FileFormatError(f"{folder / ELASTIC}: {correction.buffer.file} was made for another ranking")
        for name, tensor in tensors.items():
            check_hash(dense[name], tensor, folder / weights.file)
        return Elastic(folder, description, ranking, tensors, dense, factors)

    @property
    def anatomy(self) -> Anatomy:
        return self.description.anatomy

    @property
    def merging(self) -> Schedule:
        """The schedule by which tokens are merged: that which was measured to suit the model, or the default."""
        measured = self.description.merging
        return SCHEDULES[DEFAULT] if measured is UNSET else measured

    @property
    def fidelity(self) -> FidelityTable | None:
        """What was measured of some Plans; None if nothing was."""
        measured = self.description.fidelity
        return None if measured is UNSET else measured

    @property
    def corrects(self) -> bool:
        """True if the folder can give corrected weights."""
        return self.description.correction is not None

    @property
    def planner(self) -> Planner:
        """The Planner of the ranking, with the protection that it asks for."""
        return Planner(self.ranking, self.anatomy, self.ranking.protection, corrected=self.corrects)

    def eps(self, norm: str) -> float:
        """Return the epsilon of a norm by its canonical name: "blocks.0.norm1", "final_norm"."""
        return self.description.wiring.eps.get(norm, self.anatomy.norm_eps)

    def weights(self, plan: Plan, corrected: bool = True) -> Weights:
        """Return the tensors of a Plan by canonical name (`model.tensor_names`): views into the file, unless corrected.

        A layer that keeps all of its inputs needs no correction and stays a view. A corrected layer has a bias even if
        the dense one has none: the mean contribution of the lost inputs. A removed sub-layer only adds its bias, times
        LayerScale: these two tensors are all that remains of it.
        """
        plan.check_fits(self.anatomy)
        shapes = weight_shapes(self.anatomy.with_counts(plan))
        weights = {name: self.dense[name][: shape[0]] for name, shape in shapes.items()}  # all are cut along axis 0
        weights |= at_resolution(self.dense, self.anatomy, self.description.wiring, plan)
        for i, part in plan.removed:
            left = ("proj.bias", "scale1") if part == "attention" else ("fc2.bias", "scale2")
            weights |= {name: self.dense[name] for name in (f"blocks.{i}.{end}" for end in left) if name in self.dense}
        if corrected:
            weights |= {name: array for name, array in self.corrected_layers(plan).items() if len(array)}
        return weights

    def corrected_layers(self, plan: Plan) -> Weights:
        """Return the corrected weight and bias of every proj and fc2 that a Plan cuts."""
        plan.check_fits(self.anatomy)
        self._require_correction()
        weights: Weights = {}
        for i, block in enumerate(self.anatomy.blocks):
            weights |= self._corrected(i, "proj", plan.heads[i]) if plan.heads[i] < block.heads else {}
            weights |= self._corrected(i, "fc2", plan.neurons[i]) if plan.neurons[i] < block.hidden else {}
        return weights

    def factor(self, block: int, layer: OutputLayer, keep: int | None = None) -> Factor:
        """Return the Factor of one layer; with `keep`, only as much of it as that width needs."""
        self._require_correction()
        shape = self.anatomy.blocks[block]
        unit, structures = (shape.head_dim, shape.heads) if layer == "proj" else (1, shape.hidden)
        keep = structures if keep is None else keep
        if not 0 <= keep <= structures:
            raise ValueError(f"a layer of {structures} structures cannot keep {keep}")
        name = f"blocks.{block}.{layer}"
        if name not in self._checked:
            self._check_factor(name)
        return leading_factor({part: self.factors[f"{name}.{part}"] for part in PARTS}, unit, keep)

    def _corrected(self, block: int, layer: OutputLayer, keep: int) -> Weights:
        weight, shift = self.factor(block, layer, keep).corrected(keep)  # (E, kept), (E,)
        name = f"blocks.{block}.{layer}"
        bias = shift + self.dense.get(f"{name}.bias", np.float32(0))
        return {f"{name}.weight": np.ascontiguousarray(weight.T, np.float32), f"{name}.bias": bias.astype(np.float32)}

    def _require_correction(self) -> None:
        if not self.corrects:
            raise SnapvitError(
                f"{self.folder}: has no {CORRECTION}, so its weights cannot be corrected. "
                f"Ask for corrected=False, or pack the model with images"
            )

    def _check_factor(self, name: str) -> None:
        assert self.description.correction is not None
        buffer = self.description.correction.buffer
        for tensor in buffer.tensors:
            if tensor.name.rpartition(".")[0] == name:
                check_hash(self.factors[tensor.name], tensor, self.folder / buffer.file)
        self._checked.add(name)


def _ranking(folder: Path, description: Description) -> Ranking:
    path = inside(folder, description.ranking.file, ELASTIC)
    if not path.is_file():
        raise FileFormatError(f"{path}: missing, though {ELASTIC} lists it. Make or copy the folder again")
    if sha256(path) != description.ranking.sha256:
        raise FileFormatError(f"{path}: damaged: it is not the file that {ELASTIC} describes")
    ranking = Ranking.load(path)
    try:
        ranking.check_fits(description.anatomy)
    except SnapvitError as error:
        raise FileFormatError(f"{path}: {error}") from error
    return ranking
