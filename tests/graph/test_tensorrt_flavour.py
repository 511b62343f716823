"""The flavour for TensorRT and fp8: what is stored, what any number of heads reads of it, and what is refused."""

import json

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from helpers.graphs import exact_and, run, writer_of
from helpers.images import noise_arrays
from helpers.models import FAMILIES, as_model, make_model, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export import profiles
from snapvit_export.checks.gates import agreement
from snapvit_export.checks.inspect import inspect, why_not
from snapvit_export.errors import UsageError
from snapvit_export.graph.float8 import LARGEST_FP8, from_fp8, to_fp8
from snapvit_export.graph.format import GraphFormat, flavour_for
from snapvit_export.graph.precision import LEAST_HALF, GraphPrecision, stored, up_to_half
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint
from snapvit_export.target import Target, faster_than, parse_precision
from snapvit_export.workflows.export import Request, export

# Least cosine of three blocks in fp8. Weights and inputs have 4 bits of mantissa, so each is off by 1/16 of itself at
# most, and by 1/16 / sqrt(12) = 0.018 in the mean square, 0.026 together; twelve products after each other: 0.09.
FP8_COSINE = 0.995


def model_and_drawn(name: str = "deit_tiny_patch16_224"):
    model = as_model(small(name)[0], name, {})
    return model, blueprint(model, random_ranking(model.anatomy, seed=1))


def initialisers(path) -> dict:
    return {tensor.name: tensor for tensor in onnx.load(path, load_external_data=False).graph.initializer}


def test_tensorrt_gets_this_flavour_and_others_get_theirs():
    wanted = {"tensorrt": "tensorrt", "onnxruntime-tensorrt": "tensorrt", "openvino": "portable", "onnxruntime": "ort"}
    assert {runtime: flavour_for(runtime) for runtime in wanted} == wanted
    assert flavour_for("onnxruntime-cuda") == "portable"
    assert GraphFormat("tensorrt").opset == 19  # TensorRT 10.3 reads up to 20


def test_q_k_and_v_are_one_matrix_of_which_fewer_heads_read_a_prefix(tmp_path):
    model, drawn = model_and_drawn()
    writer, separate = writer_of(drawn, tmp_path, "tensorrt"), writer_of(drawn, tmp_path, "portable")
    block, plan = model.anatomy.blocks[0], uneven_plan(model.anatomy)
    fused = writer.shared["blocks.0.qkv.weight"].reshape(block.heads, 3, block.head_dim, -1)
    for part, name in enumerate("qkv"):
        wanted = separate.shared[f"blocks.0.{name}.weight"].reshape(block.heads, block.head_dim, -1)
        assert np.array_equal(fused[:, part], wanted)
        assert f"blocks.0.{name}.weight" not in writer.shared
    few, all_heads = (
        initialisers(writer.write("x", wanted, format=GraphFormat("tensorrt")).graph)["blocks.0.qkv.weight"]
        for wanted in (plan, Plan.dense(model.anatomy))
    )
    assert list(few.dims) == [3 * plan.heads[0] * block.head_dim, model.anatomy.embed_dim]
    place = [{entry.key: entry.value for entry in tensor.external_data} for tensor in (few, all_heads)]
    assert place[0]["offset"] == place[1]["offset"]
    assert int(place[0]["length"]) < int(place[1]["length"])


def test_a_writer_has_the_weights_of_one_kind_of_flavour(tmp_path):
    model, drawn = model_and_drawn()
    dense = Plan.dense(model.anatomy)
    with pytest.raises(ValueError, match="not those of the flavour portable"):
        writer_of(drawn, tmp_path, "tensorrt").write("x", dense)
    with pytest.raises(ValueError, match="not those of the flavour tensorrt"):
        writer_of(drawn, tmp_path, "ort").write("x", dense, format=GraphFormat("tensorrt"))
    with pytest.raises(ValueError, match="has float16 around int8-static"):
        GraphWriter(drawn, tmp_path, precision="int8-static").write(
            "x", dense, precision=GraphPrecision("int8-static", half_around=True)
        )


