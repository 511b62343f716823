"""However a part of a ViT is written, it is recognised as that part."""

import warnings

import numpy as np
import onnx
import pytest
import timm
import torch
import torchvision
from onnx import helper

import helpers.spelled_vit as spelled
from helpers.models import as_model, randomise
from helpers.onnx_files import SIZE, images_for, in_file_order, module_of, traced
from helpers.spelled_vit import SpelledViT
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.onnx_import.gate import require_same_as_original
from snapvit_export.onnx_import.recognise import Recognised, recognise
from snapvit_export.prune.pack import blueprint

WAYS = {
    "usual": {},
    "patches by unfold": {"patches": spelled.by_unfold},
    "patches by reshape": {"patches": spelled.by_reshape},
    "chunks": {"split": spelled.split_by_chunk},
    "values first, heads interleaved": {"split": spelled.split_interleaved, "interleaved": True},
    "scale of both sides": {"attend": spelled.scaled_apart},
    "heads in the batch": {"attend": spelled.in_one_batch},
    "another scale": {"attend": spelled.another_scale},
    "erf": {"activation": spelled.gelu_by_erf},
    "norm written out": {"norm": spelled.norm_written_out},
    "norm by a power": {"norm": spelled.norm_by_power},
    "convolutions of single pixels": {"layer": spelled.as_convolution},
}


def recognised(module: torch.nn.Module, path, size: int = spelled.IMAGE, **options) -> Recognised:
    """A traced module, whose graph was compared with its file."""
    module = randomise(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.zeros(2, 3, size, size),), str(path), opset_version=17, dynamo=False, **options
        )
    found = recognise(path)
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> Recognised:
    return recognised(SpelledViT(), tmp_path_factory.mktemp("usual") / "usual.onnx")


@pytest.mark.parametrize("way", WAYS)
def test_the_same_model_in_other_words_has_the_same_anatomy(way, usual, tmp_path):
    found = recognised(SpelledViT(**WAYS[way]), tmp_path / "model.onnx")
    assert found.anatomy == usual.anatomy
    assert found.anatomy.heads == (spelled.HEADS,) * spelled.BLOCKS


@pytest.mark.parametrize("way", ["patches by reshape", "chunks", "heads in the batch", "norm written out"])
def test_and_the_same_tensors(way, usual, tmp_path):
    found = recognised(SpelledViT(**WAYS[way]), tmp_path / "model.onnx")
    for name, tensor in usual.dense.items():
        np.testing.assert_allclose(found.dense[name], tensor, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (spelled.gelu_by_tanh, "gelu_tanh"),
        (spelled.gelu_by_power, "gelu_tanh"),
        (spelled.quick_gelu, "quick_gelu"),
        (torch.relu, "relu"),
        (torch.nn.functional.silu, "silu"),
    ],
)
def test_an_activation_is_told_by_its_values(activation, name, tmp_path):
    found = recognised(SpelledViT(activation=activation), tmp_path / "model.onnx")
    assert {block.activation for block in found.anatomy.blocks} == {name}


def test_an_rms_norm_written_out(tmp_path):
    found = recognised(SpelledViT(norm=spelled.rms_norm), tmp_path / "model.onnx")
    assert (found.anatomy.norm, found.anatomy.norm_eps) == ("rms", 1e-5)


def test_rotary_pairs_in_an_order_of_their_own(tmp_path):
    found = recognised(SpelledViT(rotate=spelled.mirrored_rotation), tmp_path / "model.onnx")
    assert found.wiring.rotate_half
    assert found.anatomy.rope == "cat"
    assert "its rotary tables follow no known formula: it stays at its own resolution" in found.notes


@pytest.mark.parametrize("flavour", ["portable", "ort", "tensorrt"])
def test_rms_norms_of_our_own_graphs(flavour, tmp_path):
    module = randomise(timm.create_model("vit_tiny_patch16_224", norm_layer="rmsnorm", **SIZE))
    model = as_model(module, "rms", {})
    drawn = blueprint(model, in_file_order(model.anatomy))
    path = (
        GraphWriter(drawn, tmp_path, flavour=flavour)
        .write("x", Plan.dense(model.anatomy), format=GraphFormat(flavour))
        .graph
    )
    found = recognise(path)
    assert found.anatomy.norm == "rms"
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6


