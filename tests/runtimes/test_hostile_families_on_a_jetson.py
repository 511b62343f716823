"""The Jetson agent and a stranger's family: one line, before trtexec sees anything."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from snapvit_export.runtimes import jetson_agent as agent

WEIGHTS = np.arange(12, dtype=np.float32)


def external(
    name: str, location: str = "weights.bin", dims: tuple[int, ...] = (3, 4), **entries: object
) -> TensorProto:
    """A tensor whose weights are in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def model_with(tensor: TensorProto | None, where: str = "initialiser") -> onnx.ModelProto:
    """A small model that has the tensor in one of the places where ONNX allows one."""
    port = helper.make_tensor_value_info("images", TensorProto.FLOAT, [None, 4])
    nodes, functions, initialisers, sparse = [helper.make_node("Identity", ["images"], ["out"])], [], [], []
    body = helper.make_graph([helper.make_node("Constant", [], ["inner"], value=tensor)], "body", [], [port])
    if tensor is None:
        pass
    elif where == "initialiser":
        initialisers = [tensor]
    elif where == "sparse initialiser":
        values = TensorProto(data_type=TensorProto.INT64, dims=[1])
        sparse = [onnx.SparseTensorProto(values=tensor, indices=values, dims=[3, 4])]
    elif where == "attribute":
        nodes.append(helper.make_node("Constant", [], ["c"], value=tensor))
    elif where == "list of an attribute":
        nodes.append(helper.make_node("Any", [], ["c"], values=[tensor]))
    elif where == "graph of an attribute":
        nodes.append(helper.make_node("If", ["images"], ["c"], then_branch=body, else_branch=body))
    elif where == "function":
        made = [helper.make_node("Constant", [], ["y"], value=tensor)]
        functions = [helper.make_function("own", "f", [], ["y"], made, [helper.make_opsetid("", 17)])]
    graph = helper.make_graph(nodes, "g", [port], [port], initialisers, sparse_initializer=sparse)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], functions=functions)


PLACES = ("initialiser", "sparse initialiser", "attribute", "list of an attribute", "graph of an attribute", "function")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_family(folder: Path, model: onnx.ModelProto | bytes) -> dict:
    """A family of one variant as the agent reads it; the manifest comes back too."""
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(WEIGHTS.tobytes())
    (folder / "dense.onnx").write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    weights = {"file": "weights.bin", "sha256": digest(folder / "weights.bin")}
    dense = {"name": "dense", "file": "dense.onnx", "sha256": digest(folder / "dense.onnx"), "weights": ["weights.bin"]}
    target = {"precision": "fp32", "batch": 1, "threads": 1}
    manifest = {"format_version": 1, "model": "m", "dense": "dense", "target": target, "input": {"batch": None}}
    manifest.update(weights=[weights], variants=[dense])
    write(folder, manifest)
    return manifest


def write(folder: Path, manifest: object) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(folder: Path, capsys, *words: str) -> str:
    """The one line that the agent prints; trtexec is not asked."""
    code = agent.main([str(folder), "--out", str(folder.parent / "orin.json"), "--trtexec", "no-trtexec", *words])
    lines = capsys.readouterr().err.splitlines()
    assert code in (1, 2)
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "no-trtexec" not in lines[0], "nothing was wrong with the family"
    return lines[0]


@pytest.mark.parametrize("where", PLACES)
def test_weights_outside_of_the_listed_files_are_refused_wherever_a_tensor_is(where, tmp_path, capsys):
    folder = tmp_path / "family"
    (tmp_path / "secret").write_bytes(WEIGHTS.tobytes())
    (folder).mkdir()
    (folder / "unlisted.bin").write_bytes(WEIGHTS.tobytes())
    make_family(folder, model_with(external("w", length=48), where))
    assert agent.read_family(folder).variants[0].graph.input == "images"
    for location in ("../secret", str(tmp_path / "secret"), "unlisted.bin", "", "weights.bin\0x", "a/../weights.bin"):
        make_family(folder, model_with(external("w", location, length=48), where))
        assert "it reads what manifest.json does not list for it" in refused(folder, capsys)


@pytest.mark.parametrize(
    "entries",
    [
        dict(length=49),
        dict(length=44),
        dict(offset=4, length=48),
        dict(offset=-4, length=48),
        dict(offset="x"),
        dict(length="1" * 100),
        dict(dims=(3, 5)),
    ],
)
def test_weights_that_are_not_within_their_file_are_refused(entries, tmp_path, capsys):
    make_family(tmp_path / "family", model_with(external("w", **entries)))
    assert "'weights.bin'" in refused(tmp_path / "family", capsys)


