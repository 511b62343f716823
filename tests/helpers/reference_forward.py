"""The forward pass of every family in plain numpy, from the tensors of an Elastic folder alone.

It is slow and simple on purpose: the specification of what a graph made from (Elastic, Plan) must compute. Whether a
part is there is told by its name being there; Anatomy and Wiring tell what names cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from snapvit_export.elastic.folder import Elastic
from snapvit_export.model.plan import Plan

Array = np.ndarray
erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
}


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Reference:
    """One Plan of an Elastic: call it with images (B, C, H, W) for logits, or features of a model without classes."""

    def __init__(self, elastic: Elastic, plan: Plan, corrected: bool = False) -> None:
        self.elastic, self.anatomy, self.wiring = elastic, elastic.anatomy, elastic.description.wiring
        stored = elastic.weights(plan, corrected)
        self.w = {name: array.astype(np.float64) for name, array in stored.items()}

    def __call__(self, images: Array) -> Array:
        x = self.embed(images)  # (B, T, E)
        for i in range(len(self.anatomy.blocks)):
            x = self.block(x, i)
        return self.classify(self.norm(x, "final_norm"))

    def embed(self, images: Array) -> Array:
        """Patches times a matrix, plus positions; before them the prefix tokens, which have theirs already."""
        (ph, pw), c = self.anatomy.patch, self.anatomy.channels
        rows, columns = images.shape[2] // ph, images.shape[3] // pw
        seen = images[:, :, : rows * ph, : columns * pw].reshape(-1, c, rows, ph, columns, pw)
        patches = seen.transpose(0, 2, 4, 1, 3, 5).reshape(len(images), rows * columns, c * ph * pw)
        weight = self.w["patch.weight"]
        x = patches @ weight.reshape(len(weight), -1).T + self.w.get("patch.bias", 0)
        x = x + self.w.get("positions", 0)
        if "prefix" in self.w:
            prefix = np.broadcast_to(self.w["prefix"], (len(x), *self.w["prefix"].shape))
            x = np.concatenate([prefix, x], axis=1)
        return self.norm(x, "pre_norm")

    def block(self, x: Array, i: int) -> Array:
        name = f"blocks.{i}"
        if f"{name}.proj.weight" in self.w:
            attended = self.attention(self.norm(x, f"{name}.norm1"), i)
        else:  # a sub-layer that is gone adds its bias
            attended = self.w.get(f"{name}.proj.bias", 0)
        x = x + attended * self.w.get(f"{name}.scale1", 1)
        if f"{name}.fc2.weight" in self.w:
            return x + self.mlp(self.norm(x, f"{name}.norm2"), i) * self.w.get(f"{name}.scale2", 1)
        return x + self.w.get(f"{name}.fc2.bias", 0) * self.w.get(f"{name}.scale2", 1)

    def attention(self, x: Array, i: int) -> Array:
        name, size = f"blocks.{i}", self.anatomy.blocks[i].head_dim
        q, k, v = (heads(self.linear(x, f"{name}.{part}"), size) for part in "qkv")  # (B, heads, T, h)
        q, k = (self.rotate(self.norm(part, f"{name}.{of}_norm")) for part, of in ((q, "q"), (k, "k")))
        return self.linear(self.norm(attend(q, k, v), f"{name}.attn_norm"), f"{name}.proj")

    def rotate(self, x: Array) -> Array:
        """Turn each pair of features of the patches by the angles of the table; the prefix tokens stay."""
        if "rope.sin" not in self.w:
            return x
        prefix = self.anatomy.prefix
        patches = x[:, :, prefix:]
        if self.wiring.rotate_half:
            a, b = np.split(patches, 2, axis=-1)
            turned = np.concatenate([-b, a], axis=-1)
        else:
            turned = np.stack([-patches[..., 1::2], patches[..., ::2]], axis=-1).reshape(patches.shape)
        patches = patches * self.w["rope.cos"] + turned * self.w["rope.sin"]
        return np.concatenate([x[:, :, :prefix], patches], axis=2)

    def mlp(self, x: Array, i: int) -> Array:
        name, act = f"blocks.{i}", ACTIVATIONS[self.anatomy.blocks[i].activation]
        if f"{name}.gate.weight" in self.w:
            hidden = act(self.linear(x, f"{name}.gate")) * self.linear(x, f"{name}.up")
        else:
            hidden = act(self.linear(x, f"{name}.fc1"))
        return self.linear(self.norm(hidden, f"{name}.mlp_norm"), f"{name}.fc2")

    def classify(self, x: Array) -> Array:
        if self.anatomy.distillation_token:  # two tokens, two classifiers, the mean of both
            return (self.head(x[:, 0], "head") + self.head(x[:, 1], "distillation_head")) / 2
        return self.head(self.norm(self.pool(x), "fc_norm"), "head")

    def head(self, x: Array, name: str) -> Array:
        return self.linear(x, name) if self.anatomy.classes else x

    def pool(self, x: Array) -> Array:
        kind = self.anatomy.pooling
        if kind == "token":
            return x[:, 0]
        x = x if self.wiring.pool_prefix else x[:, self.anatomy.prefix :]
        if self.anatomy.attention_pool is not None:
            return self.attention_pool(x)
        return {"avg": x.mean(1), "max": x.max(1), "avgmax": (x.mean(1) + x.max(1)) / 2}[kind]

    def attention_pool(self, x: Array) -> Array:
        """One learnt query attends to all tokens; then an MLP with its own residual."""
        assert self.anatomy.attention_pool is not None
        assert self.wiring.pool_activation is not None
        size = self.anatomy.embed_dim // self.anatomy.attention_pool.heads
        q = heads(self.linear(self.w["pool.latent"][None], "pool.q"), size)  # (1, heads, 1, h): the same for any image
        k, v = (heads(self.linear(x, f"pool.{part}"), size) for part in "kv")
        y = self.linear(attend(q, k, v), "pool.proj")  # (B, 1, E)
        hidden = ACTIVATIONS[self.wiring.pool_activation](self.linear(self.norm(y, "pool.norm"), "pool.fc1"))
        return (y + self.linear(hidden, "pool.fc2"))[:, 0]

    def linear(self, x: Array, name: str) -> Array:
        weight = self.w[f"{name}.weight"]
        transposed = name.endswith((".proj", ".fc2"))  # stored [in, out]; all others [out, in]
        return x @ (weight if transposed else weight.T) + self.w.get(f"{name}.bias", 0)

    def norm(self, x: Array, name: str) -> Array:
        """LayerNorm or RMSNorm over the last axis; a norm that the model does not have changes nothing."""
        if f"{name}.weight" not in self.w:
            return x
        if self.anatomy.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.elastic.eps(name))
        return x * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0)


def heads(x: Array, size: int) -> Array:
    """(B, T, heads*h) to (B, heads, T, h)."""
    return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3)


def attend(q: Array, k: Array, v: Array) -> Array:
    """Attention of every head, and the heads side by side again: (B, T of q, heads*h)."""
    z = softmax(q @ k.swapaxes(-2, -1) * q.shape[-1] ** -0.5) @ v
    return z.transpose(0, 2, 1, 3).reshape(z.shape[0], z.shape[2], -1)
