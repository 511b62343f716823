"""The C++ program for an engine: its preprocessing is compiled and compared with Pillow and the library; it compiles.

Against which headers of TensorRT and CUDA the whole program compiles is told by docs/application.md; they are not ours
to commit. `SNAPVIT_TENSORRT_HEADERS` names folders of them, TensorRT's and CUDA's together, to try it again.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from helpers.tensorrt_families import make_tensorrt_family
from snapvit_export.calibration.decode import MOST_PROPORTION
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.family.applications.cpp import preprocess_header

KNOWN = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
# Since 13.0 Pillow passes along columns first where that is less work (its pull request 9549); each pass rounds.
ONE_ORDER = int(PIL.__version__.split(".")[0]) < 13
STRICT = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
HARNESS = r"""
#include <cstdio>
#include <iostream>
#include "preprocess.h"
// height width crop squash margin_down filter far_more mean*3 deviation*3, then pairs of files: image.ppm out
int main(int count, char** words) {
    snapvit::Steps steps{std::stoi(words[1]), std::stoi(words[2]), std::stod(words[3]), std::stoi(words[4]) != 0,
        std::stoi(words[5]) != 0, static_cast<snapvit::Filter>(std::stoi(words[6])),
        {std::stod(words[8]), std::stod(words[9]), std::stod(words[10])},
        {std::stod(words[11]), std::stod(words[12]), std::stod(words[13])}, std::stoi(words[7])};
    try {
        for (int i = 14; i + 1 < count; i += 2) {
            snapvit::Image const image = snapvit::placed(snapvit::read_ppm(words[i]), steps);
            std::vector<float> normal(image.rgb.size());
            snapvit::normalise(image, steps, normal.data());
            std::FILE* out = std::fopen(words[i + 1], "wb");
            std::fwrite(image.rgb.data(), 1, image.rgb.size(), out);
            std::fwrite(normal.data(), sizeof(float), normal.size(), out);
            std::fclose(out);
        }
    } catch (std::exception const& error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("needs g++ to compile the C++ program's preprocessing")
    return found


@pytest.fixture(scope="module")
def harness(compiler, tmp_path_factory) -> Path:
    """A program that prepares images by `preprocess.h` alone."""
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "preprocess.h").write_text(preprocess_header())
    (folder / "harness.cpp").write_text(HARNESS)
    subprocess.run([compiler, "-O1", *STRICT, "-o", folder / "harness", folder / "harness.cpp"], check=True)
    return folder / "harness"


def prepared(harness: Path, steps: Preprocessing, paths: list[Path]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The bytes and the floats that the C++ code makes of images."""
    height, width = steps.input_size[1:]
    words = [height, width, repr(steps.crop_pct), int(steps.crop_mode == "squash"), int(steps.margin == "down")]
    words += [FILTERS.index(steps.interpolation), 16, *map(repr, steps.mean), *map(repr, steps.std)]
    outs = [path.with_suffix(".out") for path in paths]
    pairs = [str(word) for pair in zip(paths, outs) for word in pair]
    subprocess.run([str(harness), *map(str, words), *pairs], check=True)
    count = height * width * 3
    found = []
    for out in outs:
        data = out.read_bytes()
        pixels = np.frombuffer(data[:count], np.uint8).reshape(height, width, 3)
        found.append((pixels, np.frombuffer(data[count:], np.float32).reshape(3, height, width)))
    return found


def by_rows_first(steps: Preprocessing, image: Image.Image) -> np.ndarray:
    """The bytes of Pillow's two passes, made one by one: along rows first, as all of its versions before 13 do."""

    class InTwoPasses:
        def __init__(self) -> None:
            self.width, self.height, self.size = image.width, image.height, image.size

        def resize(self, size, kind, box=None):
            if kind == Image.Resampling.NEAREST:
                return image.resize(size, kind, box)
            left, top, right, bottom = box or (0, 0, *image.size)
            rows = image.resize((size[0], image.height), kind, (left, 0, right, image.height))
            return rows.resize(size, kind, (0, top, size[0], bottom))

    return np.asarray(steps._placed(InTwoPasses(), steps.interpolation))


def require_equal(
    harness: Path, steps: Preprocessing, images: dict[Path, Image.Image], nearly: int | None = None
) -> None:
    """Require the bytes of Pillow along rows first, and the floats of the library.

    `nearly`: levels of 255 that other orders of the passes may be away; None: noise, whose clipping depends on it.
    """
    for path, image in images.items():
        image.save(path)
    for (path, image), (pixels, floats) in zip(images.items(), prepared(harness, steps, list(images))):
        assert np.array_equal(pixels, by_rows_first(steps, image)), path.name
        if ONE_ORDER or nearly is not None:
            away = np.abs(pixels.astype(int) - steps.pixels(image)).max()
            assert away <= (0 if ONE_ORDER else nearly), path.name
        assert np.array_equal(floats, steps.normalise(pixels[None])[0]), path.name


SIZES = [(37, 91), (200, 33), (16, 16), (1, 40), (900, 10), (32, 35), (36, 36), (301, 517), (640, 480)]


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize(
    "steps",
    [
        dict(crop_pct=0.9, input_size=(3, 32, 32)),
        dict(crop_pct=1.0, crop_mode="squash", input_size=(3, 32, 32)),
        dict(crop_pct=0.875, input_size=(3, 24, 40)),
        dict(crop_pct=0.91, margin="down", input_size=(3, 32, 32)),
    ],
    ids=["centre", "squashed", "not square", "odd margin"],
)
def test_images_are_prepared_as_by_pillow_to_the_last_bit(harness, tmp_path, interpolation, steps):
    rng = np.random.default_rng(0)
    noise = {tmp_path / f"{w}x{h}.ppm": Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8)) for w, h in SIZES}
    require_equal(harness, Preprocessing(**KNOWN, interpolation=interpolation, **steps), noise)