@pytest.mark.parametrize("dims", [(-3, 4), (2**62, 4), (2**40,) * 10**5])
def test_sizes_that_no_memory_holds_are_refused_at_once(dims, tmp_path, capsys):
    make_family(tmp_path / "family", model_with(external("w", dims=dims)))
    assert "a negative size, or more than any memory" in refused(tmp_path / "family", capsys)


def test_a_tensor_that_names_two_places_or_is_written_in_pieces_is_seen_whole(tmp_path, capsys):
    twice = external("w", length=48)
    twice.external_data.add(key="location", value="../secret")
    make_family(tmp_path / "family", model_with(twice))
    assert "names the place of its weights twice" in refused(tmp_path / "family", capsys)
    # A reader of protobuf merges the pieces of `t`: the first says that the weights are outside, the second where.
    first = TensorProto(data_type=TensorProto.FLOAT, dims=[3, 4], data_location=TensorProto.EXTERNAL)
    second = external("w", "../secret", dims=())
    second.ClearField("data_location")
    attribute = onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR).SerializeToString()
    for piece in (first, second):
        raw = piece.SerializeToString()
        attribute += bytes([5 << 3 | 2, len(raw)]) + raw
    model = model_with(None)
    model.graph.node.append(helper.make_node("Constant", [], ["c"]))
    model.graph.node[-1].attribute.append(onnx.AttributeProto.FromString(attribute))
    assert model.graph.node[-1].attribute[0].t.external_data[0].value == "../secret"
    raw = model_with(None).SerializeToString()
    node = b"\x2a" + bytes([len(attribute)]) + attribute  # NodeProto 5
    graph = b"\x0a" + bytes([len(node)]) + node  # GraphProto 1
    make_family(tmp_path / "family", raw + b"\x3a" + bytes([len(graph)]) + graph)  # ModelProto 7, once more
    assert "'../secret'" in refused(tmp_path / "family", capsys)


def test_graphs_within_graphs_without_end_are_refused(tmp_path, capsys):
    inner = model_with(None).graph
    for _ in range(20):  # protobuf itself goes a hundred messages deep, four of which are one graph
        node = helper.make_node("If", ["images"], ["c"], then_branch=inner)
        inner = helper.make_graph([node], "g", model_with(None).graph.input, model_with(None).graph.output)
    model = helper.make_model(inner, opset_imports=[helper.make_opsetid("", 17)])
    make_family(tmp_path / "family", model)
    assert "nested too deep" in refused(tmp_path / "family", capsys)


@pytest.mark.parametrize("name", ["im\0ages", "images:1x1,evil", "a b", "", "\x1b[31m", "x" * 300])
def test_an_input_whose_name_trtexec_would_read_as_something_else_is_refused(name, tmp_path, capsys):
    model = model_with(None)
    model.graph.input[0].name = name
    make_family(tmp_path / "family", model)
    assert "its input is called" in refused(tmp_path / "family", capsys)


