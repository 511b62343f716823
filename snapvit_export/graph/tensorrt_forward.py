"""The forward pass in the forms that TensorRT makes the fewest kernels of: what differs from `forward`. Light.

    q, k, v     one Gemm of a weight in the order (heads, 3, h), so that any number of heads is a prefix; Split by parts
    proj, fc2   parts of their own for float16: if only what they add to the stream is too large for it, they alone
                compute in float32, and the attention before them stays one kernel
    last block  queries are made of all tokens too, in the one Gemm, and those of the tokens that are read are taken:
                attention stays one kernel, and proj and MLP work on these tokens alone, as elsewhere
    int8, fp8   with float16 around the products (`layers.about_zero`)
    merging     as elsewhere: gathers, a one-hot product and TopK, no scatter

What TensorRT-RTX makes of each was read from its kernel plan: docs/runtimes.md has the counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..elastic.format import Wiring
from ..model.anatomy import Anatomy
from .format import GraphFormat
from .forward import Forward
from .layers import about_zero
from .merging import Merging
from .nodes import Nodes
from .precision import OF_TENSORRT, GraphPrecision


def emit_for_tensorrt(
    anatomy: Anatomy, wiring: Wiring, biased: Mapping[str, bool], format: GraphFormat, precision: GraphPrecision
) -> Nodes:
    """Return the nodes of a model, as `forward.emit_nodes`; `biased` also has each "blocks.0.qkv"."""
    return ForTensorRT(anatomy, wiring, biased, format, precision).run()


class MergingForTensorRT(Merging):
    """Token merging with a reshape of indices instead of one of cosines, which is a kernel of its own."""

    def decided(self, cosines: str, best: str, order: str) -> tuple[str, str]:
        """The best partner of each token of A and A in their order, under these names."""
        n, size = self.n, self.halves[0]
        value, place = n.add_many("TopK", cosines, n.ints([1]), count=2, axis=2)  # (B, |A|, 1) each
        rows = n.add_many("TopK", value, n.ints([size]), count=2, axis=1)[1]
        by_image = n.ints([-1, size])
        return n.add("Reshape", place, by_image, name=best), n.add("Reshape", rows, by_image, name=order)


class ForTensorRT(Forward):
    """Writes one graph for TensorRT."""

    merging_class = MergingForTensorRT

    def asking(self, x: str, read: int) -> str:
        """All tokens: the one Gemm makes queries of them."""
        return x

    def attention(self, asking: str, x: str, i: int, read: int) -> str:
        """Attention of the first `read` tokens of each image to all; queries of the others are made and dropped."""
        n, name = self.n, f"blocks.{i}"
        q, k, v = self.parts(self.layer(asking, f"{name}.qkv", self.biased[f"{name}.qkv"], in_first=False), i)
        if read < self.tokens:
            q = n.add("Slice", q, n.ints([0]), n.ints([read]), n.ints([2]))
        q, self.keys = self.placed(q, k, i, read)
        return self.project(self.over_heads(q, self.keys, v, i, self.bias(read)), i)

    def parts(self, qkv: str, i: int) -> list[str]:
        """(B*T, heads*3*h) to queries, keys and values of (B, heads, T, h)."""
        n, block = self.n, self.anatomy.blocks[i]
        whole = n.reshape(qkv, [-1, self.tokens, block.heads, 3 * block.head_dim])
        return n.split(n.add("Transpose", whole, perm=[0, 2, 1, 3]), axis=-1, parts=3)

    def keys_by_head(self, i: int) -> bool:
        """Return True: keys are never by token."""
        return True

    def output(self, x: str, name: str) -> str:
        """proj or fc2, in a type of its own; the result is of the stream."""
        n, before = self.n, self.n.float_type
        block, _, layer = name.rpartition(".")
        kind = self.precision.float_type(f"{block}.{OF_TENSORRT[layer]}")
        with n.part(layer), n.floats(kind):
            return super().output(n.cast(x, before, kind), name)

    def layer(self, x: str, name: str, bias: bool, in_first: bool) -> str:
        """Add a linear layer in its precision."""
        precision = self.precision
        if precision.precision == "int8-dynamic" or not precision.quantises(name):
            return super().layer(x, name, bias, in_first)
        self.n.layer_inputs[name] = x
        return about_zero(self.n, x, name, bias, in_first, precision.ranges[name], precision.precision)
