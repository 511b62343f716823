"""Files of `transformers` models, traced by torch: q, k and v apart, other names, positions and tables made inside."""

import warnings

import pytest
import torch

from helpers.models import randomise
from helpers.onnx_files import images_for, traced
from snapvit_export.onnx_import.gate import require_same_as_original
from snapvit_export.onnx_import.recognise import recognise

transformers = pytest.importorskip("transformers", reason="its models are exported here")

SIZE = dict(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8
)


class Picked(torch.nn.Module):
    """One output of a model, as exporters name it."""

    def __init__(self, model: torch.nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(pixel_values=pixels), self.output)


def model(kind: str, output: str = "logits", attention: str = "sdpa", **settings) -> torch.nn.Module:
    family = kind.split("For")[0].split("Model")[0]
    config = getattr(transformers, f"{family}Config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(transformers, kind)(config(**{**SIZE, "num_labels": 7, **settings}))
    made.set_attn_implementation(attention)
    return Picked(randomise(made), output).eval()


MODELS = {
    "ViT": lambda: model("ViTForImageClassification"),
    "ViT, eager": lambda: model("ViTForImageClassification", attention="eager"),
    "DeiT": lambda: model("DeiTForImageClassificationWithTeacher"),
    "DINOv2": lambda: model("Dinov2Model", "pooler_output", mlp_ratio=2),
    "DINOv2 SwiGLU": lambda: model("Dinov2Model", "pooler_output", use_swiglu_ffn=True),
    "DINOv3": lambda: model("DINOv3ViTModel", "pooler_output", num_register_tokens=4),
    "DINOv3 gated": lambda: model(
        "DINOv3ViTModel", "pooler_output", num_register_tokens=4, use_gated_mlp=True, hidden_act="silu"
    ),
    "SigLIP": lambda: model("SiglipVisionModel", "pooler_output"),
    "CLIP": lambda: model("CLIPVisionModelWithProjection", "image_embeds", projection_dim=20),
    "I-JEPA": lambda: model("IJepaForImageClassification"),
    "MSN": lambda: model("ViTMSNForImageClassification"),
}
FACTS = {  # what tells them apart
    "ViT": dict(classes=7, class_token=True, pooling="token"),
    "DeiT": dict(classes=7, distillation_token=True, family="deit-distilled"),
    "DINOv2": dict(classes=0, class_token=True, positions=17),
    "DINOv3": dict(registers=4, rope="dinov3", positions=0),
    "DINOv3 gated": dict(registers=4, rope="dinov3"),
    "SigLIP": dict(pooling="map", class_token=False, positions=16),
    "CLIP": dict(pre_norm=True, classes=20, patch_bias=False),
    "I-JEPA": dict(pooling="avg", class_token=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_transformers_is_recognised_and_its_graph_equals_it(name, tmp_path):
    path = tmp_path / "model.onnx"
    traced(MODELS[name](), path)
    found = recognise(path)
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6
    assert found.anatomy.heads == (3, 3, 3)
    for fact, value in FACTS.get(name, {}).items():
        assert getattr(found.anatomy, fact) == value, fact


def test_all_tokens_as_output_ask_which_is_read(tmp_path):
    path = tmp_path / "model.onnx"
    traced(model("Dinov2Model", "last_hidden_state"), path)
    with pytest.raises(Exception, match=r"not 17x48 numbers.*--output scores:token"):
        recognise(path)
    for read, pooling, prefix in (("token", "token", False), ("mean", "avg", True), ("patches", "avg", False)):
        found = recognise(path, f"scores:{read}")
        assert (found.anatomy.pooling, found.wiring.pool_prefix, found.tokens_read) == (pooling, prefix, read)
        assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6


@pytest.mark.parametrize("name", ["DINOv2", "DINOv3"])
@pytest.mark.parametrize("image", [(32, 32), (48, 32)])
def test_a_file_for_images_of_any_size_is_read_for_one(name, image, tmp_path):
    """As optimum exports: nothing is fixed, and positions are resized inside."""
    path = tmp_path / "model.onnx"
    axes = {"pixels": {0: "batch_size", 1: "num_channels", 2: "height", 3: "width"}}
    traced(MODELS[name](), path, axes=axes)
    found = recognise(path, image=image)
    assert (found.anatomy.image, found.anatomy.channels) == (image, 3)
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6
