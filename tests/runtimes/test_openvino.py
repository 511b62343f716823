"""OpenVINO, for real: equal to ONNX Runtime in every family, int8 that is int8, threads as asked for, refusals."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from helpers.graphs import close, exact_and, run
from helpers.images import noise_arrays
from helpers.models import FAMILIES, SOME_MODELS, as_model, deep, make_model, small
from helpers.plans import plan_without, uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.checks.gates import agreement
from snapvit_export.errors import MissingDependency, SnapvitError
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes.openvino import OpenVinoSession, read_model, version
from snapvit_export.runtimes.openvino_nncf import quantise
from snapvit_export.storage.atomic import sha256

openvino = pytest.importorskip("openvino", reason="needs openvino: pip install 'snapvit-export[openvino]'")
INT8 = ("i8", "u8")


@pytest.fixture
def nncf():
    """int8 is made by it, and it is imported when it is needed."""
    if not _has_nncf():
        pytest.skip("needs nncf: pip install 'snapvit-export[openvino]'")


def _has_nncf() -> bool:
    from importlib.util import find_spec

    return find_spec("nncf") is not None


def emitter_of(model, folder: Path, **settings) -> GraphWriter:
    return GraphWriter(blueprint(model, random_ranking(model.anatomy, seed=1)), folder, **settings)


def in_openvino(path: Path, images: np.ndarray, **settings) -> np.ndarray:
    with OpenVinoSession(path, 1, **settings) as session:
        return session.run(images)


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_every_family_gives_what_onnx_runtime_gives(name, tmp_path):  # narrow ones crash it with its own settings
    module, _ = small(name)
    model = as_model(module, name, {})
    emitter, images = emitter_of(model, tmp_path), noise_arrays(model.anatomy, 2)
    for plan in (Plan.dense(model.anatomy), uneven_plan(model.anatomy)):
        path = emitter.write("x", plan).graph
        assert close(in_openvino(path, images), run(path, images)), plan


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize(("attention", "mlps"), [({0}, set()), ({1}, {1, 2}), ({0, 1}, set()), ({0, 1, 2}, set())])
def test_sub_layers_that_are_gone(name, attention, mlps, tmp_path):
    model = deep(name)
    if model.anatomy.reads_token and len(attention) == len(model.anatomy.blocks):
        with pytest.raises(SnapvitError, match="the class token would never see the image"):
            emitter_of(model, tmp_path).write("x", plan_without(model.anatomy, attention, mlps))
        return
    path = emitter_of(model, tmp_path).write("x", plan_without(model.anatomy, attention, mlps)).graph
    images = noise_arrays(model.anatomy, 2)
    assert close(in_openvino(path, images), run(path, images))


def test_the_flavour_for_onnx_runtime_runs_or_is_refused_with_what_to_do(tmp_path):
    model = make_model()
    path = emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy), format=GraphFormat("ort")).graph
    images = noise_arrays(model.anatomy, 2)
    try:
        found = in_openvino(path, images)
    except SnapvitError as error:  # OpenVINO 2026.0 and older
        assert "does not support" in str(error)
        assert "operations: Attention. Export it with --flavour portable" in str(error)
    else:
        assert close(found, run(path, images))


def test_batches_of_any_size_and_of_one(tmp_path):
    model = make_model()
    emitter, images, plan = emitter_of(model, tmp_path), noise_arrays(model.anatomy, 5), Plan.dense(model.anatomy)
    path = emitter.write("any", plan).graph
    wanted = run(path, images)
    for batch in (1, 2, 5, 8):
        assert close(in_openvino(path, images, batch=batch), wanted), batch
    fixed = emitter.write("fixed", plan, format=GraphFormat(batch=2)).graph
    assert close(in_openvino(fixed, images, batch=3), wanted)  # a graph knows best
    assert close(in_openvino(fixed, images[:, :, ::-1].copy()[:, :, ::-1]), wanted)  # memory in any order


def test_bytes_and_half_precision_and_openvinos_own_files(tmp_path):
    model = make_model()
    for name in ("bytes", "plain"):
        (tmp_path / name).mkdir()
    plan, random = Plan.dense(model.anatomy), np.random.default_rng(0)
    pixels = random.integers(0, 256, (2, *model.anatomy.image, 3), np.uint8)
    of_bytes = emitter_of(model, tmp_path / "bytes", takes_bytes=True).write("x", plan).graph
    assert close(in_openvino(of_bytes, pixels), run(of_bytes, pixels))
    images = noise_arrays(model.anatomy, 2)
    _, half, _ = exact_and("fp16", emitter_of(model, tmp_path).blueprint, plan, tmp_path, images, "portable")
    with OpenVinoSession(half.graph, 1) as session:
        assert agreement(run(half.graph, images), session.run(images)).cosine > 0.9999
        assert set(session.products) == {"f32"}  # never bf16 or f16, whatever the machine has
    plain = emitter_of(model, tmp_path / "plain").write("x", plan).graph
    openvino.save_model(read_model(plain), tmp_path / "own.xml", compress_to_fp16=False)
    assert close(in_openvino(tmp_path / "own.xml", images), run(plain, images))


def busy_threads(work: Callable[[], object]) -> int:
    """How many threads of this process did some of the work."""
    before = _ticks()
    for _ in range(60):
        work()
    spent = [ticks - before.get(task, 0) for task, ticks in _ticks().items()]
    return sum(each > 0.02 * sum(spent) for each in spent)


def _ticks() -> dict[str, int]:
    """CPU time of each thread, in hundredths of a second."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = int(fields[11]) + int(fields[12])
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to see the threads of a process")
def test_no_more_threads_work_than_were_asked_for(tmp_path):
    model = make_model(dict(img_size=96, patch_size=8, embed_dim=192, depth=4, num_heads=3, num_classes=10))
    path, images = (
        emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy)).graph,
        noise_arrays(model.anatomy, 1),
    )
    for threads in range(1, min(2, len(os.sched_getaffinity(0))) + 1):
        with OpenVinoSession(path, threads) as session:
            busy = busy_threads(lambda session=session: session.run(images))
            assert 1 <= busy <= threads  # beside other work on the machine it is fewer
    with pytest.raises(SnapvitError, match=r"x.onnx: asked for 999 threads, OpenVINO takes \d+: .* Ask for no more"):
        OpenVinoSession(path, 999)