@pytest.mark.parametrize("precision", ["int8-static", "fp8"])
def test_everything_but_the_quantised_weights_is_float16(precision, tmp_path):
    model, drawn = model_and_drawn()
    images = noise_arrays(model.anatomy, 4)
    _, written, _ = exact_and(precision, drawn, uneven_plan(model.anatomy), tmp_path, images, "tensorrt")
    found = initialisers(written.graph)
    of_eight_bits = onnx.TensorProto.INT8 if precision == "int8-static" else onnx.TensorProto.FLOAT8E4M3FN
    layers = [f"blocks.{i}.{layer}" for i in range(3) for layer in ("qkv", "proj", "fc1", "fc2")]
    assert {found[f"{layer}.weight"].data_type for layer in layers} == {of_eight_bits}
    floats = {tensor.data_type for tensor in found.values()} - {of_eight_bits, onnx.TensorProto.INT64}
    assert floats == {onnx.TensorProto.FLOAT16}
    operators = {node.op_type for node in onnx.load(written.graph, load_external_data=False).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= operators
    assert why_not(written.graph, inspect(written.graph), "tensorrt") is None
    assert why_not(written.graph, inspect(written.graph), "onnxruntime") is None


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_every_family_computes_nearly_the_same_in_fp8(name, tmp_path):
    model, drawn = model_and_drawn(name)
    images, plan = noise_arrays(model.anatomy, 6), uneven_plan(model.anatomy)
    exact, written, _ = exact_and("fp8", drawn, plan, tmp_path, images, "tensorrt")
    onnx.checker.check_model(str(written.graph), full_check=True)
    assert agreement(run(exact.graph, images), run(written.graph, images)).cosine > FP8_COSINE


def test_fp8_is_stored_in_a_byte_and_shared_and_a_file_may_hold_it_all(snapvit, tmp_path):
    model = make_model(dict(img_size=64, patch_size=16, embed_dim=192, depth=4, num_heads=3, num_classes=10))
    drawn = blueprint(model, random_ranking(model.anatomy))
    images, dense = noise_arrays(model.anatomy, 4), Plan.dense(model.anatomy)
    exact, written, numerics = exact_and("fp8", drawn, dense, tmp_path, images, "tensorrt")
    assert written.size_bytes < 0.35 * exact.size_bytes
    writer = writer_of(drawn, tmp_path, "tensorrt", "fp8")
    cut = writer.write(
        "cut", Plan(heads=(2, 1, 3, 2), neurons=(99, 768, 7, 64)), format=GraphFormat("tensorrt"), precision=numerics
    )
    assert [path.name for path in cut.weights] == ["weights.bin"]
    alone = writer.write("alone", dense, format=GraphFormat("tensorrt", single_file=True), precision=numerics)
    assert not alone.weights
    assert np.array_equal(run(alone.graph, images), run(written.graph, images))
    told = json.loads(snapvit("inspect", written.graph, "--json").out)
    assert told["precision"] == "fp8"
    of_layers = sum(tensor.size for tensor in writer.shared.values() if tensor.dtype == np.uint8)
    assert told["weights"]["float8"] == of_layers + 1  # and the zero that tells QuantizeLinear its type


# Numbers of eight bits


def test_every_number_of_eight_bits_keeps_its_code():
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    assert np.array_equal(to_fp8(from_fp8(codes)), codes)
    assert from_fp8(np.array([126, 254], np.uint8)).tolist() == [LARGEST_FP8, -LARGEST_FP8]
    assert np.isnan(from_fp8(np.array([127], np.uint8)))


@given(arrays.arrays(np.float32, 50, elements=st.floats(-1000, 1000, width=32)))
def test_the_nearest_number_of_eight_bits_is_taken(values):
    levels = np.sort(from_fp8(np.array([code for code in range(256) if code & 127 != 127], np.uint8)))
    nearest = np.abs(levels[None] - values[:, None].clip(-LARGEST_FP8, LARGEST_FP8)).min(1)
    off = np.abs(from_fp8(to_fp8(values)) - values.clip(-LARGEST_FP8, LARGEST_FP8))
    assert np.array_equal(off, nearest.astype(np.float32))


def test_onnx_runtime_rounds_to_the_same_numbers():
    """Beside random values, those between two numbers, where the even code is taken."""
    import onnxruntime
    from onnx import TensorProto, helper

    codes = np.arange(126, dtype=np.uint8)
    ties = (from_fp8(codes) + from_fp8(codes + np.uint8(1))) / 2
    values = np.concatenate([ties, -ties, np.random.default_rng(0).standard_normal(1000) * 100]).astype(np.float32)
    zero = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], bytes(1), raw=True)
    one = helper.make_tensor("s", TensorProto.FLOAT, [], [1.0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(values)]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], initializer=[zero, one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": values})[0], from_fp8(to_fp8(values)))


@given(st.floats(2**-24, 60000, width=32))
def test_scales_in_float16_are_never_smaller(scale):
    found = up_to_half(np.float32(scale))
    assert found.dtype == np.float16
    assert found >= np.float32(scale)
    assert found <= max(np.float32(scale) * np.float32(1 + 2**-4), LEAST_HALF)


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e-6])
def test_int8_steps_are_those_that_are_written(factor):
    """A LayerScale that is folded in may be tiny: then float16 has few bits for the step, or none."""
    weight = (factor * np.random.default_rng(0).standard_normal((64, 48))).astype(np.float32)
    found = stored({"blocks.0.fc1.weight": weight}, "int8-static", half_around=True)
    scale, whole = found["blocks.0.fc1.scale"], found["blocks.0.fc1.weight"]
    assert scale.dtype == np.float16
    assert (scale > 0).all()
    assert np.abs(whole * scale.astype(np.float32)[:, None] - weight).max() <= 0.51 * scale.astype(np.float32).max()


