"""Token merging computed the slow way: no token ever leaves its place, and groups are lists of patches.

A token that stands for s patches is s equal rows here. That is what makes this an independent reference: attention over
all rows counts such a key s times, which is what adding log s to its logit must do; the mean over all patches is the
mean weighted by sizes; and the mean of the rows of two groups is the weighted mean of two tokens. No size is kept, the
stream is never gathered, and partners are found by loops over pairs of groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from helpers.reference_forward import Array, Reference, heads
from snapvit_export.elastic.folder import Elastic
from snapvit_export.model.plan import Plan


@dataclass
class Group:
    """Patches that have become one token, and the patch whose rotation they all take."""

    patches: list[int]
    turned_as: int


class MergingReference(Reference):
    """One Plan of an Elastic, with the tokens that it merges: call it with images (B, C, H, W)."""

    def __init__(self, elastic: Elastic, plan: Plan, corrected: bool = False) -> None:
        super().__init__(elastic, plan, corrected)
        self.plan = plan
        self.groups: list[Group] = []  # of the image that is computed, in the order of the tokens
        self.left: list[list[list[int]]] = []  # of each image: the patches of its groups at the end

    def __call__(self, images: Array) -> Array:
        self.left = []
        return np.concatenate([self.one(image[None]) for image in images])

    def one(self, image: Array) -> Array:
        count = self.elastic.anatomy.patches_of(self.plan)
        self.groups = [Group([patch], patch) for patch in range(count)]
        found = super().__call__(image)
        self.left.append([group.patches for group in self.groups])
        return found

    def block(self, x: Array, i: int) -> Array:
        """The two branches of the block, and between them the merge."""
        merged = self.plan.merged[i]
        if not merged:
            return super().block(x, i)
        name = f"blocks.{i}"
        y = self.norm(x, f"{name}.norm1")
        x = x + self.attention(y, i) * self.w.get(f"{name}.scale1", 1)
        self.join(self.keys(y, i), merged)
        x = self.averaged(x)
        if f"{name}.fc2.weight" in self.w:
            return x + self.mlp(self.norm(x, f"{name}.norm2"), i) * self.w.get(f"{name}.scale2", 1)
        return x + self.w.get(f"{name}.fc2.bias", 0) * self.w.get(f"{name}.scale2", 1)

    def rotate(self, x: Array) -> Array:
        """Every patch is turned as the one that stands for its group."""
        if "rope.sin" not in self.w:
            return x
        own = {name: self.w[name] for name in ("rope.sin", "rope.cos")}  # (patches, h) each
        turned_as = {patch: group.turned_as for group in self.groups for patch in group.patches}
        rows = [turned_as[patch] for patch in range(len(turned_as))]
        self.w |= {name: table[rows] for name, table in own.items()}
        turned = super().rotate(x)
        self.w |= own
        return turned

    def keys(self, y: Array, i: int) -> Array:
        """Keys of the patches, all heads side by side: (patches, heads*h)."""
        name, block = f"blocks.{i}", self.anatomy.blocks[i]
        has_effect = self.anatomy.rope != "none" or block.qk_norm  # otherwise a bias shifts all logits alike
        k = y @ self.w[f"{name}.k.weight"].T + (self.w.get(f"{name}.k.bias", 0) if has_effect else 0)
        k = self.rotate(self.norm(heads(k, block.head_dim), f"{name}.k_norm"))  # (1, heads, T, h)
        return k[0].transpose(1, 0, 2).reshape(k.shape[2], -1)[self.anatomy.prefix :]

    def join(self, keys: Array, count: int) -> None:
        """Let the `count` best matched groups in even places join their partners in odd places."""
        even, odd = self.groups[::2], self.groups[1::2]
        found = []  # for each even group: how near its partner is, and which one that is
        for group in even:
            near, partner = -np.inf, -1
            for place, other in enumerate(odd):
                cosine = angle(keys[group.patches[0]], keys[other.patches[0]])
                if cosine > near:
                    near, partner = cosine, place
            found.append((near, partner))
        order = sorted(range(len(even)), key=lambda place: -found[place][0])  # stable: the first of equals first
        for place in order[:count]:
            odd[found[place][1]].patches += even[place].patches
        self.groups = [even[place] for place in order[count:]] + odd

    def averaged(self, x: Array) -> Array:
        """Every patch becomes the mean of its group's patches."""
        x, prefix = x.copy(), self.anatomy.prefix
        for group in self.groups:
            rows = [prefix + patch for patch in group.patches]
            x[:, rows] = x[:, rows].mean(1, keepdims=True)
        return x


def angle(a: Array, b: Array) -> float:
    """The cosine of the angle between two vectors."""
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
