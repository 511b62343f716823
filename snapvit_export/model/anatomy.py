"""The Anatomy: the parts of a ViT, and from them the parameters and FLOPs of any Plan. Light: no torch.

Symbols, as in the paper's Table 7:

| symbol | meaning                     | here           |
|--------|-----------------------------|----------------|
| E      | embedding width             | embed_dim      |
| T      | tokens, with every prefix   | tokens, lengths|
| h, k   | head width, heads kept      | head_dim, heads|
| n      | MLP hidden units kept       | neurons        |

A FLOP count has two for each multiply-add, and 3 per attention weight for the softmax. Norms, biases and activations
are not counted, as in the paper.

A block of a cut model may lack its attention (no heads), its MLP (no neurons) or both. Its norm, biases and LayerScale
are removed with it. A block may also merge tokens between its attention and its MLP: `lengths` has the tokens that each
of the two computes with.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from ..storage.json import Count, Kept, Size, Value, read_json, write_json

if TYPE_CHECKING:
    from .plan import Plan

Bias = Literal["q", "k", "v", "proj", "fc1", "fc2"]
Norm = Literal["layer", "rms"]
Side = Annotated[int, msgspec.Meta(ge=1, le=2**15)]  # of an image, in pixels
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
MOST_BLOCKS, MOST_PATCHES = 1000, 10**6  # far beyond any model: what is more would take for ever
NORM_PARAMS: dict[str, int] = {"layer": 2, "rms": 1}  # per feature: weight and bias, or weight alone


class Block(Value, frozen=True, kw_only=True):
    """One transformer block; without heads it has no attention, without hidden units no MLP."""

    heads: Kept
    head_dim: Size
    hidden: Kept
    mlp: Literal["plain", "glu"] = "plain"  # glu: act(gate) * up, two matrices before fc2
    activation: str = "gelu"
    biases: tuple[Bias, ...] = ("q", "k", "v", "proj", "fc1", "fc2")
    qk_norm: bool = False
    attn_norm: bool = False  # a norm over the concatenated heads, before proj
    mlp_norm: bool = False  # a norm over the hidden units, before fc2
    layer_scale: tuple[Literal["attn", "mlp"], ...] = ()

    def params_per_head(self, embed: int, norm: Norm) -> int:
        matrices = 4 * embed * self.head_dim  # q, k, v, proj
        biases = sum(name in self.biases for name in ("q", "k", "v")) * self.head_dim
        return matrices + biases + self.attn_norm * NORM_PARAMS[norm] * self.head_dim

    def params_per_neuron(self, embed: int, norm: Norm) -> int:
        inputs = 2 if self.mlp == "glu" else 1
        return (inputs + 1) * embed + inputs * ("fc1" in self.biases) + self.mlp_norm * NORM_PARAMS[norm]

    def params_of_attention(self, embed: int, norm: Norm) -> int:
        """Return the parameters of an attention beside its heads: norms, the bias of proj, LayerScale."""
        norms = NORM_PARAMS[norm] * (embed + self.qk_norm * 2 * self.head_dim)
        return norms + embed * (("proj" in self.biases) + ("attn" in self.layer_scale))

    def params_of_mlp(self, embed: int, norm: Norm) -> int:
        """Return the parameters of an MLP beside its neurons: a norm, the bias of fc2, LayerScale."""
        return NORM_PARAMS[norm] * embed + embed * (("fc2" in self.biases) + ("mlp" in self.layer_scale))

    def with_counts(self, heads: int, neurons: int) -> Block:
        """Return the block after a cut; what belongs to a sub-layer without any structure is removed with it."""
        block = msgspec.structs.replace(self, heads=heads, hidden=neurons)
        if not heads:
            block = block._without(("q", "k", "v", "proj"), "attn", qk_norm=False, attn_norm=False)
        if not neurons:
            block = block._without(("fc1", "fc2"), "mlp", mlp="plain", activation="gelu", mlp_norm=False)
        return block

    def _without(self, biases: tuple[Bias, ...], part: Literal["attn", "mlp"], **changes: object) -> Block:
        return msgspec.structs.replace(
            self,
            biases=tuple(name for name in self.biases if name not in biases),
            layer_scale=tuple(name for name in self.layer_scale if name != part),
            **changes,
        )


class AttentionPool(Value, frozen=True, kw_only=True):
    """Pooling by one learnt query that attends to all tokens (SigLIP). Never cut."""

    heads: Size
    hidden: Size


class Anatomy(Value, frozen=True, kw_only=True):
    """The parts of a ViT and their sizes.

    >>> anatomy.params(plan), anatomy.flops(plan)     # of a Plan, or of the dense model without one
    """

    format_version: Literal[1] = 1
    family: Literal["vit", "deit-distilled", "eva"]
    embed_dim: Size
    blocks: tuple[Block, ...]
    image: tuple[Side, Side]  # height, width in pixels
    patch: tuple[Side, Side]
    channels: Size = 3
    patch_bias: bool = True
    class_token: bool = True
    distillation_token: bool = False
    registers: Count = 0
    positions: Count  # rows of the learnt position embedding, 0 without one
    rope: Literal["none", "cat", "dinov3"] = "none"
    norm: Norm = "layer"
    norm_eps: Epsilon = 1e-6
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool = False
    pooling: Literal["token", "avg", "max", "avgmax", "map"] = "token"
    attention_pool: AttentionPool | None = None
    classes: Count = 0
    merged: tuple[Kept, ...] | UnsetType = UNSET  # tokens merged in each block; not in the file of a model without any

    def save(self, path: Path | str) -> None:
        """Write the anatomy as JSON."""
        write_json(Path(path), self)

    @staticmethod
    def load(path: Path | str) -> Anatomy:
        """Read an anatomy and check it."""
        return read_json(Path(path), Anatomy)

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("a ViT has at least one block")
        if len(self.blocks) > MOST_BLOCKS:
            raise ValueError(f"{len(self.blocks)} blocks are more than the {MOST_BLOCKS} of any model")
        if not any(self.heads + self.neurons):
            raise ValueError("a ViT has at least one head or neuron; blocks may lack a sub-layer, not all")
        if any(side < step for side, step in zip(self.image, self.patch)):
            raise ValueError(f"image {self.image} is smaller than a patch {self.patch}")
        if self.patches > MOST_PATCHES:
            raise ValueError(f"images of {self.patches} patches are more than the {MOST_PATCHES} of any model")
        if self.merged is not UNSET and len(self.merged) != len(self.blocks):
            raise ValueError(f"merged tokens of {len(self.merged)} blocks, of {len(self.blocks)}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class, distillation, registers. They are never merged."""
        return self.class_token + self.distillation_token + self.registers

    @property
    def tokens(self) -> int:
        """Tokens before the first block."""
        return self.prefix + self.patches

    @property
    def merges(self) -> tuple[int, ...]:
        """Tokens merged in each block."""
        return (0,) * len(self.blocks) if self.merged is UNSET else self.merged

    def patches_of(self, plan: Plan | None = None) -> int:
        """Return the patches of a Plan's images."""
        return self.patches if plan is None or plan.grid is None else plan.grid[0] * plan.grid[1]

    def image_of(self, plan: Plan | None = None) -> tuple[int, int]:
        """Return the height and width of a Plan's images."""
        if plan is None or plan.grid is None or plan.grid == self.grid:
            return self.image  # which need not be a multiple of the patch
        return plan.grid[0] * self.patch[0], plan.grid[1] * self.patch[1]

    def lengths(self, plan: Plan | None = None) -> tuple[tuple[int, int], ...]:
        """Return the tokens that each block's attention and its MLP compute with: before and after its merge."""
        merged = self.merges if plan is None else plan.merged
        after = [self.prefix + self.patches_of(plan) - sum(merged[: i + 1]) for i in range(len(merged))]
        return tuple((length + gone, length) for length, gone in zip(after, merged))

    def tokens_after(self, plan: Plan | None = None) -> tuple[int, ...]:
        """Return the tokens after each block."""
        return tuple(after for _, after in self.lengths(plan))

    @property
    def reads_token(self) -> bool:
        """True if the output is read from prefix tokens alone."""
        return self.pooling == "token"

    @property
    def read_tokens(self) -> int:
        """The number of tokens that the output is read from; they come first."""
        return 1 + self.distillation_token if self.reads_token else self.tokens

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(block.heads for block in self.blocks)

    @property
    def neurons(self) -> tuple[int, ...]:
        return tuple(block.hidden for block in self.blocks)

    def _counts(self, plan: Plan | None) -> zip[tuple[Block, int, int]]:
        heads, neurons = (plan.heads, plan.neurons) if plan else (self.heads, self.neurons)
        return zip(self.blocks, heads, neurons)

    def prunable_params(self, plan: Plan | None = None) -> int:
        """Return the parameters that belong to a head or a neuron: what sparsity is a fraction of."""
        e, norm = self.embed_dim, self.norm
        return sum(k * b.params_per_head(e, norm) + n * b.params_per_neuron(e, norm) for b, k, n in self._counts(plan))

    def params(self, plan: Plan | None = None) -> int:
        """Return all parameters of the model, exactly as many as the sliced module has."""
        e, per_feature = self.embed_dim, NORM_PARAMS[self.norm]
        patch_embedding = e * self.channels * self.patch[0] * self.patch[1] + e * self.patch_bias
        prefix = e * self.prefix
        positions = e * self._positions_of(plan)
        norms = e * per_feature * (self.pre_norm + self.final_norm + self.fc_norm)
        logits = (e * self.classes + self.classes) * (1 + self.distillation_token)
        blocks = sum(
            (k > 0) * b.params_of_attention(e, self.norm) + (n > 0) * b.params_of_mlp(e, self.norm)
            for b, k, n in self._counts(plan)
        )
        outside = patch_embedding + prefix + positions + norms + logits + self._pool_params()
        return outside + blocks + self.prunable_params(plan)

    def _positions_of(self, plan: Plan | None) -> int:
        """Return the rows of the position embedding, which is resampled for another grid."""
        return self.positions - self.patches + self.patches_of(plan) if self.positions else 0

    def _pool_params(self) -> int:
        if self.attention_pool is None:
            return 0
        e, n = self.embed_dim, self.attention_pool.hidden
        attention = e + 4 * (e * e + e)  # the query token, then q, k, v, proj with biases
        return attention + NORM_PARAMS[self.norm] * e + 2 * e * n + n + e

    def block_flops(self, plan: Plan | None = None) -> int:
        """Return the FLOPs of the blocks alone for one image: what `flops_ratio` compares."""
        each = self.structure_flops(plan)
        return sum(k * head + n * neuron for (head, neuron), (_, k, n) in zip(each, self._counts(plan)))

    def structure_flops(self, plan: Plan | None = None) -> list[tuple[int, int]]:
        """Return the FLOPs of one head and of one neuron of each block, for one image with a Plan's tokens."""
        e, found = self.embed_dim, []
        for block, (t, after) in zip(self.blocks, self.lengths(plan)):
            h = block.head_dim
            head = 8 * e * h * t + 4 * h * t * t + 3 * t * t
            found.append((head, (6 if block.mlp == "glu" else 4) * e * after))
        return found

    def flops(self, plan: Plan | None = None) -> int:
        """Return the FLOPs of the whole model for one image."""
        e = self.embed_dim
        patch_embedding = 2 * self.patches_of(plan) * self.patch[0] * self.patch[1] * self.channels * e
        logits = 2 * e * self.classes * (1 + self.distillation_token)
        return patch_embedding + self.block_flops(plan) + self._pool_flops(self.tokens_after(plan)[-1]) + logits

    def _pool_flops(self, tokens: int) -> int:
        if self.attention_pool is None:
            return 0
        e, t = self.embed_dim, tokens
        attention = 4 * e * e + 4 * e * e * t + 4 * e * t + 3 * self.attention_pool.heads * t
        return attention + 4 * e * self.attention_pool.hidden

    def same_structures(self, other: Anatomy) -> bool:
        """Return True if a ranking of one also ranks the other: the same heads and neurons in every block."""
        shape = [(b.heads, b.head_dim, b.hidden, b.mlp) for b in self.blocks]
        return self.embed_dim == other.embed_dim and shape == [
            (b.heads, b.head_dim, b.hidden, b.mlp) for b in other.blocks
        ]

    def with_counts(self, plan: Plan) -> Anatomy:
        """Return the Anatomy of the model after the cut."""
        blocks = [b.with_counts(k, n) for b, k, n in self._counts(plan)]
        return msgspec.structs.replace(
            self,
            blocks=tuple(blocks),
            image=self.image_of(plan),
            positions=self._positions_of(plan),
            merged=plan.merged if any(plan.merged) else UNSET,
        )

    def with_output_biases(self) -> Anatomy:
        """Return the Anatomy after correction, which gives proj and fc2 a bias where they had none."""

        def biases(block: Block) -> tuple[Bias, ...]:
            has = {*block.biases, *["proj"] * (block.heads > 0), *["fc2"] * (block.hidden > 0)}
            return tuple(name for name in get_args(Bias) if name in has)

        return msgspec.structs.replace(
            self, blocks=tuple(msgspec.structs.replace(b, biases=biases(b)) for b in self.blocks)
        )
