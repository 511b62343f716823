"""Images: the same pixels as timm's own transform, honest splits, and clear words about bad files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform

from snapvit_export.calibration.folder import folder_source
from snapvit_export.calibration.images import Images, calibration_and_held_out, in_two_parts, prepare
from snapvit_export.calibration.list_file import list_source
from snapvit_export.calibration.open_source import open_source
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.calibration.sampling import equal_parts, shuffled
from snapvit_export.calibration.source import decoded_once
from snapvit_export.errors import SnapvitError, UsageError

SMALL = Preprocessing(input_size=(3, 16, 16), mean=(0,) * 3, std=(1,) * 3)


def cut_short(path: Path) -> str:
    """Damage a picture; return its name."""
    path.write_bytes(path.read_bytes()[:60])
    return str(path)


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
    made = prepare(folder_source(tmp_path), SMALL)
    assert made.pixels.shape == (1, 16, 16, 3)


def test_calibration_and_held_out_never_share_a_picture(image_folder):
    calibration, held_out = calibration_and_held_out(str(image_folder), 40, seed=0, most_held_out=100)
    assert (calibration.count, held_out.count) == (40, 20)
    seen = [calibration.open(i).tobytes() for i in range(40)] + [held_out.open(i).tobytes() for i in range(20)]
    assert len(set(seen)) == 60


def test_images_for_many_sizes_are_decoded_once_as_far_as_memory_goes(image_folder):
    source, opened = folder_source(image_folder), []

    def counted(i: int) -> Image.Image:
        opened.append(i)
        return source.open(i)

    some = replace(source.subset(range(4)), open=counted)
    kept = prepare(decoded_once(some), SMALL)
    again = kept.at((8, 8))
    assert opened == [0, 1, 2, 3]
    assert np.array_equal(again.pixels, prepare(some, SMALL.at((8, 8))).pixels)
    opened.clear()
    prepare(decoded_once(some, most_bytes=0), SMALL).at((8, 8))
    assert opened == [0, 1, 2, 3] * 2  # nothing may stay


def test_a_part_is_held_out_even_where_all_were_asked_for(image_folder):
    count = folder_source(image_folder).count
    calibration, held_out = calibration_and_held_out(str(image_folder), count, 0, 500, least_held_out=count)
    assert (calibration.count, held_out.count) == (count - count // 4, count // 4)
    whole, none = calibration_and_held_out(str(image_folder), count, 0, 500)
    assert (whole.count, none.count) == (count, 0)


def test_raced_and_reported_images_are_others_unless_there_are_few(image_folder):
    source = folder_source(image_folder)
    race, report = in_two_parts(source, (3, 4), least=6)
    names = [{part.title(i) for i in range(part.count)} for part in (race, report)]
    assert [len(each) for each in names] == [
        min(3, -(-source.count // 3)),
        min(4, source.count - -(-source.count // 3)),
    ]
    assert not names[0] & names[1]
    both = in_two_parts(source, (3, 4), least=source.count + 1)
    assert both[0] is both[1] is source


def test_sampling_is_by_seed_and_told_by_a_fingerprint(image_folder):
    def fingerprint(seed: int) -> dict:
        return prepare(calibration_and_held_out(str(image_folder), 10, seed, 5)[0], SMALL).fingerprint

    assert fingerprint(0) == fingerprint(0) != fingerprint(1)
    assert fingerprint(0)["images"] == 10


def test_the_order_of_a_seed_is_the_same_on_every_machine():
    assert shuffled(10, seed=0) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert shuffled(10, seed=7) == [8, 0, 7, 1, 3, 6, 2, 4, 5, 9]


@given(st.integers(0, 300), st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_parts_are_as_equal_as_the_sources_allow(total, sizes):
    parts = equal_parts(total, sizes)
    assert sum(parts) == min(total, sum(sizes))
    assert all(0 <= part <= size for part, size in zip(parts, sizes))
    can_give_more = [part for part, size in zip(parts, sizes) if part < size]
    assert all(max(parts) - part <= 1 for part in can_give_more)


@pytest.fixture
def two_sources(image_folder, tmp_path):
    """A labelled folder of sixty pictures, and ten labelled ones in an .npz file."""
    pixels = np.random.default_rng(1).integers(0, 255, (10, 12, 12, 3), np.uint8)
    np.savez(tmp_path / "ten.npz", images=pixels, labels=np.arange(10))
    return str(image_folder), str(tmp_path / "ten.npz")


def titles(source):
    return [source.title(i) for i in range(source.count)]


@pytest.mark.parametrize(("count", "of_the_npz"), [(16, 8), (30, 10), (100, 10)])
def test_several_sources_give_equal_parts_and_a_smaller_one_all_it_has(two_sources, count, of_the_npz):
    calibration, _ = calibration_and_held_out(two_sources, count, seed=0, most_held_out=10)
    assert calibration.count == min(count, 70)
    assert sum(".npz image" in title for title in titles(calibration)) == of_the_npz
    assert len(set(titles(calibration))) == calibration.count


def test_several_sources_are_split_without_overlap_and_mixed_by_seed(two_sources):
    calibration, held_out = calibration_and_held_out(two_sources, 12, seed=3, most_held_out=500)
    assert sorted(titles(calibration) + titles(held_out)) == sorted(
        title for data in two_sources for title in titles(open_source(data))
    )
    again, _ = calibration_and_held_out(two_sources, 12, seed=3, most_held_out=500)
    other, _ = calibration_and_held_out(two_sources, 12, seed=4, most_held_out=500)
    assert titles(again) == titles(calibration) != titles(other)
    kinds = [".npz image" in title for title in titles(calibration)]
    assert kinds != sorted(kinds) != kinds[::-1]  # not one source after the other


def test_labels_are_kept_from_one_source_and_dropped_from_several(two_sources):
    folder, npz = two_sources
    for data in (folder, [folder]):
        _, held_out = calibration_and_held_out(data, 10, seed=0, most_held_out=20)
        names = [held_out.classes[label] for label in held_out.labels]
        assert names == [Path(title).parent.name for title in titles(held_out)]
    for part in calibration_and_held_out([folder, npz], 10, seed=0, most_held_out=20):
        assert part.labels is None
        assert part.name == f"{folder} + {npz}"


def test_digits_beside_others_still_report_on_their_held_out_split(two_sources):
    calibration, held_out = calibration_and_held_out(["digits", two_sources[1]], 10, seed=0, most_held_out=10)
    assert sum(title.startswith("digits train") for title in titles(calibration)) == 5
    assert sum(title.startswith("digits held-out") for title in titles(held_out)) == 5
    assert not any(title.startswith("digits train") for title in titles(held_out))


def test_a_picture_in_two_sources_is_never_both_calibrated_and_reported_on(image_folder, tmp_path):
    (tmp_path / "list.txt").write_text("".join(f"pictures/class{i % 5}/{i}.png\n" for i in range(30)))
    data = [str(tmp_path / "list.txt"), str(image_folder), str(image_folder / "class1")]
    calibration, held_out = calibration_and_held_out(data, 20, seed=0, most_held_out=100)
    seen = titles(calibration) + titles(held_out)
    assert len(seen) == len(set(seen)) == 60


def test_no_source_and_the_same_source_twice_are_refused():
    with pytest.raises(UsageError, match="Give --data FOLDER"):
        calibration_and_held_out([], 10, 0, 10)
    with pytest.raises(UsageError, match="--data digits is given twice"):
        calibration_and_held_out(["digits", "digits"], 10, 0, 10)


def test_the_fingerprint_names_every_source(two_sources):
    calibration, _ = calibration_and_held_out(two_sources, 12, seed=0, most_held_out=0)
    fingerprint = prepare(calibration, SMALL).fingerprint
    assert fingerprint["source"] == " + ".join(two_sources)
    assert (fingerprint["images"], fingerprint["unreadable"], len(fingerprint["sha256"])) == (12, 0, 64)


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


def test_bad_folders_and_counts_are_named(tmp_path):
    with pytest.raises(SnapvitError, match="no such image folder"):
        folder_source(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapvitError, match="holds no images"):
        folder_source(tmp_path / "empty")
    with pytest.raises(UsageError, match="--images"):
        calibration_and_held_out("digits", 0, 0, 0)


def test_a_few_unreadable_pictures_are_left_out_and_told(image_folder):
    bad = [cut_short(image_folder / f"class{i}" / f"{i}.png") for i in (1, 2, 3)]  # 3 of 60: just the share
    whole = folder_source(image_folder)
    told = []
    images = prepare(whole, SMALL, on_unreadable=told.append)
    rows = [i for i in range(60) if whole.title(i) not in bad]
    assert images.unreadable == told[0] == tuple(bad)
    assert images.fingerprint["images"] == 57
    assert images.fingerprint["unreadable"] == 3
    assert np.array_equal(images.pixels, prepare(whole.subset(rows), SMALL).pixels)
    assert images.labels.tolist() == [whole.labels[i] for i in rows]


def test_more_unreadable_pictures_than_the_share_stop_the_run(image_folder):
    for i in range(4):
        cut_short(image_folder / f"class{i}" / f"{i}.png")
    told = []
    with pytest.raises(SnapvitError, match=r"class0/0.png: cannot be read as an image .*\(4 of 60 images"):
        prepare(folder_source(image_folder), SMALL, on_unreadable=told.append)
    assert len(told[0]) == 4  # all are named before it stops


@pytest.mark.parametrize(("count", "stops"), [(1, True), (19, True), (20, False)])
def test_one_unreadable_picture_stops_fewer_than_twenty(count, stops, image_folder):
    cut_short(image_folder / "class0" / "0.png")
    source = folder_source(image_folder).subset(range(count))  # class0/0.png comes first
    if stops:
        with pytest.raises(SnapvitError, match=r"class0/0.png: cannot be read as an image .*Mend or remove it"):
            prepare(source, SMALL)
    else:
        assert len(prepare(source, SMALL)) == 19


def test_missing_pictures_of_a_list_are_counted_as_unreadable(image_folder, tmp_path):
    names = [f"pictures/class{i % 5}/{i}.png" for i in range(39)]
    (tmp_path / "list.txt").write_text("\n".join([*names, "pictures/gone.png"]))
    images = prepare(list_source(tmp_path / "list.txt"), SMALL)
    assert images.unreadable == (str(tmp_path / "pictures" / "gone.png"),)
    assert (images.fingerprint["images"], images.fingerprint["unreadable"]) == (39, 1)


def test_batches_are_normalised_pixels_in_order(image_folder):
    preprocessing = Preprocessing(input_size=(3, 16, 16), mean=(0.5,) * 3, std=(0.25,) * 3)
    images = prepare(folder_source(image_folder), preprocessing)
    batches = list(images.batches(25))
    assert [len(batch) for batch in batches] == [25, 25, 10]
    joined = torch.from_numpy(np.concatenate(batches))
    expected = (torch.from_numpy(images.pixels).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    assert torch.allclose(joined, expected, atol=1e-6)


def test_images_of_another_size_are_read_again_and_not_resized_twice(image_folder):
    source = folder_source(image_folder)
    cut_short(Path(source.title(3)))
    images = prepare(source, SMALL)
    larger = images.at((40, 24))
    assert images.at((16, 16)) is images
    assert larger.preprocessing == SMALL.at((40, 24))
    assert np.array_equal(larger.pixels, prepare(source, SMALL.at((40, 24))).pixels)
    assert np.array_equal(larger.labels, images.labels)
    assert (larger.unreadable, larger.source, larger.classes) == (images.unreadable, images.source, images.classes)
    assert np.array_equal(larger.at((16, 16)).pixels, images.pixels)


def test_some_of_the_images_stay_the_same_ones_in_another_size(image_folder):
    images = prepare(folder_source(image_folder), SMALL)
    whole = images.at((24, 24)).pixels
    assert np.array_equal(images.only(slice(5, None)).first(7).at((24, 24)).pixels, whole[5:12])
    assert np.array_equal(images.only([9, 2]).at((24, 24)).labels, images.labels[[9, 2]])


def test_one_other_size_is_decoded_once(image_folder):
    opened = []
    source = folder_source(image_folder)
    counting = replace(source, open=lambda i: opened.append(i) or source.open(i))
    images = prepare(counting, SMALL)
    opened.clear()
    assert np.array_equal(images.first(2).at((24, 24)).pixels, images.at((24, 24)).first(2).pixels)
    assert len(opened) == source.count


def test_pixels_without_a_source_have_one_size(image_folder):
    images = Images(np.zeros((2, 16, 16, 3), np.uint8), None, SMALL, "zeros")
    assert images.at((16, 16)) is images
    with pytest.raises(SnapvitError, match="zeros: given as pixels, which have one size"):
        images.at((8, 8))
