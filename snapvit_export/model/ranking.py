"""A Ranking: one score per head and per neuron, and so the order in which every block is cut. Light.

One ranking serves every sparsity. Within a block the order is by falling score, equal scores by index; across blocks
equal scores are cut from the last block backwards. So counts are exact even under ties, and the structures that any
Plan keeps are a prefix of each block's order.

A ranking may also know the damage of each sub-layer at every width: what of its output is lost when only the first k of
its order are kept. From these curves heads and neurons of all blocks are allocated together (`allocation`).

The file is safetensors (`blocks.{i}.head_scores`, `blocks.{i}.neuron_scores`, float32; with curves also
`blocks.{i}.head_damage`, `blocks.{i}.neuron_damage`, float64) with a JSON description and a hash over both: a file with
any changed byte is refused. A block that lacks its attention or its MLP has no scores of it, and its curve is one 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, SnapvitError
from ..storage.checksummed import load_checksummed, save_checksummed
from ..storage.json import Value, as_builtins, from_json, to_json
from .anatomy import Anatomy
from .plan import Protection
from .scores import strictly_falling
from .sublayer import KEY as SUBLAYERS
from .sublayer import SubLayer, read_sublayers
from .timing import Timing, read_timings

KIND = "snapvit-ranking"
Array = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]
Curve = npt.NDArray[np.float64]
Damage = tuple[tuple[Curve, Curve], ...]  # per block: of its heads (H+1,), of its neurons (n+1,)
SCORES = ("head_scores", "neuron_scores")
DAMAGE = ("head_damage", "neuron_damage")
MIXED = "mixed"  # in provenance: heads and neurons have scores of one scale, and are cut in one order
LARGEST_SCORE = 1e38  # room above it for a million float32 steps


class RankingDescription(Value, frozen=True, kw_only=True):
    """The metadata of a ranking file."""

    format_version: Literal[1] = 1
    model: str
    anatomy: Anatomy | None  # None: unknown, as for imported scores
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Scores of all heads and neurons, best first when sorted; valid for every sparsity.

    >>> ranking = Ranking.load("ranking.safetensors")
    >>> ranking.neuron_order(0)[:10]          # the ten neurons of block 0 that are removed last
    """

    head_scores: tuple[Array, ...]
    neuron_scores: tuple[Array, ...]
    model: str = ""
    anatomy: Anatomy | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    damage: Damage | None = None  # of each sub-layer with its first 0, 1, ... all structures kept

    def __post_init__(self) -> None:
        for name in SCORES:
            scores = tuple(_frozen_scores(block, f"blocks.{i}.{name}") for i, block in enumerate(getattr(self, name)))
            object.__setattr__(self, name, scores)
        if not self.head_scores or len(self.head_scores) != len(self.neuron_scores):
            raise FileFormatError("a ranking needs head and neuron scores for the same number of blocks, at least one")
        if not any(self.heads + self.neurons):
            raise FileFormatError("a ranking needs at least one head or neuron; blocks may lack a sub-layer, not all")
        if self.damage is not None:
            object.__setattr__(self, "damage", self._frozen_damage(self.damage))
        if self.anatomy is not None:
            self.check_fits(self.anatomy)

    def _frozen_damage(self, damage: Damage) -> Damage:
        if len(damage) != len(self.heads):
            raise FileFormatError(f"damage curves of {len(damage)} blocks do not belong to {len(self.heads)} blocks")
        return tuple(
            (
                _frozen_curve(of_heads, self.heads[i], f"blocks.{i}.head_damage"),
                _frozen_curve(of_neurons, self.neurons[i], f"blocks.{i}.neuron_damage"),
            )
            for i, (of_heads, of_neurons) in enumerate(damage)
        )

    @staticmethod
    def from_orders(
        head_orders: Sequence[npt.ArrayLike],
        neuron_orders: Sequence[npt.ArrayLike],
        damage: Damage,
        model: str = "",
        anatomy: Anatomy | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Ranking:
        """Return a ranking with exactly these orders, best first, and the damage along them.

        A structure's score is the damage that its loss adds, so that `pair` compares blocks; raised by single steps of
        float32 where needed to fall strictly along the order.
        """
        orders = (head_orders, neuron_orders)
        if any(len(of_kind) != len(damage) for of_kind in orders):
            raise FileFormatError("a ranking from orders needs orders and damage curves for the same number of blocks")
        heads, neurons = (
            tuple(
                _scores_along(order, curves[kind], f"blocks.{i}.{DAMAGE[kind]}")
                for i, (order, curves) in enumerate(zip(of_kind, damage))
            )
            for kind, of_kind in enumerate(orders)
        )
        return Ranking(heads, neurons, model, anatomy, provenance or {}, damage)

    def weighted(self, weights: npt.ArrayLike) -> Ranking:
        """Return the same orders with every damage curve times a factor: (blocks, 2), of attention and of the MLP.

        Scores follow, so that `pair` weighs the blocks in the same way; and so does the damage of whole sub-layers.
        """
        if self.damage is None:
            raise SnapvitError("the ranking has no damage curves to weight")
        w = np.asarray(weights, np.float64)
        if w.shape != (len(self.damage), 2) or not (np.isfinite(w) & (w >= 0)).all():
            raise SnapvitError(f"expected {len(self.damage)} x 2 finite weights that are not negative, got {w.shape}")
        damage = tuple((heads * a, neurons * m) for (heads, neurons), (a, m) in zip(self.damage, w))
        blocks = range(len(damage))
        orders = [self.head_order(i) for i in blocks], [self.neuron_order(i) for i in blocks]
        provenance = {**self.provenance}
        if (measured := self.sublayers) is not None:
            provenance[SUBLAYERS] = as_builtins([s.weighted(by) for s, by in zip(measured, w.ravel().tolist())])
        return Ranking.from_orders(*orders, damage, self.model, self.anatomy, provenance)

    @staticmethod
    def flat(anatomy: Anatomy) -> Ranking:
        """Return a ranking of equal scores, for uses where only the shapes matter."""
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
        """The part that is never cut: from the file's provenance, or the default."""
        try:
            return msgspec.convert(self.provenance.get("protection", {}), Protection)
        except msgspec.ValidationError as error:
            raise FileFormatError(f"the ranking's protection is damaged: {error}") from error

    @property
    def is_mixed(self) -> bool:
        """True if heads and neurons are cut in one order, not as two with a ratio for each."""
        return self.damage is None and self.provenance.get(MIXED) is True

    @property
    def sublayers(self) -> tuple[SubLayer, ...] | None:
        """The measured effect of each attention and MLP, and of its removal; None if it was not measured."""
        return read_sublayers(self.provenance, len(self.heads))

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The seconds that each phase of making it took; none if that was not measured."""
        return read_timings(self.provenance)

    def head_order(self, block: int) -> Order:
        """Return the heads of one block, best first."""
        return _best_first(self.head_scores[block])

    def neuron_order(self, block: int) -> Order:
        """Return the neurons of one block, best first."""
        return _best_first(self.neuron_scores[block])

    @property
    def order_sha256(self) -> str:
        """SHA-256 of the orders alone: equal for rankings that cut the same structures, whatever the scores."""
        digest = hashlib.sha256()
        for block in range(len(self.heads)):
            for order in (self.head_order(block), self.neuron_order(block)):
                digest.update(len(order).to_bytes(8, "little") + order.astype("<i8").tobytes())
        return digest.hexdigest()

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
        described = RankingDescription(model=self.model, anatomy=self.anatomy, provenance=dict(self.provenance))
        save_checksummed(Path(path), KIND, self.arrays(), to_json(described).decode())

    @staticmethod
    def load(path: Path | str) -> Ranking:
        """Read a ranking and check version, names, sizes and hash before anything is used."""
        arrays, described = load_checksummed(Path(path), KIND)
        description = from_json(described, RankingDescription, str(path))
        try:
            made = Ranking.of_arrays(arrays, description.model, description.anatomy, description.provenance)
            # Damaged ones are refused here, where the file has a name.
            _ = made.protection, made.sublayers, made.timings
            return made
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from error

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return scores and curves by name."""
        named: dict[str, npt.NDArray[Any]] = {
            f"blocks.{i}.{kind}": scores for kind in SCORES for i, scores in enumerate(getattr(self, kind))
        }
        for i, curves in enumerate(self.damage or ()):
            named |= {f"blocks.{i}.{kind}": curve for kind, curve in zip(DAMAGE, curves)}
        return named

    @staticmethod
    def of_arrays(
        arrays: Mapping[str, npt.NDArray[Any]], model: str, anatomy: Anatomy | None, provenance: Mapping[str, Any]
    ) -> Ranking:
        """Return the ranking that has these `arrays`."""
        has_damage = any(name.endswith(DAMAGE) for name in arrays)
        kinds = SCORES + DAMAGE if has_damage else SCORES
        depth = len(arrays) // len(kinds)
        if set(arrays) != {f"blocks.{i}.{kind}" for i in range(depth) for kind in kinds}:
            raise FileFormatError(f"damaged: its blocks are not numbered 0 to {depth - 1}")
        heads, neurons, *curves = (tuple(arrays[f"blocks.{i}.{kind}"] for i in range(depth)) for kind in kinds)
        damage = tuple(zip(*curves)) if has_damage else None
        return Ranking(heads, neurons, model, anatomy, provenance, damage)


def _frozen_scores(scores: npt.ArrayLike, name: str) -> Array:
    array = np.array(scores, dtype=np.float32)  # a copy of our own: nobody else can change it
    if array.ndim != 1:
        raise FileFormatError(f"{name}: expected one score per structure, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise FileFormatError(f"{name}: {int((~np.isfinite(array)).sum())} scores are not finite numbers")
    array.flags.writeable = False
    return array


def _frozen_curve(curve: npt.ArrayLike, structures: int, name: str) -> Curve:
    array = np.array(curve, dtype=np.float64)
    if array.shape != (structures + 1,):
        raise FileFormatError(f"{name}: expected {structures + 1} values, 0 to {structures} kept, got {array.shape}")
    if not np.isfinite(array).all():
        raise FileFormatError(f"{name}: {int((~np.isfinite(array)).sum())} values are not finite numbers")
    if array[-1] != 0 or (np.diff(array) > 0).any():
        raise FileFormatError(f"{name}: damage must never grow with what is kept, and end in 0")
    array.flags.writeable = False
    return array


def _scores_along(order: npt.ArrayLike, curve: npt.ArrayLike, name: str) -> Array:
    """Return scores that give this order: the damage that the loss of each structure adds."""
    best_first = np.asarray(order, np.int64)
    if sorted(best_first.ravel().tolist()) != list(range(best_first.size)):
        raise FileFormatError(f"{name}: its order does not name each structure once")
    added = -np.diff(_frozen_curve(curve, len(best_first), name))  # (structures,) by rank
    scores = np.zeros(len(best_first), np.float32)
    scores[best_first] = strictly_falling(np.minimum(added, LARGEST_SCORE).astype(np.float32))
    return scores


def _best_first(scores: Array) -> Order:
    return np.argsort(-scores, kind="stable")


def _sizes(heads: Sequence[int], neurons: Sequence[int]) -> str:
    return f"{len(heads)} blocks with {sum(heads)} heads and {sum(neurons)} neurons"