def doubled(manifest: dict) -> None:
    manifest["variants"].append(dict(manifest["variants"][0]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["variants"].clear(), "no variant is called 'dense'"),
        (lambda m: m.update(variants={}), "no variant is called 'dense'"),
        (lambda m: m.update(dense="nobody"), "no variant is called 'nobody'"),
        (lambda m: m.update(dense=["dense"]), "which should be the dense one"),
        (doubled, "two variants have the same name"),
        (lambda m: m["target"].update(batch="1 --x"), "batch is not a whole number"),
        (lambda m: m["target"].update(batch=True), "batch is not a whole number"),
        (lambda m: m["target"].update(batch=0), "batch is not a whole number"),
        (lambda m: m["target"].update(batch=10**400), "a number of 401 digits"),
        (lambda m: m["target"].update(batch=1.5), "batch is not a whole number"),
        (lambda m: m["target"].update(threads=None), "threads is not a whole number"),
        (lambda m: m["target"].update(precision="fp8 --x"), "precision is none of"),
        (lambda m: m["variants"][0].update(precision=["fp16"]), "precision is none of"),
        (lambda m: m["input"].update(batch="4"), "batch is not a whole number"),
        (lambda m: m["variants"][0].update(name="de\0nse"), "name is no text"),
        (lambda m: m["variants"][0].update(name="../x"), "cannot name a file"),
        (lambda m: m["variants"][0].update(name="x/../../y"), "cannot name a file"),
        (lambda m: m["variants"][0].update(name=".x"), "cannot name a file"),
        (lambda m: m["variants"][0].update(name="dense\n"), "cannot name a file"),
        (lambda m: m["variants"][0].update(name="d*"), "cannot name a file"),
        (lambda m: m["variants"][0].update(name="x" * 1000), "cannot name a file"),
        (lambda m: m["variants"][0].update(name=7), "name is no text"),
        (lambda m: m["variants"][0].update(file="de\0nse.onnx"), "file is no text"),
        (lambda m: m["variants"][0].update(file="../dense.onnx"), "leaves the folder"),
        (lambda m: m["variants"][0].update(file="/etc/passwd"), "leaves the folder"),
        (lambda m: m["variants"][0].update(file=None), "file is no text"),
        (lambda m: m["variants"][0].update(sha256=7), "sha256 is no text"),
        (lambda m: m["variants"][0].update(weights=7), "not the manifest of a family"),
        (lambda m: m["variants"].insert(0, "dense"), "not the manifest of a family"),
        (lambda m: m.update(model="a\0b"), "model is no text"),
        (lambda m: m.update(target=None), "not the manifest of a family"),
        (lambda m: m.update(format_version="\x1b[31m"), "of format \\x1b[31m"),
    ],
)
def test_a_manifest_that_no_export_writes_gets_one_line(change, says, tmp_path, capsys):
    manifest = make_family(tmp_path / "family", model_with(None))
    assert agent.read_family(tmp_path / "family").batch == 1
    change(manifest)
    write(tmp_path / "family", manifest)
    assert says in refused(tmp_path / "family", capsys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 10**5, "nested too deep"),
        ('{"format_version": 1, "x": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested too deep"),
        ("[]", "not the manifest of a family"),
        ("7", "not the manifest of a family"),
        ('{"format_version": 1, "format_version": 1}', "a key is given twice"),
        ('{"format_version": NaN}', "NaN is no number"),
        ("\ud800", "damaged"),
    ],
)
def test_text_that_is_no_manifest_gets_one_line(text, says, tmp_path, capsys):
    make_family(tmp_path / "family", model_with(None))
    (tmp_path / "family" / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert says in refused(tmp_path / "family", capsys)


def test_links_that_leave_or_go_round_and_files_that_block_are_refused(tmp_path, capsys):
    folder = tmp_path / "family"
    make_family(folder, model_with(None))
    (tmp_path / "outside.onnx").write_bytes((folder / "dense.onnx").read_bytes())
    (folder / "dense.onnx").unlink()
    (folder / "dense.onnx").symlink_to(tmp_path / "outside.onnx")
    assert "leaves the folder" in refused(folder, capsys)
    (folder / "dense.onnx").unlink()
    (folder / "dense.onnx").symlink_to("dense.onnx")
    assert "dense.onnx" in refused(folder, capsys)
    (folder / "dense.onnx").unlink()
    os.mkfifo(folder / "dense.onnx")
    assert "not a plain file" in refused(folder, capsys)
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert "not a plain file" in refused(folder, capsys)


def test_what_the_agent_did_not_write_is_not_written_over(tmp_path, capsys):
    folder = tmp_path / "family"
    make_family(folder, model_with(None))
    trtexec = tmp_path / "trtexec"
    trtexec.write_text("#!/bin/sh\necho '[TensorRT v100300]'\n")
    trtexec.chmod(0o755)
    before = (folder / "manifest.json").read_bytes()
    for out in ("manifest.json", "weights.bin", "dense.onnx"):
        code = agent.main([str(folder), "--out", str(folder / out), "--trtexec", str(trtexec)])
        assert (code, capsys.readouterr().err.splitlines()[-1]) == (
            2,
            f"error: {folder / out}: exists, and no agent wrote it. Choose another --out",
        )
    assert (folder / "manifest.json").read_bytes() == before


def test_control_characters_and_what_a_terminal_cannot_show_are_written_out(tmp_path):
    make_family(tmp_path / "family", model_with(None))
    manifest = json.loads((tmp_path / "family" / "manifest.json").read_text())
    manifest["dense"] = "\x1b]0;owned\x07\r\nerror: é\u202e"
    write(tmp_path / "family", manifest)
    done = subprocess.run(
        [sys.executable, agent.__file__, str(tmp_path / "family")],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"\\x1b]0;owned\\x07\\r\\nerror: \\xe9\\u202e" in done.stderr
    assert b"\x1b" not in done.stderr
