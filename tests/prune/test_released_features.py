"""Files of features of the released SnapViT code: read, written, and refused where they are damaged."""

import numpy as np
import pytest
import torch

from helpers.models import description
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.evaluate.features import Features, MadeBy, Split
from snapvit_export.prune.released_features import read_released_features, write_released_features


def part(count: int, seed: int, width: int = 6) -> dict:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 3, count)
    features = np.eye(3, width)[targets] + 0.2 * rng.normal(size=(count, width))
    return {"features": torch.tensor(features, dtype=torch.float32), "targets": torch.tensor(targets)}


def released(merge: bool = True) -> dict:
    return {"train": part(60, 0), "valid": part(20, 1), "test": part(30, 2), "merge_train_valid": merge}


@pytest.mark.parametrize("merge", [True, False])
def test_a_file_comes_back_as_it_was(merge, tmp_path):
    made = released(merge)
    torch.save(made, tmp_path / "f.pt")
    features = read_released_features(tmp_path / "f.pt")
    assert (features.merge, features.made_by, features.classes) == (merge, None, ("0", "1", "2"))
    write_released_features(features, tmp_path / "g.pt")
    again = torch.load(tmp_path / "g.pt", weights_only=True)
    assert list(again) == ["train", "valid", "test", "merge_train_valid"]
    assert again["merge_train_valid"] is merge
    for name in ("train", "valid", "test"):
        assert torch.equal(again[name]["features"], made[name]["features"])
        assert torch.equal(again[name]["targets"], made[name]["targets"])
    assert again["train"]["targets"].dtype == torch.int64


def test_half_precision_is_read(tmp_path):
    made = released()
    made["test"]["features"] = made["test"]["features"].half()
    made["test"]["targets"] = made["test"]["targets"].int()
    torch.save(made, tmp_path / "f.pt")
    test = read_released_features(tmp_path / "f.pt").test
    assert (test.features.dtype, test.targets.dtype) == (np.float32, np.int64)


def test_without_validation_images_a_fifth_of_the_training_images_becomes_them(tmp_path):
    features = read(tmp_path, {"train": part(60, 0), "test": part(30, 2)})
    assert (features.valid, features.merge) == (None, None)
    write_released_features(features, tmp_path / "g.pt")
    again = read_released_features(tmp_path / "g.pt")
    assert (len(again.train), len(again.valid), again.merge) == (48, 12, True)
    both = np.concatenate([again.train.features, again.valid.features])
    np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(features.train.features, axis=0))


def test_own_validation_images_are_not_merged(tmp_path):
    made_by = MadeBy(
        model="m", weights_sha256="ab", runtime="torch", preprocessing=description().preprocessing, images={}
    )
    own = read(tmp_path, released())
    write_released_features(Features(made_by, own.test, own.train, own.valid), tmp_path / "g.pt")
    assert read_released_features(tmp_path / "g.pt").merge is False
    with pytest.raises(SnapvitError, match="h.pt: such a file has labelled training and test images"):
        write_released_features(Features(made_by, Split(own.test.features)), tmp_path / "h.pt")
    with pytest.raises(SnapvitError, match="would not tell which weights and images its features are of"):
        own.save(tmp_path / "h.safetensors")


def read(folder, made) -> Features:
    torch.save(made, folder / "f.pt")
    return read_released_features(folder / "f.pt")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"test": None}, r"test is missing"),
        ({"extra": 1}, "holds extra, which does not belong"),
        ({"merge_train_valid": 3}, "merge_train_valid is neither true nor false"),
        ({"train": torch.zeros(3)}, "train does not have features and targets"),
        ({"train": {"features": torch.zeros(3, 6)}}, "train does not have features and targets"),
        ({"train": {"features": torch.zeros(3, 5), "targets": torch.zeros(3).long()}}, "train has 5 columns, test 6"),
        ({"train": {"features": [1.0], "targets": torch.zeros(1).long()}}, "features are not a plain tensor"),
        ({"train": {"features": torch.zeros(3).long(), "targets": torch.zeros(3).long()}}, "are int64 of shape"),
        ({"train": {"features": torch.zeros(3, 6), "targets": torch.zeros(2).long()}}, "one class for each of 3"),
        ({"train": {"features": torch.zeros(3, 6), "targets": torch.zeros(3)}}, "one class for each of 3"),
        ({"train": {"features": torch.full((1, 6), torch.inf), "targets": torch.zeros(1).long()}}, "6 values that are"),
        ({"train": {"features": torch.zeros(1, 6), "targets": torch.tensor([-1])}}, "go from -1 to -1: no class"),
        ({"train": {"features": torch.zeros(1, 6), "targets": torch.tensor([10**9])}}, "no class numbers"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(changes, says, tmp_path):
    made = {name: value for name, value in {**released(), **changes}.items() if value is not None}
    with pytest.raises(FileFormatError, match=f"f.pt.*{says}"):
        read(tmp_path, made)


def test_files_of_others_are_no_features(tmp_path):
    (tmp_path / "f.pt").write_bytes(b"nothing")
    with pytest.raises(FileFormatError, match=r"f\.pt: not a readable file of features"):
        read_released_features(tmp_path / "f.pt")
    torch.save(torch.zeros(3), tmp_path / "f.pt")
    with pytest.raises(FileFormatError, match=r"f\.pt: not a file of features of the released SnapViT code"):
        read_released_features(tmp_path / "f.pt")
    with pytest.raises(SnapvitError, match=r"g\.pt: no such file of features"):
        read_released_features(tmp_path / "g.pt")
