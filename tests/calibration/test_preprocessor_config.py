"""Preprocessing as `transformers` files describe it: the pixels of its own image processors."""

import json
import warnings

import numpy as np
import pytest
from PIL import Image

from snapvit_export.calibration.preprocessor_config import preprocessing_in, read_preprocessor
from snapvit_export.errors import FileFormatError, SnapvitError

CROP = {"crop_size": {"height": 40, "width": 40}}
PROCESSORS = {
    "ViT": {"size": {"height": 40, "width": 40}},
    "DeiT": {"size": {"height": 46, "width": 46}, **CROP},
    "CLIP": {"size": {"shortest_edge": 46}, **CROP},
    "Bit": {"size": {"shortest_edge": 47}, **CROP, "image_mean": [0.485, 0.456, 0.406], "resample": 1},
    "Siglip": {"size": {"height": 40, "width": 32}},
    "DINOv3ViT": {"size": {"height": 40, "width": 40}},
}
SQUARE = {"image_processor_type": "ViTImageProcessor", "size": {"height": 40, "width": 40}}
SIZES = [(200, 120), (97, 64), (64, 97), (40, 40)]  # width, height


def picture(size: tuple[int, int]) -> Image.Image:
    """Smooth noise: resizing it is not all rounding."""
    coarse = np.random.default_rng(0).integers(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def processor(kind: str, **changes):
    """The image processor of `transformers` that computes with Pillow, where it has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        made = getattr(transformers, f"{kind}ImageProcessorPil", None) or getattr(transformers, f"{kind}ImageProcessor")
        return made(**{**PROCESSORS[kind], **changes})


def difference(theirs, size: tuple[int, int]) -> float:
    """The largest difference of the two inputs, in steps of a byte."""
    ours = preprocessing_in(json.loads(theirs.to_json_string()), "x")
    image = picture(size)
    wanted = np.asarray(theirs(image, return_tensors="np")["pixel_values"])[0]
    got = ours.normalise(ours.pixels(image)[None])[0]
    assert got.shape == wanted.shape
    return float(np.abs((got - wanted) * np.array(ours.std)[:, None, None] * 255).max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_pixels_are_those_of_transformers(kind, size):
    most = 1.0 if kind == "DINOv3ViT" else 0.01  # it resizes before it rounds to bytes, or never does
    assert difference(processor(kind), size) <= most


@pytest.mark.parametrize(
    "changes",
    [
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [100.0, 110.0, 120.0], "image_std": [50.0, 60.0, 70.0]},
        {"rescale_factor": 1 / 127.5},
        {"resample": 0},
        {"resample": 5},
    ],
)
def test_other_ranges_and_filters_come_out_the_same(changes):
    assert difference(processor("ViT", **changes), (97, 64)) <= 0.01


@pytest.mark.parametrize(
    ("content", "size", "mode", "pct"),
    [
        ({"feature_extractor_type": "ViTFeatureExtractor", "size": 224}, 224, "squash", 1.0),
        ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224}, 224, "center", 1.0),
        ({"image_processor_type": "BitImageProcessor", "size": 256, "crop_size": 224}, 224, "center", 0.875),
        ({"image_processor_type": "DeiTImageProcessorFast"}, 224, "squash", 0.875),
        ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}, 384, "squash", 1.0),
        ({"image_processor_type": "SiglipImageProcessor"}, 224, "squash", 1.0),
    ],
)
def test_older_files_say_less_and_mean_the_same(content, size, mode, pct):
    found = preprocessing_in(content, "x")
    assert (found.input_size, found.crop_mode, found.crop_pct) == ((3, size, size), mode, pct)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_file_that_names_no_size_means_that_of_its_processor(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        plain = getattr(transformers, f"{kind}ImageProcessor")()
    whole = json.loads(plain.to_json_string())
    short = {key: value for key, value in whole.items() if key not in ("size", "crop_size")}
    assert preprocessing_in(short, "x") == preprocessing_in(whole, "x")


def test_a_crop_is_taken_from_exactly_the_size_that_is_named():
    from math import floor

    for side in range(224, 600):
        found = preprocessing_in({"image_processor_type": "CLIPImageProcessor", "size": side, "crop_size": 224}, "x")
        assert floor(224 / found.crop_pct) == side


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"do_resize": False}, "do_resize is off"),
        ({"do_pad": True}, "do_pad is a step that is not supported"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"crop_pct": 0.9}, "crop_pct is not supported"),
        ({"rescale_offset": True}, "rescale_offset"),
        ({"size": {"shortest_edge": 40}}, "keep their proportions"),
        (
            {"size": {"shortest_edge": 40, "longest_edge": 90}, "do_center_crop": True, **CROP},
            "not a height and a width",
        ),
        ({"size": {"longest_edge": 40}}, "not a height and a width"),
        ({"size": {"height": 40, "width": 0}}, "not a height and a width"),
        ({"size": "large"}, "not a height and a width"),
        ({"image_processor_type": "MyImageProcessor", "size": 40}, "My does not explain"),
        ({"do_center_crop": True, "crop_size": 50}, "would be padded"),
        ({"do_center_crop": True, "crop_size": {"height": 20, "width": 30}}, "different fractions"),
        ({"do_center_crop": True}, "crop_size None is not a height"),
        ({"resample": 7}, "resample 7"),
        ({"resample": "bicubic"}, "resample bicubic"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "x: "),
        ({"rescale_factor": 0}, "rescale_factor 0"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes, says):
    with pytest.raises(FileFormatError, match=says) as refused:
        preprocessing_in({**SQUARE, **changes}, "x")
    assert str(refused.value).isprintable()


def test_it_is_found_in_a_folder_and_inside_a_processor_of_several(tmp_path):
    with pytest.raises(SnapvitError, match=r"has no preprocessor_config\.json"):
        read_preprocessor(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SQUARE, "tokenizer": {}}))
    assert read_preprocessor(tmp_path).input_size == (3, 40, 40)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**SQUARE, "size": {"height": 24, "width": 40}}))
    assert read_preprocessor(tmp_path).input_size == (3, 24, 40)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(FileFormatError, match="preprocessor_config.json"):
        read_preprocessor(tmp_path)
