"""`snapvit inspect`: what it says is what is in the file, and what a target can run."""

import json

import onnx
import pytest
from onnx import TensorProto, helper

from helpers.models import make_model
from helpers.rankings import random_ranking
from snapvit_export.checks.inspect import inspect
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.precision import GraphPrecision
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint

PLAN = Plan(heads=(1, 4, 3), neurons=(20, 192, 7))


@pytest.fixture
def graphs(tmp_path):
    """The same cut model in both flavours."""
    model = make_model()
    emitter = GraphWriter(blueprint(model, random_ranking(model.anatomy)), tmp_path)
    return {flavour: emitter.write(flavour, PLAN, format=GraphFormat(flavour)).graph for flavour in ("portable", "ort")}


def test_it_says_what_is_in_the_file(graphs, tmp_path):
    found = inspect(graphs["portable"])
    assert (found.opset, found.plan, found.model, found.variant) == (17, PLAN, "tiny", "portable")
    loaded = onnx.load(graphs["portable"])
    floats = sum(len(t.raw_data) for t in loaded.graph.initializer if t.data_type == TensorProto.FLOAT)
    assert found.weights["float32"] == floats
    assert found.reads == ("weights.bin",)
    assert found.size_bytes < graphs["portable"].stat().st_size + (tmp_path / "weights.bin").stat().st_size
    assert found.inputs[0].shape == ("batch", 3, 32, 32)
    assert inspect(graphs["ort"]).operators["Attention"] == 2  # the last block has one query, and no keys
    assert "Attention" not in found.operators


def test_the_command_prints_it(snapvit, graphs):
    outcome = snapvit("inspect", graphs["ort"], "--runtime", "onnxruntime")
    assert outcome.code == 0
    assert "opset 23" in outcome.out
    assert "takes images float32 [batch, 3, 32, 32]" in outcome.out
    assert "onnxruntime can run it." in outcome.out
    printed = json.loads(snapvit("inspect", graphs["portable"], "--json").out)
    assert printed["plan"]["heads"] == [1, 4, 3]


def test_bytes_that_are_not_cast_first_and_scales_found_while_running_are_not_for_tensorrt(snapvit, tmp_path):
    model = make_model()
    drawn = blueprint(model, random_ranking(model.anatomy))
    dynamic = GraphWriter(drawn, tmp_path, precision="int8-dynamic")
    path = dynamic.write("d", PLAN, format=GraphFormat("portable"), precision=GraphPrecision("int8-dynamic")).graph
    assert "int8-static" in snapvit("inspect", path, "--runtime", "tensorrt").error_line
    (tmp_path / "bytes").mkdir()
    path = GraphWriter(drawn, tmp_path / "bytes", takes_bytes=True).write("b", PLAN).graph
    assert snapvit("inspect", path, "--runtime", "tensorrt").code == 0
    graph = onnx.load(path, load_external_data=False)
    cast = next(node for node in graph.graph.node if node.op_type == "Cast")
    graph.graph.node.insert(0, onnx.helper.make_node("Identity", [cast.input[0]], ["copied"]))
    cast.input[0] = "copied"
    path.write_bytes(graph.SerializeToString())
    assert (
        "Identity reads bytes, and TensorRT only casts them"
        in snapvit("inspect", path, "--runtime", "tensorrt").error_line
    )


@pytest.mark.parametrize(
    ("flavour", "target", "says"),
    [
        ("portable", "tensorrt", None),
        ("portable", "openvino", None),
        ("portable", "onnxruntime", None),
        ("ort", "tensorrt", "opset 23, and TensorRT 10.3 reads up to 20"),
    ],
)
def test_targets_that_can_run_it_and_that_cannot(snapvit, graphs, flavour, target, says):
    outcome = snapvit("inspect", graphs[flavour], "--target", target)
    assert outcome.code == (0 if says is None else 1)
    assert (f"{target} can run it." in outcome.out) if says is None else (says in outcome.error_line)


def test_graphs_of_others_and_mistakes(snapvit, tmp_path):
    node = helper.make_node("Softplusplus", ["x"], ["y"])
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    graph = helper.make_graph([node], "odd", ports[:1], ports[1:])
    path = tmp_path / "odd.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    outcome = snapvit("inspect", path)
    assert outcome.code == 0
    assert "not made by snapvit" in outcome.out
    refused = snapvit("inspect", path, "--target", "onnxruntime")
    assert refused.code == 1
    assert "ONNX Runtime cannot open it" in refused.error_line
    assert snapvit("inspect", path, "--target", "toaster").code == 2
    assert "cannot be read" in snapvit("inspect", tmp_path / "nowhere.onnx").error_line
