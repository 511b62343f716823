"""Small models of `transformers` with random weights, saved as it saves them, and what each of them computes."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from helpers.models import randomise

SHAPE = dict(
    image_size=40, patch_size=8, hidden_size=48, num_attention_heads=3, num_hidden_layers=3, intermediate_size=77
)
DINO = {key: value for key, value in SHAPE.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
TEXT = dict(vocab_size=11, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=24)
NAFLEX = {key: value for key, value in SHAPE.items() if key != "image_size"} | {"num_patches": 25}
NAMES = {"num_labels": 7}


@dataclass(frozen=True)
class Case:
    """A class of `transformers`, the arguments of its config, and which of its outputs ours must equal."""

    model: str
    config: str
    output: str  # logits, pooled, class token, mean
    arguments: dict[str, Any] = field(default_factory=dict)
    inner: str = ""  # path of the half for images in a model of two


CASES = {
    "vit": Case("ViTForImageClassification", "ViTConfig", "logits", {**SHAPE, **NAMES}),
    "vit without biases": Case(
        "ViTForImageClassification", "ViTConfig", "logits", {**SHAPE, **NAMES, "qkv_bias": False}
    ),
    "vit of wide images": Case(
        "ViTForImageClassification", "ViTConfig", "logits", {**SHAPE, **NAMES, "image_size": [24, 40]}
    ),
    "vit features": Case("ViTModel", "ViTConfig", "class token", {**SHAPE, "hidden_act": "relu"}),
    "deit": Case("DeiTForImageClassification", "DeiTConfig", "logits", {**SHAPE, **NAMES}),
    "deit with teacher": Case("DeiTForImageClassificationWithTeacher", "DeiTConfig", "logits", {**SHAPE, **NAMES}),
    "deit features": Case("DeiTModel", "DeiTConfig", "class token", SHAPE),
    "vit_mae": Case("ViTMAEModel", "ViTMAEConfig", "class token", {**SHAPE, "mask_ratio": 0.0}),
    "vit_mae with decoder": Case(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        "class token",
        {
            **{**SHAPE, "mask_ratio": 0.0, "decoder_hidden_size": 32, "decoder_num_attention_heads": 2},
            **{"decoder_num_hidden_layers": 1, "decoder_intermediate_size": 20},
        },
        "vit",
    ),
    "vit_msn": Case("ViTMSNForImageClassification", "ViTMSNConfig", "logits", {**SHAPE, **NAMES}),
    "vit_msn features": Case("ViTMSNModel", "ViTMSNConfig", "class token", SHAPE),
    "ijepa": Case("IJepaForImageClassification", "IJepaConfig", "logits", {**SHAPE, **NAMES}),
    "ijepa features": Case("IJepaModel", "IJepaConfig", "mean", SHAPE),
    "dinov2": Case("Dinov2Model", "Dinov2Config", "pooled", DINO),
    "dinov2 gated": Case("Dinov2Model", "Dinov2Config", "pooled", {**DINO, "use_swiglu_ffn": True, "mlp_ratio": 3}),
    "dinov2 with registers": Case(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", "pooled", {**DINO, "num_register_tokens": 3}
    ),
    "dinov3": Case("DINOv3ViTModel", "DINOv3ViTConfig", "pooled", {**SHAPE, "num_register_tokens": 4}),
    "dinov3 gated": Case(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        "pooled",
        {**SHAPE, "num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 50.0},
    ),
    "dinov3 bare": Case(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        "pooled",
        {**SHAPE, "query_bias": False, "value_bias": False, "proj_bias": False, "mlp_bias": False},
    ),
    "dinov3 of one bias": Case("DINOv3ViTModel", "DINOv3ViTConfig", "pooled", {**SHAPE, "query_bias": False}),
    "clip": Case("CLIPVisionModel", "CLIPVisionConfig", "pooled", SHAPE),
    "clip with projection": Case(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", "pooled", {**SHAPE, "projection_dim": 20}, "vision_model"
    ),
    "clip of images and texts": Case(
        "CLIPModel", "CLIPConfig", "pooled", {"vision_config": SHAPE, "text_config": TEXT}, "vision_model"
    ),
    "clip classifier": Case(
        "CLIPForImageClassification", "CLIPConfig", "logits", {"vision_config": SHAPE, "text_config": TEXT, **NAMES}
    ),
    "siglip": Case("SiglipVisionModel", "SiglipVisionConfig", "pooled", SHAPE),
    "siglip of images and texts": Case(
        "SiglipModel", "SiglipConfig", "pooled", {"vision_config": SHAPE, "text_config": TEXT}, "vision_model"
    ),
    "siglip classifier": Case(
        "SiglipForImageClassification",
        "SiglipConfig",
        "logits",
        {"vision_config": SHAPE, "text_config": TEXT, **NAMES},
    ),
    "siglip2": Case("Siglip2VisionModel", "Siglip2VisionConfig", "pooled", NAFLEX),
    "siglip2 classifier": Case(
        "Siglip2ForImageClassification",
        "Siglip2Config",
        "logits",
        {"vision_config": NAFLEX, "text_config": TEXT, **NAMES},
    ),
}


def make(case: Case, seed: int = 0) -> Any:
    """The model of a case with weights that matter everywhere."""
    with warnings.catch_warnings():  # what its imports and constructors say is not ours
        warnings.simplefilter("ignore")
        import transformers

        config = getattr(transformers, case.config)(**case.arguments)
        model = getattr(transformers, case.model)(config)
    return randomise(model, seed, scale=0.2)


def save(model: Any, folder: Path, **preprocessing: Any) -> Path:
    """Save a model as it saves itself, and a preprocessing of its size beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    write_preprocessing(folder, model.config, **preprocessing)
    return folder


def write_preprocessing(folder: Path, config: Any, **changes: Any) -> None:
    config = getattr(config, "vision_config", config)
    if hasattr(config, "num_patches"):
        content: dict[str, Any] = {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 8}
    else:
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
        content = {"image_processor_type": "ViTImageProcessor", "size": {"height": sides[0], "width": sides[1]}}
    content |= {"do_normalize": True, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(content | changes))


def wanted(case: Case, model: Any, images: torch.Tensor) -> torch.Tensor:
    """What `transformers` computes for these images."""
    inputs: dict[str, torch.Tensor] = {"pixel_values": images}
    if "Siglip2" in case.model:
        inputs = patches(images)
    elif "MAE" in case.model:
        inputs["noise"] = torch.arange(25.0).repeat(len(images), 1)
    inner = model.get_submodule(case.inner) if case.inner else model
    with torch.no_grad():
        found = inner(**inputs)
    if case.output == "logits":
        return found.logits
    if case.output == "pooled":
        return found.pooler_output
    return found.last_hidden_state[:, 0] if case.output == "class token" else found.last_hidden_state.mean(1)


def patches(images: torch.Tensor, size: int = 8) -> dict[str, torch.Tensor]:
    """Images as SigLIP 2 takes them: a row of numbers for each patch, by row, column and channel."""
    batch, channels, height, width = images.shape
    grid = (height // size, width // size)
    cut = images.reshape(batch, channels, grid[0], size, grid[1], size).permute(0, 2, 4, 3, 5, 1)
    return {
        "pixel_values": cut.reshape(batch, grid[0] * grid[1], -1),
        "pixel_attention_mask": torch.ones(batch, grid[0] * grid[1], dtype=torch.int32),
        "spatial_shapes": torch.tensor([grid] * batch),
    }
