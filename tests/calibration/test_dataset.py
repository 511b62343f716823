"""Data sets in splits: one numbering of classes, nothing in two splits, and clear words where that cannot be."""

import numpy as np
import pytest
from PIL import Image

from helpers.models import description
from snapvit_export.calibration.dataset import open_dataset
from snapvit_export.calibration.folder import folder_source
from snapvit_export.calibration.hub import hf_source
from snapvit_export.calibration.masks import UNKNOWN, check_masks, mask_of, numbered, prepare_masks
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.calibration.sampling import spread
from snapvit_export.errors import MissingDependency, SnapvitError, UsageError

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 9, 7, 3), np.uint8)


def write(path, pixels=PIXELS[0]):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def make_splits(folder, splits, classes=("cat", "dog"), each=3):
    for split in splits:
        for name in classes:
            for i in range(each):
                write(folder / split / name / f"{i}.jpg")
    return str(folder)


def titles(source):
    return {source.title(i) for i in range(source.count)}


@pytest.mark.parametrize(
    ("there", "roles"),
    [
        (("train", "test"), {"train": "train", "test": "test"}),
        (("trainval", "test"), {"train": "trainval", "test": "test"}),
        (("train", "val"), {"train": "train", "test": "val"}),
        (("train", "validation", "test"), {"train": "train", "valid": "validation", "test": "test"}),
        (("train", "valid", "test", "extra"), {"train": "train", "valid": "valid", "test": "test"}),
    ],
)
def test_split_folders_take_their_roles(there, roles, tmp_path):
    data = open_dataset(make_splits(tmp_path, there))
    assert {role: source.name for role, source in data.splits.items()} == {
        role: str(tmp_path / name) for role, name in roles.items()
    }
    assert all(list(source.classes) == ["cat", "dog"] for source in data.splits.values())


def test_a_class_that_a_split_lacks_is_named(tmp_path):
    text = make_splits(tmp_path, ("train", "test"))
    write(tmp_path / "train" / "ant" / "1.jpg")
    with pytest.raises(SnapvitError, match=r"test: has no class 'ant', which .*train has"):
        open_dataset(text)
    write(tmp_path / "test" / "ant" / "1.jpg")
    write(tmp_path / "test" / "bee" / "1.jpg")
    with pytest.raises(SnapvitError, match=r"train: has no class 'bee', which .*test has"):
        open_dataset(text)


def test_splits_with_and_without_labels_do_not_mix(tmp_path):
    text = make_splits(tmp_path, ("train", "test"))
    write(tmp_path / "test" / "loose.jpg")
    with pytest.raises(SnapvitError, match=r"test: has no labels, but .*train has"):
        open_dataset(text)


def test_two_names_for_one_split_are_refused(tmp_path):
    text = make_splits(tmp_path, ("train", "trainval", "test"))
    with pytest.raises(SnapvitError, match="has both train and trainval"):
        open_dataset(text)


def test_any_other_source_is_split_by_seed_and_class(image_folder):
    data = open_dataset(str(image_folder), seed=1)
    assert (data.train.count, data.valid, data.test.count) == (48, None, 12)
    assert not titles(data.train) & titles(data.test)
    assert sorted(np.bincount(data.test.labels)) == [2, 2, 2, 3, 3]
    assert titles(data.test) == titles(open_dataset(str(image_folder), seed=1).test)
    assert titles(data.test) != titles(open_dataset(str(image_folder), seed=2).test)


def test_digits_keep_their_own_split():
    data = open_dataset("digits")
    assert (data.train.count, data.test.count) == (1297, 500)


def test_at_most_so_many_of_each_split_with_all_classes(tmp_path):
    data = open_dataset(make_splits(tmp_path, ("train", "test"), each=5)).at_most(4, seed=3)
    assert (data.train.count, data.test.count) == (4, 4)
    assert sorted(data.test.labels) == [0, 0, 1, 1]


def test_one_picture_is_too_few(tmp_path):
    write(tmp_path / "one.jpg")
    with pytest.raises(UsageError, match="one image cannot serve for training and for testing"):
        open_dataset(str(tmp_path))


