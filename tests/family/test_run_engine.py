"""`run_engine.py` against STUBS of libcuda and TensorRT: calls, their order and sizes, and that all is given back.

That the real ones take these calls is what their documentation says; tests/runtimes/test_tensorrt_contract.py looks for
the names of the Python API in the real bindings. Nothing here ran on a GPU.
"""

import ctypes
import json
import re
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from helpers.gpu_stub import StubCuda, stub_tensorrt, write_engine
from helpers.shared import ROOT
from helpers.tensorrt_families import make_tensorrt_family
from snapvit_export.family.folder import read_family
from snapvit_export.family.loaded import load_family

pytestmark = pytest.mark.usefixtures("short_timings")  # what is chosen does not matter here


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    return make_tensorrt_family(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def in_batches(tmp_path_factory) -> Path:
    """A family of bytes in batches of three."""
    folder = tmp_path_factory.mktemp("batches")
    return make_tensorrt_family(folder, batch=3, takes_bytes=True)


@pytest.fixture
def pictures(tmp_path) -> list[Path]:
    paths = [tmp_path / f"{n}.png" for n in range(4)]
    for n, path in enumerate(paths):
        pixels = np.random.default_rng(n).integers(0, 256, (50 + n, 90 - n, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


@dataclass
class Bench:
    """Runs the program in this process, with the stubs in the place of the driver and of TensorRT."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    cuda: StubCuda = field(default_factory=StubCuda)
    version: str | None = "10.3.0"
    has_driver: bool = True

    def run(self, family: Path, *words: object) -> tuple[int, str, str]:
        def load(name: str) -> StubCuda:
            assert name == "libcuda.so.1"
            if not self.has_driver:
                raise OSError(f"{name}: cannot open shared object file")
            return self.cuda

        with self.monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", load)
            patch.setattr(sys, "argv", ["run_engine.py", *map(str, words)])
            trt = None if self.version is None else stub_tensorrt(self.cuda, self.version)
            patch.setitem(sys.modules, "tensorrt", trt)
            patch.setitem(sys.modules, "tensorrt_rtx", None)
            code = 0
            try:
                runpy.run_path(str(family / "run_engine.py"), run_name="__main__")
            except SystemExit as stop:
                code = 1 if isinstance(stop.code, str) else int(stop.code or 0)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
        captured = self.capsys.readouterr()
        assert self.cuda.errors == []
        return code, captured.out, captured.err

    def refused(self, family: Path, *words: object) -> str:
        """The one line of a refusal, after which nothing of the GPU is kept."""
        code, _, err = self.run(family, *words)
        assert code == 1
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        assert self.cuda.live == {}
        return line


@pytest.fixture
def bench(monkeypatch, capsys) -> Bench:
    return Bench(monkeypatch, capsys)


def engine_of(family: Path, place: Path, **changes: object) -> Path:
    return write_engine(place / f"{read_family(family).choice.variant}.engine", family / "model.onnx", **changes)


def answers_of(family: Path, pictures: list[Path]) -> list[str]:
    chosen = load_family(family).chosen
    chosen.__dict__["session"] = load_on_cpu(family)
    rows = []
    for path in pictures:
        rows += [str(path), *(f"  {100 * p:5.1f} %  {label}" for label, p in chosen.predict(path))]
    return rows


def load_on_cpu(family: Path):
    from snapvit_export.runtimes.ort import OrtSession

    return OrtSession(family / "model.onnx", 1)


def test_it_gives_the_answers_of_the_library(bench, family, pictures, tmp_path):
    code, out, err = bench.run(family, "--engine", engine_of(family, tmp_path), *pictures)
    assert (code, err) == (0, "")
    assert out.splitlines() == answers_of(family, pictures)


def test_calls_are_in_order_and_everything_is_given_back(bench, family, pictures, tmp_path):
    bench.run(family, "--engine", engine_of(family, tmp_path), *pictures[:2])
    begin = "cuInit cuDeviceGetCount cuDeviceGet cuDevicePrimaryCtxRetain cuCtxSetCurrent cuStreamCreate"
    take = "cuMemHostAlloc cuMemHostAlloc cuMemAlloc_v2 cuMemAlloc_v2"
    run = "cuMemcpyHtoDAsync_v2 execute_async_v3 cuMemcpyDtoHAsync_v2 cuStreamSynchronize"
    end = "cuMemFree_v2 cuMemFree_v2 cuMemFreeHost cuMemFreeHost cuStreamDestroy_v2 cuDevicePrimaryCtxRelease_v2"
    assert " ".join(bench.cuda.calls) == f"{begin} {take} {run} {run} {end}"
    assert bench.cuda.live == {}
    assert bench.cuda.queue == []
    size = read_family(family).variant(read_family(family).choice.variant).image_of(read_family(family).anatomy)
    assert bench.cuda.sizes == {"gpu": [4 * 3 * size[0] * size[1], 4 * 5], "host": [4 * 3 * size[0] * size[1], 4 * 5]}


def test_bytes_in_batches_run_too_and_the_last_batch_is_filled_up(bench, in_batches, pictures, tmp_path):
    code, out, err = bench.run(in_batches, "--engine", engine_of(in_batches, tmp_path, batches=[3]), *pictures)
    assert (code, err) == (0, "")
    assert out.splitlines() == answers_of(in_batches, pictures)
    assert bench.cuda.calls.count("execute_async_v3") == 2
    side = read_family(in_batches).anatomy.image[0]
    assert bench.cuda.sizes["gpu"] == [3 * side * side * 3, 4 * 3 * 5]


def test_the_engine_is_found_where_the_agent_keeps_it(bench, family, pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine_of(family, tmp_path / "engines")
    assert bench.run(family, pictures[0])[0] == 0


def test_an_image_that_cannot_be_read_ends_it_with_one_line_and_nothing_is_kept(bench, family, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    code, out, err = bench.run(family, "--engine", engine_of(family, tmp_path), tmp_path / "text.jpg")
    assert (code, out) == (1, "")
    assert "text.jpg: cannot be read" in err
    assert bench.cuda.live == {}


def test_without_images_it_says_how_it_is_called(bench, family):
    code, _, err = bench.run(family)
    assert code == 2
    assert "give images, or --check" in err
    assert bench.cuda.calls == []


def test_without_a_driver_a_gpu_or_tensorrt_it_says_so(bench, family, pictures, tmp_path):
    engine = engine_of(family, tmp_path)
    bench.has_driver = False
    assert "no NVIDIA driver is installed here: libcuda.so.1" in bench.refused(family, "--engine", engine, pictures[0])
    bench.has_driver, bench.cuda = True, StubCuda(gpus=0)
    assert "finds no GPU" in bench.refused(family, "--engine", engine, pictures[0])
    bench.cuda, bench.version = StubCuda(), None
    assert "no TensorRT here. On a Jetson" in bench.refused(family, "--engine", engine, pictures[0])
    bench.version = "8.6.1"
    assert "TensorRT 8.6.1 is too old: 10.3" in bench.refused(family, "--engine", engine, pictures[0])
    bench.version = "11.1.0"
    assert bench.run(family, "--engine", engine, pictures[0])[0] == 0


@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemAlloc_v2", "cuMemHostAlloc"])
def test_what_the_gpu_refuses_is_told_and_the_rest_given_back(bench, family, pictures, tmp_path, call):
    bench.cuda = StubCuda(fails=call)
    line = bench.refused(family, "--engine", engine_of(family, tmp_path), pictures[0])
    assert f"the GPU refused {call}: out of memory" in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"images": None}, "is of another graph: it has logits, not images and logits"),
        ({"images": ["INPUT", "float16", [-1, 3, 32, 32]]}, "its images is float16"),
        (
            {"images": ["INPUT", "float32", [-1, 3, 99, 99]]},
            "its images is float32 (-1, 3, 99, 99), not float32 (1, 3,",
        ),
        ({"images": ["INPUT", "float32", [8, 3, 32, 32]]}, "its images is float32 (8, 3, 32, 32)"),
        ({"images": ["OUTPUT", "float32", [-1, 3, 32, 32]]}, "is of another graph"),
        ({"logits": ["OUTPUT", "float32", [-1, 1000]]}, "its logits is float32 (-1, 1000), not float32 (1, 5)"),
        ({"more": ["OUTPUT", "float32", [-1, 5]]}, "it has images, logits, more"),
    ],
)
def test_the_engine_of_another_graph_is_refused(bench, family, pictures, tmp_path, changes, says):
    engine = engine_of(family, tmp_path)
    described = json.loads(engine.read_text())
    tensors = {**described["tensors"], **changes}
    described["tensors"] = {name: what for name, what in tensors.items() if what is not None}
    engine.write_text(json.dumps(described))
    assert says in bench.refused(family, "--engine", engine, pictures[0])


def test_an_engine_that_does_not_load_names_the_reason_and_the_way_to_build_it(bench, family, pictures, tmp_path):
    (tmp_path / "x.engine").write_bytes(b"ftrt of something else")
    line = bench.refused(family, "--engine", tmp_path / "x.engine", pictures[0])
    assert "x.engine: TensorRT 10.3.0 cannot load it: stub: the engine plan is of another version." in line
    assert re.search(r"trtexec --onnx=model.onnx .* --stronglyTyped --noTF32 --minShapes=images:1x3x\d+x\d+ ", line)
    missing = bench.refused(family, "--engine", tmp_path / "none.engine", pictures[0])
    assert "none.engine: cannot be read: No such file or directory. Build it on this device: trtexec" in missing
    other = engine_of(family, tmp_path, batches=[8])
    assert "was not built for images of (1, 3, " in bench.refused(family, "--engine", other, pictures[0])


def with_reference(family: Path, place: Path, wrong: float = 0.0, undecided: tuple[int, ...] = ()) -> Path:
    """A copy of the program beside reference images and answers, as a family has them; `wrong`: added to the first."""
    (place / "run_engine.py").write_bytes((family / "run_engine.py").read_bytes())
    manifest = read_family(family)
    variant = manifest.variant(manifest.choice.variant)
    size, steps = variant.image_of(manifest.anatomy), manifest.preprocessing_of(variant)
    pixels = np.random.default_rng(0).integers(0, 256, (4, *size, 3), np.uint8)
    answers = load_on_cpu(family).run(steps.normalise(pixels)).astype("<f4")
    answers[0, 0] += wrong
    pixels.tofile(place / "reference.rgb")
    answers.tofile(place / f"{variant.name}.answers")
    reference = {
        "kind": "scores",
        "pixels": [{"file": "reference.rgb", "image_size": size}],
        "answers": {variant.name: {"file": f"{variant.name}.answers", "undecided": undecided}},
    }
    (place / "manifest.json").write_text(json.dumps({"reference": reference}))
    return place


def test_the_check_compares_with_the_reference_answers_of_the_family(bench, family, tmp_path):
    engine = engine_of(family, tmp_path)
    code, out, _ = bench.run(with_reference(family, tmp_path), "--engine", engine, "--check")
    assert code == 0
    assert out == "4 reference images: least cosine 1.000000, the same best class in 4\n"
    line = bench.refused(with_reference(family, tmp_path, wrong=30.0), "--engine", engine, "--check")
    assert "does not answer as its graph does" in line
    with_reference(family, tmp_path, wrong=30.0, undecided=(0, 1, 2, 3))  # rounding cannot change an answer so far
    assert "does not answer as its graph does" in bench.refused(tmp_path, "--engine", engine, "--check")
    (tmp_path / "manifest.json").write_text("{}")
    assert "no reference images and answers" in bench.refused(tmp_path, "--engine", engine, "--check")


def test_it_runs_with_the_pillow_of_jetpack_6_which_has_no_groups_of_constants(
    bench, family, pictures, tmp_path, monkeypatch
):
    class OlderImage:
        """PIL.Image as 9.0.1 has it: Image.BICUBIC, not Image.Resampling.BICUBIC."""

        def __getattr__(self, name: str) -> object:
            if name in ("Resampling", "Transpose"):
                raise AttributeError(name)
            return getattr(Image, name)

    monkeypatch.setattr(PIL, "Image", OlderImage())
    assert bench.run(family, "--engine", engine_of(family, tmp_path), pictures[0])[0] == 0


def test_it_needs_nothing_but_the_standard_library_numpy_and_pillow(family):
    text = (family / "run_engine.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - set(sys.stdlib_module_names) == {"numpy", "PIL"}
    assert "cuda-python" not in text.replace("no cuda-python", "")


def test_it_uses_only_names_that_the_real_bindings_of_tensorrt_have(family):
    names = runpy.run_path(str(ROOT / "tests" / "runtimes" / "tensorrt_bindings" / "names.py"))["NAMES"]
    text = (family / "run_engine.py").read_text()
    kinds = {"engine": "ICudaEngine", "context": "IExecutionContext", "runtime": "Runtime"}
    used = {f"{kinds[kind]}.{name}" for kind, name in re.findall(r"self\.(engine|context|runtime)\.(\w+)", text)}
    used |= set(re.findall(r"\btrt\.(\w+)\b", text)) - {"TensorIOMode"}
    used |= {f"TensorIOMode.{name}" for name in re.findall(r"\bmodes\.(\w+)", text)}
    assert len(used) > 12
    assert used - {"version"} <= set(names)


def test_images_are_prepared_by_the_same_text_as_in_run_py(family):
    texts = [(family / name).read_text() for name in ("run.py", "run_engine.py")]
    steps = [text[text.index("HERE = ") : text.index("def show(")] for text in texts]
    assert steps[0] == steps[1]
