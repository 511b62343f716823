"""Token merging as nodes of a graph: what `prune.blocks.merging` defines, without scatter and sizes. Light.

A block that merges r of its tokens knows all of its shapes when the graph is written, but for the batch. With A and B the
patch tokens in even and odd places, and P prefix tokens in front:

    cosines    (B, |A|, |B|)   of the keys, from one MatMul
    best       (B, |A|)        the partner of each token of A: a TopK of 1, the first of equals
    order      (B, |A|)        a TopK of all of A by its best cosine, the first of equals first: r of them go, others stay
    joined     (B, |B|, r)     one-hot, 1 where one that goes joins a token of B
    x_b        += joined s_a / s_b' (x_a - x_b), a MatMul with r columns: the mean of the group, weighted by sizes

So only the rows that go are added up, and the stream is copied once: [prefix, those that stay, B]. The one-hot MatMul
stands where others scatter: TensorRT has added up wrongly there, and has no reduction in ScatterND at all.

Sizes (patches that a token stands for) are float32 in every precision, where they are exact, and are not written as long
as all are 1. In fp16 the keys get their length 1 in float32, where their squares fit; cosines fit fp16.

`blocks.I.merge.cosines`, `.order` and `.best` name the decisions; `checks.merging` reads them.
"""

from __future__ import annotations

import numpy as np

from .nodes import Nodes
from .precision import FLOAT, OF_STREAM

COSINES, ORDER, BEST = "merge.cosines", "merge.order", "merge.best"  # after "blocks.I."


