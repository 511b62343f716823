"""Canonical names and shapes of all tensors that a model of an Anatomy has. Light.

Whatever timm calls them, the parts have the same names in every family. A name also fixes the layout: everything that
belongs to a head or a neuron is cut along axis 0.

| name                                      | shape                   | is                                            |
|-------------------------------------------|-------------------------|-----------------------------------------------|
| `patch.weight`, `patch.bias`              | (E, C, ph, pw), (E,)    | a convolution whose stride is the patch       |
| `prefix`                                  | (prefix tokens, E)      | class, distillation, registers; with positions |
| `positions`                               | (patches, E)            | position embedding of the patches alone       |
| `rope.sin`, `rope.cos`                    | (patches, h)            | rotary embedding of q and k of the patches    |
| `pre_norm`, `final_norm`, `fc_norm` `.*`  | (E,)                    | before the blocks, after them, after pooling  |
| `blocks.{i}.norm1.*`, `.norm2.*`          | (E,)                    | before attention, before the MLP              |
| `blocks.{i}.q`, `.k`, `.v` `.weight`      | (heads*h, E)            | [out, in], heads in rank order                |
| `blocks.{i}.q`, `.k`, `.v` `.bias`        | (heads*h,)              |                                               |
| `blocks.{i}.q_norm.*`, `.k_norm.*`        | (h,)                    | over each head, before rotation               |
| `blocks.{i}.attn_norm.*`                  | (heads*h,)              | over all kept heads, before proj              |
| `blocks.{i}.proj.weight`, `.bias`         | (heads*h, E), (E,)      | [in, out]: transposed                         |
| `blocks.{i}.scale1`, `.scale2`            | (E,)                    | LayerScale after proj, after fc2              |
| `blocks.{i}.fc1.weight`, `.bias`          | (neurons, E), (neurons,)| plain MLP: [out, in], neurons in rank order   |
| `blocks.{i}.gate.*`, `.up.*`              | as fc1                  | gated MLP instead of fc1: act(gate) * up      |
| `blocks.{i}.mlp_norm.*`                   | (neurons,)              | over all kept neurons, before fc2             |
| `blocks.{i}.fc2.weight`, `.bias`          | (neurons, E), (E,)      | [in, out]: transposed                         |
| `pool.latent`                             | (1, E)                  | the query token of attention pooling          |
| `pool.q`, `.k`, `.v`, `.proj`, `.norm`, `.fc1`, `.fc2` `.*` |       | as in a block; never cut                      |
| `head.weight`, `head.bias`                | (classes, E), (classes,)| classifier                                    |
| `distillation_head.weight`, `.bias`       | as head                 | classifier of the distillation token          |

Norms have `weight`, and `bias` if they are LayerNorms. What the Anatomy lacks has no name here. Of a
sub-layer that a Plan removes, only what it adds to every token remains: the bias of proj or fc2, and LayerScale.
"""

from __future__ import annotations

from .anatomy import Anatomy, Block, Norm

Shapes = dict[str, tuple[int, ...]]
TRANSPOSED = frozenset({"proj", "fc2"})  # layers whose weight is [in, out]: they lose inputs, the others outputs


def weight_shapes(anatomy: Anatomy) -> Shapes:
    """Return the shape of every tensor of the model, in the order of the computation.

    >>> weight_shapes(anatomy.with_counts(plan))["blocks.0.fc2.weight"]     # (neurons kept, E)
    """
    e, norm = anatomy.embed_dim, anatomy.norm
    prefix = anatomy.prefix
    shapes: Shapes = {"patch.weight": (e, anatomy.channels, *anatomy.patch)}
    shapes |= {"patch.bias": (e,)} if anatomy.patch_bias else {}
    shapes |= {"prefix": (prefix, e)} if prefix else {}
    shapes |= {"positions": (anatomy.patches, e)} if anatomy.positions else {}
    if anatomy.rope != "none":
        table = (anatomy.patches, anatomy.blocks[0].head_dim)
        shapes |= {"rope.sin": table, "rope.cos": table}
    shapes |= _norm("pre_norm", e, norm) if anatomy.pre_norm else {}
    for i, block in enumerate(anatomy.blocks):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in _block(block, e, norm).items()}
    shapes |= _norm("final_norm", e, norm) if anatomy.final_norm else {}
    shapes |= _pool(anatomy)
    shapes |= _norm("fc_norm", e, norm) if anatomy.fc_norm else {}
    heads = ["head"] + ["distillation_head"] * anatomy.distillation_token if anatomy.classes else []
    for name in heads:
        shapes |= _linear(name, anatomy.classes, e, bias=True)
    return shapes


