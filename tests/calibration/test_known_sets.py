"""Sets by name and sets of the hub: the right split for each use, no more of the hub than is needed, clear words.

Nothing is fetched: the sets are made in the layout of the hub, where `datasets` looks before it asks the network.
"""

import numpy as np
import pytest
from PIL import Image

from helpers.hub import make_hub_set, pictures, pixels_of
from snapvit_export.calibration import hub
from snapvit_export.calibration.dataset import (
    are_other_splits,
    is_merged,
    open_dataset,
    open_to_calibrate,
    open_to_report,
)
from snapvit_export.calibration.hub import Sample
from snapvit_export.calibration.images import calibration_and_held_out
from snapvit_export.calibration.known_sets import ALIASES, BY_HAND, KNOWN_SETS, SEVEN, known_name, known_split, merged
from snapvit_export.calibration.masks import check_masks, prepare_masks, voc_colours
from snapvit_export.calibration.open_source import open_images, open_source
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import SnapvitError, UsageError

SQUARE = Preprocessing(input_size=(3, 8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
CIFAR10, EUROSAT, IMAGENET, VOC = (
    KNOWN_SETS[name].repository for name in ("cifar10", "eurosat", "imagenet-1k", "voc2012")
)
HUGE = 10**11


def titles(source):
    return [source.title(i) for i in range(source.count)]


def test_the_sets_of_the_paper_have_names():
    assert set(SEVEN) == {"imagenet-1k", "cifar10", "cifar100", "dtd", "eurosat", "oxford-pets", "fgvc-aircraft"}
    assert set(KNOWN_SETS) == {*SEVEN, "voc2012"}
    assert set(ALIASES.values()) <= set(KNOWN_SETS)
    assert [known_name(text) for text in ("pets", "dtd", "voc", "cats")] == ["oxford-pets", "dtd", "voc2012", None]
    assert KNOWN_SETS["cifar100"].label == "fine_label"


def test_what_is_reported_is_the_test_split_or_where_its_labels_are_secret_the_validation_split():
    reported = {name: known.test for name, known in KNOWN_SETS.items()}
    assert {name for name, split in reported.items() if split != "test"} == {"imagenet-1k", "voc2012"}
    assert (reported["imagenet-1k"], reported["voc2012"]) == ("validation", "val")
    assert {name for name, known in KNOWN_SETS.items() if known.valid} == {"dtd", "fgvc-aircraft"}


def test_a_known_set_has_the_right_split_for_each_use(datasets):
    make_hub_set(datasets, CIFAR10, {"train": 12, "test": 5})
    train, test = f"hf:{CIFAR10}:train", f"hf:{CIFAR10}:test"
    data, calibrating = open_dataset("cifar10"), open_to_calibrate("cifar10")
    assert [(role, source.name, source.count) for role, source in data.splits.items()] == [
        ("train", train, 12),
        ("test", test, 5),
    ]
    assert (calibrating.name, calibrating.held_out.name, open_to_report("cifar10").name) == (train, test, test)
    assert (open_source("cifar10").name, open_images("cifar10").name) == (train, test)
    assert (open_source("cifar10:test").name, open_images("cifar10:train").name) == (test, train)
    assert list(data.train.classes) == ["cat", "dog"]


@pytest.mark.parametrize("name", ["cifar10", f"hf:{CIFAR10}"])
def test_a_split_that_is_not_asked_for_is_not_fetched(name, datasets):
    folder = make_hub_set(datasets, CIFAR10, {"train": 12, "test": 5})
    (folder / "data" / "train-00000-of-00001.parquet").write_bytes(b"damaged: whoever reads it fails")
    assert open_to_report(name).count == 5
    assert open_dataset(name, roles=("test",)).test.count == 5
    with pytest.raises(SnapvitError, match=r"hf:uoft-cs/cifar10:train: cannot be fetched"):
        open_to_calibrate(name)


def test_calibrating_with_nothing_to_report_takes_no_other_split(datasets):
    folder = make_hub_set(datasets, CIFAR10, {"train": 12, "test": 5})
    (folder / "data" / "test-00000-of-00001.parquet").write_bytes(b"damaged: whoever reads it fails")
    assert calibration_and_held_out("cifar10", 4, 0, most_held_out=0)[0].count == 4
    with pytest.raises(SnapvitError, match=r"hf:uoft-cs/cifar10:test: cannot be fetched"):
        calibration_and_held_out("cifar10", 4, 0, most_held_out=4)


def test_what_another_program_has_fetched_is_not_fetched_again(datasets, tmp_path):
    make_hub_set(datasets, CIFAR10, {"train": 12, "test": 5})
    datasets.load_dataset(CIFAR10)
    assert open_dataset("cifar10").train.count == 12
    assert not list((tmp_path / "cache").glob("split-*"))


def test_of_a_very_large_split_only_a_sample_is_read(datasets, tmp_path):
    make_hub_set(datasets, IMAGENET, {"train": 60, "validation": 30}, files=3, told_bytes=HUGE)
    chosen, held_out = calibration_and_held_out("imagenet-1k", 12, seed=0, most_held_out=6)
    assert (chosen.name, chosen.count) == (f"hf:{IMAGENET}:train (sample)", 12)
    assert (held_out.name, held_out.count) == (f"hf:{IMAGENET}:validation (sample)", 6)
    assert set(chosen.labels) == {0, 1}  # although the files have their classes in order
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    everything = {picture.tobytes() for picture in pictures(60, 0)}
    assert {image.tobytes() for image in pixels_of(chosen)} <= everything


def test_the_sample_of_a_large_split_is_decided_by_the_seed(datasets):
    make_hub_set(datasets, IMAGENET, {"train": 60, "validation": 30}, files=2, told_bytes=HUGE)
    one, again, other = (
        pixels_of(calibration_and_held_out("imagenet-1k", 12, seed, most_held_out=0)[0]) for seed in (3, 3, 4)
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_a_large_set_without_splits_calibrates_on_the_same_images_whatever_is_held_out(datasets):
    make_hub_set(datasets, "owner/huge", {"train": 60}, told_bytes=HUGE)
    alone, none = calibration_and_held_out("hf:owner/huge", 10, 0, most_held_out=0)
    chosen, held_out = calibration_and_held_out("hf:owner/huge", 10, 0, most_held_out=8)
    assert np.array_equal(pixels_of(alone), pixels_of(chosen))
    assert (none.count, held_out.count) == (0, 8)
    assert not {each.tobytes() for each in pixels_of(chosen)} & {each.tobytes() for each in pixels_of(held_out)}


def test_all_of_a_large_split_is_fetched_where_it_is_wanted(datasets, monkeypatch):
    make_hub_set(datasets, IMAGENET, {"train": 60, "validation": 30}, told_bytes=HUGE)
    assert open_dataset("imagenet-1k").train.count == 60  # to evaluate by neighbours
    assert open_to_calibrate("imagenet-1k", Sample(4, 0)).count == 60  # it is here now
    monkeypatch.setattr(hub, "MOST_DRAWN", 3)
    make_hub_set(datasets, "owner/huge", {"train": 60}, told_bytes=HUGE)
    assert open_to_calibrate("hf:owner/huge", Sample(4, 0)).count == 60  # more than stay in memory


def test_eurosat_is_split_by_class_once_and_for_all(datasets):
    """Its splits on the hub are not its authors', so all of its images are one heap."""
    classes = ("forest", "river", "road")
    make_hub_set(datasets, EUROSAT, {"train": 30, "validation": 15, "test": 15}, classes=classes)
    data, other = open_dataset("eurosat", seed=0), open_dataset("eurosat", seed=1)
    assert (data.train.count, data.valid, data.test.count) == (48, None, 12)
    assert np.bincount(data.test.labels).tolist() == [4, 4, 4]
    assert titles(data.test) == titles(other.test)  # what calibrated in one run is not reported on in another
    assert len({*titles(data.train), *titles(data.test)}) == 60
    seen = {image.tobytes() for part in (data.train, data.test) for image in pixels_of(part)}
    assert seen == {picture.tobytes() for seed, n in enumerate((30, 15, 15)) for picture in pictures(n, seed)}
    assert (data.train.name, titles(open_source("eurosat:test"))) == ("eurosat:train", titles(data.test))


def test_merged_takes_equal_parts_of_the_seven_training_sets(datasets):
    for name in SEVEN:
        known = KNOWN_SETS[name]
        splits = dict.fromkeys(known.unsplit or (known.train, known.test), 10)
        make_hub_set(datasets, known.repository, splits, label=known.label)
    chosen, held_out = calibration_and_held_out("merged", 21, seed=0, most_held_out=14)
    of = [title.split(" image ")[0] for title in titles(chosen)]
    assert sorted(of.count(name) for name in set(of)) == [1, 2, 3, 3, 3, 3, 3, 3]  # EuroSAT's from where they lie
    assert sum("EuroSAT" in name for name in of) == 3
    assert (chosen.labels, held_out.count) == (None, 14)
    assert {f"hf:{KNOWN_SETS[name].repository}:{KNOWN_SETS[name].test}" for name in SEVEN if name != "eurosat"} <= {
        title.split(" image ")[0] for title in titles(held_out)
    }
    few, _ = calibration_and_held_out("merged:cifar10, pets", 6, seed=0, most_held_out=0)
    assert few.name == f"hf:{CIFAR10}:train + hf:timm/oxford-iiit-pet:train"
    assert open_to_report("merged:cifar10,pets").count == 20


def test_merged_is_for_calibration_of_known_sets(tmp_path, monkeypatch):
    assert (merged("merged"), merged("cifar10")) == (SEVEN, ("cifar10",))
    for text in ("merged:cifar10,cats", "merged:", "merged:voc2012"):
        with pytest.raises(UsageError, match="is not one of its sets. Known: imagenet-1k"):
            merged(text)
    with pytest.raises(UsageError, match=r"--data merged is several training sets, to calibrate on"):
        open_dataset("merged")
    with pytest.raises(UsageError, match="--data cifar10 is given twice"):
        calibration_and_held_out(["merged", "cifar10"], 10, 0, 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "merged").mkdir()
    assert not is_merged("merged")  # a folder of that name is taken


def voc(package, how):
    """VOC on the hub: masks of classes 0 to 2 and the border, as `how` makes them of the class numbers."""
    numbers = np.repeat(np.array([[0, 1], [2, 255]], np.uint8), 4, 0).repeat(4, 1)  # (8, 8)
    columns = {"mask": [how(numbers)] * 6}
    make_hub_set(package, VOC, {"train": 6, "val": 6}, label=None, columns=columns)
    return numbers


def in_palette(numbers):
    mask = Image.fromarray(numbers).convert("P")
    mask.putdata(numbers.ravel().tolist())
    mask.putpalette(voc_colours().ravel().tolist())
    return mask


@pytest.mark.parametrize("how", [in_palette, lambda n: Image.fromarray(voc_colours()[n])], ids=["palette", "colours"])
def test_voc_has_its_masks_in_a_column(how, datasets):
    numbers = voc(datasets, how)
    data = open_dataset("voc2012")
    assert (data.train.name, data.test.name, data.test.labels) == (f"hf:{VOC}:train", f"hf:{VOC}:val", None)
    for part in (data.train, data.test.subset([4, 2])):
        check_masks(part)
        assert np.array_equal(prepare_masks(part, SQUARE), np.stack([numbers] * part.count))
    assert len(prepare_masks(data.test, SQUARE, left_out=[data.test.title(0)])) == 5
    assert open_to_calibrate("voc2012").open(0).tobytes() == pictures(6, 0)[0].tobytes()  # an image, not its mask


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda n: Image.fromarray(np.full((8, 8, 3), 7, np.uint8)), r"has the colour \[7, 7, 7\], which is no class"),
        (lambda n: Image.fromarray(n[:4]), "is 8x4, its image 8x8"),
        (lambda n: Image.fromarray(n).convert("LA"), "is of kind LA, a mask has one channel"),
    ],
)
def test_bad_masks_in_a_column_are_named(how, says, datasets):
    voc(datasets, how)
    with pytest.raises(SnapvitError, match=f"the mask of hf:{VOC}:train image 0: {says}"):
        prepare_masks(open_dataset("voc2012").train, SQUARE)


