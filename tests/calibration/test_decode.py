"""Decoding: every kind of picture gives the pixels that a viewer shows, or is refused by name."""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from helpers.odd_pictures import chunk, flat_png, gradient, tiff, turned
from snapvit_export.calibration import preprocessing as module
from snapvit_export.calibration.decode import MOST_PROPORTION, UnreadableImage, as_rgb, open_image
from snapvit_export.calibration.digits import load
from snapvit_export.calibration.folder import folder_source
from snapvit_export.calibration.images import prepare
from snapvit_export.calibration.masks import prepare_masks
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError
from snapvit_export.prune.models.load import load_model

SMALL = Preprocessing(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)


def grey_16(picture: np.ndarray) -> Image.Image:
    return Image.fromarray(picture.astype(np.uint16) * 257)


def mode_of(path: Path) -> str:
    with Image.open(path) as picture:
        return picture.mode


def test_digits_in_16_bits_are_predicted_as_those_in_8(tmp_path):
    images, labels = load("held-out")
    for name in ("8", "16"):
        (tmp_path / name).mkdir()
    for i, image in enumerate(images[:16]):
        grey = np.asarray(image.convert("L"))
        Image.fromarray(grey).save(tmp_path / "8" / f"{i:02}.png")
        grey_16(grey).save(tmp_path / "16" / f"{i:02}.png")
    assert mode_of(tmp_path / "16" / "00.png") in ("I;16", "I")
    model = load_model()
    few, many = (prepare(folder_source(tmp_path / name), model.preprocessing) for name in ("8", "16"))
    assert np.array_equal(few.pixels, many.pixels)
    import torch

    with torch.no_grad():
        guesses = [model.module(torch.from_numpy(next(part.batches(16)))).argmax(1).numpy() for part in (few, many)]
    assert np.array_equal(*guesses)
    assert (guesses[1] == labels[:16]).mean() > 0.9


@pytest.mark.parametrize(
    "mode", ["L", "RGB", "RGBA", "LA", "La", "RGBa", "PA", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX"]
)
def test_a_grey_picture_stays_the_same_in_every_mode(mode):
    picture = Image.fromarray(gradient())
    through = picture.convert("RGBA") if mode == "RGBa" else picture.convert("LA") if mode == "La" else picture
    if mode in ("YCbCr", "HSV", "LAB", "CMYK", "RGBX", "P"):
        through = picture.convert("RGB")
    if mode == "PA":
        through = picture.convert("P")
    given = through.quantize(256) if mode == "P" else through.convert(mode)
    assert given.mode == mode
    found = np.asarray(as_rgb(given)).astype(int)
    assert found.shape == (40, 50, 3)
    assert np.abs(found - gradient()[..., None]).max() <= (3 if mode in ("LAB", "PA", "P") else 1)


def test_black_and_white_of_one_bit():
    picture = Image.fromarray(gradient() > 128)
    assert picture.mode == "1"
    assert np.array_equal(np.asarray(as_rgb(picture))[..., 0], np.where(gradient() > 128, 255, 0))


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_of_grey_give_the_upper_byte_as_16_bits_of_colour_do(suffix, tmp_path):
    grey_16(gradient()).save(tmp_path / f"x.{suffix}")
    assert np.array_equal(np.asarray(open_image(tmp_path / f"x.{suffix}"))[..., 1], gradient())


def test_16_bits_with_the_larger_byte_first(tmp_path):
    tiff(tmp_path / "x.tif", gradient().astype(np.uint16) * 256 + 77, 16, order=">")
    assert mode_of(tmp_path / "x.tif") == "I;16B"
    assert np.array_equal(np.asarray(open_image(tmp_path / "x.tif"))[..., 0], gradient())


def test_transparency_leaves_the_colours_alone_and_warns_of_nothing(tmp_path):
    picture = Image.fromarray(gradient()).quantize(256)
    picture.save(tmp_path / "p.png", transparency=bytes(range(256)))
    shown = Image.open(tmp_path / "p.png").convert("RGBA")
    assert np.array_equal(np.asarray(open_image(tmp_path / "p.png")), np.asarray(shown)[..., :3])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: Image.fromarray(gradient().astype(np.float32)).save(path), "floating-point numbers"),
        (lambda path: Image.fromarray(gradient().astype(np.int32) * 99999).save(path), "numbers"),
        (lambda path: tiff(path, gradient().astype(np.int16), 16, sample_format=2), "signed numbers"),
        (lambda path: tiff(path, gradient().astype(np.int8), 8, sample_format=2), "signed numbers"),
        (
            lambda path: tiff(path, gradient().astype(np.uint16), 16, photometric=0),
            "grey of 12 bits, or with white as 0",
        ),
        (lambda path: tiff(path, np.zeros((40, 75), np.uint8), 12), "bits"),
    ],
    ids=["float", "int32", "int16", "int8", "white is 0", "12 bits"],
)
def test_what_has_no_defined_black_and_white_is_refused_by_name(make, says, tmp_path):
    make(tmp_path / "x.tif")
    if says == "bits":  # 50 pixels in 75 bytes
        data = (tmp_path / "x.tif").read_bytes()
        (tmp_path / "x.tif").write_bytes(data.replace((75).to_bytes(4, "little"), (50).to_bytes(4, "little")))
        assert mode_of(tmp_path / "x.tif") == "I;16"
    with pytest.raises(UnreadableImage, match=f"x.tif: cannot be read as an image .*{says}.* not defined"):
        open_image(tmp_path / "x.tif")


