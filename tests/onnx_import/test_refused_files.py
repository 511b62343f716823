"""What is no plain ViT, or hides a trap, is refused in one line that says where, and what to do."""

import re
import warnings

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper

from helpers.models import randomise
from helpers.onnx_files import SIZE, images_for
from helpers.spelled_vit import SpelledViT
from snapvit_export.errors import FileFormatError, ModelNotUnderstood, SnapvitError, UsageError
from snapvit_export.onnx_import.gate import require_same_as_original
from snapvit_export.onnx_import.recognise import recognise


def vit(**changes) -> torch.nn.Module:
    return randomise(timm.create_model("vit_tiny_patch16_224", **{**SIZE, "depth": 1, **changes}))


def refusal(path, output=None, image=None, error=SnapvitError) -> str:
    """The one line that a file is refused with, without its path."""
    with pytest.raises(error) as caught:
        recognise(path, output, image)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(f"{path}: ")


def export(module: torch.nn.Module, path, images: torch.Tensor | None = None, **options):
    images = torch.zeros(1, 3, 32, 32) if images is None else images
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (images,), str(path), **{"opset_version": 17, "dynamo": False, **options})
    return path


class Before(torch.nn.Module):
    """Something that is done to the images first."""

    def __init__(self, change, module=None) -> None:
        super().__init__()
        self.change, self.module = change, vit() if module is None else module

    def forward(self, x):
        return self.module(self.change(x))


