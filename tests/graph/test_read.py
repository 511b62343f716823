"""Foreign graphs: nothing leaves the folder, and 200 damaged files give one clear line each."""

import random
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from helpers.models import make_model
from helpers.rankings import random_ranking
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.graph.read import external_files, files_read_by, read_graph
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes.ort import OrtSession


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One graph with its weight file."""
    folder = tmp_path_factory.mktemp("graph")
    model = make_model()
    GraphWriter(blueprint(model, random_ranking(model.anatomy)), folder).write("g", Plan.dense(model.anatomy))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "family")


def test_a_graph_of_ours_is_read_and_says_what_it_points_into(folder):
    assert external_files(read_graph(folder / "g.onnx")) == {"weights.bin"}


def pointing(folder, **entries: str) -> None:
    """Change where the first outside tensor is said to be."""
    model = onnx.load(folder / "g.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        entry.value = entries.get(entry.key, entry.value)
    (folder / "g.onnx").write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret", "..\\secret", "", "link"])
def test_weights_outside_the_folder_are_refused(folder, tmp_path, location):
    (tmp_path / "secret").write_bytes(bytes(10**6))
    (folder / "link").symlink_to(tmp_path / "secret")
    pointing(folder, location=location)
    with pytest.raises(FileFormatError, match="leaves the folder"):
        read_graph(folder / "g.onnx")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"offset": "999999999"}, "not within weights.bin"),
        ({"offset": "-4"}, "not within weights.bin"),
        ({"length": "8"}, "not within weights.bin"),
        ({"offset": "x"}, "no valid place"),
        ({"location": "gone.bin"}, "gone.bin: missing"),
    ],
)
def test_pieces_that_are_not_there_are_refused(folder, entries, says):
    pointing(folder, **entries)
    with pytest.raises(FileFormatError, match=says):
        read_graph(folder / "g.onnx")


def outside_tensor() -> TensorProto:
    tensor = TensorProto(name="stray", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "../secret"), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def constant(tensor: TensorProto) -> onnx.NodeProto:
    return onnx.helper.make_node("Constant", [], ["stray"], value=tensor)


def in_function(model: onnx.ModelProto, tensor: TensorProto) -> None:
    opsets = [onnx.helper.make_opsetid("", 17)]
    model.functions.append(onnx.helper.make_function("local", "F", [], ["stray"], [constant(tensor)], opsets))


def in_default_of_a_function(model: onnx.ModelProto, tensor: TensorProto) -> None:
    in_function(model, TensorProto(data_type=TensorProto.FLOAT, dims=[1], raw_data=bytes(4)))
    model.functions[0].attribute_proto.append(onnx.helper.make_attribute("value", tensor))


def in_graph_inside_a_function(model: onnx.ModelProto, tensor: TensorProto) -> None:
    inner = onnx.helper.make_graph([constant(tensor)], "inner", [], [])
    in_function(model, TensorProto(data_type=TensorProto.FLOAT, dims=[1], raw_data=bytes(4)))
    model.functions[0].node.append(onnx.helper.make_node("If", ["c"], ["x"], then_branch=inner, else_branch=inner))


def in_nested_graph(model: onnx.ModelProto, tensor: TensorProto) -> None:
    innermost = onnx.helper.make_graph([constant(tensor)], "innermost", [], [])
    inner = onnx.helper.make_graph([onnx.helper.make_node("If", ["c"], ["x"], then_branch=innermost)], "inner", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["c"], ["x"], then_branch=inner))


def in_training(model: onnx.ModelProto, tensor: TensorProto) -> None:
    model.training_info.add().algorithm.initializer.append(tensor)


def in_start_of_training(model: onnx.ModelProto, tensor: TensorProto) -> None:
    model.training_info.add().initialization.node.append(constant(tensor))


def in_sparse_tensor(model: onnx.ModelProto, tensor: TensorProto) -> None:
    model.graph.sparse_initializer.add().values.CopyFrom(tensor)


def in_sparse_attribute(model: onnx.ModelProto, tensor: TensorProto) -> None:
    node = onnx.NodeProto(op_type="Constant", output=["stray"])
    attribute = node.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR)
    attribute.sparse_tensor.values.CopyFrom(tensor)
    model.graph.node.append(node)


@pytest.mark.parametrize("name", ["g.onnx", "g.xml.onnx", "g.model", "g"])
@pytest.mark.parametrize(
    "hide",
    [
        *(in_function, in_default_of_a_function, in_graph_inside_a_function, in_nested_graph),
        *(in_training, in_start_of_training, in_sparse_tensor, in_sparse_attribute),
    ],
)
def test_weights_outside_the_folder_are_found_wherever_they_hide(folder, tmp_path, hide, name):
    (tmp_path / "secret").write_bytes(bytes(100))
    model = onnx.load(folder / "g.onnx", load_external_data=False)
    hide(model, outside_tensor())
    (folder / name).write_bytes(model.SerializeToString())
    with pytest.raises(FileFormatError, match="'../secret' leaves the folder"):
        files_read_by(folder / name)


def test_an_onnx_file_is_no_graph_of_openvino(folder, tmp_path):
    shutil.copy(folder / "g.onnx", folder / "g.xml")
    with pytest.raises(FileFormatError, match="g.xml: damaged, or not a graph of OpenVINO"):
        files_read_by(folder / "g.xml")
    (folder / "g.xml").write_text('<?xml version="1.0"?>\n<net name="g" version="11"/>\n')
    (folder / "g.bin").write_bytes(b"")
    assert files_read_by(folder / "g.xml") == {"g.bin"}
    (folder / "g.bin").unlink()
    (folder / "g.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(FileFormatError, match="g.bin: a link that leaves the folder"):
        files_read_by(folder / "g.xml")


def test_files_that_are_no_graphs(tmp_path):
    for data in (b"", b"not a graph", bytes(100), b"\xff" * 50):
        (tmp_path / "x.onnx").write_bytes(data)
        with pytest.raises(FileFormatError, match="x.onnx: damaged, or not an ONNX file"):
            read_graph(tmp_path / "x.onnx")
    with pytest.raises(FileFormatError, match=r"cannot be read"):
        read_graph(tmp_path / "nowhere.onnx")


def test_two_hundred_damaged_graphs_give_one_line_or_the_same_structure(folder):
    """A changed byte is refused in one line, or it reads: then the hash of a manifest is what tells."""
    original = (folder / "g.onnx").read_bytes()
    rng, refused = random.Random(0), 0
    for _ in range(200):
        data = bytearray(original)
        kind = rng.choice(("flip", "cut", "repeat"))
        if kind == "cut":
            data = data[: rng.randrange(len(data))]
        for _ in range(rng.randint(1, 20) if kind == "flip" else 0):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if kind == "repeat":
            at = rng.randrange(len(data))
            data = data[:at] + data[at : at + 50] + data[at:]
        (folder / "g.onnx").write_bytes(data)
        try:
            read_graph(folder / "g.onnx")
            with OrtSession(folder / "g.onnx", 1) as session:
                session.run(np.zeros((1, 3, 32, 32), np.float32))
        except SnapvitError as error:
            refused += 1
            assert "\n" not in str(error)
            assert "g.onnx" in str(error)
    assert refused > 100