def test_every_beginning_of_the_spread_order_is_in_proportion():
    labels = [0] * 60 + [1] * 30 + [2] * 10
    order = spread(labels, 100, seed=0)
    assert sorted(order) == list(range(100))
    for cut in (10, 20, 50, 80):
        counts = np.bincount(np.array(labels)[order[:cut]], minlength=3)
        assert np.abs(counts - np.array([0.6, 0.3, 0.1]) * cut).max() <= 1


def test_an_npz_may_hold_splits(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(
        path,
        train_images=PIXELS[:4],
        train_labels=np.array([0, 1, 2, 0]),
        test_images=PIXELS[4:],
        test_labels=np.array([1, 0]),
    )
    data = open_dataset(str(path))
    assert (data.train.labels, data.valid, data.test.labels) == ([0, 1, 2, 0], None, [1, 0])
    assert list(data.test.classes) == ["0", "1", "2"]  # numbers mean the same in both
    assert np.array_equal(np.asarray(data.test.open(0)), PIXELS[4])
    np.savez(path, train_images=PIXELS, test_images=PIXELS, test_labels=np.zeros(5, int))
    with pytest.raises(SnapvitError, match=r"x.npz: test_labels are int64 of shape \(5,\)"):
        open_dataset(str(path))
    np.savez(path, images=PIXELS)
    assert (open_dataset(str(path)).train.count, open_dataset(str(path)).test.count) == (5, 1)


def test_a_known_set_needs_the_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match="hf:uoft-cs/cifar10:train needs datasets"):
        open_dataset("cifar10")


@pytest.fixture
def hub_set(datasets, tmp_path):
    """cifar100 of two classes in the place where `datasets` looks before it asks the network."""
    features = {"img": datasets.Image(), "coarse_label": datasets.ClassLabel(names=["x"])}
    features["fine_label"] = datasets.ClassLabel(names=["cat", "dog"])
    columns = {"img": [Image.fromarray(pixels) for pixels in PIXELS], "coarse_label": [0] * 6}
    columns["fine_label"] = [0, 1, 1, 0, 1, 0]
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    folder = tmp_path / "uoft-cs" / "cifar100"
    folder.mkdir(parents=True)
    made.to_parquet(folder / "train.parquet")
    made.select(range(2)).to_parquet(folder / "test.parquet")
    return made


def test_a_set_of_the_hub_opens_with_its_splits_and_label_column(hub_set):
    data = open_dataset("cifar100")
    assert (data.train.count, data.valid, data.test.count) == (6, None, 2)
    assert (data.train.labels, list(data.train.classes)) == ([0, 1, 1, 0, 1, 0], ["cat", "dog"])
    usual = open_dataset("hf:uoft-cs/cifar100")
    assert (usual.train.name, usual.test.name) == ("hf:uoft-cs/cifar100:train", "hf:uoft-cs/cifar100:test")
    assert list(usual.train.classes) == ["x"]  # the first column of classes
    alone = open_dataset("hf:uoft-cs/cifar100:train")
    assert (alone.train.count, alone.test.count) == (5, 1)


def test_a_label_column_that_is_not_there_is_named(hub_set):
    with pytest.raises(SnapvitError, match=r"hf:c: has no column of classes called kind \(it has: img, coarse_label"):
        hf_source(hub_set, "hf:c", "kind")


def square(side=8, crop_pct=1.0, mode="center"):
    return Preprocessing(input_size=(3, side, side), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=crop_pct, crop_mode=mode)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("size", [(60, 40), (33, 71), (16, 16)])