def test_the_colours_of_voc():
    """As in the development kit: aeroplane, bird, person, tv monitor, and the border."""
    colours = voc_colours()
    known = {1: (128, 0, 0), 3: (128, 128, 0), 15: (192, 128, 128), 20: (0, 64, 128), 255: (224, 224, 192)}
    assert {number: tuple(colours[number]) for number in known} == known
    assert len({tuple(colour) for colour in colours}) == 256


def test_a_set_without_the_column_of_masks_is_refused(datasets):
    make_hub_set(datasets, VOC, {"train": 4, "val": 4})
    with pytest.raises(SnapvitError, match=r"train: has no column of masks called mask \(it has: image, label\)"):
        open_dataset("voc2012")


def test_a_wrong_split_is_answered_by_the_right_ones(datasets):
    make_hub_set(datasets, CIFAR10, {"train": 4, "test": 4})
    with pytest.raises(SnapvitError, match=r"cifar10:dev: has no split 'dev' \(it has: train, test\). Name one of"):
        open_source(f"hf:{CIFAR10}:dev")
    for text in ("cifar10:dev", "eurosat:validation"):
        with pytest.raises(UsageError, match=r"has no split '\w+' \(it has: train, test\). Name one of these"):
            known_split(text)
    datasets.load_dataset(CIFAR10)  # the same of what is kept
    with pytest.raises(SnapvitError, match=r"cifar10:dev: has no split 'dev' \(it has: train, test\)"):
        open_source(f"hf:{CIFAR10}:dev")


