"""The chosen variant as files that run alone: model.onnx, labels, run.py and README.txt."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from PIL import Image

import snapvit_export as sv
from helpers.families import make_family
from helpers.odd_pictures import flat_png, gradient, tiff, turned
from snapvit_export.calibration.decode import UnreadableImage, open_image
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family import shipped
from snapvit_export.family.folder import read_family
from snapvit_export.family.loaded import load_family
from snapvit_export.graph.read import external_files, read_graph
from snapvit_export.runtimes.ort import OrtSession

pytestmark = pytest.mark.usefixtures("short_timings")  # what is chosen does not matter here
# Without snapvit, torch and all else that a product does not have.
ALONE = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("snapvit_export", "torch", "timm", "onnx", "msgspec", "typer", "rich"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocked())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-I", "-c", ALONE, *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("shipped"), budget="99%", levers=("tokens", "width"))


@pytest.fixture
def picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 90, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_the_shipped_model_runs_without_any_other_file(family, tmp_path):
    manifest = read_family(family)
    (tmp_path / "model.onnx").write_bytes((family / "model.onnx").read_bytes())
    assert not external_files(read_graph(tmp_path / "model.onnx"))
    chosen = manifest.variant(manifest.choice.variant)
    images = np.random.default_rng(0).standard_normal((2, 3, *chosen.image_of(manifest.anatomy))).astype(np.float32)
    with OrtSession(tmp_path / "model.onnx", 1) as one, OrtSession(family / chosen.file, 1) as other:
        assert np.array_equal(one.run(images), other.run(images))


def test_bytes_to_ship_are_those_of_the_file_and_at_most_what_limits_compare(family):
    manifest = read_family(family)
    assert manifest.shipped.size_bytes == (family / "model.onnx").stat().st_size
    assert manifest.shipped.size_bytes <= manifest.variant(manifest.choice.variant).size_bytes


def test_run_py_gives_the_answers_of_the_library_without_snapvit_and_torch(family, picture):
    done = alone(family / "run.py", picture)
    assert done.returncode == 0, done.stderr
    best = load_family(family).chosen.predict(picture)
    assert done.stdout.splitlines() == [str(picture), *(f"  {100 * p:5.1f} %  {label}" for label, p in best)]


def test_run_py_says_in_one_line_what_is_wrong(family, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    flat_png(tmp_path / "strip.png", 1, 20_000)
    os.mkfifo(tmp_path / "pipe.png")
    bad = [((tmp_path / name,), "cannot be read") for name in ("text.jpg", "strip.png", "pipe.png")]
    for arguments, says in (((), "give images"), *bad):
        done = alone(family / "run.py", *arguments)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert says in line


KNOWN = dict(input_size=(3, 32, 32), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def run_py(family: Path, folder: Path, preprocessing: Preprocessing) -> dict[str, Any]:
    """Write a run.py with other steps; return what it defines."""
    manifest = read_family(family)
    variant = msgspec.structs.replace(manifest.variant(manifest.dense), image_size=preprocessing.input_size[1:])
    changed = msgspec.structs.replace(manifest, preprocessing=preprocessing)
    values = shipped._values(changed, variant, [family / "model.onnx"])
    (folder / "run.py").write_text(shipped.filled(shipped.program("run.py.in"), values))
    return runpy.run_path(str(folder / "run.py"))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
@pytest.mark.parametrize("size", [(37, 91), (200, 33), (16, 16), (1, 40), (900, 10)])
@pytest.mark.parametrize(
    "steps",
    [
        dict(crop_pct=0.9, interpolation="bicubic"),
        dict(crop_pct=1.0, interpolation="bilinear", crop_mode="squash"),
        dict(crop_pct=0.875, interpolation="lanczos", input_size=(3, 24, 40)),
        dict(crop_pct=0.91, margin="down"),  # 35 - 32 pixels: one on the left, two on the right
    ],
    ids=["centre", "squashed", "not square", "odd margin"],
)
def test_run_py_prepares_images_exactly_as_the_library(family, tmp_path, mode, size, steps):
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).convert(mode)
    preprocessing = Preprocessing(**{**KNOWN, **steps})
    prepare = run_py(family, tmp_path, preprocessing)["prepare"]
    assert np.array_equal(prepare(image)[None], preprocessing.normalise(preprocessing.pixels(image)[None]))


def odd_pictures(folder: Path) -> Iterator[Path]:
    """Pictures of every kind that decoding treats in its own way, and some that it refuses."""
    grey, rgb = gradient(), Image.fromarray(gradient()).convert("RGB")
    for orientation in range(1, 9):
        yield turned(folder / f"{orientation}.jpg", orientation, rgb)
    kinds = {"16.png": grey.astype(np.uint16) * 200, "16.tif": grey.astype(np.uint16) * 200}
    kinds |= {"16.pgm": grey.astype(np.uint16) * 200, "float.tif": grey.astype(np.float32)}
    kinds |= {"32.tif": grey.astype(np.int32)}
    for name, pixels in kinds.items():
        Image.fromarray(pixels).save(folder / name)
        yield folder / name
    for name, mode in (
        ("la.png", "LA"),
        ("rgba.png", "RGBA"),
        ("one.png", "1"),
        ("cmyk.tif", "CMYK"),
        ("lab.tif", "LAB"),
    ):
        rgb.convert(mode).save(folder / name)
        yield folder / name
    rgb.quantize(256).save(folder / "p.png", transparency=bytes(range(256)))
    yield folder / "p.png"
    yield tiff(folder / "signed.tif", grey.astype(np.int16), 16, sample_format=2)
    yield tiff(folder / "white.tif", grey.astype(np.uint16), 16, photometric=0)
    yield flat_png(folder / "strip.png", 1, 20_000)
    yield flat_png(folder / "long.png", 90, 1)
    (folder / "program.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    yield folder / "program.png"


def test_run_py_decodes_every_kind_of_file_as_the_library_or_refuses_it_too(family, tmp_path):
    preprocessing = Preprocessing(**KNOWN)
    defined = run_py(family, tmp_path, preprocessing)
    refused = set()
    for path in odd_pictures(tmp_path):
        try:
            wanted = preprocessing.normalise(preprocessing.pixels(open_image(path))[None])[0]
        except UnreadableImage:
            refused.add(path.name)
            with pytest.raises((ValueError, OSError)), defined["open_image"](path) as file:
                defined["prepare"](file)
            continue
        with defined["open_image"](path) as file:
            assert np.array_equal(defined["prepare"](file), wanted), path
    assert refused == {"float.tif", "32.tif", "signed.tif", "white.tif", "strip.png", "program.png"}


def test_run_py_uses_no_more_threads_than_there_are_cores(family, tmp_path):
    manifest = read_family(family)
    target = msgspec.structs.replace(manifest.target, threads=10**7)
    greedy = msgspec.structs.replace(manifest, target=target)
    values = shipped._values(greedy, manifest.variant(manifest.dense), [family / "model.onnx"])
    (tmp_path / "run.py").write_text(shipped.filled(shipped.program("run.py.in"), values))
    assert runpy.run_path(str(tmp_path / "run.py"))["THREADS"] == os.cpu_count()


def test_the_readme_has_what_a_program_must_know(family):
    manifest, text = read_family(family), (family / "README.txt").read_text()
    height, width = manifest.variant(manifest.choice.variant).image_of(manifest.anatomy)
    for part in (f"(N, 3, {height}, {width})", "float32 (N, 5)", str(manifest.preprocessing.mean), "model.onnx"):
        assert part in text
    assert manifest.shipped.sha256 in text
    assert text.isascii()


def test_names_from_a_strangers_manifest_cannot_put_code_into_run_py(family, tmp_path):
    manifest = read_family(family)
    hostile = msgspec.structs.replace(manifest, model='x"""\nprint("owned")\n"""', labels=("a\x1b[2Jb\nc",) * 5)
    for name in ("weights.bin", *(variant.file for variant in manifest.variants), *(w.file for w in manifest.weights)):
        (tmp_path / name).write_bytes((family / name).read_bytes())
    shipped.write_shipped(tmp_path, hostile)
    assert 'print("owned")' not in (tmp_path / "run.py").read_text()
    assert (tmp_path / "labels.txt").read_text() == "a?[2Jb c\n" * 5


def test_bytes_as_input_and_a_fixed_batch_run_too(tmp_path, picture):
    folder = make_family(tmp_path / "bytes", budget="99%", takes_bytes=True, static_batch=True, levers=("width",))
    done = alone(folder / "run.py", picture)
    assert done.returncode == 0, done.stderr
    (label, chance), *_ = load_family(folder).chosen.predict(picture)
    assert f"{100 * chance:5.1f} %  {label}" in done.stdout


def test_without_a_choice_nothing_is_shipped(tmp_path):
    folder = make_family(tmp_path / "none", sparsity=[0.3])
    assert read_family(folder).shipped is None
    assert not {"model.onnx", "run.py"} & {path.name for path in folder.iterdir()}
    with pytest.raises(SnapvitError, match="has no choice"):
        _ = load_family(folder).chosen


def test_a_new_choice_ships_another_model_and_a_damaged_one_is_refused(snapvit, device_folder):
    family = device_folder / "family"
    assert snapvit("choose", family, "--budget", "1000ms").code == 0
    assert read_family(family).shipped.size_bytes == (family / "model.onnx").stat().st_size
    before = (family / "model.onnx").read_bytes()
    assert len(before) > 100_000
    assert snapvit("choose", family, "--budget", "95%").code == 0
    after = onnx.load(family / "model.onnx")
    manifest = json.loads((family / "manifest.json").read_text())
    assert (len(after.SerializeToString()) == len(before)) == (manifest["choice"]["variant"] == "dense")
    (family / "model.onnx").write_bytes(before[:-1])
    refused = snapvit("report", family)
    assert (refused.code, "damaged" in refused.error_line) == (1, True)


def test_files_of_the_same_names_that_are_somebodys_own_are_not_written_over(snapvit, device_folder):
    family = device_folder / "family"
    (family / "README.txt").write_text("mine")
    refused = snapvit("choose", family, "--budget", "1000ms")
    assert (refused.code, "is there already and not ours" in refused.error_line) == (1, True)
    assert (family / "README.txt").read_text() == "mine"
    (family / "README.txt").unlink()
    assert snapvit("choose", family, "--budget", "1000ms").code == 0
    assert snapvit("choose", family, "--budget", "1000ms").code == 0  # what is ours is


def test_variants_are_found_by_name_and_take_files_images_and_arrays(family, picture):
    loaded = sv.load_family(family)
    assert loaded.dense.name == "dense"
    assert {variant.name for variant in loaded} == {variant.name for variant in loaded.manifest.variants}
    with Image.open(picture) as image:
        answers = [loaded.dense.predict(given, top=2) for given in (picture, str(picture), image, np.asarray(image))]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == 2
    assert answers[0][0].probability >= answers[0][1].probability
    assert loaded.dense.run(picture, picture).shape == (2, 5)
    with pytest.raises(UsageError, match="no variant is called 'x'"):
        loaded["x"]
    with pytest.raises(UsageError, match="is no image"):
        loaded.dense.predict(np.zeros((4, 4), np.float32))
    with pytest.raises(SnapvitError, match="cannot be read"):
        loaded.dense.predict("nowhere.png")