def test_a_mask_stays_on_its_picture(size, mode):
    """A picture in two flat colours, and its mask: placed, they agree everywhere but at the edge."""
    width, height = size
    mask = np.zeros((height, width), np.uint8)
    mask[:, : width // 3] = 7
    mask[: height // 4] = 7
    picture = Image.fromarray(np.repeat(np.where(mask, 250, 5).astype(np.uint8)[..., None], 3, axis=2))
    placed = square(32, 0.9, mode)
    seen, masked = placed.pixels(picture)[..., 0] > 128, placed.mask(Image.fromarray(mask))
    assert set(np.unique(masked)) <= {0, 7}  # nearest: no value in between
    assert (seen == (masked == 7)).mean() > 0.93
    assert placed.pixels(picture).shape[:2] == masked.shape == (32, 32)


def test_a_mask_beside_a_picture_is_not_a_picture(tmp_path):
    write(tmp_path / "a" / "one.jpg")
    write(tmp_path / "a" / "one.png", np.zeros((9, 7), np.uint8))
    write(tmp_path / "a" / "two.png")  # alone: a picture
    source = folder_source(tmp_path)
    assert sorted(titles(source)) == [str(tmp_path / "a" / "one.jpg"), str(tmp_path / "a" / "two.png")]
    assert mask_of(str(tmp_path / "a" / "one.jpg")).is_file()
    with pytest.raises(SnapvitError, match=r"two.png: has no mask. Give --data a folder with masks"):
        check_masks(source)


def make_voc(folder, train="p0\np1\n", val="p2\n"):
    for i in range(3):
        write(folder / "JPEGImages" / f"p{i}.jpg")
        mask = Image.fromarray(np.full((9, 7), i, np.uint8)).convert("P")
        mask.putpalette(bytes(range(256)) * 3)
        (folder / "SegmentationClass").mkdir(exist_ok=True)
        mask.save(folder / "SegmentationClass" / f"p{i}.png")
    lists = folder / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text(train)
    (lists / "val.txt").write_text(val)
    return folder


def test_the_layout_of_pascal_voc_is_understood(tmp_path):
    data = open_dataset(str(make_voc(tmp_path)))
    assert (data.train.count, data.valid, data.test.count, data.test.labels) == (2, None, 1, None)
    check_masks(data.train)
    masks = prepare_masks(data.train, square())
    assert masks.shape == (2, 8, 8)
    assert [set(np.unique(mask)) for mask in masks] == [{0}, {1}]  # palette numbers, not colours
    assert len(prepare_masks(data.train, square(), left_out=[data.train.title(0)])) == 1


@pytest.mark.parametrize(("val", "says"), [("", "names no images"), ("../p2", "is not the bare name of an image")])
def test_bad_lists_of_voc_are_named(val, says, tmp_path):
    with pytest.raises(SnapvitError, match=f"val.txt: .*{says}"):
        open_dataset(str(make_voc(tmp_path, val=val)))


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (np.zeros((9, 7, 3), np.uint8), "is of kind RGB, a mask has one channel"),
        (np.zeros((9, 8), np.uint8), "is 8x9, its image 7x9"),
    ],
)
def test_bad_masks_are_named(mask, says, tmp_path):
    write(tmp_path / "one.jpg")
    write(tmp_path / "one.png", mask)
    with pytest.raises(SnapvitError, match=f"one.png: {says}"):
        prepare_masks(folder_source(tmp_path), square())
    (tmp_path / "one.png").write_bytes(b"no picture")
    with pytest.raises(SnapvitError, match="one.png: cannot be read as a mask"):
        prepare_masks(folder_source(tmp_path), square())


def test_values_of_masks_become_classes_and_some_are_passed_over():
    raw = {"train": np.array([[[1, 3], [2, 255]]], np.uint8), "test": np.array([[[2, 2], [7, 1]]], np.uint8)}
    masks, values = numbered(raw, ignore=(255, 3))
    assert values == (1, 2, 7)
    assert masks["train"].tolist() == [[[0, UNKNOWN], [1, UNKNOWN]]]
    assert masks["test"].tolist() == [[[1, 1], [2, 0]]]
    with pytest.raises(SnapvitError, match=r"at least two classes beside what is ignored, these have 7. Change"):
        numbered(raw, ignore=(255, 1, 2, 3))


def test_the_models_preprocessing_places_masks():
    placed = description().preprocessing
    assert placed.mask(Image.fromarray(np.ones((40, 50), np.uint8))).shape == placed.input_size[1:]