def one_node(operator: str, domain: str = "") -> bytes:
    value, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], domain=domain)], "g", [value], [result])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("strange", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


BROKEN = {
    "nonsense.onnx": (b"nonsense", "OpenVINO [0-9.]+ cannot read it: "),
    "empty.onnx": (b"", "OpenVINO finds no input in it. Export it again"),
    "strange.onnx": (
        one_node("Strange", "strange"),
        r"OpenVINO .* cannot read it: .*operations: strange.Strange. Export",
    ),
    "nonsense.xml": (b"nonsense", "OpenVINO [0-9.]+ cannot read it: "),
    "model.txt": (b"text", "OpenVINO opens .onnx and .xml files here"),
    "missing.onnx": (None, "no such file"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_files_that_cannot_be_opened_are_told_in_one_line(name, tmp_path, capfd):
    data, says = BROKEN[name]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SnapvitError, match=f"{name}: {says}") as error:
        OpenVinoSession(tmp_path / name, 1)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_weights_that_are_not_there_or_not_whole(tmp_path, capfd):
    model = make_model()
    path = emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy)).graph
    openvino.save_model(read_model(path), tmp_path / "own.xml", compress_to_fp16=False)
    for file, graph in (("weights.bin", "x.onnx"), ("own.bin", "own.xml")):
        (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:5000])
        for _ in range(2):
            with pytest.raises(SnapvitError, match=f"{graph}: OpenVINO .* must lie beside it as"):
                OpenVinoSession(tmp_path / graph, 1)
            (tmp_path / file).unlink(missing_ok=True)
    assert capfd.readouterr() == ("", "")


