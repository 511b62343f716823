"""Graphs for DeepStream answer as the graphs they were made of, in ONNX Runtime: normalisation is in their weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers.graphs import run
from helpers.tensorrt_families import make_tensorrt_family
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError
from snapvit_export.family.applications import deepstream
from snapvit_export.family.applications.interface import Interface
from snapvit_export.family.folder import read_family
from snapvit_export.graph.scaled_pixels import give_probabilities, take_scaled_pixels
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.target import Target

STEPS = Preprocessing(input_size=(3, 8, 8), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def planes(pixels: np.ndarray) -> np.ndarray:
    """What Gst-nvinfer computes with net-scale-factor=1/256: (B, 3, H, W) float32."""
    return np.ascontiguousarray((np.float32(1 / 256) * pixels.astype(np.float32)).transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("asked", "away"),
    [
        ({}, 1e-6),
        ({"precision": "fp16", "takes_bytes": True, "static_batch": True}, 2e-3),
        ({"precision": "int8-static"}, 1e-2),  # a rounding of the floats before may turn a quantisation step
    ],
    ids=["fp32", "fp16 of bytes", "int8"],
)
@pytest.mark.usefixtures("short_timings")
def test_answers_are_the_softmax_of_the_models_own(tmp_path, asked, away):
    precision = asked.pop("precision", "fp32")
    target = Target(runtime="onnxruntime", precision=precision, batch=1, threads=1)
    family = make_tensorrt_family(tmp_path, target=target, mixes_precisions=False, **asked)
    manifest = read_family(family)
    variant = manifest.variant(manifest.choice.variant)
    size, steps = variant.image_of(manifest.anatomy), manifest.preprocessing_of(variant)
    pixels = np.random.default_rng(0).integers(0, 256, (1, *size, 3), np.uint8)
    wanted = softmax(run(family / "model.onnx", pixels if asked.get("takes_bytes") else steps.normalise(pixels)))
    path = family / "deepstream" / "model_deepstream.onnx"
    assert np.abs(run(path, planes(pixels)) - wanted).max() <= away
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [each.name for each in (*model.graph.input, *model.graph.output)] == ["images", "probabilities"]
    assert model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    operators = [node.op_type for node in onnx.load(family / "model.onnx").graph.node]
    assert len(model.graph.node) <= len(operators) + 1, "nothing but the softmax is added"


def patches(folder: Path, has_bias: bool, half: bool) -> Path:
    """A patch embedding alone, with weights and pixels in halves if asked."""
    rng, kind = np.random.default_rng(0), np.float16 if half else np.float32
    weights = {"w": rng.standard_normal((4, 3, 4, 4)), "b": rng.standard_normal(4)}
    names = ["w", "b"] if has_bias else ["w"]
    source = "x" if half else "images"
    nodes = [helper.make_node("Cast", ["images"], ["x"], to=TensorProto.FLOAT16)] if half else []
    nodes.append(helper.make_node("Conv", [source, *names], ["c"], kernel_shape=[4, 4], strides=[4, 4]))
    nodes += [
        helper.make_node("Cast", ["c"], ["d"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["d"], ["logits"]),
    ]
    inside = [numpy_helper.from_array(weights[name].astype(kind), name) for name in names]
    given = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 8, 8])
    result = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 16])
    graph = helper.make_graph(nodes, "g", [given], [result], inside)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "p.onnx")
    return folder / "p.onnx"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("half", "away"), [(False, 2e-6), (True, 4e-3)])
def test_mean_and_deviation_are_folded_with_and_without_a_bias(tmp_path, has_bias, half, away):
    path = patches(tmp_path, has_bias, half)
    pixels = np.random.default_rng(1).integers(0, 256, (2, 8, 8, 3), np.uint8)
    wanted = run(path, STEPS.normalise(pixels))
    model = onnx.load(path)
    take_scaled_pixels(model, STEPS)
    onnx.save(model, tmp_path / "folded.onnx")
    found = run(tmp_path / "folded.onnx", planes(pixels))
    assert np.abs(found - wanted).max() <= away * np.abs(wanted).max()
    assert {tensor.name for tensor in model.graph.initializer} == {"patch.weight.scaled", "patch.bias.scaled"}


def test_a_graph_without_a_patch_embedding_is_refused(tmp_path):
    model = onnx.load(patches(tmp_path, True, False))
    model.graph.node[0].op_type = "Other"
    with pytest.raises(SnapvitError, match="no convolution that reads its pixels"):
        take_scaled_pixels(model, STEPS)


def test_probabilities_sum_to_one(tmp_path):
    model = onnx.load(patches(tmp_path, True, False))
    give_probabilities(model)
    onnx.save(model, tmp_path / "p.onnx")
    found = run(tmp_path / "p.onnx", np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32))
    assert np.abs(found.sum(1) - 1).max() < 1e-6


@pytest.mark.usefixtures("short_timings")
def test_weights_beyond_one_file_lie_beside_it(tmp_path):
    family = make_tensorrt_family(tmp_path)
    manifest = read_family(family)
    about = Interface.of(manifest, manifest.variant(manifest.choice.variant), family / "model.onnx")
    images = np.random.default_rng(0).random((1, *about.steps.input_size)).astype(np.float32)
    path = family / "deepstream" / "model_deepstream.onnx"
    wanted = run(path, images)
    path.unlink()
    deepstream.write_graph(family, about, family / "model.onnx", largest=1000)
    assert path.stat().st_size < (family / "deepstream" / "model_deepstream.bin").stat().st_size
    with OrtSession(path, 1) as session:
        assert np.array_equal(session.run(images), wanted)
