"""What lies beside a model for TensorRT: whose files are ours, Triton's and DeepStream's settings, the README.

Settings are checked against what the programs that read them document; neither Triton nor DeepStream was run.
"""

import configparser
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from google.protobuf import text_format

from helpers.tensorrt_families import for_tensorrt, make_tensorrt_family
from helpers.triton_schema import parse_config
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.family.applications import deepstream, triton
from snapvit_export.family.applications.interface import Interface
from snapvit_export.family.folder import own_files, read_family, write_manifest
from snapvit_export.family.manifest import Input
from snapvit_export.family.shipped import check_place, write_shipped

pytestmark = pytest.mark.usefixtures("short_timings")  # what is chosen does not matter here
NAMES = {"run_engine.py", "tensorrt-cpp", "triton", "deepstream"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_tensorrt_family(tmp_path_factory.mktemp("applications"))


@pytest.fixture
def family(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "family")


def interface(**changes: object) -> Interface:
    """An interface of a classifier of images of 224 pixels, some of it changed."""
    steps = Preprocessing(input_size=(3, 224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    values = dict(
        variant="s30+t70",
        title="deit, variant s30+t70",
        source="images",
        result="logits",
        given=Input(),
        steps=steps,
        batch=1,
        outputs=3,
        labels=("cat", "dog; or wolf", "owl"),
        classes=3,
        precision="fp16",
    )
    return Interface(**{**values, **changes})


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_choice_for_tensorrt_has_all_of_them_and_one_for_a_cpu_none(family):
    manifest = read_family(family)
    assert set(manifest.shipped.applications) == NAMES
    variant = manifest.choice.variant
    wanted = {f"tensorrt-cpp/{name}" for name in ("CMakeLists.txt", "main.cpp", "model.h", "preprocess.h")}
    wanted |= {f"triton/{variant}/config.pbtxt", "deepstream/config_infer_primary.txt", "deepstream/labels.txt"}
    wanted |= {"deepstream/model_deepstream.onnx", "run_engine.py"}
    wanted |= {f"triton/{variant}/labels.txt"} if manifest.labels else set()
    assert {name for name in files_in(family) if name.split("/")[0] in NAMES} == wanted
    here = msgspec.structs.replace(manifest, target=msgspec.structs.replace(manifest.target, runtime="onnxruntime"))
    assert write_shipped(family, here).shipped.applications == ()
    assert not NAMES & {path.name for path in family.iterdir()}


def test_a_choice_by_the_profile_of_a_board_has_them(snapvit, family, tmp_path):
    manifest = read_family(family)
    on_cpu = msgspec.structs.replace(manifest.target, runtime="onnxruntime")
    write_manifest(family, write_shipped(family, msgspec.structs.replace(manifest, target=on_cpu)))
    board = {"name": "Orin", "software": {}, "power_mode": "MAXN", "clocks_mhz": {}, "temperatures_c": {}}
    target = json.loads(msgspec.json.encode(manifest.target))
    target["device"]["accelerator"] = {**board, "memory_bytes": 1}
    profiles = {v.name: json.loads(msgspec.json.encode(v.profile)) for v in manifest.variants}
    profile = {"format_version": 1, "model": manifest.model, "target": target, "profiles": profiles}
    (tmp_path / "orin.json").write_text(json.dumps(profile))
    (family / "triton").mkdir()
    (family / "triton" / "mine").write_text("mine")
    choose = ("choose", family, "--budget", "1000ms", "--profile", tmp_path / "orin.json")
    before = (family / "manifest.json").read_bytes()
    assert "triton: is there already and not ours. Move it away" in snapvit(*choose).error_line
    assert (family / "manifest.json").read_bytes() == before
    shutil.rmtree(family / "triton")
    outcome = snapvit(*choose)
    assert outcome.code == 0, outcome.err
    assert set(read_family(family).shipped.applications) == NAMES
    assert "run_engine.py" in outcome.out


def test_they_belong_to_the_family_and_a_new_choice_replaces_them(family):
    assert set(own_files(family)) >= NAMES
    (family / "deepstream" / "model_deepstream.engine").write_text("of the model before")
    assert set(own_files(family)) >= NAMES
    manifest = read_family(family)
    other = next(v.name for v in manifest.variants if v.name != manifest.choice.variant)
    choice = msgspec.structs.replace(manifest.choice, variant=other, measurements=manifest.choice.measurements)
    write_manifest(family, write_shipped(family, msgspec.structs.replace(manifest, choice=choice)))
    assert [path.name for path in (family / "triton").iterdir()] == [other]
    assert not (family / "deepstream" / "model_deepstream.engine").exists()
    assert f'NAME = "{other}"' in (family / "run_engine.py").read_text()
    read_family(family)


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (lambda f: (f / "tensorrt-cpp" / "notes.txt").write_text("mine"), "tensorrt-cpp/notes.txt"),
        (lambda f: (f / "tensorrt-cpp" / "build").mkdir(), "tensorrt-cpp/build"),
        (lambda f: (f / "triton" / "own").write_text("mine"), "triton/own"),
        (lambda f: (next((f / "triton").iterdir()) / "1").mkdir(), "triton/"),
        (lambda f: (f / "deepstream" / "app.txt").write_text("mine"), "deepstream/app.txt"),
        (lambda f: (f / "run_engine.py").unlink() or (f / "run_engine.py").symlink_to("/dev/null"), "run_engine.py"),
        (lambda f: shutil.rmtree(f / "deepstream") or (f / "deepstream").write_text("mine"), "deepstream"),
    ],
)
def test_what_somebody_put_there_is_kept_and_a_new_choice_refused(family, put, name):
    put(family)
    before = files_in(family)
    assert name.split("/")[0] not in own_files(family)
    with pytest.raises(SnapvitError, match=f"{name}.*: is there already and not ours"):
        check_place(family, read_family(family))
    with pytest.raises(SnapvitError, match="not ours"):
        write_shipped(family, read_family(family))
    assert files_in(family) == before


def test_a_family_of_an_older_version_does_not_own_what_its_user_called_so(family):
    manifest = read_family(family)
    shipped = msgspec.structs.replace(manifest.shipped, applications=())  # as an older version wrote it
    older = msgspec.structs.replace(manifest, shipped=shipped)
    write_manifest(family, older)
    assert not NAMES & set(own_files(family))
    with pytest.raises(SnapvitError, match="run_engine.py: is there already and not ours"):
        check_place(family, older)
    on_cpu = msgspec.structs.replace(older, target=msgspec.structs.replace(older.target, runtime="onnxruntime"))
    check_place(family, on_cpu)  # nothing of these names will be written
    with pytest.raises(SnapvitError, match="not ours"):
        check_place(family, on_cpu, "tensorrt")


def test_a_manifest_cannot_name_other_files_as_ours(family):
    manifest = json.loads((family / "manifest.json").read_text())
    manifest["shipped"]["applications"] = ["../victim"]
    (family / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FileFormatError, match="applications"):
        read_family(family)


def test_names_from_a_strangers_graph_cannot_become_code(family):
    import onnx

    manifest = read_family(family)
    graph = onnx.load(family / "model.onnx")
    for node in graph.graph.node:
        for n, name in enumerate(node.input):
            if name == "images":
                node.input[n] = 'x"; system("rm")'
    graph.graph.input[0].name = 'x"; system("rm")'
    onnx.save(graph, family / "model.onnx")
    with pytest.raises(FileFormatError, match="name that is not ours"):
        Interface.of(manifest, manifest.variant(manifest.choice.variant), family / "model.onnx")


def test_the_readme_has_the_commands_with_their_names(family):
    text, manifest = (family / "README.txt").read_text(), read_family(family)
    name = manifest.choice.variant
    for part in (
        f"python3 run_engine.py --engine {name}.engine image.jpg",
        "--minShapes=images:1x3x32x32 --optShapes=images:1x3x32x32 --maxShapes=images:1x3x32x32",
        f"cp {name}.engine REPOSITORY/{name}/1/model.plan",
        "trtexec --onnx=deepstream/model_deepstream.onnx --saveEngine=deepstream/model_deepstream.engine",
        "Nothing below was ever run on a GPU",
    ):
        assert part in text
    assert text.isascii()


# ---- Triton


def test_the_schema_of_triton_refuses_what_is_not_in_it():
    for wrong in ("nmae: 'x'", "max_batch_size: 'x'", "input [{dims: [ 1.5 ]}]", "input [{data_type: FP32}]"):
        with pytest.raises(text_format.ParseError):
            parse_config(wrong)


@pytest.mark.parametrize(
    ("changes", "batch", "dims", "outputs", "kind"),
    [
        ({}, 1, [3, 224, 224], [3], "TYPE_FP32"),
        ({"batch": 8}, 0, [8, 3, 224, 224], [8, 3], "TYPE_FP32"),
        ({"given": Input(batch=1)}, 0, [1, 3, 224, 224], [1, 3], "TYPE_FP32"),
        ({"given": Input(type="uint8", layout="NHWC")}, 1, [224, 224, 3], [3], "TYPE_UINT8"),
    ],
    ids=["one image", "eight", "fixed", "bytes"],
)
def test_the_settings_of_triton_are_valid_and_of_the_engine(changes, batch, dims, outputs, kind):
    about = interface(**changes)
    found = parse_config(triton.config(about))
    (given,), (result,) = found.input, found.output
    assert (found.name, found.platform, found.max_batch_size) == ("s30_t70", "tensorrt_plan", batch)
    assert (given.name, list(given.dims), result.name, list(result.dims)) == ("images", dims, "logits", outputs)
    types = given.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    assert (types[given.data_type].name, types[result.data_type].name) == (kind, "TYPE_FP32")
    assert result.label_filename == "labels.txt"
    assert found.optimization.cuda.graphs
    files = triton.files(about)
    assert files["triton/s30_t70/labels.txt"] == "cat\ndog; or wolf\nowl\n"


def test_without_labels_triton_is_told_of_none():
    about = interface(labels=())
    assert list(triton.files(about)) == ["triton/s30_t70/config.pbtxt"]
    assert parse_config(triton.config(about)).output[0].label_filename == ""


# ---- DeepStream

# Keys of the group [property] that gstnvinfer_property_parser.h of DeepStream has, in 2021 as in 9.1 (July 2026,
# NVIDIA/DeepStream): those that a classifier of our kind could use, with the values that its parser takes.
KEYS = {
    "gpu-id": int,
    "gie-unique-id": int,
    "process-mode": (1, 2),
    "interval": int,
    "model-engine-file": str,
    "onnx-file": str,
    "labelfile-path": str,
    "batch-size": int,
    "network-mode": (0, 1, 2, 3),
    "network-type": (0, 1, 2, 3, 100),
    "network-input-order": (0, 1),
    "infer-dims": [int, int, int],
    "model-color-format": (0, 1, 2),
    "net-scale-factor": float,
    "offsets": [float, float, float],
    "maintain-aspect-ratio": (0, 1),
    "symmetric-padding": (0, 1),
    "scaling-filter": (0, 1, 2, 3, 4, 5, 6),
    "scaling-compute-hw": (0, 1, 2),
    "output-blob-names": str,
    "output-tensor-meta": (0, 1),
    "classifier-threshold": float,
    "classifier-async-mode": (0, 1),
    "classifier-type": str,
}


def parsed(text: str) -> dict[str, object]:
    """The group [property], every key known and every value of its kind."""
    reader = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",), inline_comment_prefixes=None)
    reader.optionxform = str
    reader.read_string(text)
    assert reader.sections() == ["property"]
    found: dict[str, object] = {}
    for key, value in reader["property"].items():
        kind = KEYS[key]
        assert "#" not in value, "GKeyFile has no comments behind a value"
        if isinstance(kind, tuple):
            found[key] = int(value)
            assert found[key] in kind
        elif isinstance(kind, list):
            found[key] = [each(part) for each, part in zip(kind, value.split(";"), strict=True)]
        else:
            found[key] = kind(value)
    return found


@pytest.mark.parametrize("interpolation", ["bicubic", "nearest", "lanczos", "box", "hamming", "bilinear"])
@pytest.mark.parametrize("squash", [False, True])
def test_the_settings_of_deepstream_are_keys_of_nvinfer(interpolation, squash):
    steps = msgspec.structs.replace(interface().steps, interpolation=interpolation)
    if squash:
        steps = msgspec.structs.replace(steps, crop_mode="squash", crop_pct=1.0)
    text = deepstream.config(interface(steps=steps, batch=2))
    found = parsed(text)
    assert (found["network-type"], found["batch-size"], found["infer-dims"]) == (1, 2, [3, 224, 224])
    assert found["net-scale-factor"] == 1 / 256
    assert found["output-blob-names"] == "probabilities"
    assert "onnx-file" not in found  # nvinfer would build an engine of another precision
    assert ("expect other answers" in text) == (not squash)


def test_deepstream_names_every_class_on_one_line():
    assert deepstream.files(interface())["deepstream/labels.txt"] == "cat;dog, or wolf;owl\n"
    assert deepstream.files(interface(labels=()))["deepstream/labels.txt"] == "class 0;class 1;class 2\n"


def test_of_an_embedding_deepstream_attaches_the_tensor():
    about = interface(labels=(), classes=0, outputs=48, result="features")
    found = parsed(deepstream.config(about))
    assert (found["network-type"], found["output-blob-names"], found["output-tensor-meta"]) == (100, "features", 1)
    assert list(deepstream.files(about)) == ["deepstream/config_infer_primary.txt"]


def test_a_new_family_is_read_back_by_the_same_settings(made):
    manifest = read_family(made)
    name = manifest.choice.variant
    assert parse_config((made / "triton" / name / "config.pbtxt").read_text()).name == name
    found = parsed((made / "deepstream" / "config_infer_primary.txt").read_text())
    assert found["model-engine-file"] == "model_deepstream.engine"
    for key in ("labelfile-path",):
        assert (made / "deepstream" / str(found[key])).is_file()
    assert for_tensorrt(manifest).target == manifest.target
    assert np.float16(found["net-scale-factor"]) * 256 == 1  # exact in every precision