def stored_shapes(anatomy: Anatomy) -> Shapes:
    """Return the shapes of a model that is stored whole: a sub-layer that it lacks still has its bias, (E,)."""
    shapes = weight_shapes(anatomy)
    for i, block in enumerate(anatomy.blocks):
        shapes |= {} if block.heads else {f"blocks.{i}.proj.bias": (anatomy.embed_dim,)}
        shapes |= {} if block.hidden else {f"blocks.{i}.fc2.bias": (anatomy.embed_dim,)}
    return shapes


def factor_shapes(anatomy: Anatomy) -> Shapes:
    """Return the shape of every array of the correction: input width d, L a lower triangle packed by rows."""
    e = anatomy.embed_dim
    shapes: Shapes = {}
    for i, block in enumerate(anatomy.blocks):
        for layer, d in (("proj", block.heads * block.head_dim), ("fc2", block.hidden)):
            of = f"blocks.{i}.{layer}"
            shapes |= {f"{of}.mean": (d,), f"{of}.lower": (d * (d + 1) // 2,), f"{of}.projected": (d, e)}
            shapes |= {f"{of}.constant": (e,), f"{of}.gain": (e,)}
    return shapes


def _block(block: Block, e: int, norm: Norm) -> Shapes:
    return (_attention(block, e, norm) if block.heads else {}) | (_mlp(block, e, norm) if block.hidden else {})


def _attention(block: Block, e: int, norm: Norm) -> Shapes:
    width, has = block.heads * block.head_dim, block.biases
    shapes = _norm("norm1", e, norm)
    for name in ("q", "k", "v"):
        shapes |= _linear(name, width, e, name in has)
    if block.qk_norm:
        shapes |= _norm("q_norm", block.head_dim, norm) | _norm("k_norm", block.head_dim, norm)
    shapes |= _norm("attn_norm", width, norm) if block.attn_norm else {}
    shapes |= _linear("proj", e, width, "proj" in has)
    return shapes | ({"scale1": (e,)} if "attn" in block.layer_scale else {})


def _mlp(block: Block, e: int, norm: Norm) -> Shapes:
    n, has = block.hidden, block.biases
    shapes = _norm("norm2", e, norm)
    for name in ("fc1",) if block.mlp == "plain" else ("gate", "up"):
        shapes |= _linear(name, n, e, "fc1" in has)
    shapes |= _norm("mlp_norm", n, norm) if block.mlp_norm else {}
    shapes |= _linear("fc2", e, n, "fc2" in has)
    return shapes | ({"scale2": (e,)} if "mlp" in block.layer_scale else {})


def _pool(anatomy: Anatomy) -> Shapes:
    if anatomy.attention_pool is None:
        return {}
    e, n = anatomy.embed_dim, anatomy.attention_pool.hidden
    shapes: Shapes = {"pool.latent": (1, e)}
    for name in ("q", "k", "v", "proj"):
        shapes |= _linear(f"pool.{name}", e, e, bias=True)
    shapes |= _norm("pool.norm", e, anatomy.norm)
    return shapes | _linear("pool.fc1", n, e, bias=True) | _linear("pool.fc2", e, n, bias=True)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Shapes:
    transposed = name.rpartition(".")[2] in TRANSPOSED
    weight = (inputs, outputs) if transposed else (outputs, inputs)
    return {f"{name}.weight": weight} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name: str, width: int, norm: Norm) -> Shapes:
    parts = ("weight", "bias") if norm == "layer" else ("weight",)
    return {f"{name}.{part}": (width,) for part in parts}