def test_arrays_of_other_types_are_refused_by_name():
    for picture in (Image.new("F", (9, 9)), Image.new("I", (9, 9))):
        with pytest.raises(UnreadableImage, match="numbers: what is black and white is not defined"):
            SMALL.pixels(picture)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_pictures_are_turned_once_as_their_exif_says(orientation, suffix, tmp_path):
    path = turned(tmp_path / f"x.{suffix}", orientation, Image.fromarray(gradient()).convert("RGB"))
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    assert np.array_equal(np.asarray(open_image(path)), wanted)
    assert np.array_equal(np.asarray(as_rgb(open_image(path))), wanted)
    assert np.array_equal(SMALL.pixels(Image.open(path)), SMALL.pixels(open_image(path)))
    if orientation == 6:
        assert wanted.shape == (50, 40, 3)


def test_a_damaged_exif_leaves_the_picture_as_it_is_stored(tmp_path):
    Image.fromarray(gradient()).save(tmp_path / "x.jpg", exif=b"Exif\0\0no such thing", quality=100)
    assert open_image(tmp_path / "x.jpg").size == (50, 40)


def test_a_picture_of_the_hub_is_decoded_alike(tmp_path):
    datasets = pytest.importorskip("datasets")
    from snapvit_export.calibration.hub import hf_source

    turned(tmp_path / "x.png", 6, grey_16(gradient()))
    rows = [{"bytes": (tmp_path / "x.png").read_bytes(), "path": None}]
    source = hf_source(
        datasets.Dataset.from_dict({"image": rows}, features=datasets.Features({"image": datasets.Image()})), "hf:one"
    )
    assert np.array_equal(np.asarray(source.open(0)), np.asarray(open_image(tmp_path / "x.png")))
    assert source.open(0).size == (40, 50)