def test_smooth_and_hard_edged_pictures_too(harness, tmp_path):
    across = np.linspace(0, 255, 333)[None, :, None] * np.ones((251, 1, 3))
    stripes = np.tile((np.arange(333)[None, :, None] % 2 * 255), (251, 1, 3))
    images = {
        tmp_path / f"{name}.ppm": Image.fromarray(pixels.astype(np.uint8))
        for name, pixels in (
            ("smooth", across),
            ("stripes", stripes),
            ("black", across * 0),
            ("white", across * 0 + 255),
        )
    }
    for size, crop in ((224, 0.9), (384, 1.0)):  # smaller, and larger than the picture
        require_equal(harness, Preprocessing(**KNOWN, crop_pct=crop, input_size=(3, size, size)), images, nearly=0)


def test_photographs_too(harness, tmp_path, shared):
    photographs = sorted((shared / "data" / "imagenet-sample").glob("*.jpg"))[::200][:5]
    images = {tmp_path / f"{path.stem}.ppm": Image.open(path).convert("RGB") for path in photographs}
    assert images
    for interpolation, crop in (("bicubic", 0.9), ("bilinear", 0.875)):
        steps = Preprocessing(**KNOWN, crop_pct=crop, interpolation=interpolation, input_size=(3, 224, 224))
        require_equal(harness, steps, images, nearly=1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"P5 2 2 255\n" + bytes(4), "not a binary PPM"),
        (b"P6 x", "not a binary PPM"),
        (b"P6 2 2 65535\n" + bytes(24), "not of 8 bits"),
        (b"P6 2 2 255\n" + bytes(11), "not whole"),
        (b"P6 0 2 255\n", "too many pixels, or none"),
        (b"P6 -3 -4 255\n" + bytes(36), "too many pixels, or none"),
        (b"P6 1 %d 255\n" % (MOST_PROPORTION + 1) + bytes(3 * MOST_PROPORTION + 3), "a thread of them"),
        (b"P6 99999 99999 255\n", "too many pixels"),
        (None, "cannot be opened"),
    ],
)
def test_files_that_are_no_images_are_refused(harness, tmp_path, data, says):
    if data is not None:
        (tmp_path / "x.ppm").write_bytes(data)
    words = ["32", "32", "0.9", "0", "0", "4", "16", *["0.5"] * 6, str(tmp_path / "x.ppm"), str(tmp_path / "out")]
    done = subprocess.run([str(harness), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert says in done.stderr


def test_comments_in_a_ppm_are_skipped(harness, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    (tmp_path / "x.ppm").write_bytes(b"P6\n# a camera\n50 40\n# more\n255\n" + pixels.tobytes())
    steps = Preprocessing(**KNOWN, input_size=(3, 32, 32))
    ((found, _),) = prepared(harness, steps, [tmp_path / "x.ppm"])
    assert np.array_equal(found, steps.pixels(Image.fromarray(pixels)))


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> list[Path]:
    """The program of a model that takes floats, and of one that takes bytes in batches."""
    plain = make_tensorrt_family(tmp_path_factory.mktemp("floats"))
    of_bytes = make_tensorrt_family(tmp_path_factory.mktemp("bytes"), batch=4, takes_bytes=True)
    return [family / "tensorrt-cpp" for family in (plain, of_bytes)]


def test_the_header_of_a_model_compiles_and_has_its_values(compiler, programs, tmp_path):
    checks = """
    #include "model.h"
    static_assert(model::kBatch == 4 && model::kOutputs == 5 && model::kTakesBytes && model::kHasClasses);
    static_assert(model::kSteps.height == 32 && model::kSteps.filter == snapvit::Filter::bicubic);
    """
    (tmp_path / "check.cpp").write_text(checks)
    arguments = [compiler, "-fsyntax-only", *STRICT, "-I", programs[1], tmp_path / "check.cpp"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_program_compiles_against_the_headers_that_are_there(compiler, programs):
    folders = [part for part in os.environ.get("SNAPVIT_TENSORRT_HEADERS", "").split(os.pathsep) if part]
    if not folders:
        pytest.skip("SNAPVIT_TENSORRT_HEADERS names no folders of TensorRT's and CUDA's headers")
    included = [word for folder in folders for word in ("-isystem", folder)]
    for program in programs:
        arguments = [compiler, "-fsyntax-only", *STRICT, *included, program / "main.cpp"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_filter_of_the_library_is_one_of_the_header():
    kinds = Preprocessing.__annotations__["interpolation"]
    assert all(name in kinds for name in FILTERS)
    assert f"enum class Filter {{ {', '.join(FILTERS)} }};" in preprocess_header()
    assert len(FILTERS) == kinds.count(",") + 1
