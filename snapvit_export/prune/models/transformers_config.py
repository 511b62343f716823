"""The `config.json` of a `transformers` model: what it is made of, as arguments with which timm builds the same module.

`read_config` reads one, alone or inside a model of images and texts, and refuses by the name of the key what no module
of ours computes. `timm_arguments` then needs to know which heads the weights have: a classifier may read another token
than the embedding does.

| model type | what goes in front of the patches | embedding | classifier reads |
|---|---|---|---|
| vit, vit_msn, vit_mae | class token | class token | the same |
| deit | class and distillation token | class token | the same; with a teacher: both tokens, each by its own |
| dinov2, dinov2_with_registers | class token, registers | class token | two things at once: it is left out |
| dinov3_vit | class token, registers | class token | - |
| clip | class token | class token | mean of the patches, without the last norm |
| siglip, siglip2 | nothing | attention pooling | mean of the patches |
| ijepa | nothing | mean of the patches | the same |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import FileFormatError, ModelNotUnderstood

ACTIVATIONS = {  # theirs → timm's
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
REFUSED = {
    "beit": "adds relative positions in the attention of every block",
    "data2vec-vision": "adds relative positions in the attention of every block",
    "swin": "attends within windows",
    "swinv2": "attends within windows",
    "convnext": "has no attention",
    "convnextv2": "has no attention",
    "dinov3_convnext": "has no attention",
    "resnet": "has no attention",
    "hiera": "has stages of different widths",
}


@dataclass(frozen=True)
class Kind:
    """What all models of a type have in common, and what a config of it leaves out because it is usual."""

    prefix: int = 1  # tokens in front of the patches that have a row of the position embedding
    embedding: str = "token"  # what the embedding is pooled from
    classified: str | None = "token"  # what a classifier reads; None: nothing that a module of ours could pool
    pre_norm: bool = False
    layer_scale: bool = False
    any_size: bool = False  # it resamples its positions, or makes them, for images of any size
    defaults: Mapping[str, Any] = field(default_factory=dict)


_USUAL = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
_DINO = {"layer_norm_eps": 1e-6, "mlp_ratio": 4, "use_swiglu_ffn": False}
_SIGLIP = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True}
_DINOV3 = {
    **{"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "layer_norm_eps": 1e-5},
    **{"rope_theta": 100.0, "use_gated_mlp": False, "num_register_tokens": 0},
    **{"query_bias": True, "key_bias": False, "value_bias": True},
}
KINDS: dict[str, Kind] = {
    "vit": Kind(),
    "deit": Kind(prefix=2),
    "vit_mae": Kind(),
    "vit_msn": Kind(defaults={"layer_norm_eps": 1e-6}),
    "ijepa": Kind(prefix=0, embedding="avg", classified="avg"),
    "dinov2": Kind(classified=None, layer_scale=True, any_size=True, defaults={**_DINO, "patch_size": 14}),
    "dinov2_with_registers": Kind(
        classified=None, layer_scale=True, any_size=True, defaults={**_DINO, "num_register_tokens": 4}
    ),
    "dinov3_vit": Kind(prefix=0, classified=None, layer_scale=True, any_size=True, defaults=_DINOV3),
    "clip": Kind(
        classified="avg",
        pre_norm=True,
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "patch_size": 32},
    ),
    "siglip": Kind(prefix=0, embedding="map", classified="avg", defaults=_SIGLIP),
    "siglip2": Kind(prefix=0, embedding="map", classified="avg", defaults={**_SIGLIP, "num_patches": 256}),
}
TOWERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip", "siglip2_vision_model": "siglip2"}


@dataclass(frozen=True)
class Config:
    """A model type and its values, checked when they are asked for; errors begin with `where`."""

    model_type: str
    values: Mapping[str, Any]
    where: str

    @property
    def kind(self) -> Kind:
        return KINDS[self.model_type]

    def whole(self, key: str) -> int:
        value = self.values[key]
        if type(value) is not int or not 0 < value <= 10**6:
            raise FileFormatError(f"{self.where}: {key} {value} is not a whole number above 0")
        return value

    def number(self, key: str) -> float:
        value = self.values[key]
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise FileFormatError(f"{self.where}: {key} {value} is not a number above 0")
        return float(value)

    def sides(self, key: str) -> tuple[int, int]:
        """Return height and width."""
        value = self.values[key]
        found = [value] * 2 if type(value) is int else value
        if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and 0 < n < 10**5 for n in found):
            raise FileFormatError(f"{self.where}: {key} {value} is not a number of pixels, or two")
        return found[0], found[1]

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images that its positions are of."""
        if self.model_type != "siglip2":
            return self.sides("image_size")
        patches, patch = self.whole("num_patches"), self.sides("patch_size")
        side = math.isqrt(patches)
        return side * patch[0], side * patch[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches that its positions are of."""
        (height, width), patch = self.image, self.sides("patch_size")
        return height // patch[0], width // patch[1]

    @property
    def registers(self) -> int:
        value = self.values.get("num_register_tokens", 0)
        return 0 if value == 0 else self.whole("num_register_tokens")

    @property
    def hidden(self) -> int:
        """Neurons of an MLP."""
        if "mlp_ratio" not in self.values:
            return self.whole("intermediate_size")
        wide = int(self.whole("hidden_size") * self.number("mlp_ratio"))
        return (int(wide * 2 / 3) + 7) // 8 * 8 if self.gated else wide  # as DINOv2 rounds it

    @property
    def gated(self) -> bool:
        return bool(self.values.get("use_swiglu_ffn") or self.values.get("use_gated_mlp"))


def read_config(content: Mapping[str, Any], where: str) -> Config:
    """Return what a decoded `config.json` says of the model, or of the images' half of it."""
    model_type = content.get("model_type")
    if model_type in ("clip", "siglip", "siglip2"):
        # Older files have the values in a second place, which then counts.
        inner = {**(content.get("vision_config") or {}), **(content.get("vision_config_dict") or {})}
        outer = {key: content[key] for key in ("id2label", "quantization_config") if content.get(key)}
        content = {**inner, **outer}
    model_type = TOWERS.get(str(model_type), str(model_type))
    if model_type not in KINDS:
        raise ModelNotUnderstood(_refusal(model_type, where))
    given = {key: value for key, value in content.items() if value is not None}
    config = Config(model_type, {**_USUAL, **KINDS[model_type].defaults, **given}, where)
    _check(config)
    return config


def _refusal(model_type: str, where: str) -> str:
    if model_type in REFUSED:
        reason = f"a model of type '{model_type}' {REFUSED[model_type]}"
        return f"{where}: {reason}, so it is no plain ViT and cannot be cut here"
    return f"{where}: model type '{model_type}' is not supported. Supported are {', '.join(KINDS)}"


def _check(config: Config) -> None:
    """Refuse what no module of ours computes, before weights are read or fetched."""
    where, values = config.where, config.values
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    config.whole("num_hidden_layers"), config.number("layer_norm_eps"), config.hidden, config.registers
    if width % heads:
        raise ModelNotUnderstood(f"{where}: hidden_size {width} is not a multiple of {heads} heads")
    if values.get("head_dim", width // heads) != width // heads:
        raise ModelNotUnderstood(f"{where}: heads of {values['head_dim']} in a model of {width} are not supported")
    if values["num_channels"] != 3:
        raise ModelNotUnderstood(f"{where}: takes {values['num_channels']} channels, images here have 3")
    if values.get("pruned_heads"):
        raise ModelNotUnderstood(f"{where}: pruned_heads names heads that were cut before. Give the model they are of")
    if values.get("quantization_config"):
        raise ModelNotUnderstood(f"{where}: its weights are quantised. Give the model as it was before")
    activation = values["hidden_act"]
    if activation not in ACTIVATIONS:
        raise ModelNotUnderstood(f"{where}: hidden_act '{activation}' is none of {', '.join(ACTIVATIONS)}")
    _check_type(config, activation)
    if any(side < step for side, step in zip(config.image, config.sides("patch_size"))):
        raise ModelNotUnderstood(f"{where}: image_size {values['image_size']} is smaller than a patch")


def _check_type(config: Config, activation: str) -> None:
    where, values = config.where, config.values
    if config.model_type == "siglip2" and math.isqrt(config.whole("num_patches")) ** 2 != values["num_patches"]:
        raise ModelNotUnderstood(f"{where}: num_patches {values['num_patches']} is no square of patches")
    if config.model_type == "dinov3_vit":
        config.number("rope_theta")
        if values["key_bias"]:
            raise ModelNotUnderstood(f"{where}: key_bias is not supported: timm's module has no bias of keys")
        usual = "silu" if config.gated else "gelu"
        if ACTIVATIONS[activation] != usual:
            raise ModelNotUnderstood(f"{where}: hidden_act '{activation}' is not supported in this type, {usual} is")


@dataclass(frozen=True)
class Heads:
    """The heads that the weights of a model have."""

    classes: int = 0  # of the classifier; 0: none
    with_teacher: bool = False  # a second classifier, of the distillation token


def timm_arguments(config: Config, heads: Heads, image: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """Return the name of a timm model, and the arguments with which timm makes this one of it.

    `image`: height and width of the images that come in.
    """
    kind = config.kind
    arguments: dict[str, Any] = {
        "img_size": list(image),
        "patch_size": list(config.sides("patch_size")),
        "embed_dim": config.whole("hidden_size"),
        "depth": config.whole("num_hidden_layers"),
        "num_heads": config.whole("num_attention_heads"),
        "num_classes": heads.classes,
        "global_pool": (kind.classified if heads.classes else kind.embedding) or "token",
        "norm_eps": config.number("layer_norm_eps"),
    }
    if arguments["global_pool"] == "map" and not config.values["vision_use_head"]:
        arguments["global_pool"] = "avg"
    if config.model_type == "dinov3_vit":
        return _dinov3(config, arguments)
    arguments |= {
        "mlp_ratio": _ratio(config.hidden * (1 + config.gated), arguments["embed_dim"]),
        "qkv_bias": bool(config.values["qkv_bias"]),
        "fc_norm": False,
    }
    if config.gated:
        return "vit_giant_patch14_dinov2", arguments | _tokens(config)  # the one with gated MLPs
    arguments["act_layer"] = ACTIVATIONS[config.values["hidden_act"]]
    if heads.with_teacher:
        return "deit_base_distilled_patch16_224", arguments
    arguments |= _tokens(config)
    if kind.pre_norm:
        arguments |= {"pre_norm": True, "final_norm": not heads.classes}
    return "vit_base_patch16_224", arguments


def _tokens(config: Config) -> dict[str, Any]:
    """Return what stands in front of the patches, and LayerScale."""
    found: dict[str, Any] = {"init_values": 1.0} if config.kind.layer_scale else {}
    if not config.kind.prefix:
        return found | {"class_token": False}
    if config.registers:  # they come in between class token and patches, after positions were added
        return found | {"reg_tokens": config.registers, "no_embed_class": True}
    return found | ({"reg_tokens": 1} if config.model_type == "deit" else {})  # a distillation token that no head reads


def _dinov3(config: Config, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    arguments |= {
        "mlp_ratio": _ratio(config.hidden, arguments["embed_dim"]),
        "qkv_bias": bool(config.values["query_bias"] or config.values["value_bias"]),
        "num_reg_tokens": config.registers,
        "rope_temperature": config.number("rope_theta"),
    }
    if config.gated:
        return "vit_small_plus_patch16_dinov3", arguments | {"swiglu_align_to": 1}
    return "vit_small_patch16_dinov3", arguments


def _ratio(hidden: int, embed: int) -> float:
    """Return a ratio of which timm, which rounds down, makes exactly so many hidden units."""
    ratio = hidden / embed
    return ratio if int(embed * ratio) == hidden else (hidden + 0.5) / embed