def test_a_validation_split_goes_by_any_of_its_names(datasets):
    make_hub_set(datasets, IMAGENET, {"train": 4, "val": 6})
    assert open_to_report("imagenet-1k").count == 6


def test_terms_that_were_not_accepted_are_told(datasets, monkeypatch):
    def refuse(repository, **_):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{repository}' is a gated dataset on the Hub.\nMore")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(SnapvitError) as caught:
        open_dataset("imagenet-1k")
    assert str(caught.value).endswith(
        "Accept its terms at https://huggingface.co/datasets/ILSVRC/imagenet-1k, then log in: hf auth login"
    )
    assert "\n" not in str(caught.value)


def test_without_a_network_the_remedy_is_a_folder(datasets):
    with pytest.raises(SnapvitError, match=r"or put a copy of the repository into the folder uoft-cs/cifar10 here$"):
        open_dataset("cifar10")


@pytest.mark.parametrize("name", BY_HAND)
def test_sets_that_are_fetched_by_hand_say_from_where(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for opens in (open_to_calibrate, open_dataset, open_to_report):
        with pytest.raises(SnapvitError, match=f"^{name}: no such image folder, and this set is fetched by hand."):
            opens(name)


@pytest.mark.parametrize(
    "paths",
    [
        ("diffusiondb/part-000001/3b.png", "diffusiondb/part-000002/5f.png", "diffusiondb/part-000001/7a.png"),
        ("shaders21k/000/000.png", "shaders21k/000/001.png", "shaders21k/001/000.png"),
        ("shaders21k_6mixup/train/0/000.png", "shaders21k_6mixup/train/1/000.png", "shaders21k_6mixup/train/1/1.png"),
    ],
    ids=["DiffusionDB", "Shaders21k", "Shaders21k in train"],
)
def test_sub_folders_that_are_no_classes_give_no_labels(paths, tmp_path):
    for path, picture in zip(paths, pictures(3)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / path)
        (tmp_path / path).with_name("part.json").write_text("{}")
    source = open_to_calibrate(str(tmp_path / paths[0].split("/")[0]))
    assert (source.count, source.labels) == (3, None)


def test_splits_of_the_hub_are_told_apart_by_their_names(datasets, image_folder):
    make_hub_set(datasets, CIFAR10, {"train": 4, "test": 4})
    data = open_dataset("cifar10")
    assert are_other_splits([f"hf:{CIFAR10}:train", "eurosat:train", f"hf:{IMAGENET}:train (sample)"], data)
    assert not are_other_splits([f"hf:{CIFAR10}:test"], data)
    assert not are_other_splits([f"hf:{CIFAR10}:test (sample)"], data)
    assert not are_other_splits([f"hf:{CIFAR10}:train", str(image_folder)], data)
    assert not are_other_splits([f"hf:{CIFAR10}:train"], open_dataset(str(image_folder)))
