"""`snapvit evaluate FILE`: features that were kept, with no model and no images; and those of the released code."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.models import description
from snapvit_export.evaluate.features import Features, MadeBy, Split
from snapvit_export.evaluate.knn import nearest_neighbours
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.storage.json import from_json


def part(count: int, seed: int, shift: float = 0.0) -> Split:
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 3, count)
    features = np.eye(3, 6)[(targets + int(shift)) % 3] + 0.8 * rng.normal(size=(count, 6))
    return Split(features.astype(np.float32), targets)


def made() -> Features:
    """Validation images whose classes are all other ones: who learns from them does worse."""
    images = {"test": {"source": "pets", "images": 80, "unreadable": 0, "sha256": "ab"}}
    settings = dict(model="m", weights_sha256="ab", runtime="torch", preprocessing=description().preprocessing)
    test = part(80, 2)
    logits = np.eye(3, dtype=np.float32)[test.targets]
    test = Split(test.features, test.targets, logits)
    return Features(MadeBy(**settings, images=images, classes=("a", "b", "c")), test, part(60, 0), part(55, 1, shift=1))


def released(merge: bool | None) -> dict:
    features = made()
    found = {
        name: {"features": torch.from_numpy(split.features), "targets": torch.from_numpy(split.targets)}
        for name, split in features.splits.items()
    }
    return found if merge is None else {**found, "merge_train_valid": merge}


def read(outcome) -> Evaluation:
    assert outcome.code == 0, outcome.err
    return from_json(outcome.out, Evaluation, "stdout")


def knn_of(features: Features, merged: bool) -> float:
    bank = (features.merge_train_valid() if merged else features).train
    return nearest_neighbours(bank.features, bank.targets, features.test.features, features.test.targets)


def test_features_are_measured_as_when_they_were_made(snapvit, tmp_path):
    made().save(tmp_path / "f.safetensors")
    found = read(snapvit("evaluate", tmp_path / "f.safetensors", "--by", "knn,linear,head", "--json", "--quiet"))
    assert found.knn == knn_of(made(), merged=True)
    assert found.top1 == 1
    assert found.linear > 0.4
    assert (found.images, found.source) == (80, "pets")
    assert read(snapvit("evaluate", tmp_path / "f.safetensors", "--json", "--quiet")).measures == ("knn",)


def test_ours_are_measured_without_torch(tmp_path):
    made().save(tmp_path / "f.safetensors")
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'timm', 'sklearn', 'onnx')));"
        "from snapvit_export.cli.app import main; main()"
    )
    words = [sys.executable, "-c", program, "evaluate", str(tmp_path / "f.safetensors"), "--by", "knn,linear"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "k-NN" in done.stdout


@pytest.mark.parametrize(
    ("flag", "options", "merged"),
    [
        (True, [], True),
        (False, [], False),
        (None, [], True),
        (True, ["--no-merge-train-valid"], False),
        (False, ["--merge-train-valid"], True),
    ],
)
def test_the_flag_of_a_released_file_is_honoured_unless_told_otherwise(flag, options, merged, snapvit, tmp_path):
    assert knn_of(made(), True) < knn_of(made(), False) - 0.05  # otherwise nothing would be shown here
    torch.save(released(flag), tmp_path / "f.pt")
    found = read(snapvit("evaluate", tmp_path / "f.pt", "--by", "knn", *options, "--json", "--quiet"))
    assert found.knn == knn_of(made(), merged)
    assert found.source == str(tmp_path / "f.pt")


def test_a_merged_probe_learns_from_validation_images_too(snapvit, tmp_path):
    path = tmp_path / "f.safetensors"
    made().save(path)
    alone, merged, not_merged = (
        read(snapvit("evaluate", path, "--by", "linear", *options, "--json", "--quiet")).linear
        for options in ([], ["--merge-train-valid"], ["--no-merge-train-valid"])
    )
    assert alone == not_merged
    assert merged != alone


def test_features_are_written_for_the_released_code(snapvit, tmp_path):
    made().save(tmp_path / "f.safetensors")
    read(snapvit("evaluate", tmp_path / "f.safetensors", "--features", tmp_path / "f.pt", "--json", "--quiet"))
    written = torch.load(tmp_path / "f.pt", weights_only=True)
    wanted = released(False)
    assert written["merge_train_valid"] is False
    for name in ("train", "valid", "test"):
        assert torch.equal(written[name]["features"], wanted[name]["features"])
    again = snapvit("evaluate", tmp_path / "f.safetensors", "--features", tmp_path / "f.pt", "--quiet")
    assert (again.code, "is there already" in again.error_line) == (1, True)


def test_a_run_writes_them_too(snapvit, tmp_path):
    goal = tmp_path / "digits.pt"
    ran = read(snapvit("evaluate", "--by", "knn", "--images", 60, "--features", goal, "--json", "--quiet"))
    written = torch.load(goal, weights_only=True)
    assert {name: len(written[name]["targets"]) for name in ("train", "valid", "test")} == {
        "train": 48,
        "valid": 12,
        "test": 60,
    }
    assert read(snapvit("evaluate", goal, "--json", "--quiet")).knn == pytest.approx(ran.knn, abs=0.05)


def test_a_released_file_wants_training_images(snapvit, tmp_path):
    outcome = snapvit("evaluate", "--by", "head", "--features", tmp_path / "digits.pt", "--quiet")
    assert (outcome.code, "has training images, and none are run here" in outcome.error_line) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--data", "digits"], 2, "holds features: no model is run and no image read. Leave --data out"),
        (["--runtime", "openvino"], 2, "Leave --runtime out"),
        (["--images", "5"], 2, "--images chooses images, and the features"),
        (["--features", "g.safetensors"], 2, "Give --features FILE.pt to write them as SnapViT does"),
        (["--by", "segment"], 2, "has embeddings, and --by segment reads patch tokens. Give a model and --data"),
        (["--by", "in-context"], 2, "and --by in-context reads patch tokens"),
    ],
)
def test_what_a_file_of_features_cannot_do_is_one_line(options, code, says, snapvit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made().save(tmp_path / "f.safetensors")
    outcome = snapvit("evaluate", "f.safetensors", *options, "--quiet")
    assert (outcome.code, says in outcome.error_line) == (code, True), outcome.err


def test_what_a_file_has_too_little_for_is_one_line(snapvit, tmp_path):
    features = made()
    few = Split(features.train.features[:5], features.train.targets[:5])
    path = tmp_path / "f.safetensors"
    for test, train, by, says in (
        (Split(features.test.features), features.train, "knn", "its images have no labels"),
        (Split(features.test.features, features.test.targets), features.train, "head", "has no test_logits"),
        (features.test, None, "linear", "has no labelled training images"),
        (features.test, few, "knn", "5 training images, and k-NN needs 20"),
    ):
        Features(features.made_by, test, train).save(path)
        outcome = snapvit("evaluate", path, "--by", by, "--quiet")
        assert (outcome.code, says in outcome.error_line) == (1, True), outcome.err
    missing = snapvit("evaluate", tmp_path / "absent.pt", "--quiet")
    assert "absent.pt: no such file of features" in missing.error_line
