"""Images: the same pixels as timm's own transform, honest splits, and clear words about bad files."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from snapvit_export.calibration.folder import folder_source
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError, UsageError


@pytest.mark.parametrize("size", [(50, 40), (40, 50), (300, 200), (224, 224), (8, 8), (225, 640)])
@pytest.mark.parametrize(
    ("crop_pct", "crop_mode", "interpolation"),
    [
        (0.875, "center", "bicubic"),
        (0.9, "center", "bilinear"),
        (1.0, "squash", "bicubic"),
        (0.95, "squash", "bilinear"),
    ],
)
def test_pixels_equal_timms_evaluation_transform(size, crop_pct, crop_mode, interpolation):
    settings = dict(interpolation=interpolation, crop_pct=crop_pct, crop_mode=crop_mode)
    settings |= dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    ours = Preprocessing(input_size=(3, 224, 224), **settings)
    theirs = create_transform(input_size=(3, 224, 224), **settings)
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    picture = Image.fromarray(pixels)
    got = ours.normalise(ours.pixels(picture)[None])[0]
    assert got.shape == (3, 224, 224)
    assert np.abs(got - theirs(picture).numpy()).max() < 1e-6


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_any_picture_mode_becomes_rgb(mode, tmp_path):
    Image.new(mode, (30, 20)).save(tmp_path / f"x.{'tiff' if mode == 'CMYK' else 'png'}")
    made = prepare(folder_source(tmp_path), Preprocessing(input_size=(3, 16, 16), mean=(0,) * 3, std=(1,) * 3))
    assert made.pixels.shape == (1, 16, 16, 3)


def test_calibration_and_held_out_never_share_a_picture(image_folder):
    calibration, held_out = calibration_and_held_out(str(image_folder), 40, seed=0, most_held_out=100)
    assert (calibration.count, held_out.count) == (40, 20)
    seen = [calibration.open(i).tobytes() for i in range(40)] + [held_out.open(i).tobytes() for i in range(20)]
    assert len(set(seen)) == 60


def test_sampling_is_by_seed_and_told_by_a_fingerprint(image_folder):
    preprocessing = Preprocessing(input_size=(3, 16, 16), mean=(0,) * 3, std=(1,) * 3)

    def fingerprint(seed: int) -> dict:
        return prepare(calibration_and_held_out(str(image_folder), 10, seed, 5)[0], preprocessing).fingerprint

    assert fingerprint(0) == fingerprint(0) != fingerprint(1)
    assert fingerprint(0)["images"] == 10


def test_folders_of_classes_give_labels_and_flat_ones_none(image_folder):
    source = folder_source(image_folder)
    assert list(source.classes) == [f"class{i}" for i in range(5)]
    assert sorted(set(source.labels)) == [0, 1, 2, 3, 4]
    flat = folder_source(image_folder / "class0")
    assert flat.labels is None


def test_digits_split_is_fixed_and_disjoint():
    calibration, held_out = calibration_and_held_out("digits", 2000, seed=0, most_held_out=7)
    assert (calibration.count, held_out.count) == (1297, 500)
    assert held_out.labels[:5] != calibration.labels[:5]
    assert set(held_out.labels) == set(range(10))


def test_bad_folders_and_files_are_named(tmp_path, image_folder):
    with pytest.raises(SnapvitError, match="no such image folder"):
        folder_source(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapvitError, match="holds no images"):
        folder_source(tmp_path / "empty")
    bad = image_folder / "class2" / "2.png"
    bad.write_bytes(bad.read_bytes()[:60])
    preprocessing = Preprocessing(input_size=(3, 16, 16), mean=(0,) * 3, std=(1,) * 3)
    with pytest.raises(SnapvitError, match="class2/2.png: cannot be read as an image"):
        prepare(folder_source(image_folder), preprocessing)
    with pytest.raises(UsageError, match="--images"):
        calibration_and_held_out("digits", 0, 0, 0)


def test_batches_are_normalised_pixels_in_order(image_folder):
    preprocessing = Preprocessing(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.25,) * 3)
    images = prepare(folder_source(image_folder), preprocessing)
    batches = list(images.batches(25))
    assert [len(batch) for batch in batches] == [25, 25, 10]
    joined = torch.from_numpy(np.concatenate(batches))
    expected = (torch.from_numpy(images.pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    assert torch.allclose(joined, expected, atol=1e-6)