@pytest.mark.parametrize(("own", "size"), [(1, (40, 50)), (6, (50, 40))])
def test_a_mask_lies_on_its_picture_as_that_is_shown(own, size, tmp_path):
    """A picture that is turned, and its mask: drawn over what is seen, or stored and turned in the same way."""
    levels = np.repeat(np.repeat(np.array([[10, 60], [110, 210]], np.uint8), 20, 0), 25, 1)  # (40, 50): four quarters
    turned(tmp_path / "x.jpg", 6, Image.fromarray(levels).convert("RGB"))
    seen = Image.fromarray(levels) if own == 6 else Image.fromarray(levels).transpose(Image.Transpose.ROTATE_270)
    assert seen.size == size
    turned(tmp_path / "x.png", own, seen)
    square = Preprocessing(input_size=(3, 8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    source = folder_source(tmp_path)
    (mask,), (pixels,) = prepare_masks(source, square), prepare(source, square).pixels
    corners = np.ix_([0, -1], [0, -1])
    assert np.abs(mask[corners].astype(int) - pixels[corners][..., 0]).max() < 8


def test_a_mask_of_the_stored_picture_is_refused(tmp_path):
    turned(tmp_path / "x.jpg", 6)
    Image.fromarray(gradient()).save(tmp_path / "x.png")
    with pytest.raises(SnapvitError, match="x.png: is 50x40, its image 40x50, turned as its EXIF says"):
        prepare_masks(folder_source(tmp_path), SMALL)


@pytest.mark.parametrize("size", [(1, 20_000), (60_000, 1), (MOST_PROPORTION + 1, 1)])
def test_pictures_of_absurd_sizes_are_refused_by_name(size, tmp_path):
    path = flat_png(tmp_path / "x.png", *size)
    with pytest.raises(UnreadableImage, match=f"x.png: cannot be read as an image .{size[0]} x {size[1]} pixels"):
        open_image(path)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [12_000, 20_000])
def test_pictures_of_too_many_pixels_are_refused_unseen(side, tmp_path):
    path = flat_png(tmp_path / "x.png", side, side)
    assert path.stat().st_size < 100_000
    with pytest.raises(UnreadableImage, match="x.png: cannot be read as an image .* pixels"):
        open_image(path)


def test_the_longest_strip_that_is_taken(tmp_path):
    assert prepare(folder_source(flat_png(tmp_path / "x.png", MOST_PROPORTION, 1).parent), SMALL).pixels.max() == 0


@pytest.mark.parametrize("crop_pct", [0.9, 0.01])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("size", [(1, 40), (13, 600), (900, 30), (100, 2000)])
def test_strips_are_cropped_before_they_are_resized_with_the_same_pixels(size, interpolation, crop_pct, monkeypatch):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
    steps = Preprocessing(
        input_size=(3, 24, 16), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=crop_pct, interpolation=interpolation
    )
    cropped = steps.pixels(picture)
    if crop_pct > 0.1:  # otherwise there is far too much to resize
        resized: list[tuple[int, int]] = []
        resize = Image.Image.resize
        monkeypatch.setattr(
            Image.Image, "resize", lambda self, to, *more: (resized.append(to), resize(self, to, *more))[1]
        )
        assert np.array_equal(steps.pixels(picture), cropped)
        assert resized == [(16, 24)]
        monkeypatch.setattr(module, "FAR_MORE", 10**9)
        whole = steps.pixels(picture)
        assert resized[1] != (16, 24)
        assert np.abs(whole.astype(int) - cropped).max() <= 1
    assert cropped.shape == (24, 16, 3)


def test_an_absurd_picture_among_many_is_left_out_and_named(image_folder):
    strip = flat_png(image_folder / "class0" / "strip.png", 1, 20_000)
    names: list[str] = []
    made = prepare(folder_source(image_folder), SMALL, on_unreadable=names.extend)
    assert (len(made), made.unreadable, names) == (60, (str(strip),), [str(strip)])


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
def test_text_and_profiles_that_unpack_to_very_much_are_refused(kind, tmp_path):
    bomb = chunk(kind, b"name\0\0" + zlib.compress(bytes(50_000_000), 9))
    with pytest.raises(UnreadableImage, match="x.png: cannot be read as an image .*too large"):
        open_image(flat_png(tmp_path / "x.png", 20, 20, more=bomb))


def test_of_a_picture_with_many_frames_the_first_counts(tmp_path):
    frames = [Image.fromarray(np.full((8, 8), level, np.uint8)) for level in (20, 200, 250)]
    for suffix in ("gif", "tif", "webp"):
        frames[0].convert("RGB").save(
            tmp_path / f"x.{suffix}", save_all=True, append_images=[f.convert("RGB") for f in frames[1:]]
        )
        assert np.abs(np.asarray(open_image(tmp_path / f"x.{suffix}")).astype(int) - 20).max() < 4


@pytest.mark.parametrize(
    "data",
    [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a" + bytes(7), b"BM" + bytes(60), b"P5 0 5 255\n", b"II*\0\x08\0\0\0\0\0",
     b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"%PDF-1.4\n"],
)  # fmt: skip
def test_no_pixels_no_picture_and_programs_are_refused(data, tmp_path):
    (tmp_path / "x.png").write_bytes(data)
    with pytest.raises(UnreadableImage, match="x.png: cannot be read as an image"):
        open_image(tmp_path / "x.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp", "bmp"])
def test_pictures_cut_short_are_refused(suffix, tmp_path):
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UnreadableImage, match="cannot be read as an image"):
        open_image(path)


def test_pipes_devices_and_huge_files_are_no_pictures(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with open(tmp_path / "huge.png", "wb") as file:
        file.truncate(1 << 41)
    for name, says in (("pipe", "a pipe"), ("zero", "a device"), ("huge", "2048 GB")):
        with pytest.raises(UnreadableImage, match=f"{name}.png: cannot be read as an image .it .*{says}"):
            open_image(tmp_path / f"{name}.png")