def test_images_that_do_not_suit_are_refused_not_converted(tmp_path):
    model = make_model()
    path, images = (
        emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy)).graph,
        noise_arrays(model.anatomy, 1),
    )
    with OpenVinoSession(path, 1) as session:
        with pytest.raises(SnapvitError, match="x.onnx: takes float32, not uint8"):
            session.run(images.astype(np.uint8))
        with pytest.raises(SnapvitError, match="x.onnx: OpenVINO cannot run it: .*incompatible"):
            session.run(images[:, :, :8])
        assert session.run(images).shape == (1, 5)
    with pytest.raises(SnapvitError, match="x.onnx: OpenVINO cannot run it"):
        session.run(images)  # it is closed


def test_int8_that_would_be_computed_in_float32_is_refused(tmp_path):
    model = make_model(dict(img_size=64, patch_size=16, embed_dim=96, depth=3, num_heads=3, num_classes=10))
    drawn = emitter_of(model, tmp_path).blueprint
    plan, images = Plan.dense(model.anatomy), noise_arrays(model.anatomy, 4)
    for flavour in ("portable", "ort"):
        _, written, _ = exact_and("int8-dynamic", drawn, plan, tmp_path, images, flavour)
        with pytest.raises(SnapvitError, match=r"only 0 of 18 int8 layers in int8.*--runtime openvino|--flavour port"):
            OpenVinoSession(written.graph, 1)


@pytest.mark.parametrize("package", ["openvino", "nncf"])
def test_a_missing_package_is_told_with_the_command_that_installs_it(package, monkeypatch, tmp_path):
    model = make_model()
    path, images = (
        emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy)).graph,
        noise_arrays(model.anatomy, 1),
    )
    monkeypatch.setitem(sys.modules, package, None)
    what = "running in OpenVINO" if package == "openvino" else "int8 for OpenVINO"
    with pytest.raises(MissingDependency, match=rf"{what} needs {package}, .*'snapvit-export\[openvino\]'"):
        quantise(path, tmp_path / "int8", [images])


def test_the_version_is_the_one_that_loads():
    assert openvino.__version__.startswith(version())
    assert version().replace(".", "").isdigit()


@pytest.mark.usefixtures("nncf")
@pytest.mark.parametrize("name", SOME_MODELS)
def test_int8_is_int8_and_close_to_float32(name, tmp_path, capfd):
    model = deep(name)
    drawn, images = emitter_of(model, tmp_path).blueprint, noise_arrays(model.anatomy, 8)
    plans = {"cut": uneven_plan(model.anatomy), "gone": plan_without(model.anatomy, {1}, {0})}
    for title, plan in plans.items():
        exact = GraphWriter(drawn, tmp_path).write(title, plan).graph
        graph, weights = quantise(exact, tmp_path / f"{title}-int8", [image[None] for image in images])
        assert (graph.name, weights.name) == (f"{title}-int8.xml", f"{title}-int8.bin")
        layers = sum(4 * bool(heads) for heads in plan.heads) + sum((2 + glu(model)) * bool(n) for n in plan.neurons)
        with OpenVinoSession(graph, 1) as session:
            found = agreement(run(exact, images), session.run(images))
            assert found.cosine > 0.98, (title, found)
            assert (
                layers - 2 <= sum(session.products[kind] for kind in INT8) <= layers
            )  # keys, values of the last block
    assert not list(tmp_path.glob(".*"))
    assert capfd.readouterr() == ("", "")


def glu(model) -> bool:
    return model.anatomy.blocks[0].mlp == "glu"


