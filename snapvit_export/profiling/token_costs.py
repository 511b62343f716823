"""How the costs of a latency model go with tokens: a head's, a neuron's, those of being there, and of a merge. Light.

A latency model's own numbers are of the model's own tokens, T. With t tokens before a merge and a after it:

    head        weights + linear part x t/T + pairs x (t/T)^2     weights: read once, for however few tokens
    neuron      weights + linear part x a/T                       pairs: products of queries and keys, softmax
    attention   constant + per token x t                          its norm, its addition to the stream
    MLP         constant + per token x a
    merge       constant + stream x t/T + keys x t/T + matching x (p/P)^2 + sums x p/P x merged/P
    embedding   per patch

A merge normalises keys and copies the stream, and a feature of either costs the same; then it compares all p patch
tokens (P at first) with each other. What it does with keys it does head by head, so that is a part of what a head
costs. Matching and sums are matrix products as those of heads, and so as fast: their FLOPs tell what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import Count, NotNegative, Size, Value

Each = list[list[float]]  # costs of a head, a neuron, an attention and an MLP, by block


class TokenCosts(Value, frozen=True, kw_only=True):
    """What fewer tokens save of a latency model's costs, and what merging them costs, in milliseconds."""

    prefix: Count  # tokens that never merge
    patches: Size  # of the model's own grid
    head_weight_ms: tuple[NotNegative, ...]  # of what a head costs, by block: the part that no token adds to
    neuron_weight_ms: tuple[NotNegative, ...]
    pair_ms: tuple[NotNegative, ...]  # of what a head costs, by block: the part that goes with pairs of tokens
    token_ms: NotNegative  # of an attention or an MLP, for each token
    patch_ms: NotNegative
    merge_ms: NotNegative
    merge_stream_ms: NotNegative  # where all tokens are still there, as the next three
    merge_key_ms: tuple[NotNegative, ...]  # for each head, by block
    match_ms: tuple[NotNegative, ...]  # for each head, by block
    sum_ms: NotNegative  # if all patches were merged

    @property
    def by_block(self) -> tuple[tuple[float, ...], ...]:
        """All costs that there is one of for each block."""
        return self.head_weight_ms, self.neuron_weight_ms, self.pair_ms, self.merge_key_ms, self.match_ms

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
            whatever, pairs = self.head_weight_ms[i], self.pair_ms[i]
            head = whatever + (head - whatever - pairs) * share + pairs * share**2
            neuron = self.neuron_weight_ms[i] + (neuron - self.neuron_weight_ms[i]) * left
            attention -= self.token_ms * (whole - before)
            if merged:
                of_patches = patches / self.patches
                head += self.merge_key_ms[i] * share + self.match_ms[i] * of_patches**2
                attention += self.merge_ms + self.merge_stream_ms * share
                attention += self.sum_ms * of_patches * merged / self.patches
            for costs, ms in zip(found, (head, neuron, attention, mlp - self.token_ms * (whole - after))):
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


def merge_shares(anatomy: Anatomy) -> tuple[list[float], float]:
    """Return the FLOPs of a merge, relative to those of the linear layers of one head of the first block.

    They are of matching all patches by one head of each block, and of the sums if all patches were merged.
    """
    linear = 8 * anatomy.embed_dim * anatomy.blocks[0].head_dim * anatomy.tokens
    half = anatomy.patches / 2
    matching = [2 * block.head_dim * half**2 / linear for block in anatomy.blocks]
    return matching, 2 * anatomy.embed_dim * half * anatomy.patches / linear
