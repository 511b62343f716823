"""A student: one cut model that learns from the dense one, in the form in which it runs.

A model that merges tokens learns with the tokens merged, one of smaller images with those. It stays in eval mode: a
recovery has no dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...calibration.images import Images
from ...errors import SnapvitError, UsageError
from ...family.fidelity import Comparison
from ...model.anatomy import Anatomy
from ..blocks.merging import holder_of
from ..blocks.timm_blocks import blocks_of
from ..models.load import Model
from ..models.read_anatomy import read_anatomy
from .augment import Size, Views
from .parameters import trained
from .settings import TrainingSettings
from .targets import Answers, Distance, Recorder

BATCH = 16  # of held-out images
DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Outputs = npt.NDArray[np.float32]


class Learner(Protocol):
    """What a training loop trains: one model, or nested ones."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What changes, by name."""
        ...

    @property
    def sizes(self) -> Sequence[Size]:
        """The sizes in which it wants every picture."""
        ...

    def backward(self, views: Views, step: int, share: float) -> float:
        """Add the gradient of the loss times `share`, and return the loss."""
        ...

    def compared(self) -> Sequence[Comparison]:
        """Compare with the teacher on held-out images: one model, or each of several."""
        ...


class Teacher:
    """The dense model, frozen, and what it says of the held-out images."""

    def __init__(self, model: Model, held_out: Images, device: torch.device, autocast: torch.dtype | None) -> None:
        if len(held_out) < (1 if model.anatomy.classes > 1 else 3):
            raise SnapvitError(f"{held_out.source}: too few images to hold some out. Give more of them")
        self.model, self.held_out, self.device, self.autocast = model, held_out, device, autocast
        self.anatomy: Anatomy = model.anatomy
        self.module = model.module if device.type == "cpu" else copy.deepcopy(model.module).to(device)
        self._record = Recorder(self.module)

    @torch.no_grad()
    def __call__(self, inputs: npt.NDArray[np.float32]) -> Answers:
        """Answer a batch."""
        with in_precision(self.device, self.autocast):
            return self._record(torch.from_numpy(inputs).to(self.device))

    @cached_property
    def outputs(self) -> Outputs:
        """What the teacher says of the held-out images."""
        return outputs_of(self.module, self.held_out, self.device)

    def compare(self, outputs: Outputs) -> Comparison:
        """Compare outputs for the held-out images with the teacher's."""
        return Comparison.of(outputs, self.outputs, classifies=self.anatomy.classes > 1)


class Student:
    """A cut model that learns."""

    def __init__(
        self,
        module: nn.Module,
        teacher: Teacher,
        settings: TrainingSettings,
        columns: npt.NDArray[np.int64] | None = None,  # the output of each class of the labels
    ) -> None:
        self.module, self.teacher, self.settings, self.columns = module, teacher, settings, columns
        self.anatomy = read_anatomy(module, teacher.model.name)
        self.parameters = trained(module, settings.train, teacher.model.module)
        if not self.parameters:
            raise UsageError(f"{teacher.model.name}: has nothing to train by '{settings.train}'. Give --train all")
        for name, tensor in module.named_parameters():
            tensor.requires_grad_(name in self.parameters)
        if settings.recompute:
            recompute_blocks(module)
        self._record = Recorder(module.to(teacher.device))
        self._distance = Distance(teacher.anatomy, self.anatomy.grid, settings)

    @property
    def sizes(self) -> Sequence[Size]:
        return tuple(dict.fromkeys([self.teacher.anatomy.image, self.anatomy.image]))

    def backward(self, views: Views, step: int, share: float) -> float:
        """Add the gradient of the loss times `share`, and return the loss."""
        teacher, device = self.teacher, self.teacher.device
        wanted = teacher(views.inputs[teacher.anatomy.image])
        with in_precision(device, teacher.autocast):
            found = self._record(torch.from_numpy(views.inputs[self.anatomy.image]).to(device))
        loss = self._distance(found, wanted, labels_of(views, self.columns, device))
        (loss * share).backward()
        return float(loss.detach())

    def compared(self) -> Sequence[Comparison]:
        """Compare with the teacher on the held-out images."""
        images = self.teacher.held_out.at(self.anatomy.image)
        return [self.teacher.compare(outputs_of(self.module, images, self.teacher.device))]

    def close(self) -> nn.Module:
        """Return the module as others take it: on the CPU, ready to be cut or saved."""
        undo_recompute(self.module)
        for tensor in self.module.parameters():
            tensor.requires_grad_(True)
            tensor.grad = None
        return self.module.to("cpu")


def labels_of(views: Views, columns: npt.NDArray[np.int64] | None, device: torch.device) -> Tensor | None:
    """Return the right outputs of a batch; None where labels are not read."""
    if columns is None or views.labels is None:
        return None
    return torch.from_numpy(columns[views.labels]).to(device)


@contextmanager
def in_precision(device: torch.device, autocast: torch.dtype | None) -> Iterator[None]:
    """Within the context matrix products are computed in this precision; None: in float32."""
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        yield


@torch.no_grad()
def outputs_of(module: nn.Module, images: Images, device: torch.device) -> Outputs:
    """Return the outputs of a module for all images, in float32."""
    batches = (torch.from_numpy(batch).to(device) for batch in images.batches(BATCH))
    return torch.cat([module(batch).float().cpu() for batch in batches]).numpy()


def recompute_blocks(module: nn.Module) -> None:
    """Let the blocks of a module keep their inputs alone, and compute the rest again on the way back."""
    if holder_of(module) is not None:
        raise UsageError("a model that merges tokens cannot compute its activations again. Leave --recompute out")
    for block in blocks_of(module):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def undo_recompute(module: nn.Module) -> None:
    """Undo `recompute_blocks`."""
    for block in blocks_of(module):
        block.__dict__.pop("forward", None)