@pytest.mark.parametrize(("heads", "neurons"), [((2, 0, 3), (192, 50, 0)), ((0, 3, 1), (7, 0, 192))])
def test_a_pruned_graph_of_ours_has_the_blocks_that_are_left(heads, neurons, tmp_path):
    model = as_model(module_of("DeiT"), "deit", {})
    plan = Plan(heads=heads, neurons=neurons)
    path = GraphWriter(blueprint(model, in_file_order(model.anatomy)), tmp_path).write("x", plan).graph
    found = recognise(path)
    assert [n for n in found.anatomy.heads if n] == [n for n in heads if n]
    assert [n for n in found.anatomy.neurons if n] == [n for n in neurons if n]
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6


def test_a_vit_of_torchvision(tmp_path):
    module = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=7
    )
    found = recognised(module, tmp_path / "model.onnx", size=32)
    assert found.anatomy.heads == (3, 3)
    assert found.anatomy.classes == 7


class OpenCLIP(torch.nn.Module):
    """An image tower as OpenAI and OpenCLIP write it: tokens before images, and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 48, 8, stride=8, bias=False)
        self.token, self.positions = torch.nn.Parameter(torch.zeros(48)), torch.nn.Parameter(torch.zeros(17, 48))
        self.before, self.after = torch.nn.LayerNorm(48), torch.nn.LayerNorm(48)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(48, 3, 96, activation="gelu", norm_first=True) for _ in range(2)
        )
        self.projection = torch.nn.Parameter(torch.zeros(48, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token + torch.zeros(x.shape[0], 1, 48), x], dim=1) + self.positions
        x = self.before(x).permute(1, 0, 2)
        for block in self.blocks:
            y = block.norm1(x)
            x = x + block.self_attn(y, y, y, need_weights=False)[0]
            x = x + block.linear2(block.activation(block.linear1(block.norm2(x))))
        return self.after(x.permute(1, 0, 2)[:, 0]) @ self.projection


@pytest.mark.parametrize("batch", ["fixed", "any"])
def test_a_tower_of_open_clip(batch, tmp_path):
    axes = {} if batch == "fixed" else {"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
    found = recognised(OpenCLIP(), tmp_path / "model.onnx", size=32, **axes)
    assert found.anatomy.pre_norm
    assert found.anatomy.classes == 20
    assert found.batch == (2 if batch == "fixed" else None)


def attention_replaced(path, made) -> None:
    """Replace ONNX's Attention operators in a graph of ours."""
    model = onnx.load(path)
    for i, node in enumerate(model.graph.node):
        if node.op_type == "Attention":
            given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            model.graph.node.remove(node)
            model.graph.node.insert(i, made(node, given))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, path)


def test_multi_head_attention_of_onnx_runtime(exported, tmp_path):
    def made(node, given):
        settings = dict(num_heads=given["q_num_heads"], scale=given["scale"], domain="com.microsoft")
        return helper.make_node("MultiHeadAttention", list(node.input[:3]), list(node.output), **settings)

    path = tmp_path / "model.onnx"
    path.write_bytes(exported("DeiT", "ours, ort").read_bytes())
    attention_replaced(path, made)
    assert any(node.op_type == "MultiHeadAttention" for node in onnx.load(path).graph.node)
    found = recognise(path)
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6


def test_attention_fused_by_onnx_runtimes_tool_for_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the tool knows its attention")
    from onnxruntime.transformers import optimizer

    config = transformers.CLIPVisionConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8
    )
    tower = transformers.CLIPVisionModelWithProjection(config)
    tower.set_attn_implementation("eager")

    class Embeds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, pixels):
            return self.tower(pixel_values=pixels).image_embeds

    traced(randomise(Embeds()), tmp_path / "plain.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = optimizer.optimize_model(
            str(tmp_path / "plain.onnx"), model_type="clip", num_heads=3, hidden_size=48, opt_level=0
        )
    path = tmp_path / "fused.onnx"
    fused.save_model_to_file(str(path))
    operators = {(node.domain, node.op_type) for node in onnx.load(path).graph.node}
    assert {("com.microsoft", "Attention"), ("com.microsoft", "SkipLayerNormalization")} <= operators
    found = recognise(path)
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6
