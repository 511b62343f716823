"""Features of images that stream through a model: the same as if all were in memory, in bounded memory, resumable."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from helpers.models import make_model
from snapvit_export.calibration.dataset import Dataset
from snapvit_export.calibration.decode import UnreadableImage
from snapvit_export.calibration.images import Images, prepare
from snapvit_export.calibration.source import Source
from snapvit_export.calibration.streamed import StreamedImages
from snapvit_export.errors import SnapvitError
from snapvit_export.evaluate import extraction
from snapvit_export.evaluate.evaluator import EvalOptions, Evaluator
from snapvit_export.evaluate.features import Features
from snapvit_export.progress import Silent

PREPROCESSING = make_model().preprocessing
SIDE = PREPROCESSING.input_size[1]
EVERY = 4  # images of a batch


class Colours:
    """An extractor that counts what it runs: an image is its mean colour, and the sum of its batch."""

    name, weights_sha256, runtime, batch = "colours", "none", "numpy", EVERY
    preprocessing, labels, outputs = PREPROCESSING, (), 0

    def __init__(self, stops_after: int | None = None) -> None:
        self.ran, self.largest, self._stops_after = 0, 0, stops_after

    def features(self, images: Images, progress) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for batch in images.batches(self.batch):
            if self._stops_after is not None and self.ran >= self._stops_after:
                raise KeyboardInterrupt
            self.ran += len(batch)
            means = batch.mean((2, 3))
            found.append(np.concatenate([means, np.broadcast_to(means.sum(0), means.shape)], 1))
        self.largest = max(self.largest, len(images))
        features = np.concatenate(found).astype(np.float32)
        return features, features[:, :2]

    def tokens(self, images, progress):
        raise AssertionError("nobody asked for tokens")


def noise(count: int, name: str = "noise", damaged: tuple[int, ...] = ()) -> Source:
    """Images of two classes that are made when they are opened."""

    def opened(i: int) -> Image.Image:
        if i in damaged:
            raise UnreadableImage(f"{name}/{i}: cannot be read as an image")
        pixels = np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        return Image.fromarray(pixels)

    return Source(name, opened, count, lambda i: f"{name}/{i}", [i % 2 for i in range(count)], ("a", "b"))


def data(count: int = 90, damaged: tuple[int, ...] = ()) -> Dataset:
    return Dataset("noise", noise(count, "train", damaged), None, noise(30, "test"))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(extraction, "CHUNK", 8)
    monkeypatch.setattr(extraction, "CHUNKS_OF_A_PART", 2)


def features(model: Colours, dataset: Dataset, options: EvalOptions, streamed: bool) -> Features:
    evaluator = Evaluator.prepare(model, dataset, options, Silent(), streamed=streamed)
    return evaluator.features(model, Silent())


KNN = EvalOptions(by=("knn",))


def assert_equal(one: Features, other: Features) -> None:
    assert one.made_by == other.made_by
    assert list(one.splits) == list(other.splits)
    for name, split in one.splits.items():
        for kind in ("features", "targets", "logits"):
            np.testing.assert_array_equal(getattr(split, kind), getattr(other.splits[name], kind))


@pytest.mark.parametrize("damaged", [(), (0, 3, 70)])
def test_streamed_features_are_those_of_images_in_memory(damaged):
    """To the last bit, also where a batch of the second half has moved up for an unreadable image."""
    model, dataset = Colours(), data(damaged=damaged)
    held, streamed = (features(model, dataset, KNN, way) for way in (False, True))
    assert_equal(held, streamed)
    assert len(streamed.train) == 90 - len(damaged)
    assert streamed.made_by.images["train"] == prepare(dataset.train, PREPROCESSING).fingerprint
    assert model.largest == 8
    assert streamed.train.logits is None
    assert streamed.test.logits.shape == (30, 2)


def test_too_many_unreadable_images_are_refused():
    with pytest.raises(SnapvitError, match=r"cannot be read as an image \(9 of 90 images unreadable; up to 5%"):
        features(Colours(), data(damaged=tuple(range(0, 90, 10))), KNN, streamed=True)


def test_images_that_change_between_two_passes_are_refused():
    shift = [0]
    source = noise(20)
    moving = Source(source.name, lambda i: source.open(i + shift[0]), 20, source.title)
    images = StreamedImages(moving, PREPROCESSING)
    assert len(images) == 20
    shift[0] = 1
    with pytest.raises(SnapvitError, match="noise: its images changed while they were read"):
        list(images.chunks(8))


def test_memory_does_not_grow_with_the_images():
    """Of 600 images, 1.8 MB decoded, never more than some chunks are there."""
    each = 3 * SIDE * SIDE
    few, many = (peak(count) for count in (60, 600))
    assert many - few < 60 * each  # features, labels and names of 540 further images; decoded they are 540 * each


def peak(count: int) -> int:
    dataset = data(count)
    tracemalloc.start()
    try:
        features(Colours(), dataset, KNN, streamed=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_interrupted_run_goes_on_from_its_parts(tmp_path):
    goal = tmp_path / "f.safetensors"
    options = EvalOptions(by=("knn",), features=goal)
    with pytest.raises(KeyboardInterrupt):
        features(Colours(stops_after=60), data(), options, streamed=True)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == [f"f.safetensors.train-0000{i}.part" for i in range(3)]  # 48 images
    model = Colours()
    found = features(model, data(), options, streamed=True)
    assert model.ran == 90 + 30 - 48
    assert [path.name for path in tmp_path.iterdir()] == ["f.safetensors"]
    assert_equal(found, features(Colours(), data(), KNN, streamed=True))
    assert_equal(Features.load(goal), found)


def test_parts_of_other_images_or_weights_are_not_taken(tmp_path):
    options = EvalOptions(by=("knn",), features=tmp_path / "f.safetensors")
    with pytest.raises(KeyboardInterrupt):
        features(Colours(stops_after=60), data(), options, streamed=True)
    begun = {path: path.read_bytes() for path in tmp_path.iterdir()}
    other = Colours()
    other.weights_sha256 = "others"
    features(other, data(), options, streamed=True)
    assert other.ran == 120
    for path, content in begun.items():
        path.write_bytes(content)
    (tmp_path / "f.safetensors").unlink()
    begun_parts = sorted(begun)
    begun_parts[0].write_bytes(b"damaged, and no part of ours any more")
    with pytest.raises(SnapvitError, match="is there already, and a part of features would take its place"):
        features(Colours(), data(), options, streamed=True)


def test_kept_features_are_reused_and_only_hashed(tmp_path):
    options = EvalOptions(by=("knn",), features=tmp_path / "f.safetensors")
    first = features(Colours(), data(), options, streamed=True)
    model = Colours()
    assert_equal(features(model, data(), options, streamed=True), first)
    assert model.ran == 0
    features(model, data(count=91), options, streamed=True)
    assert model.ran == 121


def test_images_that_are_streamed_are_not_in_memory():
    held = Evaluator.prepare(Colours(), data(), KNN, Silent(), streamed=False)
    assert all(isinstance(part, Images) for part in held.images.values())
    streamed = Evaluator.prepare(Colours(), data(), KNN, Silent(), streamed=True)
    assert all(isinstance(part, StreamedImages) for part in streamed.images.values())
    with pytest.raises(ValueError, match="streamed images are not in memory"):
        _ = streamed.test
