"""How the costs of a latency model go with tokens: a head's, a neuron's, those of being there, and of a merge. Light.

A latency model's own numbers are of the model's own tokens, T. With t tokens before a merge and a after it:

    head        linear part x t/T  +  pairs x (t/T)^2        pairs: its products of queries and keys, its softmax
    neuron      x a/T
    attention   constant + per token x t                     its norm, its addition to the stream
    MLP         constant + per token x a
    merge       constant + per token x t + per head x (p/P)^2 + sums x p/P x merged/P      p: patch tokens, of P
    embedding   per patch

A merge compares all keys with each other, head by head; so that part of it is a part of what a head costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, Size, Value

Each = list[list[float]]  # costs of a head, a neuron, an attention and an MLP, by block


class TokenCosts(Value, frozen=True, kw_only=True):
    """What fewer tokens save of a latency model's costs, and what merging them costs, in milliseconds."""

    prefix: Count  # tokens that never merge
    patches: Size  # of the model's own grid
    pair_ms: tuple[float, ...]  # of what a head costs, by block: the part that goes with pairs of tokens
    token_ms: float  # of an attention or an MLP, for each token
    patch_ms: float
    merge_ms: float
    merge_token_ms: float  # for each token before the merge
    match_ms: tuple[float, ...]  # for each head, by block, where all patches are still there
    sum_ms: float  # of a merge of all patches into each other, as the unit of smaller ones

    def fixed(self, fixed_ms: float, plan: Plan) -> float:
        """Return the fixed part at a Plan's grid, from that of the model's own."""
        return fixed_ms - self.patch_ms * (self.patches - _patches(plan, self.patches))

    def each(self, own: Sequence[Sequence[float]], plan: Plan) -> Each:
        """Return the costs of a head, a neuron, an attention and an MLP of every block with a Plan's tokens."""
        whole = self.prefix + self.patches
        found: Each = [[], [], [], []]
        for i, (patches, merged) in enumerate(patches_and_merges(plan, self.patches)):
            head, neuron, attention, mlp = (costs[i] for costs in own)
            before, after = self.prefix + patches, self.prefix + patches - merged
            share, left = before / whole, after / whole
            head = (head - self.pair_ms[i]) * share + self.pair_ms[i] * share**2
            attention -= self.token_ms * (whole - before)
            if merged:
                of_patches = patches / self.patches
                head += self.match_ms[i] * of_patches**2
                attention += self.merge_ms + self.merge_token_ms * before
                attention += self.sum_ms * of_patches * merged / self.patches
            for costs, ms in zip(found, (head, neuron * left, attention, mlp - self.token_ms * (whole - after))):
                costs.append(max(ms, 0.0))  # below zero by rounding alone
        return found


def patches_and_merges(plan: Plan, own: int) -> list[tuple[int, int]]:
    """Return for each block the patch tokens before its merge, and how many it merges; `own`: the model's patches."""
    left, found = _patches(plan, own), []
    for merged in plan.merged:
        found.append((left, merged))
        left -= merged
    return found


def _patches(plan: Plan, own: int) -> int:
    return own if plan.grid is None else plan.grid[0] * plan.grid[1]


def merge_flops(anatomy: Anatomy) -> tuple[list[int], int]:
    """Return the FLOPs of matching all patches by one head of each block, and of the sums of a merge of all of them."""
    half = anatomy.patches / 2
    return [int(2 * block.head_dim * half**2) for block in anatomy.blocks], int(2 * anatomy.embed_dim * half * 2 * half)