class Merging:
    """The tokens of a graph while it is written: how many there are, and what each of them stands for."""

    def __init__(self, nodes: Nodes, prefix: int, patches: int, embed_dim: int, rotates: bool) -> None:
        """`rotates`: attentions rotate keys by their place, so the places are taken along."""
        self.n, self.prefix, self.embed_dim, self.rotates = nodes, prefix, embed_dim, rotates
        self.patches = patches  # patch tokens as they are now
        self.sizes: str | None = None  # (B, patches) float32; None: all are 1
        self.rows: str | None = None  # (B, T): the place of each token among the first ones; None: its own

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    def merge(self, x: str, keys: str, count: int, block: int, stream: int, kind: int, name: str | None) -> str:
        """Merge `count` tokens of the stream, (B*T, E), by their keys, (B, T, d) in float32.

        `stream` is the type of the stream and `kind` that of the cosines; `name` that of the result, if it has one.
        """
        n, after = self.n, (self.patches + 1) // 2 - count  # of A
        best, order = self.match(keys, block, kind)
        places = self.places(order, 0)  # (B, |A|)
        goes = self.columns(order, 0, count) if after else order  # (B, r)
        into = n.add("GatherElements", best, goes, axis=1)  # (B, r), among B
        share = self.shares(into, places, count, after)  # (B, |B|, r)
        if self.rotates:
            self.follow(order, places, count, after)
        with n.part(OF_STREAM), n.floats(stream):
            x = self.joined(n.reshape(x, [-1, self.tokens, self.embed_dim]), places, into, share, count, after)
            self.patches -= count
            return n.add("Reshape", x, n.ints([-1, self.embed_dim]), name=name)

    def match(self, keys: str, block: int, kind: int) -> tuple[str, str]:
        """Return the best partner of each token of A, and A in the order of the cosines with them."""
        n, size, name = self.n, (self.patches + 1) // 2, f"blocks.{block}"
        even, odd = self.halves(keys, kind)
        with n.floats(kind):
            cosines = n.add("MatMul", even, n.add("Transpose", odd, perm=[0, 2, 1]), name=f"{name}.{COSINES}")
        largest, best = self.largest(cosines, f"{name}.{BEST}")
        order = n.add_many("TopK", largest, n.ints([size]), count=2, names=[None, f"{name}.{ORDER}"], axis=1)[1]
        return best, order

    def halves(self, keys: str, kind: int) -> list[str]:
        """The keys of A and of B, (B, |A|, d) and (B, |B|, d), each of length 1."""
        n = self.n
        with n.part("wide"), n.floats(FLOAT):
            keys = n.add("LpNormalization", keys, axis=-1, p=2)
        keys = n.cast(keys, FLOAT, kind)
        return [self.every_second(keys, self.prefix + start) for start in (0, 1)]

    def largest(self, cosines: str, name: str) -> list[str]:
        """The largest cosine of each token of A and whose it is: (B, |A|) each."""
        n, size = self.n, (self.patches + 1) // 2
        value, place = n.add_many("TopK", cosines, n.ints([1]), count=2, axis=2)
        return [n.reshape(value, [-1, size]), n.add("Reshape", place, n.ints([-1, size]), name=name)]

    def shares(self, into: str, places: str, count: int, after: int) -> str:
        """The part that each token that goes has in its group, (B, |B|, r) float32; the new sizes are noted."""
        n, others = self.n, self.patches // 2
        with n.part("wide"), n.floats(FLOAT):
            values = n.array("zero_one", np.array([0, 1], np.float32))
            joins = n.add("OneHot", into, n.ints([others]), values, axis=1)  # (B, |B|, r)
            if self.sizes is None:
                before, stays = n.number(1.0), None
            else:
                rows = self.add_to(places, -self.prefix)
                sizes = n.add("GatherElements", self.sizes, rows, axis=1)  # (B, |A|), in the order of A
                gone, stays = n.split(sizes, axis=1, sizes=[count, after]) if after else (sizes, None)
                joins = n.add("Mul", joins, n.reshape(gone, [-1, 1, count]))
                before = n.reshape(self.every_second(self.sizes, 1), [-1, others, 1])
            grown = n.add("Add", n.mean(joins, axis=2, keep=True, op="ReduceSum"), before)  # (B, |B|, 1)
            share = n.add("Div", joins, grown)
            flat = n.reshape(grown, [-1, others])
            if stays is not None:
                self.sizes = n.add("Concat", stays, flat, axis=1)
            else:
                ones = n.ints([0, after, 0, 0])  # in front of each row
                self.sizes = n.add("Pad", flat, ones, n.number(1.0)) if after else flat
        return share

    def joined(self, x: str, places: str, into: str, share: str, count: int, after: int) -> str:
        """The stream after the merge, (B, T - r, E)."""
        n = self.n
        taken = n.add("Concat", places, self.places(into, 1), axis=1)  # (B, |A| + r)
        parts = n.split(self.gathered(x, taken), axis=1, sizes=[count, *([after] if after else []), count])
        change = n.add("MatMul", n.cast(share, FLOAT, n.float_type), n.add("Sub", parts[0], parts[-1]))
        kept = [n.add("Slice", x, n.ints([0]), n.ints([self.prefix]), n.ints([1]))] if self.prefix else []
        kept += parts[1:-1]
        others = n.add("Add", self.every_second(x, self.prefix + 1), change)
        return n.add("Concat", *kept, others, axis=1) if kept else others

    def gathered(self, x: str, places: str) -> str:
        """Rows of each image: (B, T, E) and (B, n) to (B, n, E)."""
        return self.n.add("GatherND", x, self.n.add("Unsqueeze", places, self.n.ints([2])), batch_dims=1)

    def follow(self, order: str, places: str, count: int, after: int) -> None:
        """Note the places of the tokens that are kept; a constant gets the batch of `order` from zeros made of it."""
        n = self.n
        zeros = n.add("Mul", self.columns(order, 0, 1), n.ints([0]))  # (B, 1)
        fixed = [range(self.prefix), range(self.prefix + 1, self.tokens, 2)]
        front, odd = (n.add("Add", zeros, n.ints([*each])) if each else None for each in fixed)
        stays = self.columns(places, count, count + after) if after else None
        kept = n.add("Concat", *(part for part in (front, stays, odd) if part is not None), axis=1)  # (B, T - r)
        self.rows = kept if self.rows is None else n.add("GatherElements", self.rows, kept, axis=1)

    def places(self, numbers: str, odd: int) -> str:
        """The places in the stream of tokens that are numbered within A or B."""
        n = self.n
        return self.add_to(n.add("Mul", numbers, n.ints([2])), self.prefix + odd)

    def add_to(self, numbers: str, value: int) -> str:
        return self.n.add("Add", numbers, self.n.ints([value])) if value else numbers

    def columns(self, x: str, start: int, end: int) -> str:
        n = self.n
        return n.add("Slice", x, n.ints([start]), n.ints([end]), n.ints([1]))

    def every_second(self, x: str, start: int) -> str:
        """Every second token, from this one on."""
        n = self.n
        return n.add("Slice", x, n.ints([start]), n.ints([2**31 - 1]), n.ints([1]), n.ints([2]))

    def log_sizes(self, tokens: int | None = None) -> str | None:
        """What is added to the logits of every key, (B, tokens) float32; None: nothing. `tokens`: of the last ones."""
        return self._in_front(tokens, "Log", 0.0)

    def all_sizes(self, tokens: int | None = None) -> str | None:
        """The sizes of the tokens, (B, tokens) float32; None: all are 1. `tokens`: of the last ones."""
        return self._in_front(tokens, None, 1.0)

    def _in_front(self, tokens: int | None, op: str | None, of_prefix: float) -> str | None:
        """Some function of the sizes, written once, with its value for the prefix tokens in front."""
        n, sizes = self.n, self.sizes
        front = (self.tokens if tokens is None else tokens) - self.patches
        if sizes is None:
            return None

        def made() -> list[str]:
            values = n.add(op, sizes) if op else sizes
            return [n.add("Pad", values, n.ints([0, front, 0, 0]), n.number(of_prefix)) if front else values]

        with n.floats(FLOAT):
            return n.once(f"{sizes}.{op}.{front}", made)[0]