# Who may have fp8


def test_only_cards_of_devices_with_fp8_try_it():
    with_fp8 = {name for name in profiles.names() if "fp8" in profiles.load(name).precisions}
    assert with_fp8 == {"jetson-thor", "l4", "rtx-4090"}
    for name in with_fp8:
        card = profiles.load(name)
        tried = faster_than("fp16", "tensorrt", card.precisions_for("tensorrt"))
        assert tried == ("int8-static", "fp8")
        assert card.width_multiple("fp8") == 16
        assert card.precisions_for("onnxruntime") == ()  # it says nothing of other runtimes
    orin = profiles.load("jetson-orin-nano")
    assert faster_than("fp16", "tensorrt", orin.precisions_for("tensorrt")) == ("int8-static",)
    assert "fp8" not in faster_than("fp16", "tensorrt")


def test_fp8_is_refused_where_nothing_computes_in_it(snapvit, tmp_path):
    with pytest.raises(UsageError, match="onnxruntime does not compute in fp8"):
        parse_precision("fp8", "onnxruntime")
    words = ["export", "--card", "jetson-orin-nano", "--precision", "fp8", "--sparsity", "0.3", "--out", tmp_path / "x"]
    outcome = snapvit(*words)
    says = "jetson-orin-nano does not compute in fp8. Give one of fp32, fp16, int8-static"
    assert (outcome.code, says in outcome.error_line) == (2, True)
    target = Target(runtime="tensorrt", precision="fp8", batch=1, threads=1)
    request = Request(target=target, flavour="portable", sparsity=[0.3], elsewhere=True, out=tmp_path / "x")
    with pytest.raises(UsageError, match="fp8 is written for TensorRT alone, not in the flavour portable"):
        export(request)
