"""Plans: the heads, neurons and tokens that each block keeps, as counts; and what is protected. Light: no torch.

A Plan is pure counts. Heads and neurons are prefixes of the order that a ranking gives. Tokens need no weights: a block
merges a number of them between its attention and its MLP, and a smaller grid of patches is a smaller input image.
`allocation.planner` makes Plans for a sparsity, a FLOPs target or a measured cost, `allocation.tokens` the merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SnapvitError
from ..storage.json import Kept, Ratio, Size, Value, read_json, write_json

if TYPE_CHECKING:
    from .anatomy import Anatomy

Part = Literal["attention", "mlp"]  # the two sub-layers of a block


class Plan(Value, frozen=True, kw_only=True):
    """The counts of heads and neurons that each block keeps, of tokens that it merges, and the grid of patches.

    A block that keeps 0 heads has no attention, one that keeps 0 neurons no MLP; with neither, the block is removed.

    >>> Plan(heads=(6, 5), neurons=(768, 0))
    >>> Plan(heads=(6, 6), neurons=(768, 768), merged=(16, 0), grid=(12, 12))     # 144 patches, 128 after block 0
    """

    format_version: Literal[1] = 1
    heads: tuple[Kept, ...]
    neurons: tuple[Kept, ...]
    merged: tuple[Kept, ...] = ()  # tokens merged in each block, after its attention; zeros by default
    grid: tuple[Size, Size] | None = None  # rows and columns of patches; None: the model's own

    def __post_init__(self) -> None:
        if not self.heads or len(self.heads) != len(self.neurons):
            raise ValueError("a plan needs head and neuron counts for the same number of blocks, at least one")
        if not self.merged:
            msgspec.structs.force_setattr(self, "merged", (0,) * len(self.heads))
        if len(self.merged) != len(self.heads):
            raise ValueError(f"a plan of {len(self.heads)} blocks needs as many counts of merged tokens")

    @staticmethod
    def dense(anatomy: Anatomy) -> Plan:
        """Return the Plan that cuts nothing and merges what the model itself merges."""
        return Plan(heads=anatomy.heads, neurons=anatomy.neurons, merged=anatomy.merges)

    def with_tokens(self, merged: Sequence[int] = (), grid: tuple[int, int] | None = None) -> Plan:
        """Return the same heads and neurons with other tokens; none are merged by default."""
        return msgspec.structs.replace(self, merged=tuple(merged), grid=grid)

    @property
    def changes_tokens(self) -> bool:
        """True if it merges tokens or takes smaller images."""
        return any(self.merged) or self.grid is not None

    def save(self, path: Path | str) -> None:
        """Write the counts as JSON."""
        write_json(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> Plan:
        """Read counts that `save` wrote, or that somebody wrote by hand."""
        return read_json(Path(path), Plan)

    def check_fits(self, anatomy: Anatomy) -> None:
        """Refuse counts that the model does not have, and those that cut the path from the image to the output."""
        if len(self.heads) != len(anatomy.blocks):
            raise SnapvitError(f"the plan is for {len(self.heads)} blocks, the model has {len(anatomy.blocks)}")
        for kind in ("heads", "neurons"):
            for i, (keep, have) in enumerate(zip(getattr(self, kind), getattr(anatomy, kind))):
                if not 0 <= keep <= have:
                    raise SnapvitError(f"block {i}: the plan keeps {keep} {kind} of {have}. Keep 0 to {have}")
        self._check_tokens(anatomy)
        if anatomy.reads_token and not any(self.heads):
            raise SnapvitError("the plan keeps no attention, so the class token would never see the image. Keep one")
        if not any(self.heads + self.neurons):
            raise SnapvitError("the plan keeps neither heads nor neurons: nothing of the blocks is left. Keep some")

    def _check_tokens(self, anatomy: Anatomy) -> None:
        """Refuse grids that the model does not have, and merges of more tokens than can be paired."""
        if self.grid is not None and any(side > own for side, own in zip(self.grid, anatomy.grid)):
            raise SnapvitError(
                f"the plan has a grid of {_by(self.grid)} patches, the model {_by(anatomy.grid)}. Take at most that"
            )
        left = anatomy.patches_of(self)
        for i, (merged, heads) in enumerate(zip(self.merged, self.heads)):
            if merged and not heads:
                raise SnapvitError(f"block {i}: tokens are matched by the keys of an attention, which the plan removes")
            if merged > left // 2:
                raise SnapvitError(
                    f"block {i}: the plan merges {merged} of {left} patch tokens. Merge at most half: {left // 2}"
                )
            left -= merged

    def keeps_all_of(self, other: Plan) -> bool:
        """Return True if everything that `other` keeps is kept here too: heads, neurons, and tokens after each block.

        Tokens of two grids are never the same, so there neither keeps all of the other.
        """
        merged, others = np.cumsum(self.merged), np.cumsum(other.merged)
        fewer = all(a >= b for a, b in zip(self.heads + self.neurons, other.heads + other.neurons))
        return fewer and self.grid == other.grid and bool((merged <= others).all())

    @property
    def removed(self) -> tuple[tuple[int, Part], ...]:
        """The removed sub-layers, by block and part."""
        attention: list[tuple[int, Part]] = [(i, "attention") for i, n in enumerate(self.heads) if not n]
        return (*attention, *((i, "mlp") for i, n in enumerate(self.neurons) if not n))

    @property
    def last_attention(self) -> int:
        """The last block that has an attention, -1 if none has: after it no token receives anything from another."""
        return max((i for i, kept in enumerate(self.heads) if kept), default=-1)

    def sparsity(self, anatomy: Anatomy) -> float:
        """Return the fraction of the prunable parameters that is removed."""
        return 1 - anatomy.prunable_params(self) / anatomy.prunable_params()

    def flops_ratio(self, anatomy: Anatomy) -> float:
        """Return the FLOPs of the blocks relative to the dense blocks."""
        return anatomy.block_flops(self) / anatomy.block_flops()


def _by(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


class Protection(Value, frozen=True, kw_only=True):
    """The share of each block that is never cut, best structures first; at least one head and one neuron.

    If `sublayers` is False, a sub-layer may also be removed whole; one that remains keeps at least this share.
    """

    neurons: Ratio = 0.05
    heads: Ratio = 0.2
    sublayers: bool = True

    @property
    def of_whole_parts(self) -> Protection:
        """The protection under which a sub-layer is kept whole, or removed whole where that is allowed."""
        return msgspec.structs.replace(self, heads=1.0, neurons=1.0)

    @property
    def also(self) -> str:
        """What is demanded beside the shares, in words to stand beside a target: nothing."""
        return ""

    def kept_neurons(self, total: int) -> int:
        return min(total, max(1, int(total * self.neurons)))  # 0 where the model lacks the sub-layer

    def kept_heads(self, total: int) -> int:
        return min(total, max(1, int(total * self.heads)))

    def removable(self, anatomy: Anatomy, without: npt.ArrayLike) -> list[tuple[bool, bool]]:
        """Return for each block if its attention and its MLP are removable; `without`: the damage of that, (L, 2).

        One must stay, so that there is a path from the image to the output: the one with the most damage. If only the
        class token is read, it is an attention, since nothing else brings patches to that token.
        """
        ends = np.array(without, np.float64)
        if self.sublayers:
            return [(False, False)] * len(ends)
        if anatomy.reads_token:
            ends[:, 1] = -1
        ends[
            np.array([anatomy.heads, anatomy.neurons]).T == 0
        ] = -2  # a sub-layer that the model lacks cannot be the one that stays
        stays = np.unravel_index(int(ends.argmax()), ends.shape)
        return [((i, 0) != stays, (i, 1) != stays) for i in range(len(ends))]

    def least(self, anatomy: Anatomy) -> Plan:
        """Return the Plan that keeps only what is protected."""
        heads = tuple(self.kept_heads(n) for n in anatomy.heads)
        return Plan(heads=heads, neurons=tuple(self.kept_neurons(n) for n in anatomy.neurons))


class DeviceProtection(Protection, frozen=True, kw_only=True):
    """The protection for a device that computes an attention of few heads badly: a block keeps none, or so many.

    A block that has fewer in the first place keeps what it has. It is of a device, not of a model, so no ranking holds
    it.

    >>> DeviceProtection(least_heads=2).kept_heads(3), DeviceProtection(least_heads=2).kept_heads(1)
    (2, 1)
    """

    least_heads: Size = 1

    @staticmethod
    def of(protection: Protection, least_heads: int) -> Protection:
        """Return a protection with this rule; the same one where the rule demands nothing."""
        if least_heads <= 1:
            return protection
        return DeviceProtection(**msgspec.structs.asdict(protection), least_heads=least_heads)

    def kept_heads(self, total: int) -> int:
        return min(total, max(self.least_heads, Protection.kept_heads(self, total)))

    @property
    def also(self) -> str:
        return f" (0 or at least {self.least_heads} heads in a block)"
