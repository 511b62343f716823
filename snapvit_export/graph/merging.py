"""Token merging as nodes of a graph: what `prune.blocks.merging` defines, without scatter and sizes. Light.

A block that merges r of its tokens knows all of its shapes when the graph is written, but for the batch. With A and B
the patch tokens in even and odd places:

    cosines    (B, |A|, |B|)   of the keys, from one MatMul
    best       (B, |A|)        the partner in B of each token of A: the largest cosine, the first of equals
    order      (B, |A|)        one TopK of all of A by that cosine, the first of equals first: r go, the others stay
    joins      (B, |B|, r)     one-hot: 1 where a token that goes joins one of B
    x_b        += joins s_a / s_b' (x_a - x_b): a MatMul with r columns gives the mean of each group, weighted by sizes

So only rows that go are added up, and the rest of the stream is copied: [prefix, those that stay, B]. The one-hot
MatMul stands where others scatter, which TensorRT has computed wrongly (ScatterElements) or lacks (a sum in ScatterND).

Sizes (patches that a token stands for) are float32 in every precision, where they are exact; as long as all are 1 none
are written. In fp16 the keys get their length 1 in float32, where their squares fit.

`blocks.I.merge.cosines`, `.order` and `.best` name the decisions; `checks.merging` reads them. What each form of these
nodes costs in ONNX Runtime is in `benchmarks/tokens.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .nodes import Nodes
from .precision import FLOAT, OF_STREAM

COSINES, ORDER, BEST = "merge.cosines", "merge.order", "merge.best"  # after "blocks.I."
LEAST_SQUARE = 1e-24  # mean square of a key, so that one of zeros does not become NaN


class Merging:
    """The tokens of a graph while it is written: how many there are, and what each of them stands for."""

    def __init__(self, nodes: Nodes, prefix: int, patches: int, embed_dim: int, rotates: bool) -> None:
        """`rotates`: attentions rotate keys by their place, so the places are taken along."""
        self.n, self.prefix, self.embed_dim, self.rotates = nodes, prefix, embed_dim, rotates
        self.patches = patches  # patch tokens as they are now
        self.sizes: str | None = None  # (B, T) float32; None: all are 1
        self.rows: str | None = None  # (B, T): the place of each token among the first ones; None: its own

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches

    @property
    def halves(self) -> tuple[int, int]:
        """The number of tokens in A and in B."""
        return (self.patches + 1) // 2, self.patches // 2

    def merge(
        self, x: str, keys: str, width: int, count: int, block: int, stream: int, kind: int, name: str | None
    ) -> str:
        """Merge `count` tokens of the stream, (B*T, E), by their keys, (B, T, width) in float32.

        `stream` is the type of the stream and `kind` that of the cosines; `name` that of the result, if it has one.
        """
        n = self.n
        best, order = self.match(keys, width, block, kind)
        after = self.halves[0] - count  # tokens of A that stay
        goes = self.columns(order, 0, count) if after else order  # (B, r)
        into = n.add("GatherElements", best, goes, axis=1)  # (B, r), among B
        places = self.places(order)  # (B, |A|, 1)
        shares, sizes = self.shares(into, places, count, after)
        leaves, stays = n.split(places, axis=1, sizes=[count, after]) if after else (places, None)
        if self.rotates:
            self.follow(leaves, stays, count)
        with n.part(OF_STREAM), n.floats(stream):
            whole = n.reshape(x, [-1, self.tokens, self.embed_dim])
            joined = self.joined(whole, leaves, stays, into, shares, count)
            self.patches, self.sizes = self.patches - count, sizes
            return n.add("Reshape", joined, n.ints([-1, self.embed_dim]), name=name)

    def match(self, keys: str, width: int, block: int, kind: int) -> tuple[str, str]:
        """Return the best partner of each token of A, and A in the order of the cosines with them: (B, |A|) each."""
        n, name = self.n, f"blocks.{block}"
        with n.part("wide"), n.floats(FLOAT):
            keys = self.normed(keys, width)
        keys = n.cast(keys, FLOAT, kind)
        even, odd = (self.every_second(keys, self.prefix + start) for start in (0, 1))
        cosines = n.add("MatMul", even, n.add("Transpose", odd, perm=[0, 2, 1]), name=f"{name}.{COSINES}")
        return self.decided(cosines, f"{name}.{BEST}", f"{name}.{ORDER}")

    def decided(self, cosines: str, best: str, order: str) -> tuple[str, str]:
        """The best partner of each token of A and A in their order, under these names."""
        n = self.n
        largest, found = self.largest(cosines, best)
        wanted = n.ints([self.halves[0]])
        return found, n.add_many("TopK", largest, wanted, count=2, names=[None, order], axis=1)[1]

    def normed(self, keys: str, width: int) -> str:
        """The keys, each of length 1; a norm is faster in ONNX Runtime, and the portable flavour has none for this."""
        n = self.n
        if n.opset < 23:
            return n.add("LpNormalization", keys, axis=-1, p=2)
        scale = n.array(f"of_length_one.{width}", np.full(width, width**-0.5, np.float32))
        return n.add("RMSNormalization", keys, scale, axis=-1, epsilon=LEAST_SQUARE)

    def largest(self, cosines: str, name: str) -> list[str]:
        """The largest cosine of each token of A and whose it is, (B, |A|) each; in TensorRT a TopK is one kernel."""
        n, size = self.n, self.halves[0]
        if n.opset >= 23:
            value = n.mean(cosines, axis=2, op="ReduceMax")
            return [value, n.add("ArgMax", cosines, axis=2, keepdims=0, name=name)]
        value, place = n.add_many("TopK", cosines, n.ints([1]), count=2, axis=2)
        return [n.reshape(value, [-1, size]), n.add("Reshape", place, n.ints([-1, size]), name=name)]

    def shares(self, into: str, places: str, count: int, after: int) -> tuple[str, str]:
        """Return the share that each token that goes has in its group, (B, |B|, r), and the new sizes, (B, T - r)."""
        n, others = self.n, self.halves[1]
        with n.part("wide"), n.floats(FLOAT):
            joins = n.add("OneHot", into, n.ints([others]), n.array("zero_one", np.array([0, 1], np.float32)), axis=1)
            if self.sizes is None:
                grown = n.add("Add", self.summed(joins), n.number(1.0))  # (B, |B|, 1)
                front = n.ints([0, self.prefix + after, 0, 0])
                return n.add("Div", joins, grown), n.add("Pad", n.reshape(grown, [-1, others]), front, n.number(1.0))
            sizes = self.gathered(self.sizes, places)  # (B, |A|)
            gone, *stays = n.split(sizes, axis=1, sizes=[count, after]) if after else [sizes]
            joins = n.add("Mul", joins, n.reshape(gone, [-1, 1, count]))
            before = n.reshape(self.every_second(self.sizes, self.prefix + 1), [-1, others, 1])
            grown = n.add("Add", self.summed(joins), before)
            kept = [*self.front(self.sizes), *stays, n.reshape(grown, [-1, others])]
            return n.add("Div", joins, grown), self.beside(kept)

    def summed(self, joins: str) -> str:
        return self.n.mean(joins, axis=2, keep=True, op="ReduceSum")

    def joined(self, x: str, leaves: str, stays: str | None, into: str, shares: str, count: int) -> str:
        """The stream after the merge: (B, T, E) to (B, T - r, E)."""
        n, others = self.n, self.every_second(x, self.prefix + 1)
        partners = self.gathered(others, n.reshape(into, [-1, count, 1]))
        change = n.add("Sub", self.gathered(x, leaves), partners)  # (B, r, E)
        grown = n.add("Add", others, n.add("MatMul", n.cast(shares, FLOAT, n.float_type), change))
        return self.beside([*self.front(x), *([self.gathered(x, stays)] if stays else []), grown])

    def follow(self, leaves: str, stays: str | None, count: int) -> None:
        """Note the places of the tokens that are kept; constants get the batch of the others by adding zeros of it."""
        n = self.n
        zeros = n.add("Mul", self.columns(leaves, 0, 1), n.ints([0]))  # (B, 1, 1)
        fixed = [np.arange(self.prefix), np.arange(self.prefix + 1, self.tokens, 2)]
        front, odd = ([self.constant(zeros, rows)] if len(rows) else [] for rows in fixed)
        kept = self.beside([*front, *([stays] if stays else []), *odd])  # (B, T - r, 1)
        self.rows = self.gathered(self.rows, kept) if self.rows else n.reshape(kept, [-1, self.tokens - count])

    def constant(self, zeros: str, rows: npt.NDArray[np.int64]) -> str:
        """The same rows for every image: (B, n, 1)."""
        name = f"rows.{rows[0]}.{len(rows)}.{self.tokens}"
        return self.n.add("Add", zeros, self.n.array(name, rows[:, None]))

    def gathered(self, x: str, places: str) -> str:
        """Tokens of each image: (B, T, ...) and (B, n, 1) to (B, n, ...)."""
        return self.n.add("GatherND", x, places, batch_dims=1)

    def places(self, order: str) -> str:
        """The places in the stream of tokens that are numbered within A, (B, |A|) to (B, |A|, 1)."""
        n, size = self.n, self.halves[0]
        table = self.prefix + 2 * np.arange(size, dtype=np.int64)[:, None]
        return n.add("Gather", n.array(f"even_places.{self.prefix}.{size}", table), order, axis=0)

    def front(self, x: str) -> list[str]:
        """The prefix tokens, if there are any."""
        return [self.columns(x, 0, self.prefix)] if self.prefix else []

    def beside(self, parts: list[str]) -> str:
        return self.n.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]

    def columns(self, x: str, start: int, end: int) -> str:
        n = self.n
        return n.add("Slice", x, n.ints([start]), n.ints([end]), n.ints([1]))

    def every_second(self, x: str, start: int) -> str:
        """Every second token, from this one on."""
        n = self.n
        return n.add("Slice", x, n.ints([start]), n.ints([self.tokens]), n.ints([1]), n.ints([2]))

    def log_sizes(self) -> str | None:
        """What is added to the logits of every key, (B, T) float32; None: nothing."""
        n, sizes = self.n, self.sizes
        return None if sizes is None else n.once(f"{sizes}.log", lambda: [n.add("Log", sizes)])[0]
