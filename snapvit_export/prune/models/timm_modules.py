"""Modules that timm makes, with arguments that come from files or people, and what their weights say of their shape."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...calibration.preprocessing import Preprocessing
from ...errors import FileFormatError, SnapvitError, first_line
from ...model.anatomy import Anatomy
from ...visible import heard
from ..blocks.functional import ACTIVATIONS
from .checkpoints import Notes
from .read_anatomy import read_anatomy

# Arguments of timm that a model.json may set: those that shape a module, none that names files or fetches weights.
SHAPE_ARGUMENTS = frozenset(
    [
        "img_size",
        "patch_size",
        "in_chans",
        "num_classes",
        "global_pool",
        "embed_dim",
        "depth",
        "num_heads",
        "mlp_ratio",
        "qkv_bias",
        "qk_norm",
        "init_values",
        "class_token",
        "reg_tokens",
        "num_reg_tokens",
        "no_embed_class",
        "pre_norm",
        "fc_norm",
        "dynamic_img_size",
        "final_norm",
        "proj_bias",
        "pool_include_prefix",
        "use_fc_norm",
        "act_layer",
        "norm_eps",
        "swiglu_align_to",
        "rope_temperature",
    ]
)


def check_known(name: str) -> None:
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else "See: snapvit models"
        raise SnapvitError(f"{name}: no such model folder, and timm knows no model of that name. {hint}")


def create(architecture: str, name: str, **kwargs: Any) -> nn.Module:
    check_known(architecture)
    _check_arguments(kwargs, name)
    try:
        return _made(architecture, kwargs, pretrained=False)
    except Exception as error:  # arguments come from files: they can be anything
        raise SnapvitError(f"{name}: timm cannot build {architecture} with {kwargs}: {first_line(error)}") from error


def _made(architecture: str, arguments: Mapping[str, Any], pretrained: bool) -> nn.Module:
    """Let timm make a module; the eps of its norms, which timm has no argument for, is set afterwards."""
    import timm

    given = {key: value for key, value in arguments.items() if key != "norm_eps"}
    module = timm.create_model(architecture, pretrained=pretrained, **given).float().eval()
    for part in module.modules():
        if "norm_eps" in arguments and isinstance(part, nn.LayerNorm):
            part.eps = arguments["norm_eps"]
    return module


def _check_arguments(kwargs: Mapping[str, Any], name: str) -> None:
    if unknown := sorted(set(kwargs) - SHAPE_ARGUMENTS):
        known = ", ".join(sorted(SHAPE_ARGUMENTS))
        raise SnapvitError(f"{name}: {unknown[0]} is not an argument that shapes a model. Those are {known}")
    if kwargs.get("act_layer", "gelu") not in ACTIVATIONS:
        raise SnapvitError(f"{name}: act_layer {kwargs['act_layer']} is none of {', '.join(ACTIVATIONS)}")
    eps = kwargs.get("norm_eps", 1e-6)
    if type(eps) is not float or not 0 < eps < 1:
        raise SnapvitError(f"{name}: norm_eps {eps} is not a number between 0 and 1")


def from_hub(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    anatomy_without_weights(name, arguments)  # refuse an unsupported model before a long download
    try:
        with heard():  # as in `converted`
            return _made(name, arguments, pretrained=True)
    except Exception as error:  # the hub's client raises its own, requests' and the system's errors
        raise SnapvitError(
            f"{name}: its weights could not be fetched ({first_line(error)}). "
            f"Download them elsewhere and give --checkpoint FILE"
        ) from error


def anatomy_of(name: str) -> Anatomy:
    """Return the Anatomy of a timm model by name, without its weights."""
    return anatomy_without_weights(name, {})


def anatomy_without_weights(name: str, arguments: Mapping[str, Any]) -> Anatomy:
    """Return the Anatomy of what timm builds of a name and arguments; nothing is allocated."""
    with torch.device("meta"):
        return read_anatomy(create(name, name, **arguments), name)


def pooled(name: str, arguments: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return the arguments with the last norm where the weights have it, if they ask for another pooling than timm's.

    timm moves that norm behind the pooling where patches are averaged, and the weights of a class token have it before.
    `weights`: of a checkpoint; None: those that timm fetches. A pooling that such weights cannot have is refused.
    """
    pool = arguments.get("global_pool")
    if pool not in ("token", "avg"):
        return dict(arguments)
    own = anatomy_without_weights(name, {})
    if own.distillation_token:
        raise SnapvitError(f"{name}: answers from two tokens, of which its heads need both. Leave --pool {pool} out")
    if pool == own.pooling:
        return dict(arguments)
    by_attention = own.attention_pool is not None if weights is None else any("attn_pool." in key for key in weights)
    if by_attention:
        raise SnapvitError(f"{name}: pools by attention, which its weights were trained for. Leave --pool {pool} out")
    if pool == "token" and not arguments.get("class_token", own.class_token):
        raise SnapvitError(f"{name}: has no class token to read. Leave --pool token out")
    behind = own.fc_norm if weights is None else any(key.endswith("fc_norm.weight") for key in weights)
    return {("use_fc_norm" if own.family == "eva" else "fc_norm"): behind, **arguments}