@pytest.mark.usefixtures("nncf")
def test_int8_of_bytes_and_of_fixed_batches_is_the_same_twice_and_says_what_it_is(tmp_path):
    model = make_model()
    pixels = np.random.default_rng(0).integers(0, 256, (5, *model.anatomy.image, 3), np.uint8)
    emitter = emitter_of(model, tmp_path, takes_bytes=True)
    exact = emitter.write("x", uneven_plan(model.anatomy), format=GraphFormat(batch=2)).graph
    single = [image[None] for image in pixels]
    graph, weights = quantise(exact, tmp_path / "int8", single)
    before = graph.read_bytes(), weights.read_bytes()
    assert quantise(exact, tmp_path / "int8", single, threads=1) == (graph, weights)
    assert (graph.read_bytes(), weights.read_bytes()) == before
    assert agreement(run(exact, pixels), in_openvino(graph, pixels)).cosine > 0.98
    told = read_model(graph).get_rt_info
    assert json.loads(told(["framework", "snapvit.weights"]).astype(str)) == {"int8.bin": sha256(weights)}
    assert told(["framework", "snapvit.precision"]).astype(str) == "int8-static"
    assert told(["framework", "snapvit.variant"]).astype(str) == "x"
    assert weights.stat().st_size < exact.with_name("weights.bin").stat().st_size


@pytest.mark.usefixtures("nncf")
def test_int8_is_made_without_torch_and_without_a_word_in_any_process(tmp_path):
    model = make_model()
    exact = emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy)).graph
    images = noise_arrays(model.anatomy, 4)
    here = quantise(exact, tmp_path / "int8", [image[None] for image in images])
    wanted = [path.read_bytes() for path in here]
    np.save(tmp_path / "images.npy", images)
    script = f"""
import sys
import numpy as np
from pathlib import Path
from snapvit_export.runtimes.openvino_nncf import quantise
folder = Path({str(tmp_path)!r})
quantise(folder / "x.onnx", folder / "int8", [image[None] for image in np.load(folder / "images.npy")])
assert "torch" not in sys.modules
import logging
assert logging.getLoggerClass() is logging.Logger
import torch
"""
    there = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (there.returncode, there.stdout, there.stderr) == (0, "", "")
    assert [path.read_bytes() for path in here] == wanted


@pytest.mark.usefixtures("nncf")
def test_int8_of_what_cannot_be_quantised(tmp_path):
    (tmp_path / "x.onnx").write_bytes(one_node("Neg"))
    images = [np.ones((1, 4), np.float32)]
    with pytest.raises(SnapvitError, match="x.onnx: has no linear layer of a block to quantise"):
        quantise(tmp_path / "x.onnx", tmp_path / "int8", images)
    with pytest.raises(SnapvitError, match="x.onnx: int8 for OpenVINO needs calibration images. Give some with --data"):
        quantise(tmp_path / "x.onnx", tmp_path / "int8", [])
    with pytest.raises(ValueError, match="x.bin may be the weights of .*x.onnx"):
        quantise(tmp_path / "x.onnx", tmp_path / "x", images)
    model = make_model()
    exact = emitter_of(model, tmp_path).write("y", Plan.dense(model.anatomy)).graph
    with pytest.raises(SnapvitError, match=r"y.onnx: NNCF [0-9.]+ cannot quantise it: "):
        quantise(exact, tmp_path / "int8", [np.ones((1, 3, 5, 5), np.float32)])
    assert not list(tmp_path.glob("int8*"))


@pytest.mark.usefixtures("nncf")
def test_int8_of_a_real_model_on_real_images(shared, tmp_path):
    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    parts = calibration_and_held_out(str(shared / "data" / "imagenet-sample"), 16, 0, 8)
    seen, new = (next(prepare(part, model.preprocessing).batches(16)) for part in parts)
    exact = emitter_of(model, tmp_path).write("x", Plan.dense(model.anatomy)).graph
    graph, _ = quantise(exact, tmp_path / "int8", [image[None] for image in seen])
    with OpenVinoSession(graph, 1) as session:
        found = agreement(run(exact, new), session.run(new))
        assert sum(session.products[kind] for kind in INT8) == 70
    assert found.cosine > 0.985, found
