"""A Ranking: one score per head and per neuron, and from it the order in which every block is cut. Light: no torch.

One ranking serves every sparsity. Within a block the order is by falling score, equal scores by index; across blocks
equal scores are cut from the last block backwards. So counts are exact even under ties, and the structures that any
Plan keeps are a prefix of each block's order.

The file is safetensors (`blocks.{i}.head_scores`, `blocks.{i}.neuron_scores`, float32) with a JSON description, sealed
by a hash: a file with any changed byte is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .anatomy import Anatomy
from .errors import FileFormatError, SnapvitError
from .plan import Protection
from .sealed import load_sealed, save_sealed
from .values import Value, from_json, to_json

KIND = "snapvit-ranking"
Array = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]


class Description(Value, frozen=True, kw_only=True):
    """What the metadata of a ranking file says."""

    format_version: Literal[1] = 1
    model: str
    anatomy: Anatomy | None  # None: imported scores, whose file does not tell
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Scores of all heads and neurons, best first when sorted; valid for every sparsity.

    >>> ranking = Ranking.load("ranking.safetensors")
    >>> ranking.neuron_order(0)[:10]          # the ten neurons of block 0 that go last
    """

    head_scores: tuple[Array, ...]
    neuron_scores: tuple[Array, ...]
    model: str = ""
    anatomy: Anatomy | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("head_scores", "neuron_scores"):
            scores = tuple(_frozen_scores(block, f"blocks.{i}.{name}") for i, block in enumerate(getattr(self, name)))
            object.__setattr__(self, name, scores)
        if not self.head_scores or len(self.head_scores) != len(self.neuron_scores):
            raise FileFormatError("a ranking needs head and neuron scores for the same number of blocks, at least one")
        if self.anatomy is not None:
            self.check_fits(self.anatomy)

    @staticmethod
    def flat(anatomy: Anatomy) -> Ranking:
        """Equal scores for all: where only the shapes matter."""
        heads, neurons = (tuple(np.zeros(n, np.float32) for n in sizes) for sizes in (anatomy.heads, anatomy.neurons))
        return Ranking(heads, neurons)

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(len(scores) for scores in self.head_scores)

    @property
    def neurons(self) -> tuple[int, ...]:
        return tuple(len(scores) for scores in self.neuron_scores)

    @property
    def protection(self) -> Protection:
        """What is never cut: as the imported file says, or the usual."""
        return Protection(**self.provenance.get("protection", {}))

    def head_order(self, block: int) -> Order:
        """Heads of one block, best first."""
        return _best_first(self.head_scores[block])

    def neuron_order(self, block: int) -> Order:
        """Neurons of one block, best first."""
        return _best_first(self.neuron_scores[block])

    def check_fits(self, anatomy: Anatomy) -> None:
        """Refuse an anatomy that this ranking does not order."""
        if self.anatomy is not None and not self.anatomy.same_structures(anatomy):
            raise SnapvitError(f"the ranking was made for another model ({self.model or 'unnamed'})")
        if self.heads != anatomy.heads or self.neurons != anatomy.neurons:
            raise SnapvitError(
                f"the ranking orders {_sizes(self.heads, self.neurons)}, "
                f"the model has {_sizes(anatomy.heads, anatomy.neurons)}"
            )

    def save(self, path: Path | str) -> None:
        """Write the ranking; the file appears whole or not at all."""
        described = Description(model=self.model, anatomy=self.anatomy, provenance=dict(self.provenance))
        tensors = {
            f"blocks.{i}.{kind}": scores
            for kind in ("head_scores", "neuron_scores")
            for i, scores in enumerate(getattr(self, kind))
        }
        save_sealed(Path(path), KIND, tensors, to_json(described).decode())

    @staticmethod
    def load(path: Path | str) -> Ranking:
        """Read a ranking and check version, names, sizes and hash before anything is used."""
        tensors, described = load_sealed(Path(path), KIND)
        description = from_json(described, Description, str(path))
        depth = len(tensors) // 2
        expected = {f"blocks.{i}.{kind}" for i in range(depth) for kind in ("head_scores", "neuron_scores")}
        if set(tensors) != expected:
            raise FileFormatError(f"{path}: damaged: its blocks are not numbered 0 to {depth - 1}")
        heads = tuple(tensors[f"blocks.{i}.head_scores"] for i in range(depth))
        neurons = tuple(tensors[f"blocks.{i}.neuron_scores"] for i in range(depth))
        return Ranking(heads, neurons, description.model, description.anatomy, description.provenance)


def _frozen_scores(scores: npt.ArrayLike, name: str) -> Array:
    array = np.array(scores, dtype=np.float32)  # a copy of our own: nobody else can change it
    if array.ndim != 1 or not array.size:
        raise FileFormatError(f"{name}: expected one score per structure, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise FileFormatError(f"{name}: {int((~np.isfinite(array)).sum())} scores are not finite numbers")
    array.flags.writeable = False
    return array


def _best_first(scores: Array) -> Order:
    return np.argsort(-scores, kind="stable")


def _sizes(heads: Sequence[int], neurons: Sequence[int]) -> str:
    return f"{len(heads)} blocks with {sum(heads)} heads and {sum(neurons)} neurons"
