"""The C++ program for an engine is run, against stubs of TensorRT and of the CUDA runtime: nothing of a GPU is shown.

What it compiles against is told by test_tensorrt_cpp.py; here it reads, prepares, copies, waits, prints and ends.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.cpp_stub import write_engine, write_headers
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.family.applications import cpp
from snapvit_export.family.applications.interface import Interface
from snapvit_export.family.manifest import Input

STEPS = Preprocessing(input_size=(3, 32, 32), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3), interpolation="bicubic")
NAMES = ("cat", "dog", "owl", "fox")
ABOUT = Interface(
    variant="s30",
    title="tiny, variant s30",
    source="images",
    result="logits",
    given=Input(),
    steps=STEPS,
    batch=2,
    outputs=len(NAMES),
    labels=NAMES,
    classes=len(NAMES),
    precision="fp16",
)


@dataclass
class Bench:
    """The program, an engine of the stub, and images; what it prints."""

    program: Path
    folder: Path

    @property
    def engine(self) -> Path:
        return write_engine(self.folder / "s30.engine", batch=2, outputs=len(NAMES), side=32)

    def image(self, seed: int) -> Path:
        pixels = np.random.default_rng(seed).integers(0, 256, (37, 45, 3), np.uint8)
        Image.fromarray(pixels).save(self.folder / f"{seed}.ppm")
        return self.folder / f"{seed}.ppm"

    def run(self, *words: object, fails: str = "") -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "STUB_FAILS": fails}
        call = [str(word) for word in (self.program, *words)]
        return subprocess.run(call, capture_output=True, text=True, check=False, env=environment)

    def refused(self, *words: object, fails: str = "") -> str:
        """The one line of an error, and that everything was given back."""
        done = self.run(*words, fails=fails)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        error, kept = [line for line in done.stderr.splitlines() if line != "launched"]
        assert kept == "kept: 0"
        return error


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the C++ program")
    folder = tmp_path_factory.mktemp("cpp")
    for name, text in cpp.files(ABOUT).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    headers = write_headers(folder / "stub")
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    source, made = folder / cpp.FOLDER / "main.cpp", folder / "classify"
    subprocess.run([compiler, *strict, "-isystem", headers, "-o", made, source], check=True)
    return made


@pytest.fixture
def bench(program, tmp_path) -> Bench:
    return Bench(program, tmp_path)


def answers_of_the_stub(path: Path) -> list[tuple[str, float]]:
    """The classes of an image and their chances, best first, by the library's own preprocessing."""
    with Image.open(path) as image:
        flat = STEPS.normalise(STEPS.pixels(image)[None])[0].ravel().astype(np.float64)
    logits = np.array([4 * flat[k :: len(NAMES)].mean() for k in range(len(NAMES))])
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return sorted(zip(NAMES, 100 * chances), key=lambda pair: -pair[1])


@pytest.mark.parametrize("words", [(), ("--graph",)])
def test_every_image_gets_its_own_answer_and_everything_is_given_back(bench, words):
    (bench.folder / "labels.txt").write_text("\n".join(NAMES) + "\n")
    images = [bench.image(seed) for seed in (1, 2, 3)]  # the second batch is filled up
    done = bench.run(bench.engine, *images, "--labels", bench.folder / "labels.txt", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["launched"] * (2 * len(words)) + ["kept: 0"]
    lines = done.stdout.splitlines()
    assert lines[:: 1 + len(NAMES)] == [str(path) for path in images]
    for n, path in enumerate(images):
        rows = [line.split(" %  ") for line in lines[n * (1 + len(NAMES)) + 1 :][: len(NAMES)]]
        wanted = answers_of_the_stub(path)
        assert [name for _, name in rows] == [name for name, _ in wanted]
        assert [float(chance) for chance, _ in rows] == pytest.approx([chance for _, chance in wanted], abs=0.06)


def test_without_names_classes_have_numbers(bench):
    done = bench.run(bench.engine, bench.image(1))
    assert sorted(line.partition("%  ")[2] for line in done.stdout.splitlines()[1:]) == [f"class {n}" for n in range(4)]


def test_what_is_no_engine_of_this_model_is_told_in_one_line(bench):
    image, folder = bench.image(1), bench.folder
    assert bench.refused(folder / "none", image) == f"error: {folder / 'none'}: cannot be opened"
    assert bench.refused(folder, image) == f"error: {folder}: is no file of an engine"
    (folder / "text").write_text("no engine")
    line = bench.refused(folder / "text", image)
    assert line == f"error: {folder / 'text'}: cannot be loaded: magicTag does not match. Build it on this device"
    for changed in (dict(outputs=5), dict(side=48), dict(takes_bytes=True)):
        other = write_engine(folder / "other", **{**dict(batch=2, outputs=4, side=32), **changed})
        assert bench.refused(other, image) == f"error: {other}: is the engine of another graph"
    other = write_engine(folder / "other", batch=3, outputs=4, side=32)
    assert bench.refused(other, image) == f"error: {other}: was not built for this batch"


def test_what_the_gpu_refuses_and_images_that_are_none_are_told_and_the_rest_is_given_back(bench):
    engine, image = bench.engine, bench.image(1)
    assert bench.refused(engine, image, fails="cudaMalloc") == "error: no memory on the GPU: out of memory"
    assert bench.refused(engine, image, fails="cudaMallocHost") == "error: no pinned memory: out of memory"
    assert bench.refused(engine, image, fails="cudaStreamSynchronize") == "error: running: out of memory"
    assert bench.refused(engine, image, fails="enqueueV3").startswith(f"error: {engine}: did not run: ")
    assert str(bench.folder / "none.ppm") in bench.refused(engine, bench.folder / "none.ppm")
    assert str(bench.folder / "none.txt") in bench.refused(engine, image, "--labels", bench.folder / "none.txt")
    done = bench.run(engine)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("use: ")
