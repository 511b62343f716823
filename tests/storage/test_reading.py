"""Files that are none: pipes, devices, folders and terabytes are refused before they are opened, by whatever reads."""

import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest

from snapvit_export.calibration.dataset import open_dataset
from snapvit_export.calibration.list_file import list_source
from snapvit_export.calibration.npz import npz_source
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate.exported_model import read_info
from snapvit_export.evaluate.features import Features
from snapvit_export.family.class_names import read_labels
from snapvit_export.family.folder import read_family
from snapvit_export.graph.read import read_graph
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.import_scores import import_scores
from snapvit_export.prune.models.checkpoints import read_weights
from snapvit_export.prune.models.load import load_model
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.storage import reading
from snapvit_export.storage.json import read_json
from snapvit_export.storage.reading import check_readable


def voc(lists: Path) -> object:
    """Read the lists of a Pascal VOC folder, the first of which is the file in question."""
    root = lists.parent / "voc"
    for part in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / part).mkdir(parents=True)
    lists.rename(root / "ImageSets" / "Segmentation" / "train.txt")
    return open_dataset(str(root))


def folder_of(name: str, read: object) -> object:
    """Read a folder whose description is the file in question."""

    def inner(path: Path) -> object:
        path.rename(path.with_name(name))
        return read(path.parent)

    return inner


READERS = {
    "json": lambda path: read_json(path, Preprocessing),
    "profile": FamilyProfile.load,
    "manifest": folder_of("manifest.json", read_family),
    "elastic": folder_of("elastic.json", Elastic.load),
    "model": folder_of("model.json", lambda folder: load_model(str(folder))),
    "ranking": Ranking.load,
    "features": Features.load,
    "graph": read_graph,
    "exported file": lambda path: read_info(path.rename(path.with_suffix(".onnx"))),
    "list": list_source,
    "list of VOC": voc,
    "npz": npz_source,
    "class names": read_labels,
    "checkpoint": read_weights,
    "safetensors": lambda path: read_weights(path.rename(path.with_suffix(".safetensors"))),
    "scores": import_scores,
}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 41)  # takes no space


@pytest.fixture
def soon():
    """End a test that waits for ever at a pipe."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(120)  # far longer than any of them takes, also on a busy machine
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("make", [make_pipe, make_device, make_huge], ids=["pipe", "device", "huge"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_in_one_line(reader, make, tmp_path):
    make(tmp_path / "x")
    with pytest.raises(SnapvitError) as refused:
        READERS[reader](tmp_path / "x")
    assert "\n" not in str(refused.value)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_pipe, "it is a pipe"),
        (make_device, "it is a device"),
        (Path.mkdir, "it is a folder"),
        (make_huge, "2048 GB"),
    ],
)
def test_the_line_says_what_it_is_instead(make, says, tmp_path):
    make(tmp_path / "x")
    with pytest.raises(SnapvitError, match=f"x: cannot be read: .*{says}.* Give "):
        check_readable(tmp_path / "x", 1 << 30)


def test_the_bound_itself_is_taken_and_what_is_missing_is_left_to_who_opens_it(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    check_readable(tmp_path / "x", 100)
    check_readable(tmp_path / "missing", 100)
    with pytest.raises(SnapvitError, match="it has 100 bytes, more than the 99 bytes"):
        check_readable(tmp_path / "x", 99)
    with pytest.raises(SnapvitError, match="no file can have this name"):
        check_readable("a\0b", 99)


@pytest.mark.parametrize("read", [npz_source, read_weights, import_scores])
def test_archives_that_unpack_to_more_than_there_is_memory_are_refused(read, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "memory_bytes", lambda: 1_000_000)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", bytes(2_000_000))
    assert (tmp_path / "x.npz").stat().st_size < 10_000
    with pytest.raises(SnapvitError, match="x.npz: cannot be read: it unpacks to 1.907 MB, this machine has"):
        read(tmp_path / "x.npz")


def test_a_compressed_archive_that_fits_is_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", images=np.zeros((2, 300, 300, 3), np.uint8))
    assert npz_source(tmp_path / "x.npz").count == 2


@pytest.mark.usefixtures("soon")
def test_commands_refuse_pipes(snapvit, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "pipe.txt").symlink_to(pipe)
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "manifest.json").symlink_to(pipe)
    for words in (
        ("inspect", pipe),
        ("report", tmp_path / "family"),
        ("profile", tmp_path / "family"),
        ("choose", tmp_path / "family", "--budget", "9ms", "--profile", pipe),
        ("validate", tmp_path / "family", "--profile", pipe),
        ("fleet", tmp_path / "family", "--budget", f"{pipe}=9ms"),
        ("import-scores", pipe, "--out", tmp_path / "out"),
        ("rank", "bundled", "--data", tmp_path / "pipe.txt", "--out", tmp_path / "out"),
        ("export", "--sparsity", "0.3", "--ranking", pipe, "--out", tmp_path / "out"),
    ):
        outcome = snapvit(*words)
        assert outcome.code in (1, 2), words
        assert "pipe" in outcome.error_line or "manifest.json" in outcome.error_line
    assert not (tmp_path / "out").exists()
