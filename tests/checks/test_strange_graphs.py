"""Graphs with the names that ours have, and something else behind them: one line, never a traceback."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from snapvit_export.checks.embedding_output import with_embedding
from snapvit_export.checks.inspect import inspect
from snapvit_export.checks.merging import merged_counts, merging_blocks
from snapvit_export.checks.patch_tokens import open_patch_tokens
from snapvit_export.errors import FileFormatError


def write(path: Path, *nodes: onnx.NodeProto, output: str = "out", shape: tuple | None = (1,), **metadata: str) -> Path:
    given = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 8, 8])
    taken = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
    graph = helper.make_graph([*nodes, helper.make_node("Identity", ["images"], [output])], "g", [given], [taken])
    model = helper.make_model(graph)
    helper.set_model_props(model, {f"snapvit.{key}": value for key, value in metadata.items()})
    path.write_bytes(model.SerializeToString())
    return path


def test_types_that_onnx_does_not_have_are_told_by_their_number(tmp_path):
    model = onnx.load(write(tmp_path / "x.onnx"))
    model.graph.input[0].type.tensor_type.elem_type = 0
    model.graph.output[0].type.tensor_type.elem_type = 99
    model.graph.initializer.append(TensorProto(name="w", data_type=77, dims=[4], raw_data=b"1234"))
    model.graph.initializer.append(TensorProto(name="n", data_type=TensorProto.FLOAT, dims=[-4], raw_data=b"12345678"))
    (tmp_path / "x.onnx").write_bytes(model.SerializeToString())
    found = inspect(tmp_path / "x.onnx")
    assert (found.inputs[0].type, found.outputs[0].type) == ("type 0", "type 99")
    assert found.weights == {"type 77": 4, "float32": 8}


def test_values_called_like_a_merge_are_none(tmp_path):
    names = ["merge.order", "x.merge.order", "blocks.x.merge.order", "blocks..merge.order", "blocks.7.merge.order"]
    nodes = [helper.make_node("Identity", ["images"], [name]) for name in names]
    path = write(tmp_path / "x.onnx", *nodes)
    assert merging_blocks(path) == (7,)
    with pytest.raises(FileFormatError, match="not a valid Plan"):
        merged_counts(path)
    path = write(tmp_path / "x.onnx", *nodes, plan='{"heads": [1], "neurons": [1]}')
    with pytest.raises(FileFormatError, match="in a block that its plan does not have"):
        merged_counts(path)


@pytest.mark.parametrize("shape", [None, (), (1,), (1, None), (1, 0), (1, 2, 3)])
def test_class_scores_without_a_number_of_classes_are_refused(tmp_path, shape):
    head = helper.make_node("Gemm", ["images", "head.weight"], ["x"])
    path = write(tmp_path / "x.onnx", head, output="logits", shape=shape)
    with pytest.raises(FileFormatError, match="does not say how many classes"), with_embedding(path):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["x.onnx"]


@pytest.mark.parametrize("kernel", [None, [0, 0], [2]])
def test_patches_without_a_size_are_refused(tmp_path, kernel):
    nodes = [] if kernel is None else [helper.make_node("Conv", ["images", "w"], ["x"], kernel_shape=kernel)]
    path = write(tmp_path / "x.onnx", *nodes, plan='{"heads": [1], "neurons": [1]}', tokens="[]")
    with pytest.raises(FileFormatError, match="its patches are not those of"), open_patch_tokens(path, 1):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["x.onnx"]
