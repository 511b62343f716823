"""A Ranking: one score per head and per neuron, and from it the order in which every block is cut. Light: no torch.

One ranking serves every sparsity. Within a block the order is by falling score, equal scores by index; across blocks
equal scores are cut from the last block backwards. So counts are exact even under ties, and the structures that any
Plan keeps are a prefix of each block's order.

The file is safetensors (`blocks.{i}.head_scores`, `blocks.{i}.neuron_scores`, float32) whose metadata holds a JSON
description and a SHA-256 over that description and all scores: a file with any changed byte is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .anatomy import Anatomy
from .errors import FileFormatError, SnapvitError
from .files import write_atomically
from .plan import Protection
from .values import Value, from_json, to_json

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
        from safetensors.numpy import save

        described = to_json(
            Description(
                model=self.model,
                anatomy=self.anatomy,
                provenance=dict(self.provenance),
            )
        ).decode()
        tensors = {
            f"blocks.{i}.{kind}": scores
            for kind in ("head_scores", "neuron_scores")
            for i, scores in enumerate(getattr(self, kind))
        }
        metadata = {"snapvit": described, "sha256": _digest(described, self.head_scores, self.neuron_scores)}
        write_atomically(Path(path), save(tensors, metadata=metadata))

    @staticmethod
    def load(path: Path | str) -> Ranking:
        """Read a ranking and check version, names, sizes and hash before anything is used."""
        tensors, metadata = read_safetensors(Path(path))
        described = metadata.get("snapvit")
        if described is None:
            raise FileFormatError(f"{path}: not a ranking file. Make one with: snapvit export or snapvit import-scores")
        description = from_json(described, Description, str(path))
        depth = len(tensors) // 2
        expected = {f"blocks.{i}.{kind}" for i in range(depth) for kind in ("head_scores", "neuron_scores")}
        if set(tensors) != expected:
            raise FileFormatError(f"{path}: damaged: its blocks are not numbered 0 to {depth - 1}")
        heads = [tensors[f"blocks.{i}.head_scores"] for i in range(depth)]
        neurons = [tensors[f"blocks.{i}.neuron_scores"] for i in range(depth)]
        if metadata.get("sha256") != _digest(described, heads, neurons):
            raise FileFormatError(f"{path}: damaged: its contents do not match its hash. Make or copy it again")
        return Ranking(tuple(heads), tuple(neurons), description.model, description.anatomy, description.provenance)


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


def _digest(described: str, heads: Sequence[Array], neurons: Sequence[Array]) -> str:
    digest = hashlib.sha256(described.encode())
    for scores in (*heads, *neurons):
        digest.update(f"|{scores.dtype.str}{scores.shape}|".encode())
        digest.update(np.ascontiguousarray(scores).tobytes())
    return digest.hexdigest()


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise SnapvitError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileFormatError(f"{path}: not a readable safetensors file: {error}") from error
