"""Elastic recovery: nested models of many widths learn together, and one weight file serves them all afterwards.

Every step trains the dense model, the smallest and two of the others by chance (the sandwich rule: Yu and Huang,
"Universally Slimmable Networks", ICCV 2019). All are cut from one set of weights, which is what learns:

    W'(k) = W_K + W_P M,    b'(k) = b + W mu - W'(k) mu_K,    M = S[P, K] S[K, K]^-1

for the kept columns K and the cut ones P of a proj or fc2, with the mean mu and the damped covariance S of its input in
the dense model (`correction.cholesky`). They are measured once and stay. So the gradient of a narrow model reaches the
weights that it lacks, and afterwards any width is cut and corrected as ever, also on a device.

Patches, tokens and positions stay as they are: a grid of another size resamples them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...correction.cholesky import columns_of, make_factor, solve_lower
from ...correction.moments import Damping, Moments, Statistics
from ...family.fidelity import Comparison
from ...model.plan import Part, Plan
from ...model.ranking import Ranking
from ..blocks.timm_blocks import PARTS, blocks_of, give_bias, head_shares, neuron_shares, output_of
from ..correct.elastic import PrunableLayer, layers_of, make_factors
from ..models.load import Model
from ..models.read_anatomy import read_anatomy
from ..models.slicing import kept, shrink_unfolded
from .augment import Size, Views
from .parameters import trained
from .settings import TrainingSettings
from .student import Teacher, in_precision, labels_of, outputs_of
from .targets import Distance, Recorder

SAMPLED = 2  # models of a step beside the dense and the smallest one
EMBEDDING = ("patch_embed.", "cls_token", "pos_embed", "reg_token", "dist_token")
LAYERS: dict[Part, str] = {"attention": "attn.proj", "mlp": "mlp.fc2"}


@dataclass(frozen=True, eq=False)
class _CutLayer:
    """How the proj or fc2 of one Plan comes from the shared one, in the order of the module's columns."""

    name: str  # of the layer in the module
    kept: Tensor  # (K,) columns
    cut: Tensor  # (P,) columns
    mixed: Tensor  # (P, K) M
    alive: Tensor  # (d,) 0 for columns that never vary: the bias takes them
    mean: Tensor  # (d,) mu

    @staticmethod
    def of(name: str, layer: PrunableLayer, keep: int, moments: Moments, damping: Damping) -> _CutLayer:
        factor = make_factor(layer.weight, moments, layer.order, layer.unit, damping)
        k = keep * layer.unit
        mixed = solve_lower(factor.lower[k:, :k], factor.lower[:k, :k])[:, layer.from_rank_order(keep)]
        return _CutLayer(
            name,
            torch.from_numpy(layer.columns(keep)),
            torch.from_numpy(columns_of(layer.order[keep:], layer.unit)),
            torch.from_numpy(np.ascontiguousarray(mixed)).float(),
            torch.from_numpy((np.diag(moments.covariance) > 0).astype(np.float32)),
            torch.from_numpy(moments.mean).float(),
        )

    def made(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the cut layer."""
        alive = weight * self.alive
        cut = alive[:, self.kept] + alive[:, self.cut] @ self.mixed  # (E, K)
        added = weight @ self.mean - cut @ self.mean[self.kept]
        return cut, added if bias is None else bias + added

    def to(self, device: torch.device) -> _CutLayer:
        return _CutLayer(
            self.name, *(getattr(self, field).to(device) for field in ("kept", "cut", "mixed", "alive", "mean"))
        )


class NestedModel:
    """One Plan of the shared weights: a module whose tensors are made from them anew for every pass."""

    def __init__(
        self, shared: nn.Module, ranking: Ranking, plan: Plan, statistics: Statistics | None, damping: Damping
    ) -> None:
        self.plan = plan
        self.module = shrink_unfolded(shared, ranking, plan)
        self.anatomy = read_anatomy(self.module, ranking.model or "model")
        self.record = Recorder(self.module)
        self._slices: dict[str, tuple[str, int, Tensor]] = {}  # by name here: name, axis and places in the shared ones
        self._layers: list[tuple[_CutLayer, str | None, Part]] = []  # with the buffer of a removed one
        names = {id(tensor): name for name, tensor in (*shared.named_parameters(), *shared.named_buffers())}
        own = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        for i, block in enumerate(blocks_of(shared)):
            heads, neurons = kept(ranking, plan, i)
            for shares, chosen in ((head_shares(block.attn), heads), (neuron_shares(block.mlp), neurons)):
                for share in shares:
                    name = names[id(share.tensor)]
                    if name in own:
                        self._slices[name] = (name, share.axis, share.indices(chosen))
            if statistics is not None:
                self._cut_layers(i, block, ranking, statistics, damping)
        self._same = [
            name
            for name, tensor in shared.named_parameters()
            if name in own and name not in self._slices and not name.startswith(EMBEDDING)
        ]

    def _cut_layers(self, i: int, block: Any, ranking: Ranking, statistics: Statistics, damping: Damping) -> None:
        counts, moments = (self.plan.heads[i], self.plan.neurons[i]), (statistics.proj[i], statistics.fc2[i])
        for part, layer, keep, found in zip(PARTS, layers_of(block, ranking, i), counts, moments):
            if layer is not None and keep < len(layer.order):
                cut = _CutLayer.of(f"blocks.{i}.{LAYERS[part]}", layer, keep, found, damping)
                self._make_room(i, part)
                self._layers.append((cut, None if keep else f"blocks.{i}.{part}_added", part))

    def _make_room(self, i: int, part: Part) -> None:
        """Give the module a tensor for what a cut layer adds, where it has none yet."""
        block: Any = blocks_of(self.module)[i]
        linear, added = output_of(block, part), f"{part}_added"
        if linear is not None:
            give_bias(linear)
        elif getattr(block, added) is None:
            setattr(block, added, torch.zeros(self.anatomy.embed_dim))

    def weights(self, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this Plan from the shared ones, through which gradients flow back."""
        found = {name: shared[name] for name in self._same}
        for name, (of, axis, places) in self._slices.items():
            found[name] = shared[of].index_select(axis, places)
        for layer, removed, part in self._layers:
            weight, bias = layer.made(shared[f"{layer.name}.weight"], shared.get(f"{layer.name}.bias"))
            if removed is None:
                found[f"{layer.name}.weight"], found[f"{layer.name}.bias"] = weight, bias
            else:
                found[removed] = bias * _layer_scale(shared, layer.name, part)
        return found

    def to(self, device: torch.device) -> NestedModel:
        """Move everything to a device; changes this object."""
        self.module.to(device)
        self._slices = {name: (of, axis, places.to(device)) for name, (of, axis, places) in self._slices.items()}
        self._layers = [(layer.to(device), removed, part) for layer, removed, part in self._layers]
        return self


def _layer_scale(shared: Mapping[str, Tensor], layer: str, part: Part) -> Tensor | float:
    block, number = layer.rsplit(".", 2)[0], PARTS.index(part) + 1
    for name in (f"{block}.ls{number}.gamma", f"{block}.gamma_{number}"):
        if name in shared:
            return shared[name]
    return 1.0


class NestedStudents:
    """Models of several Plans that learn together (a `student.Learner`)."""

    def __init__(
        self,
        model: Model,
        ranking: Ranking,
        plans: Sequence[Plan],
        teacher: Teacher,
        settings: TrainingSettings,
        statistics: Statistics | None,
        damping: Damping = Damping(),
        columns: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`model`: a copy of the teacher's, whose weights learn. `statistics`: None: nothing is corrected."""
        self.model, self.teacher, self.settings, self.columns = model, teacher, settings, columns
        found = trained(model.module, settings.train, None)
        self.parameters = {name: tensor for name, tensor in found.items() if not name.startswith(EMBEDDING)}
        for name, tensor in model.module.named_parameters():
            tensor.requires_grad_(name in self.parameters)
        cost = model.anatomy.flops
        self.plans = sorted(dict.fromkeys(plans), key=cost, reverse=True)
        self.nested = [NestedModel(model.module, ranking, plan, statistics, damping) for plan in self.plans]
        model.module.to(teacher.device)
        for nested in self.nested:
            nested.to(teacher.device)
            for tensor in nested.module.parameters():
                tensor.requires_grad_(False)
        self._dense = Recorder(model.module)
        self._distances = [Distance(teacher.anatomy, nested.anatomy.grid, settings) for nested in self.nested]

    @property
    def sizes(self) -> Sequence[Size]:
        images = [self.teacher.anatomy.image, *(nested.anatomy.image for nested in self.nested)]
        return tuple(dict.fromkeys(images))

    def sampled(self, step: int) -> list[int | None]:
        """Return which models learn in a step: None for the dense one, the smallest, and others by chance."""
        last = len(self.nested) - 1
        rng = np.random.default_rng([self.settings.seed, step])
        others = rng.permutation(last)[:SAMPLED]
        return [None, last, *(int(other) for other in others)]

    def backward(self, views: Views, step: int, share: float) -> float:
        """Add the gradients of the models of a step, and return the mean of their losses."""
        device, chosen, total = self.teacher.device, self.sampled(step), 0.0
        wanted = self.teacher(views.inputs[self.teacher.anatomy.image])
        labels = labels_of(views, self.columns, device)
        inputs = {size: torch.from_numpy(array).to(device) for size, array in views.inputs.items()}
        for number in chosen:
            with in_precision(device, self.teacher.autocast):
                if number is None:
                    distance = Distance(self.teacher.anatomy, self.teacher.anatomy.grid, self.settings)
                    found = self._dense(inputs[self.teacher.anatomy.image])
                else:
                    nested, distance = self.nested[number], self._distances[number]
                    found = nested.record(inputs[nested.anatomy.image], nested.weights(self._shared))
            loss = distance(found, wanted, labels)
            (loss * (share / len(chosen))).backward()
            total += float(loss.detach()) / len(chosen)
        return total

    @property
    def _shared(self) -> dict[str, Tensor]:
        return {**dict(self.model.module.named_buffers()), **dict(self.model.module.named_parameters())}

    @torch.no_grad()
    def compared(self) -> Sequence[Comparison]:
        """Compare the dense model and every nested one with the teacher."""
        teacher, device = self.teacher, self.teacher.device
        found = [teacher.compare(outputs_of(self.model.module, teacher.held_out, device))]
        for nested in self.nested:
            images = teacher.held_out.at(nested.anatomy.image)
            module = _Fixed(nested, nested.weights(self._shared))
            found.append(teacher.compare(outputs_of(module, images, device)))
        return found

    def close(self) -> Model:
        """Return the model with the weights that it has learnt."""
        for tensor in self.model.module.parameters():
            tensor.requires_grad_(True)
            tensor.grad = None
        self.model.module.to("cpu")
        return self.model


class _Fixed(nn.Module):
    """A nested model with the weights of this moment."""

    def __init__(self, nested: NestedModel, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.nested, self.fixed = nested, weights

    def forward(self, inputs: Tensor) -> Tensor:
        return self.nested.record(inputs, self.fixed).outputs


def factors_after(model: Model, ranking: Ranking, statistics: Statistics, damping: Damping) -> Any:
    """Return factors that correct the learnt weights as they were corrected while they learnt."""
    return make_factors(model, ranking, replace(statistics, provenance={}), damping)
