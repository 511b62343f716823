"""Read the Anatomy of a timm module, or refuse it by name with the reason.

Supported: `VisionTransformer` (AugReg, DeiT, DeiT-III, DINO, DINOv2 with or without registers, MAE, CLIP, SigLIP),
distilled DeiT, and `Eva` (EVA-02, DINOv3). The last check is arithmetic: if the Anatomy does not account for every
parameter of the module, something in it was not read, and the module is refused.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from msgspec import UNSET, UnsetType
from timm.layers import Attention, AttentionPoolLatent, PatchEmbed
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention, EvaBlock
from timm.models.vision_transformer import Block as VitBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ...errors import ModelNotUnderstood, SnapvitError
from ...model.anatomy import Anatomy, AttentionPool, Bias, Block, Norm
from ..blocks.eva_attention import ElasticEvaAttention
from ..blocks.merging import MergingBlock
from ..blocks.pruned_block import PrunedBlock
from ..blocks.timm_blocks import PARTS, layer_scale_of

_FAMILIES: dict[type, tuple[Literal["vit", "deit-distilled", "eva"], type]] = {
    VisionTransformer: ("vit", VitBlock),
    VisionTransformerDistilled: ("deit-distilled", VitBlock),
    Eva: ("eva", EvaBlock),
}


def read_anatomy(module: nn.Module, name: str) -> Anatomy:
    """Return the Anatomy of the module; errors call it `name`."""
    model: Any = module
    family, block_type = _family(model, name)
    _check_outside(model, name)
    for i, block in enumerate(model.blocks):
        _check_block(block, block_type, f"{name}: block {i}")
    norms = (norm for block in model.blocks for norm in (block.norm1, block.norm2) if norm is not None)
    first = next(norms, None)
    if first is None:
        raise ModelNotUnderstood(f"{name}: has no block with a norm")
    norm = norm_kind(first, name)
    anatomy = Anatomy(
        family=family,
        embed_dim=model.embed_dim,
        blocks=tuple(_read_block(block) for block in model.blocks),
        image=tuple(model.patch_embed.img_size),
        patch=tuple(model.patch_embed.patch_size),
        channels=model.patch_embed.proj.in_channels,
        patch_bias=model.patch_embed.proj.bias is not None,
        class_token=model.cls_token is not None,
        distillation_token=family == "deit-distilled",
        registers=0 if model.reg_token is None else model.reg_token.shape[1],
        positions=0 if model.pos_embed is None else model.pos_embed.shape[1],
        rope=_rope_kind(model, name),
        norm=norm,
        norm_eps=float(first.eps or 1e-6),
        pre_norm=not isinstance(model.norm_pre, nn.Identity),
        final_norm=not isinstance(model.norm, nn.Identity),
        fc_norm=not isinstance(model.fc_norm, nn.Identity),
        pooling=model.global_pool,
        attention_pool=_read_pool(model.attn_pool),
        classes=model.num_classes,
        merged=_merged(model),
    )
    _check_every_parameter_explained(model, anatomy, name)
    return anatomy


def find_vit(module: nn.Module, path: str | None = None) -> nn.Module:
    """Return the ViT that a module is or contains: the one at `path`, or the only one there is."""
    if path is not None:
        try:
            return module.get_submodule(path)
        except AttributeError as error:
            raise SnapvitError(f"{type(module).__name__} has no module at '{path}': {error}") from error
    found = {name: part for name, part in module.named_modules() if type(part) in _FAMILIES}
    if type(module) in _FAMILIES or not found:
        return module
    if len(found) > 1:
        names = ", ".join(found)
        raise SnapvitError(f"{type(module).__name__} contains several ViTs ({names}). Give the path of one of them")
    return next(iter(found.values()))


def _merged(model: Any) -> tuple[int, ...] | UnsetType:
    merged = tuple(getattr(block, "merged", 0) for block in model.blocks)
    return merged if any(merged) else UNSET


def _family(model: Any, name: str) -> tuple[Literal["vit", "deit-distilled", "eva"], type]:
    known = _FAMILIES.get(type(model))
    if known is None:
        kind = type(model).__name__
        raise ModelNotUnderstood(
            f"{name}: {kind} is not a plain ViT (equal blocks of attention and MLP over one sequence of tokens), "
            f"so its heads and neurons cannot be cut here. See: snapvit models"
        )
    return known


def _check_outside(model: Any, name: str) -> None:
    if type(model.patch_embed) is not PatchEmbed or not isinstance(model.patch_embed.proj, nn.Conv2d):
        raise ModelNotUnderstood(f"{name}: {type(model.patch_embed).__name__} is not a plain patch embedding")
    if model.patch_embed.proj.in_channels != 3:
        raise ModelNotUnderstood(f"{name}: takes {model.patch_embed.proj.in_channels} channels, images here have 3")
    if not isinstance(model.patch_embed.norm, nn.Identity):
        raise ModelNotUnderstood(f"{name}: a norm inside the patch embedding is not supported")
    if model.global_pool not in ("token", "avg", "max", "avgmax", "map"):
        raise ModelNotUnderstood(f"{name}: pooling '{model.global_pool}' is not supported. Use token, avg or map")
    if not isinstance(model.head, (nn.Linear, nn.Identity)):
        raise ModelNotUnderstood(f"{name}: {type(model.head).__name__} is not a linear classifier")
    if len(model.blocks) == 0:
        raise ModelNotUnderstood(f"{name}: has no blocks")


def _check_block(block: Any, block_type: type[Any], where: str) -> None:
    if type(block) not in (block_type, PrunedBlock, MergingBlock):
        raise ModelNotUnderstood(f"{where}: {type(block).__name__} is not a plain pre-norm block")
    if block.attn is not None:
        _check_attention(block, where)
    if block.mlp is not None:
        _check_mlp(block, where)


def _check_attention(block: Any, where: str) -> None:
    if type(block.attn) not in (Attention, EvaAttention, ElasticEvaAttention):
        raise ModelNotUnderstood(f"{where}: {type(block.attn).__name__} is not plain multi-head attention")
    if isinstance(block.attn, Attention) and not hasattr(block.attn, "attn_dim"):
        import timm

        raise SnapvitError(f"timm {timm.__version__} cannot hold pruned heads. Try: pip install 'timm>=1.0.23'")
    if getattr(block.attn, "gate", None) is not None:
        raise ModelNotUnderstood(f"{where}: gated attention is not supported")


def _check_mlp(block: Any, where: str) -> None:
    if type(block.mlp) not in (Mlp, GluMlp, SwiGLU) or not isinstance(block.mlp.fc2, nn.Linear):
        raise ModelNotUnderstood(f"{where}: {type(block.mlp).__name__} is not a plain or gated MLP")
    if isinstance(block.mlp, GluMlp) and block.mlp.gate_last:
        raise ModelNotUnderstood(f"{where}: a gated MLP whose gate is the second half is not supported")


def _read_block(block: Any) -> Block:
    attn, mlp = block.attn, block.mlp
    of_attention: dict[str, Any] = {"heads": 0, "head_dim": getattr(block, "head_dim", 1)}
    if attn is not None:
        of_attention = {
            "heads": attn.num_heads,
            "head_dim": attn.head_dim,
            "qk_norm": not isinstance(attn.q_norm, nn.Identity),
            "attn_norm": not isinstance(attn.norm, nn.Identity),
        }
    of_mlp: dict[str, Any] = {"hidden": 0}
    if mlp is not None:
        of_mlp = {
            "hidden": mlp.fc2.in_features,
            "mlp": "plain" if isinstance(mlp, Mlp) else "glu",
            "activation": activation_name(mlp.act),
            "mlp_norm": not isinstance(mlp.norm, nn.Identity),
        }
    biases = (*_attention_biases(attn), *_mlp_biases(mlp))
    return Block(**of_attention, **of_mlp, biases=biases, layer_scale=tuple(_layer_scales(block)))


def _attention_biases(attn: Any) -> list[Bias]:
    found: list[Bias] = []
    if attn is None:
        return found
    if attn.qkv is not None:
        if attn.qkv.bias is not None:
            found += ["q", "k", "v"]
        elif getattr(attn, "q_bias", None) is not None:
            found += ["q", "v"]
    else:
        found += [name for name in ("q", "k", "v") if getattr(attn, f"{name}_proj").bias is not None]
    return [*found, "proj"] if attn.proj.bias is not None else found


def _mlp_biases(mlp: Any) -> list[Bias]:
    if mlp is None:
        return []
    first = mlp.fc1_g if isinstance(mlp, SwiGLU) else mlp.fc1
    linears: tuple[tuple[Bias, nn.Linear], ...] = (("fc1", first), ("fc2", mlp.fc2))
    return [name for name, linear in linears if linear.bias is not None]


def _layer_scales(block: Any) -> list[Literal["attn", "mlp"]]:
    names: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp")
    return [name for name, part in zip(names, PARTS) if layer_scale_of(block, part) is not None]


def activation_name(act: nn.Module) -> str:
    """Return the name of an activation by its value at one point: timm has several classes for each."""
    probe = torch.tensor([0.7], device="cpu")  # has values even where models are built without any
    known = {
        "gelu": nn.functional.gelu(probe),
        "gelu_tanh": nn.functional.gelu(probe, approximate="tanh"),
        "quick_gelu": probe * torch.sigmoid(1.702 * probe),
        "silu": nn.functional.silu(probe),
        "relu": nn.functional.relu(probe),
    }
    value = act(probe.clone())
    return next((name for name, wanted in known.items() if torch.equal(value, wanted)), type(act).__name__)


def norm_kind(norm: nn.Module, name: str) -> Norm:
    """Return which of the two kinds of norm this is; the error calls the model `name`."""
    if isinstance(norm, nn.LayerNorm):
        return "layer"
    if "rmsnorm" in type(norm).__name__.lower():
        return "rms"
    raise ModelNotUnderstood(f"{name}: {type(norm).__name__} is not LayerNorm or RMSNorm")


def _rope_kind(model: Any, name: str) -> Literal["none", "cat", "dinov3"]:
    rope = getattr(model, "rope", None)
    if rope is None:
        return "none"
    if getattr(model, "rope_mixed", False):
        raise ModelNotUnderstood(f"{name}: rotary embeddings learnt per head ('mixed') are not supported")
    return "dinov3" if "dinov3" in type(rope).__name__.lower() else "cat"


def _read_pool(pool: Any) -> AttentionPool | None:
    if pool is None:
        return None
    if type(pool) is not AttentionPoolLatent:
        raise ModelNotUnderstood(f"pooling by {type(pool).__name__} is not supported")
    return AttentionPool(heads=pool.num_heads, hidden=pool.mlp.fc1.out_features)


def _check_every_parameter_explained(model: nn.Module, anatomy: Anatomy, name: str) -> None:
    have = sum(parameter.numel() for parameter in model.parameters())
    if have != anatomy.params():
        raise ModelNotUnderstood(
            f"{name}: has {have} parameters, but the supported blocks, norms, tokens and head "
            f"account for {anatomy.params()}"
        )