def converted(weights: dict[str, Tensor], module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Let timm rename the keys of original releases and resample position embeddings."""
    from timm.models import eva, vision_transformer

    convert = eva.checkpoint_filter_fn if isinstance(module, eva.Eva) else vision_transformer.checkpoint_filter_fn
    try:
        with heard():  # timm prints what it leaves out of a DINOv3
            return convert(dict(weights), module)
    except (RuntimeError, KeyError, ValueError, IndexError, AssertionError, AttributeError) as error:
        raise FileFormatError(f"{path}: its weights do not suit {type(module).__name__}: {error}") from error


def shape_in(
    weights: Mapping[str, Tensor], name: str, arguments: Mapping[str, Any], path: Path
) -> tuple[dict[str, Any], Notes]:
    """Return the arguments that the shapes of a checkpoint ask for beside the given ones, and notes on them."""
    kwargs, notes = {**_classes_in(weights), **arguments}, []
    kernel = weights.get("patch_embed.proj.weight")
    for key in ("patch_size", "img_size"):
        anatomy = anatomy_without_weights(name, kwargs)  # refuses what is no ViT before it blames the checkpoint
        if key in arguments:
            continue
        if key == "patch_size":
            found = None if kernel is None or kernel.ndim != 4 else tuple(kernel.shape[2:])
            found = None if found == anatomy.patch else found
        else:
            found = _image_in(weights.get("pos_embed"), anatomy, path)
        if found is not None:
            kwargs[key] = list(found)
            notes.append(f"{key} {found[0]}x{found[1]}, as the weights in {path.name} have it")
    return kwargs, tuple(notes)


def _image_in(positions: Tensor | None, anatomy: Anatomy, path: Path) -> tuple[int, int] | None:
    """Return height and width of the images that these positions are of; None if they are the model's own."""
    if positions is None or positions.ndim != 3 or not anatomy.positions:
        return None
    # Of the tokens in front some releases have rows and others not: timm converts between them.
    own = anatomy.positions - anatomy.patches
    for rows in (own, anatomy.prefix, int(anatomy.class_token), 0):
        if positions.shape[1] - rows == anatomy.patches:
            return None
    for rows in (own,) if own else (0, int(anatomy.class_token)):
        side = math.isqrt(max(0, positions.shape[1] - rows))
        if side and side * side == positions.shape[1] - rows:
            return side * anatomy.patch[0], side * anatomy.patch[1]
    raise FileFormatError(
        f"{path}: its {positions.shape[1]} positions are of no square of patches. Give --image-size HEIGHTxWIDTH"
    )


def _classes_in(weights: Mapping[str, Tensor]) -> dict[str, int]:
    head = weights.get("head.weight")
    return {"num_classes": 0 if head is None or head.ndim != 2 else int(head.shape[0])}


def preprocessing_of(module: nn.Module, anatomy: Anatomy, config: Mapping[str, Any] | None = None) -> Preprocessing:
    """Return what timm says of a module's images, or what a configuration of the same form says."""
    from timm.data import resolve_data_config, resolve_model_data_config

    config = resolve_model_data_config(module) if config is None else resolve_data_config(pretrained_cfg=dict(config))
    if config["crop_mode"] not in ("center", "squash"):
        raise SnapvitError(f"crop mode '{config['crop_mode']}' is not supported")
    return Preprocessing(
        input_size=(anatomy.channels, *anatomy.image),
        interpolation=config["interpolation"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )
