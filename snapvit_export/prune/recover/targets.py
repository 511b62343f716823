"""What a cut model learns from: the answers of the dense one, and its stream after every block.

| symbol | meaning                                                              | shape     |
|--------|----------------------------------------------------------------------|-----------|
| y, x   | stream after a block: of the teacher, of the student                 | (B, T, E) |
| p, q   | predictions of the two, softmax of the logits over tau               | (B, C)    |

    streams   mean over blocks of E|x - y|^2 / E|y - E y|^2, half of it over the tokens that the answer is read from,
              where it is read from some alone; after the last block only those
    soft      tau^2 KL(p || q); for a model without a classifier 1 - cosine of the embeddings
    hard      cross-entropy of the teacher's top answer
    labels    cross-entropy of the labels

Where the student merges tokens, y is the mean over the patches that each of its tokens stands for. Where it takes
smaller images, the teacher sees the same crop in its own size, since fidelity is measured so, and its patches are
resampled to the student's grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...model.anatomy import Anatomy
from ..blocks.merging import Groups, holder_of
from ..blocks.timm_blocks import blocks_of
from .settings import TrainingSettings

LEAST_POWER = 1e-12  # of a stream: one that never varies has no relative error


@dataclass(frozen=True, eq=False)
class Answers:
    """The outputs of a model for a batch, and its stream after every block."""

    outputs: Tensor  # (B, classes), or (B, E) without a classifier
    streams: list[Tensor]  # (B, T, E) each
    groups: list[Groups | None]  # of merged tokens, after each block


class Recorder:
    """Runs a module and keeps its stream after every block.

    >>> Recorder(model.module)(inputs).streams[0].shape
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._holder = module, holder_of(module)
        self._streams: list[Tensor] = []
        self._groups: list[Groups | None] = []

    def _keep(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self._streams.append(output)
        now = None if self._holder is None else self._holder.groups
        self._groups.append(None if now is None else Groups(now.prefix, now.sizes, now.places))

    def __call__(self, inputs: Tensor, weights: Mapping[str, Tensor] | None = None) -> Answers:
        """Run the module, with other tensors in the place of its own if they are given."""
        self._streams, self._groups = [], []
        hooks = [block.register_forward_hook(self._keep) for block in blocks_of(self.module)]
        try:
            if weights is None:
                outputs = self.module(inputs)
            else:
                outputs = torch.func.functional_call(self.module, dict(weights), (inputs,))
            return Answers(outputs, self._streams, self._groups)
        finally:
            for hook in hooks:
                hook.remove()
            self._streams, self._groups = [], []


@dataclass(frozen=True)
class Distance:
    """The loss of a student's answers by a teacher's."""

    teacher: Anatomy
    grid: tuple[int, int]  # of the student's patches
    settings: TrainingSettings

    def __call__(self, student: Answers, teacher: Answers, labels: Tensor | None = None) -> Tensor:
        """Return the loss of a batch; `labels`: the outputs that are right, (B,)."""
        s, total = self.settings, student.outputs.new_zeros(())
        if s.streams:
            total = total + s.streams * self.streams(student, teacher)
        if s.soft:
            total = total + s.soft * outputs_distance(student.outputs, teacher.outputs, self.classifies, s.tau)
        if s.hard:
            total = total + s.hard * F.cross_entropy(student.outputs.float(), teacher.outputs.argmax(1))
        if s.labels and labels is not None:
            total = total + s.labels * F.cross_entropy(student.outputs.float(), labels)
        return total

    @property
    def classifies(self) -> bool:
        return self.teacher.classes > 1

    def streams(self, student: Answers, teacher: Answers) -> Tensor:
        """Return the relative error of the streams, the mean over all blocks."""
        read = self.teacher.read_tokens if self.teacher.reads_token else 0
        found, last = [], len(student.streams) - 1
        for i, (x, y, groups) in enumerate(zip(student.streams, teacher.streams, student.groups)):
            y = self.aligned(y.float(), groups)
            power = (y - y.mean((0, 1))).square().mean().clamp_min(LEAST_POWER)
            errors = (x.float() - y).square().mean(2) / power  # (B, T)
            if not read:
                found.append(errors.mean())
            elif i == last:
                found.append(errors[:, :read].mean())
            else:
                found.append(0.5 * (errors.mean() + errors[:, :read].mean()))
        return torch.stack(found).mean()

    def aligned(self, y: Tensor, groups: Groups | None) -> Tensor:
        """Return the teacher's stream at the tokens that the student has."""
        prefix = self.teacher.prefix
        if self.grid != self.teacher.grid:
            patches = y[:, prefix:].transpose(1, 2).unflatten(2, self.teacher.grid)  # (B, E, rows, columns)
            patches = F.interpolate(patches, self.grid, mode="bilinear", antialias=True, align_corners=False)
            y = torch.cat([y[:, :prefix], patches.flatten(2).transpose(1, 2)], dim=1)
        return y if groups is None else groups.average(y)


def outputs_distance(student: Tensor, teacher: Tensor, classifies: bool, tau: float = 1.0) -> Tensor:
    """Return tau^2 KL of predictions at a temperature, or 1 - cosine of embeddings: the mean of a batch."""
    if not classifies:
        return (1 - F.cosine_similarity(student.float(), teacher.float(), dim=1)).mean()
    wanted, found = (outputs.float().div(tau).log_softmax(1) for outputs in (teacher, student))
    return tau**2 * (wanted.exp() * (wanted - found)).sum(1).mean()