class After(torch.nn.Module):
    """Something that is done to the output."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change, self.module = change, vit()

    def forward(self, x):
        return self.change(self.module(x))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet18", {}, "looks like a convolutional network (17 convolutions), not like a plain ViT"),
        ("convnext_atto", {}, "looks like a convolutional network"),
        ("mobilevit_xxs", {}, "looks like a hybrid of convolutions (14) and attention"),
        ("mixer_s32_224", {"img_size": 32}, "has no attention, so it is no ViT"),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 56, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 2), "window_size": 7},
            "looks like windowed attention (Swin), not like a plain ViT",
        ),
    ],
)
def test_what_is_no_vit_is_named_for_what_it_looks_like(name, options, said, tmp_path):
    model = timm.create_model(name, **options)
    size = options.get("img_size", 64)
    path = export(randomise(model), tmp_path / "x.onnx", torch.zeros(1, 3, size, size))
    text = refusal(path, error=ModelNotUnderstood)
    assert text.startswith(said)
    assert "not understood at node '" in text


def test_relative_positions_are_refused_where_they_are_added(tmp_path):
    module = timm.create_model("beit_base_patch16_224", **{**SIZE, "depth": 1})
    text = refusal(export(randomise(module), tmp_path / "x.onnx"))
    assert "Softmax" in text
    assert text.endswith("without a mask or relative positions")


@pytest.mark.parametrize(
    ("block", "node", "expected"),
    [
        ("ParallelScalingBlock", "Add", "the residual stream was expected here"),
        ("ResPostBlock", "Add", "the residual stream was expected here"),
        ("ParallelThingsBlock", "Concat", "values of one layer were expected to be joined"),
    ],
)
def test_other_blocks_are_refused_at_the_first_node_that_does_not_fit(block, node, expected, tmp_path):
    from timm.models import vision_transformer

    module = vit(block_fn=getattr(vision_transformer, block))
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
    text = refusal(export(module, tmp_path / "x.onnx"))
    assert re.search(rf"not understood at node '/blocks/blocks.0/{node}\S*' \({node}, output", text)
    assert expected in text


def test_an_unknown_activation_is_refused_with_those_that_are_known(tmp_path):
    path = export(SpelledViT(activation=torch.nn.functional.hardswish), tmp_path / "x.onnx", torch.zeros(1, 3, 12, 12))
    assert "an activation was expected before this: one of gelu, gelu_tanh, quick_gelu, silu, relu" in refusal(path)


@pytest.mark.parametrize("change", [lambda x: x / 255, lambda x: (x - 0.4) / 0.2])
def test_preprocessing_inside_is_refused_with_the_reason(change, tmp_path):
    path = export(Before(change), tmp_path / "x.onnx")
    assert "preprocessing is expected outside of the file. Export the model without it" in refusal(path)


def test_resizing_inside_is_refused_with_the_reason(tmp_path):
    module = Before(lambda x: torch.nn.functional.interpolate(x, size=(32, 32)))
    text = refusal(export(module, tmp_path / "x.onnx", torch.zeros(1, 3, 48, 48)))
    assert "Resize" in text
    assert "preprocessing is expected outside of the file" in text


def test_bytes_as_input_are_refused(tmp_path):
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    text = refusal(export(Before(lambda x: x.float()), tmp_path / "x.onnx", images, input_names=["pixels"]))
    assert text == "'pixels' takes bytes: preprocessing is expected outside of the file. Export it without"


def test_channels_last_are_refused(tmp_path):
    path = export(Before(lambda x: x.permute(0, 3, 1, 2)), tmp_path / "x.onnx", torch.zeros(1, 32, 32, 3))
    assert "Images with channels last are not read: export it with channels first" in refusal(path)


@pytest.fixture(scope="module")
def any_size(tmp_path_factory):
    axes = {"pixels": {0: "n", 2: "height", 3: "width"}}
    path = tmp_path_factory.mktemp("any-size") / "x.onnx"
    return export(vit(), path, input_names=["pixels"], dynamic_axes=axes)


def test_images_of_any_size_ask_for_one(any_size):
    text = refusal(any_size)
    assert text.startswith("'pixels' is ['n', 3, 'height', 'width']: it takes images of any size")
    assert "make_dynamic_shape_fixed --dim_param height --dim_value 224 --dim_param width --dim_value 224" in text


def test_and_are_recognised_with_it(any_size):
    found = recognise(any_size, image=(32, 32))
    assert found.anatomy.image == (32, 32)
    assert require_same_as_original(found, any_size, images_for(found.anatomy)).max_abs < 2e-6


def test_another_size_than_the_files_is_refused(exported):
    path = exported("DeiT", "traced, eager")
    assert refusal(path, image=(48, 48), error=UsageError) == "takes images of 32x32, not 48x48"


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = vit()

    def forward(self, x):
        tokens = self.module.forward_features(x)
        return self.module.forward_head(tokens), tokens


def test_several_outputs_ask_which(tmp_path):
    path = export(Two(), tmp_path / "x.onnx", output_names=["logits", "tokens"])
    asked = "has 2 outputs. Say which is the model's: --output logits, --output tokens"
    assert refusal(path, error=UsageError) == asked
    assert refusal(path, "other", error=UsageError) == "no value is called 'other'. Its outputs: logits, tokens"
    found = recognise(path, "logits")
    assert found.output_name == "logits"
    require_same_as_original(found, path, images_for(found.anatomy))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.softmax(-1),
        torch.sigmoid,
        lambda x: x.argmax(-1),
        lambda x: torch.nn.functional.normalize(x, dim=-1),
    ],
)
def test_what_comes_after_the_scores_is_left_out_by_naming_them(change, tmp_path):
    path = export(After(change), tmp_path / "x.onnx")
    before = re.search(r"--output (\S+)$", refusal(path)).group(1)
    found = recognise(path, before)
    assert found.anatomy.classes == SIZE["num_classes"]
    require_same_as_original(found, path, images_for(found.anatomy))


def test_quantised_files_are_refused(exported, tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_dynamic(str(exported("DeiT", "traced, eager")), str(tmp_path / "x.onnx"))
    text = refusal(tmp_path / "x.onnx")
    assert text.startswith("already quantised (node '")
    assert "Give the file in fp32" in text


def test_files_for_one_kind_of_cpu_are_refused(exported, tmp_path):
    """ONNX Runtime saves its convolutions so at its highest level, which is its default."""
    model = onnx.load(exported("DeiT", "traced, eager"))
    next(node for node in model.graph.node if node.op_type == "Conv").domain = "com.microsoft.nchwc"
    onnx.save(model, tmp_path / "x.onnx")
    assert refusal(tmp_path / "x.onnx").endswith("Give the original file, or save it at level basic or extended")


def edited(source, path, edit):
    model = onnx.load(source)
    edit(model)
    path.write_bytes(model.SerializeToString())
    return path


def set_opset(model) -> None:
    model.opset_import[0].version = 9


def set_domain(model) -> None:
    model.graph.node[5].domain = "my.own"


def add_loop(model) -> None:
    model.graph.node[5].op_type = "Loop"


def add_input(model) -> None:
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["n", "t"]))


def take_integers(model) -> None:
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64


def lose_a_tensor(model) -> None:
    del model.graph.initializer[3]


def read_itself(model) -> None:
    node = next(node for node in model.graph.node if node.op_type == "LayerNormalization")
    node.input[0] = node.output[0]


def sparse(model) -> None:
    model.graph.sparse_initializer.append(onnx.SparseTensorProto())


def huge(model) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[3].dim_value = 1 << 40


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (set_opset, "opset 9 is too old, 11 is the oldest that is read. Export it again"),
        (set_domain, "is of the domain 'my.own', whose operators are not known here"),
        (add_loop, "is control flow, which a plain ViT has none of"),
        (
            add_input,
            "one input was expected, images; there are 2 (pixels, attention_mask): this looks like a model of text",
        ),
        (take_integers, "'pixels' takes integers: this looks like a model of text, not of images"),
        (lose_a_tensor, "damaged: nothing computes '"),
        (read_itself, "depends on its own output"),
        (sparse, "sparse weights are not read"),
        (huge, "images of such a size are not read"),
    ],
)
def test_each_trap_has_its_line(edit, said, exported, tmp_path):
    assert said in refusal(edited(exported("DeiT", "traced, eager"), tmp_path / "x.onnx", edit))


def test_a_mask_is_refused(exported, tmp_path):
    def add_mask(model) -> None:
        """Add a constant to the products of queries and keys."""
        softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
        mask = np.zeros((1, 1, 17, 17), np.float32)
        mask[..., 3] = -100
        model.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
        masked = helper.make_node("Add", [softmax.input[0], "mask"], ["masked"])
        softmax.input[0] = "masked"
        model.graph.node.append(masked)

    text = refusal(edited(exported("DeiT", "traced, eager"), tmp_path / "x.onnx", add_mask))
    assert text.endswith("without a mask or relative positions")


def test_a_missing_weight_file_is_named(exported, tmp_path):
    path = tmp_path / "x.onnx"
    path.write_bytes(exported("DeiT", "weights outside").read_bytes())
    with pytest.raises(FileFormatError, match=r"model\.bin: missing, though x\.onnx reads it"):
        recognise(path)
