"""Where images come from: list files, .npz files and the Hugging Face hub, with clear words about bad ones."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from snapvit_export.calibration.hub import from_hub, hf_source
from snapvit_export.calibration.list_file import list_source
from snapvit_export.calibration.npz import npz_source
from snapvit_export.calibration.open_source import open_source
from snapvit_export.calibration.source import UnreadableImage
from snapvit_export.errors import MissingDependency, SnapvitError, UsageError

PIXELS = np.random.default_rng(0).integers(0, 255, (6, 9, 7, 3), np.uint8)


@pytest.fixture
def small_set(datasets):
    """Six pictures of two kinds, beside columns that are neither."""
    features = {"id": datasets.Value("int64"), "picture": datasets.Image(), "note": datasets.Value("string")}
    features["kind"] = datasets.ClassLabel(names=["cat", "dog"])
    columns = {"id": range(6), "note": ["x"] * 6, "kind": [0, 1, 1, 0, 1, 0]}
    columns["picture"] = [Image.fromarray(pixels) for pixels in PIXELS]
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def pixels_of(source):
    return np.stack([np.asarray(source.open(i)) for i in range(source.count)])


def test_each_data_value_opens_its_own_kind(image_folder, tmp_path):
    (tmp_path / "some.LST").write_text("pictures/class1/1.png\n")
    np.savez(tmp_path / "some.npz", images=PIXELS)
    image_folder.rename(tmp_path / "folder.npz")  # a folder is a folder, whatever it is called
    assert open_source("digits").count == 1297
    assert open_source(str(tmp_path / "some.LST")).count == 1
    assert open_source(str(tmp_path / "some.npz")).count == 6
    assert open_source(str(tmp_path / "folder.npz")).count == 60


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("absent", "no such image folder"),
        ("absent.npz", "no such .npz file"),
        ("absent.txt", "no such list file"),
        ("absent.lst", "no such list file"),
        ("notes.csv", r"holds no images. Give --data a folder, a .txt or .lst list, or an .npz file"),
    ],
)
def test_what_is_not_there_or_not_a_source_is_named(data, says, tmp_path):
    (tmp_path / "notes.csv").write_text("a,b")
    with pytest.raises(SnapvitError, match=f"{data}: {says}"):
        open_source(str(tmp_path / data))


def test_an_empty_data_value_is_not_the_current_folder():
    with pytest.raises(UsageError, match="--data is empty"):
        open_source("")


def test_a_list_names_pictures_beside_it_or_anywhere(image_folder, tmp_path):
    first, second = image_folder / "class1" / "1.png", image_folder / "class2" / "2.png"
    (tmp_path / "list.txt").write_text(f"# chosen\r\n\r\npictures/class1/1.png\r\n{second}\r\n")
    source = list_source(tmp_path / "list.txt")
    assert source.labels is None
    assert [source.open(i).tobytes() for i in range(source.count)] == [
        Image.open(path).convert("RGB").tobytes() for path in (first, second)
    ]
    assert [source.title(i) for i in range(2)] == [str(first), str(second)]


def test_labels_of_a_list_are_names_in_alphabetical_order_or_class_numbers(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("a b.png\twild dog\nc.png\tcat\nd.png\t10\n")
    source = list_source(path)
    assert (source.labels, source.classes) == ([2, 1, 0], ["10", "cat", "wild dog"])
    path.write_text("a.png\t10\nb.png\t2\n")
    source = list_source(path)
    assert (source.labels, len(source.classes)) == ([10, 2], 11)


def test_a_picture_named_twice_in_a_list_counts_once(tmp_path):
    (tmp_path / "list.txt").write_text("a.png\tcat\nb.png\tdog\n./a.png\tcat\n")
    source = list_source(tmp_path / "list.txt")
    assert (source.count, source.labels) == (2, [0, 1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "list.txt: names no images"),
        (b"\n# only words\n", "list.txt: names no images"),
        (b"a.png\tcat\nb.png\n", "list.txt, line 2: labels are on some lines only"),
        (b"a.png\nb.png\tcat\n", "list.txt, line 2: labels are on some lines only"),
        (b"a.png\tcat\na.png\tdog\n", "list.txt, line 2: a.png has another label than before"),
        (b"\na.png\tcat\t3\n", "list.txt, line 2: is not a path"),
        (b"a.png\t999999\n", "list.txt: label 999999 is not a class number"),
        (b"\x89PNG\xff\xfe", "list.txt: not a text file in UTF-8"),
    ],
)
def test_bad_lists_say_what_and_where(content, says, tmp_path):
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(SnapvitError, match=says):
        list_source(tmp_path / "list.txt")


def test_a_list_opens_though_pictures_are_missing_and_names_them_then(tmp_path):
    (tmp_path / "list.txt").write_text("gone.png\n")
    source = list_source(tmp_path / "list.txt")
    with pytest.raises(UnreadableImage, match="gone.png: cannot be read as an image .no such file"):
        source.open(0)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_gives_its_pixels_and_labels(save, tmp_path):
    save(tmp_path / "x.npz", images=PIXELS, labels=np.array([2, 0, 1, 1, 0, 2], np.uint8))
    source = npz_source(tmp_path / "x.npz")
    assert np.array_equal(pixels_of(source), PIXELS)
    assert (source.labels, source.classes) == ([2, 0, 1, 1, 0, 2], ["0", "1", "2"])


def test_a_grey_npz_without_labels_becomes_rgb(tmp_path):
    np.savez(tmp_path / "x.npz", images=PIXELS[..., 0])
    source = npz_source(tmp_path / "x.npz")
    assert np.array_equal(pixels_of(source), np.repeat(PIXELS[..., :1], 3, axis=-1))
    assert source.labels is None


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (dict(pictures=PIXELS), "holds no array called images"),
        (dict(images=PIXELS / 255), r"images are float64 of shape \(6, 9, 7, 3\). Save them as uint8"),
        (dict(images=PIXELS.transpose(0, 3, 1, 2)), r"images are uint8 of shape \(6, 3, 9, 7\)"),
        (dict(images=PIXELS[0]), r"images are uint8 of shape \(9, 7, 3\)"),
        (dict(images=PIXELS[:0]), "holds no pixels"),
        (dict(images=np.array([b"a", None], object)), "Object arrays cannot be loaded"),
        (dict(images=PIXELS, labels=np.array(["cat"] * 6, object)), "Object arrays cannot be loaded"),
        (dict(images=PIXELS, labels=np.zeros(6)), r"labels are float64 of shape \(6,\)"),
        (dict(images=PIXELS, labels=np.zeros(5, int)), r"labels are int64 of shape \(5,\)"),
        (dict(images=PIXELS, labels=np.full(6, -1)), "label -1 is not a class number"),
    ],
)
def test_bad_arrays_say_what_they_are_and_what_they_should_be(arrays, says, tmp_path):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(SnapvitError, match=f"x.npz: .*{says}"):
        npz_source(tmp_path / "x.npz")


def test_damaged_npz_files_are_named(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, images=PIXELS)
    whole = bytearray(path.read_bytes())
    whole[300] ^= 0xFF
    for content in (b"", b"no zip", bytes(whole[:400]), bytes(whole)):
        path.write_bytes(content)
        with pytest.raises(SnapvitError, match=r"x.npz: (is not an .npz file|cannot be read as an .npz file)"):
            npz_source(path)


def test_a_data_set_gives_its_image_and_class_columns(small_set):
    source = hf_source(small_set, "hf:small")
    assert np.array_equal(pixels_of(source), PIXELS)
    assert (source.labels, source.classes) == ([0, 1, 1, 0, 1, 0], ["cat", "dog"])
    assert source.title(3) == "hf:small image 3"


def test_a_data_set_without_known_labels_has_none(small_set, datasets):
    assert hf_source(small_set.remove_columns("kind"), "hf:small").labels is None
    features = small_set.features
    secret = small_set.remove_columns("kind").add_column("kind", [-1] * 6).cast(features)
    assert hf_source(secret, "hf:small").labels is None


def test_a_data_set_without_images_is_refused(small_set):
    with pytest.raises(SnapvitError, match=r"hf:small: has no column of images \(it has: id, note, kind\)"):
        hf_source(small_set.remove_columns("picture").select_columns(["id", "note", "kind"]), "hf:small")
    with pytest.raises(SnapvitError, match="hf:small: holds no images"):
        hf_source(small_set.select([]), "hf:small")


def test_damaged_and_empty_rows_of_a_data_set_are_unreadable_pictures(datasets):
    features = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": b"no picture", "path": None}, None]
    source = hf_source(datasets.Dataset.from_dict({"image": rows}, features=features), "hf:bad")
    for i, reason in ((0, "cannot identify image file"), (1, "it is empty")):
        with pytest.raises(UnreadableImage, match=f"hf:bad image {i}: cannot be read as an image .{reason}"):
            source.open(i)


def test_a_data_set_is_loaded_by_name_and_split(small_set, tmp_path):
    folder = tmp_path / "owner" / "small"
    folder.mkdir(parents=True)
    small_set.to_parquet(folder / "train.parquet")
    small_set.select(range(2)).to_parquet(folder / "test.parquet")
    train, test = open_source("hf:owner/small"), open_source("hf:owner/small:test")
    assert (train.name, train.count, test.name, test.count) == ("hf:owner/small:train", 6, "hf:owner/small:test", 2)
    assert np.array_equal(pixels_of(train), PIXELS)
    assert train.labels == [0, 1, 1, 0, 1, 0]
    with pytest.raises(SnapvitError, match=r"hf:owner/small:nowhere: has no split 'nowhere' \(it has: train, test\)"):
        from_hub("owner/small:nowhere")


def test_a_data_set_that_cannot_be_fetched_is_one_line(datasets, tmp_path):
    code = (
        "from snapvit_export.calibration.open_source import open_source\n"
        "from snapvit_export.errors import SnapvitError\n"
        "try: open_source('hf:nobody/nothing')\n"
        "except SnapvitError as error: print(error)\n"
    )
    offline = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline)
    assert result.stderr == ""
    assert result.stdout.startswith("hf:nobody/nothing:train: cannot be fetched (")
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.parametrize("name", ["", "../x", "/x", "a/b/c", "a/", "a:", "a b", ":train"])
def test_names_that_no_data_set_can_have(name):
    with pytest.raises(UsageError, match="is not the name of a dataset"):
        from_hub(name)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it now fails
    with pytest.raises(MissingDependency) as caught:
        open_source("hf:owner/small")
    assert str(caught.value) == (
        "hf:owner/small:train needs datasets, which is not installed. Try: pip install 'snapvit-export[data]'"
    )
