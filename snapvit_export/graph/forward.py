"""The forward pass of a ViT as an ONNX graph: from an Anatomy and a Plan, by hand, without torch. Light.

The residual stream is kept as (B*T, E), so that every linear layer is one Gemm, and the batch is the only unknown size:
reshapes say -1 for it, and no Shape, Gather or Concat of sizes is left for a runtime to compute. `layers` has the
linear layers in each precision; in fp16 every part computes in half precision or, where its values would not fit, in
single, and so does the stream between them. `format` has the flavours; `tensorrt_forward` changes what is another form
in the one for TensorRT.

Where only prefix tokens are read (token pooling), the block of the last attention computes queries, proj and MLP for
these alone, and so do all blocks after it. With so few queries, keys and values are not made at all: (q W_k) x and
W_v (a x) are the same products in a cheaper order.

A block that merges tokens does so between its attention and its MLP (`merging`). Later attentions add the logarithm of
sizes to the logits of their keys, and pooling weighs tokens by them. A merge that no token that is read comes to see,
in the block of the last attention, is not written.

A removed sub-layer is simply not written: a block without heads has no attention, and what its biases would add is in
the layer before (`weights.own_tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..elastic.format import Wiring
from ..model.anatomy import Anatomy, Block
from ..model.plan import Plan
from .format import INPUT, GraphFormat
from .layers import dynamic_int8, gemm, static_int8
from .merging import Merging
from .nodes import Nodes
from .precision import EMBED, FLOAT, HALF, INT32, OF_STREAM, OUTPUT, STREAM, GraphPrecision
from .weights import ADDED, BYTES, drops_key_bias, has_patch_bias, moves_value_bias


def output_name(anatomy: Anatomy, format: GraphFormat) -> str:
    """Return the name of the graph's output: class scores, or the embedding."""
    return "logits" if anatomy.classes and not format.features else "features"


def emit_nodes(
    anatomy: Anatomy, wiring: Wiring, biased: Mapping[str, bool], format: GraphFormat, precision: GraphPrecision
) -> Nodes:
    """Return the nodes of a model of this Anatomy, which is that of the cut model.

    `biased` maps each proj and fc2 ("blocks.0.proj") to True if it has a bias: a correction may have added one. `ADDED`
    in it: removed sub-layers leave a bias, and no layer before them holds it.
    """
    return Forward(anatomy, wiring, biased, format, precision).run()


class Forward:
    """Writes one graph; each method adds a part of it and returns the name of its result."""

    merging_class = Merging

    def __init__(
        self,
        anatomy: Anatomy,
        wiring: Wiring,
        biased: Mapping[str, bool],
        format: GraphFormat,
        precision: GraphPrecision,
    ) -> None:
        self.anatomy, self.wiring, self.biased = anatomy, wiring, biased
        self.format, self.precision = format, precision
        self.stored = HALF if self.precision.is_half else FLOAT
        self.stream = self.precision.float_type(STREAM)
        self.n = Nodes(format.opset, self.stored)
        self.e, self.prefix = anatomy.embed_dim, anatomy.prefix
        self.merging = self.merging_class(self.n, self.prefix, anatomy.patches, self.e, anatomy.rope != "none")
        self.keys = ""  # of the last attention, as it compares them

    @property
    def tokens(self) -> int:
        """Tokens of the stream, as far as it is written."""
        return self.merging.tokens

    def run(self) -> Nodes:
        """Add all nodes."""
        n = self.n
        with n.part(EMBED), n.floats(self.precision.float_type(EMBED)):
            x = n.cast(self.embed(), n.float_type, self.stream)
        if ADDED in self.biased:
            with n.part(OF_STREAM), n.floats(self.stream):
                x = n.add("Add", x, n.weight(ADDED))
        last = Plan.dense(self.anatomy).last_attention  # this Anatomy is that of the cut model
        for i in range(len(self.anatomy.blocks)):
            with n.part(f"blocks.{i}"):
                only_read = i == last and self.anatomy.reads_token
                x = self.block(x, i, self.anatomy.read_tokens if only_read else self.tokens)
        kind = self.precision.float_type(OUTPUT)
        with n.part(OUTPUT), n.floats(kind):
            self.classify(n.cast(x, self.stream, kind))
        return n

    def embed(self) -> str:
        """Images to (B*T, E)."""
        n, end, patches = self.n, "", self.anatomy.patches
        if self.format.takes_bytes:  # bytes/256, exactly: the weights of whole bytes would be too small for fp16
            floats = n.add("Cast", INPUT, to=n.float_type)  # first of all, since TensorRT only casts bytes
            x = n.add("Transpose", floats, perm=[0, 3, 1, 2])
            x, end = n.add("Mul", x, n.number(2**-8)), BYTES
        else:
            x = n.cast(INPUT, FLOAT, n.float_type)
        inputs = [x, n.weight(f"patch.weight{end}")]
        if has_patch_bias(self.anatomy) or (end and not self.anatomy.positions):
            inputs.append(n.weight(f"patch.bias{end}"))
        x = n.add("Conv", *inputs, strides=list(self.anatomy.patch), kernel_shape=list(self.anatomy.patch))
        x = n.add("Transpose", n.reshape(x, [self.batch or -1, self.e, patches]), perm=[0, 2, 1])  # (B, patches, E)
        if self.anatomy.positions:
            x = n.add("Add", x, n.weight(f"positions{end}"))
        if self.prefix:
            x = n.add("Concat", self.prefix_tokens(x), x, axis=1)
        if self.anatomy.pre_norm:
            x = self.norm(x, "pre_norm")
        return n.reshape(x, [-1, self.e])

    @property
    def batch(self) -> int | None:
        return self.format.batch

    def prefix_tokens(self, x: str) -> str:
        """The prefix tokens once for every image: (B, prefix, E)."""
        n, prefix = self.n, self.n.weight("prefix")
        if self.batch == 1:
            return n.reshape(prefix, [1, self.prefix, self.e])
        if self.batch is not None:
            return n.add("Expand", prefix, n.ints([self.batch, self.prefix, self.e]))
        shape = n.add("Shape", x, end=1)
        return n.add("Expand", prefix, n.add("Concat", shape, n.ints([self.prefix, self.e]), axis=0))

    def block(self, x: str, i: int, read: int) -> str:
        """Add one block; if it has the last attention, it outputs only the first `read` tokens of each image."""
        n, name, block = self.n, f"blocks.{i}", self.anatomy.blocks[i]
        merged = self.anatomy.merges[i] if read == self.tokens else 0
        kind = self.precision.float_type(f"{name}.attn")
        with n.part("attn"), n.floats(kind):
            if block.heads:
                normed = self.from_stream(x, f"{name}.norm1")
                asking = self.asking(normed, read)
                if read < self.tokens:
                    with n.part(OF_STREAM):
                        x = self.first(x, read)
                y = self.attention(asking, normed, i, read)
                x = n.add("Add", x, y, name=f"{name}.attended" if block.hidden or merged else f"{name}.stream")
        if merged:
            with n.part("merge"):
                x = self.merge(x, i, merged, None if block.hidden else f"{name}.stream")
        kind = self.precision.float_type(f"{name}.mlp")
        with n.part("mlp"), n.floats(kind):
            if block.hidden:
                y = self.mlp(self.from_stream(x, f"{name}.norm2"), i)
                x = n.add("Add", x, y, name=f"{name}.stream")
        return x

    def merge(self, x: str, i: int, count: int, name: str | None) -> str:
        """Merge tokens by the keys that the block's attention has compared."""
        n, block, part = self.n, self.anatomy.blocks[i], f"blocks.{i}"
        keys = n.add("Transpose", self.keys, perm=[0, 2, 1, 3]) if self.keys_by_head(i) else self.keys
        width, kind = block.heads * block.head_dim, self.precision.float_type(f"{part}.merge")
        keys = n.reshape(keys, [-1, self.tokens, width])
        with n.part("wide"):
            keys = n.cast(keys, self.precision.float_type(f"{part}.attn"), FLOAT)
        return self.merging.merge(x, keys, width, count, i, self.stream, kind, name)

    def keys_by_head(self, i: int) -> bool:
        """Return True if `keys` are (B, heads, T, h), not by token."""
        return not self.is_plain(i)

    def is_plain(self, i: int) -> bool:
        """Return True if queries and keys are compared as their layers give them."""
        return self.anatomy.rope == "none" and not self.anatomy.blocks[i].qk_norm

    def from_stream(self, x: str, name: str) -> str:
        """Apply the norm that a part begins with, in the wider precision of the part and the stream."""
        n, kind = self.n, self.n.float_type
        wider = FLOAT if FLOAT in (kind, self.stream) else HALF
        with n.floats(wider):
            return n.cast(self.norm(n.cast(x, self.stream, wider), name), wider, kind)

    def first(self, x: str, count: int) -> str:
        """The first tokens of each image: (B*T, E) to (B*count, E)."""
        n = self.n
        whole = n.reshape(x, [-1, self.tokens, self.e])
        cut = n.add("Slice", whole, n.ints([0]), n.ints([count]), n.ints([1]))
        return n.reshape(cut, [-1, self.e])

    def asking(self, x: str, read: int) -> str:
        """The tokens that queries are made of: the first `read` of each image."""
        return x if read == self.tokens else self.first(x, read)

    def attention(self, asking: str, x: str, i: int, read: int) -> str:
        """Attention of the first `read` tokens of each image to all of its tokens; the result is of the stream."""
        block, name = self.anatomy.blocks[i], f"blocks.{i}"
        has = block.biases
        q = self.linear(asking, f"{name}.q", "q" in has)
        if read < self.tokens and self.can_reorder(i):
            return self.output(self.attend_few(q, x, i, read), f"{name}.proj")
        k = self.linear(x, f"{name}.k", "k" in has and not drops_key_bias(self.anatomy, i))
        v = self.linear(x, f"{name}.v", "v" in has and not moves_value_bias(self.anatomy, i))
        return self.project(self.attend(q, k, v, i, read), i)

    def project(self, z: str, i: int) -> str:
        """From the outputs of heads to what is added to the stream."""
        name = f"blocks.{i}"
        if self.anatomy.blocks[i].attn_norm:
            z = self.norm(z, f"{name}.attn_norm")
        return self.output(z, f"{name}.proj")

    def attend(self, q: str, k: str, v: str, i: int, read: int) -> str:
        """Softmax(q k^T) v of every head, from and to (tokens, heads*h)."""
        n, block = self.n, self.anatomy.blocks[i]
        width, bias = block.heads * block.head_dim, self.bias(read)
        if self.format.flavour == "ort" and self.is_plain(i):
            self.keys = k
            parts = [n.reshape(p, [-1, t, width]) for p, t in ((q, read), (k, self.tokens), (v, self.tokens))]
            z = n.add("Attention", *parts, *bias, q_num_heads=block.heads, kv_num_heads=block.heads, scale=1.0)
            return n.reshape(z, [-1, width])
        flat = k
        q, k, v = self.heads(q, block, read), self.heads(k, block, self.tokens), self.heads(v, block, self.tokens)
        q, k = self.placed(q, k, i, read)
        self.keys = flat if self.is_plain(i) else k
        return self.over_heads(q, k, v, i, bias)

    def placed(self, q: str, k: str, i: int, read: int) -> tuple[str, str]:
        """Queries and keys, (B, heads, tokens, h), as they are compared: normed and rotated, if the model does that."""
        if self.anatomy.blocks[i].qk_norm:
            q, k = self.norm(q, f"blocks.{i}.q_norm"), self.norm(k, f"blocks.{i}.k_norm")
        if self.anatomy.rope != "none":
            k = self.rotate(k, self.tokens)
            q = q if read <= self.prefix else self.rotate(q, read)  # prefix tokens are not rotated
        return q, k

    def over_heads(self, q: str, k: str, v: str, i: int, bias: list[str]) -> str:
        """Softmax(q k^T) v of (B, heads, tokens, h), to (tokens, heads*h)."""
        n, block = self.n, self.anatomy.blocks[i]
        scale = block.head_dim**-0.5 if block.qk_norm else 1.0
        if self.format.flavour == "ort":
            z = n.add("Attention", q, k, v, *bias, scale=scale)
        else:
            q = q if scale == 1.0 else n.add("Mul", q, n.number(scale))
            products = n.add("MatMul", q, n.add("Transpose", k, perm=[0, 1, 3, 2]))
            z = n.add("MatMul", self.softmax(products, bias), v)
        return n.reshape(n.add("Transpose", z, perm=[0, 2, 1, 3]), [-1, block.heads * block.head_dim])

    def bias(self, queries: int) -> list[str]:
        """What every attention adds to its logits since the first merge; ONNX Runtime wants a row for each query."""
        n, logs = self.n, self.merging.log_sizes()
        if logs is None:
            return []

        def make() -> list[str]:
            row = n.cast(n.reshape(logs, [-1, 1, 1, self.tokens]), FLOAT, n.float_type)
            if self.format.flavour != "ort" or queries == 1:
                return [row]
            return [n.add("Expand", row, n.ints([1, 1, queries, 1]))]

        return n.once(f"{logs}.{queries}.{n.float_type}", make)  # for all attentions until the next merge

    def softmax(self, products: str, bias: list[str]) -> str:
        products = self.n.add("Add", products, *bias) if bias else products
        return self.n.add("Softmax", products, axis=-1)

    def can_reorder(self, i: int) -> bool:
        """Return True if nothing stands between the tokens, their keys and values, and the output of a head."""
        return can_reorder(self.anatomy, i, self.precision)

    def attend_few(self, q: str, x: str, i: int, read: int) -> str:
        """`attend` for a few queries: these are taken to the tokens, and values are made of weighted sums of tokens."""
        n, block, e = self.n, self.anatomy.blocks[i], self.e
        count = block.heads
        n.layer_inputs |= {f"blocks.{i}.k": x, f"blocks.{i}.v": x}
        keys = n.reshape(n.weight(f"blocks.{i}.k.weight"), [count, block.head_dim, e])
        asked = n.reshape(n.add("MatMul", self.heads(q, block, read), keys), [-1, count * read, e])
        seen = n.reshape(self.weighted(asked, x, self.tokens, self.merging.log_sizes()), [-1, count, read, e])
        z = n.add("MatMul", seen, self.value_matrices(f"blocks.{i}.v", count, block.head_dim))  # (B, heads, read, h)
        return n.reshape(n.add("Transpose", z, perm=[0, 2, 1, 3]), [-1, count * block.head_dim])

    def weighted(self, asked: str, x: str, tokens: int, logs: str | None) -> str:
        """Sums of the tokens in `x`, weighted by the softmax of their products with `asked`, (B or 1, queries, E).

        `logs` are the logarithms of their sizes, (B, tokens).
        """
        n = self.n
        x = n.reshape(x, [-1, tokens, self.e])
        products = n.add("MatMul", asked, n.add("Transpose", x, perm=[0, 2, 1]))  # (B, queries, T)
        bias = [] if logs is None else [n.cast(n.reshape(logs, [-1, 1, tokens]), FLOAT, n.float_type)]
        return n.add("MatMul", self.softmax(products, bias), x)  # (B, queries, E)

    def value_matrices(self, name: str, heads: int, size: int) -> str:
        """Stored (heads*h, E), as (heads, E, h)."""
        n = self.n
        return n.add("Transpose", n.reshape(n.weight(f"{name}.weight"), [heads, size, self.e]), perm=[0, 2, 1])

    def heads(self, x: str, block: Block, tokens: int) -> str:
        """(B*T, heads*h) to (B, heads, T, h)."""
        return self.n.add("Transpose", self.n.reshape(x, [-1, tokens, block.heads, block.head_dim]), perm=[0, 2, 1, 3])

    def rotate(self, x: str, tokens: int) -> str:
        """Rotary embedding of the first tokens: x cos + (halves swapped) sin; the sign is in the table."""
        n = self.n
        a, b = n.split(x, axis=-1, parts=2)
        swapped = n.add("Concat", b, a, axis=-1)
        tables = [n.weight("rope.cos"), n.weight("rope.sin")]
        if self.merging.rows is not None:
            tables = self.gathered(tables, self.merging.rows)  # (B, 1, T, h)
        elif tokens < self.tokens:
            tables = [n.add("Slice", table, n.ints([0]), n.ints([tokens]), n.ints([0])) for table in tables]
        return n.add("Add", n.add("Mul", x, tables[0]), n.add("Mul", swapped, tables[1]))

    def gathered(self, tables: list[str], rows: str) -> list[str]:
        """The rows of rotary tables for the tokens as they lie, once for all readers."""
        n = self.n
        each = n.reshape(rows, [-1, 1, self.tokens])
        return n.once(f"{rows}.{n.float_type}", lambda: [n.add("Gather", table, each, axis=0) for table in tables])

    def mlp(self, x: str, i: int) -> str:
        block, name = self.anatomy.blocks[i], f"blocks.{i}"
        biased = "fc1" in block.biases
        if block.mlp == "glu":
            hidden = self.n.add(
                "Mul",
                self.activate(self.linear(x, f"{name}.gate", biased), block.activation),
                self.linear(x, f"{name}.up", biased),
            )
        else:
            hidden = self.activate(self.linear(x, f"{name}.fc1", biased), block.activation)
        if block.mlp_norm:
            hidden = self.norm(hidden, f"{name}.mlp_norm")
        return self.output(hidden, f"{name}.fc2")

    def linear(self, x: str, name: str, bias: bool) -> str:
        """A layer stored [out, in]."""
        return self.layer(x, name, bias, in_first=False)

    def output(self, x: str, name: str) -> str:
        """proj or fc2, stored [in, out]; the result is of the stream."""
        return self.n.cast(self.layer(x, name, self.biased[name], in_first=True), self.n.float_type, self.stream)

    def layer(self, x: str, name: str, bias: bool, in_first: bool) -> str:
        """Add a linear layer in its precision."""
        n, precision = self.n, self.precision
        n.layer_inputs[name] = x
        if not precision.quantises(name):
            return gemm(n, x, name, bias, in_first)
        if precision.precision == "int8-dynamic":
            return dynamic_int8(n, x, name, bias, in_first)
        _, number, part = name.split(".")
        block = self.anatomy.blocks[int(number)]
        out = self.e if in_first else block.heads * block.head_dim if part in ("q", "k", "v") else block.hidden
        symmetric = self.format.flavour != "ort"
        whole_bias = f"{name}{INT32}" in self.biased
        return static_int8(n, x, name, bias, in_first, out, precision.ranges[name], symmetric, whole_bias)

    def norm(self, x: str, name: str) -> str:
        n = self.n
        eps = self.wiring.eps.get(name, self.anatomy.norm_eps)
        weight = n.weight(f"{name}.weight")
        if self.anatomy.norm == "layer":
            return n.add("LayerNormalization", x, weight, n.weight(f"{name}.bias"), axis=-1, epsilon=eps)
        if n.opset >= 23:
            return n.add("RMSNormalization", x, weight, axis=-1, epsilon=eps)
        kind = n.float_type
        with n.part("wide"), n.floats(FLOAT):  # squares do not fit fp16
            x = n.cast(x, kind, FLOAT)
            mean = n.mean(n.add("Mul", x, x), axis=-1, keep=True)
            y = n.cast(n.add("Div", x, n.add("Sqrt", n.add("Add", mean, n.number(eps)))), FLOAT, kind)
        return n.add("Mul", y, weight)

    def activate(self, x: str, kind: str) -> str:
        return ACTIVATIONS[kind](self.n, x)

    def classify(self, x: str) -> None:
        """From the last block's tokens to the output."""
        n, anatomy = self.n, self.anatomy
        wanted = output_name(anatomy, self.format)
        if anatomy.final_norm:
            x = self.norm(x, "final_norm")
        if anatomy.distillation_token:
            x = self.distilled(x, wanted)
        else:
            x = self.pool(x)
            if anatomy.fc_norm:
                x = self.norm(x, "fc_norm")
            if wanted == "logits":
                x = self.linear(x, "head", True)
        n.add("Identity", x, name=wanted) if n.float_type == FLOAT else n.add("Cast", x, to=FLOAT, name=wanted)

    def distilled(self, x: str, wanted: str) -> str:
        """Two tokens: two classifiers, and the mean of both; as features their mean."""
        n = self.n
        pairs = n.reshape(x, [-1, 2, self.e])
        if wanted == "features":
            return n.mean(pairs, axis=1)
        a, b = (n.add("Gather", pairs, n.ints([k]), axis=1) for k in (0, 1))
        a, b = n.reshape(a, [-1, self.e]), n.reshape(b, [-1, self.e])
        both = n.add("Add", self.linear(a, "head", True), self.linear(b, "distillation_head", True))
        return n.add("Mul", both, n.number(0.5))

    def pool(self, x: str) -> str:
        """(B*T, E) to (B, E); with token pooling the last attention has left one token already."""
        n, kind = self.n, self.anatomy.pooling
        if kind == "token":
            return x
        x = n.reshape(x, [-1, self.tokens, self.e])
        tokens = self.tokens
        if self.prefix and not self.wiring.pool_prefix:
            x = n.add("Slice", x, n.ints([self.prefix]), n.ints([self.tokens]), n.ints([1]))
            tokens = self.merging.patches
        if self.anatomy.attention_pool is not None:
            return self.attention_pool(n.reshape(x, [-1, self.e]), tokens)
        if kind == "avg":
            return self.average(x, tokens)
        largest = n.mean(x, axis=1, op="ReduceMax")
        if kind == "max":
            return largest
        return n.add("Mul", n.add("Add", self.average(x, tokens), largest), n.number(0.5))

    def average(self, x: str, tokens: int) -> str:
        """The mean over tokens, (B, tokens, E) to (B, E); each counts as often as the patches that it stands for."""
        n, sizes = self.n, self.merging.sizes
        if sizes is None:
            return n.mean(x, axis=1)
        total = self.anatomy.patches + tokens - self.merging.patches
        with n.part("wide"), n.floats(FLOAT):
            weights = n.add("Mul", n.reshape(self.last(sizes, tokens), [-1, 1, tokens]), n.number(1 / total))
        return n.reshape(n.add("MatMul", n.cast(weights, FLOAT, n.float_type), x), [-1, self.e])

    def last(self, values: str, tokens: int) -> str:
        """The values of the last tokens, (B, T) to (B, tokens)."""
        return values if tokens == self.tokens else self.merging.columns(values, self.tokens - tokens, self.tokens)

    def attention_pool(self, x: str, tokens: int) -> str:
        """One query, the same for every image, attends to all tokens; then an MLP with its own residual."""
        n, pool = self.n, self.anatomy.attention_pool
        assert pool is not None
        assert self.wiring.pool_activation is not None
        logs = self.merging.log_sizes()
        logs = logs and self.last(logs, tokens)
        seen = n.reshape(self.weighted(n.weight("pool.asked"), x, tokens, logs), [-1, pool.heads, 1, self.e])
        values = self.value_matrices("pool.v", pool.heads, self.e // pool.heads)
        y = n.reshape(n.add("MatMul", seen, values), [-1, self.e])
        y = n.add("Gemm", y, n.weight("pool.proj.weight"), n.weight("pool.proj.bias"))
        hidden = self.activate(self.linear(self.norm(y, "pool.norm"), "pool.fc1", True), self.wiring.pool_activation)
        return n.add("Add", y, n.add("Gemm", hidden, n.weight("pool.fc2.weight"), n.weight("pool.fc2.bias")))


def _gelu(n: Nodes, x: str) -> str:
    if n.opset >= 20:
        return n.add("Gelu", x)
    erf = n.add("Erf", n.add("Div", x, n.number(math.sqrt(2))))  # in the form that runtimes know to fuse
    return n.add("Mul", n.add("Mul", x, n.add("Add", erf, n.number(1.0))), n.number(0.5))


def _gelu_tanh(n: Nodes, x: str) -> str:
    if n.opset >= 20:
        return n.add("Gelu", x, approximate="tanh")
    cube = n.add("Mul", n.add("Mul", n.add("Mul", x, x), x), n.number(0.044715))
    inner = n.add("Mul", n.add("Add", x, cube), n.number(math.sqrt(2 / math.pi)))
    return n.add("Mul", n.add("Mul", x, n.add("Add", n.add("Tanh", inner), n.number(1.0))), n.number(0.5))


def _quick_gelu(n: Nodes, x: str) -> str:
    return n.add("Mul", x, n.add("Sigmoid", n.add("Mul", x, n.number(1.702))))


ACTIVATIONS: dict[str, Callable[[Nodes, str], str]] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": lambda n, x: n.add("Mul", x, n.add("Sigmoid", x)),
    "relu": lambda n, x: n.add("Relu", x),
}


def can_reorder(anatomy: Anatomy, i: int, precision: GraphPrecision) -> bool:
    """Return True if nothing stands between the tokens, their keys and values, and the output of a head."""
    in_floats = not precision.quantises(f"blocks.{i}.k")
    plain = not anatomy.blocks[i].attn_norm
    return in_floats and plain and drops_key_bias(anatomy, i) and moves_value_bias(anatomy, i)
