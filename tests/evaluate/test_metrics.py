"""What each measure promises: against other implementations, and on data with a known answer."""

import numpy as np
import pytest
import torch

from helpers.models import description
from snapvit_export.calibration.masks import UNKNOWN
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.evaluate.features import Features, MadeBy, Split
from snapvit_export.evaluate.head import columns_for, head_right
from snapvit_export.evaluate.linear import fit_probe, linear_right, set_aside
from snapvit_export.evaluate.segmentation import Tally, patch_shares, segment, upsampling
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.family.fidelity import agreeing, cosines
from snapvit_export.family.fidelity import measures as fidelity
from snapvit_export.storage.checksummed import save_checksummed
from snapvit_export.storage.json import to_json


def blobs(count, seed, classes=4, width=12, noise=1.5):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes, count)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return Split((centres[targets] + noise * rng.normal(size=(count, width))).astype(np.float32), targets)


def made_by(**changes):
    settings = dict(model="tiny", weights_sha256="ab", runtime="torch", preprocessing=description().preprocessing)
    return MadeBy(**{**settings, "images": {}, "classes": tuple("abcd"), **changes})


def make_features(valid=True):
    return Features(made_by(), blobs(50, 1), blobs(200, 2), blobs(40, 3) if valid else None)


def test_the_linear_probe_is_that_of_torch():
    """Same start, same order of images, same rate: the weights of every epoch, hence of the best."""
    train, valid, epochs, batch, rate = blobs(300, 0), blobs(100, 1), 7, 64, 0.05
    probe = fit_probe(train, valid, 4, seed=5, epochs=epochs, rate=rate, batch=batch)

    layer = torch.nn.Linear(12, 4)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    descent = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(descent, T_max=epochs)
    x, y = torch.from_numpy(train.features), torch.from_numpy(train.targets)
    rng = np.random.default_rng(5)
    states, accuracy = [], []
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(300))
        for rows in order.split(batch):
            descent.zero_grad()
            torch.nn.functional.cross_entropy(layer(x[rows]), y[rows]).backward()
            descent.step()
        cosine.step()
        states.append((layer.weight.detach().clone().numpy(), layer.bias.detach().clone().numpy()))
        guesses = layer(torch.from_numpy(valid.features)).argmax(1).numpy()
        accuracy.append(float((guesses == valid.targets).mean()))
    assert probe.valid_accuracy == pytest.approx(accuracy)
    assert probe.epoch == int(np.argmax(accuracy))
    np.testing.assert_allclose(probe.weight, states[probe.epoch][0], atol=2e-5)
    np.testing.assert_allclose(probe.bias, states[probe.epoch][1], atol=2e-5)


def test_the_best_state_is_returned_and_not_the_last():
    train, valid = blobs(40, 0, noise=4.0), blobs(60, 1, noise=4.0)
    probe = fit_probe(train, valid, 4, epochs=30, rate=0.5, batch=8)
    best = max(probe.valid_accuracy)
    assert probe.valid_accuracy[-1] < best  # otherwise this test would show nothing
    assert (probe.guesses(valid.features) == valid.targets).mean() == best
    assert probe.epoch == probe.valid_accuracy.index(best)


def test_a_fifth_of_the_training_images_is_set_aside_by_seed():
    train = blobs(200, 0)
    first, second = set_aside(train, seed=1)
    assert (len(first), len(second)) == (160, 40)
    rows = np.concatenate([first.features, second.features])
    assert np.array_equal(np.sort(rows, axis=0), np.sort(train.features, axis=0))
    assert np.array_equal(second.features, set_aside(train, seed=1)[1].features)
    assert not np.array_equal(second.features, set_aside(train, seed=2)[1].features)
    assert np.abs(np.bincount(second.targets) - np.bincount(train.targets) / 5).max() <= 1.5


@pytest.mark.parametrize("valid", [True, False])
def test_the_linear_probe_learns_what_can_be_learnt(valid):
    easy = [blobs(count, seed, noise=0.3) for count, seed in ((100, 1), (400, 2), (60, 3))]
    features = Features(made_by(), easy[0], easy[1], easy[2] if valid else None)
    assert linear_right(features).mean() > 0.95
    assert linear_right(features).shape == (100,)
    with pytest.raises(SnapvitError, match="a linear probe needs labelled images to train and to test on"):
        linear_right(Features(made_by(), easy[0]))


def test_features_survive_their_file(tmp_path):
    features = make_features()
    test = Split(features.test.features, features.test.targets, np.ones((50, 4), np.float32))
    features = Features(features.made_by, test, features.train, features.valid)
    features.save(tmp_path / "f.safetensors")
    again = Features.load(tmp_path / "f.safetensors")
    assert again.made_by == features.made_by
    for name, split in features.splits.items():
        for kind in ("features", "targets", "logits"):
            np.testing.assert_array_equal(getattr(again.splits[name], kind), getattr(split, kind))
    Features(features.made_by, features.test).save(tmp_path / "g.safetensors")
    assert list(Features.load(tmp_path / "g.safetensors").splits) == ["test"]


def test_train_and_valid_become_one():
    features = make_features()
    merged = features.merge_train_valid()
    assert (len(merged.train), merged.valid, len(merged.test)) == (240, None, 50)
    assert np.array_equal(merged.train.targets[200:], features.valid.targets)
    assert make_features(valid=False).merge_train_valid().valid is None


GOOD = {"test_features": np.ones((3, 2), np.float32), "test_targets": np.array([0, 1, 3])}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"test_features": None}, "lacks test_features"),
        ({"extra": np.ones(2)}, "holds extra, which does not belong"),
        ({"test_features": np.ones((3, 2))}, r"test_features are float64 of shape \(3, 2\)"),
        ({"test_features": np.ones(3, np.float32)}, r"test_features are float32 of shape \(3,\)"),
        ({"test_features": np.full((3, 2), np.nan, np.float32)}, "hold 6 values that are not finite"),
        ({"test_targets": np.array([0, 1])}, r"test_targets are int64 of shape \(2,\)"),
        ({"test_targets": np.array([0, 1, 4])}, "test_targets go from 0 to 4: not its classes"),
        ({"train_targets": np.array([0])}, "has train_targets without train_features"),
        ({"train_features": np.ones((1, 3), np.float32)}, "train_features has 3 columns, test_features 2"),
        ({"test_logits": np.ones((2, 4), np.float32)}, "test_logits has 2 rows for 3 images"),
    ],
)
def test_damaged_features_say_what_is_wrong(changes, says, tmp_path):
    arrays = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    save_checksummed(tmp_path / "f.safetensors", "snapvit-features", arrays, to_json(made_by()).decode())
    with pytest.raises(FileFormatError, match=f"f.safetensors: .*{says}"):
        Features.load(tmp_path / "f.safetensors")


def test_foreign_and_changed_files_are_no_features(tmp_path):
    path = tmp_path / "f.safetensors"
    save_checksummed(path, "snapvit-ranking", GOOD, "{}")
    with pytest.raises(FileFormatError, match="f.safetensors: not a snapvit-features file"):
        Features.load(path)
    make_features().save(path)
    changed = bytearray(path.read_bytes())
    changed[-3] ^= 1
    path.write_bytes(changed)
    with pytest.raises(FileFormatError, match="f.safetensors: damaged"):
        Features.load(path)
    path.write_bytes(b"x" * 40)
    with pytest.raises(FileFormatError, match="f.safetensors: not a readable safetensors file"):
        Features.load(path)
    with pytest.raises(SnapvitError, match="absent.safetensors: cannot be read"):
        Features.load(tmp_path / "absent.safetensors")


def test_the_head_is_judged_among_the_classes_of_the_data():
    logits = np.array([[9, 1, 5, 2], [9, 6, 5, 7], [0, 3, 2, 8]], np.float32)
    targets = np.array([1, 0, 0])  # of the data's classes c and d
    columns = columns_for(["d", "c"], 4, labels=["a", "b", "c", "d"])
    assert columns.tolist() == [3, 2]
    first, five = head_right(logits, targets, columns)
    assert first.tolist() == [True, True, True]
    assert five is None  # of two classes, five are always right
    first, _ = head_right(logits, np.array([0, 0, 3]), np.arange(4))
    assert first.tolist() == [True, True, True]


def test_top_five_is_one_of_the_first_five():
    logits = -np.arange(8, dtype=np.float32)[None].repeat(3, 0)  # the first outputs are the best
    first, five = head_right(logits, np.array([0, 4, 5]), np.arange(8))
    assert first.tolist() == [True, False, False]
    assert five.tolist() == [True, True, False]
    assert head_right(np.zeros((1, 8), np.float32), np.array([7]), np.arange(8))[1].tolist() == [False]  # no free ties
    with pytest.raises(SnapvitError, match="1 images have outputs that are not finite"):
        head_right(np.array([[np.nan] * 8, [0] * 8], np.float32), np.array([0, 0]), np.arange(8))


def test_a_file_names_the_outputs_of_a_head(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("n1 tench\nn2\tgold fish\nn3\n\n")
    assert columns_for(["n3", "n1"], 3, labels=["x", "y", "z"], classes_file=path).tolist() == [2, 0]
    assert columns_for(["n2\tgold fish", "n1 tench"], 3, classes_file=path).tolist() == [1, 0]
    assert columns_for(["anything", "else", "here"], 3).tolist() == [0, 1, 2]  # as many, and nobody names them


def test_a_class_is_named_by_its_whole_line_or_by_a_first_word_that_no_other_has(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_text("golden retriever\ngolden eagle\ntiger shark\ntiger\nn02123045 tabby, tabby cat\n")
    found = columns_for(["golden eagle", "tiger", "golden retriever", "n02123045"], 5, classes_file=path)
    assert found.tolist() == [1, 3, 0, 4]
    with pytest.raises(SnapvitError, match="class 'golden' of the data is not among .*classes.txt of the head"):
        columns_for(["golden"], 5, classes_file=path)


@pytest.mark.parametrize(
    ("classes", "outputs", "labels", "content", "says"),
    [
        (["a"], 0, [], None, "the model has no head"),
        (["a", "b"], 3, [], None, "the data has 2 classes, the head 3 outputs without names. Give --classes FILE"),
        (["a", "x"], 2, ["a", "b"], None, "class 'x' of the data is not among its labels of the head"),
        (["a"], 2, ["a"], None, "its labels: names 1 classes, the head has 2 outputs"),
        (["a"], 2, [], "a\nb\nc\n", "classes.txt: names 3 classes, the head has 2 outputs"),
        (["a"], 2, [], "a\na\n", "classes.txt, line 2: 'a' is on line 1 too"),
        (["a"], 2, [], "a\n\nb\n", "classes.txt, line 2: is empty"),
        (["a"], 2, [], "\n", "classes.txt: names no classes"),
        (["x"], 2, ["x", "y"], "a\nb\n", "class 'x' of the data is not among .*classes.txt of the head"),
    ],
)
def test_heads_that_do_not_suit_say_what_to_give(classes, outputs, labels, content, says, tmp_path):
    path = tmp_path / "classes.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SnapvitError, match=says):
        columns_for(classes, outputs, labels, path if content is not None else None)


def test_fidelity_is_cosine_and_agreement_by_image():
    dense = np.array([[1, 0, 0], [0, 2, 0], [0, 0, 3], [1, 1, 0]], float)
    other = np.array([[2, 0, 0], [0, -1, 0], [0, 3, 3], [1, 0.9, 0]], float)
    assert cosines(other, dense) == pytest.approx([1, -1, 0.5**0.5, 1.9 / (2 * 1.81) ** 0.5])
    assert agreeing(other, dense).tolist() == [True, False, False, True]
    found = fidelity(other, dense)
    assert found["agreement"] == pytest.approx((0.5, 0.25))
    assert found["cosine"][0] == pytest.approx(cosines(other, dense).mean())
    assert found["cosine"][1] == pytest.approx(cosines(other, dense).std(ddof=1) / 2)
    assert "agreement" not in fidelity(other, dense, classifies=False)
    assert Evaluation.of(found, 4, "here").error("agreement") == pytest.approx(0.25)
    same = fidelity(dense, dense)
    assert same["cosine"] == pytest.approx((1.0, 0.0))
    assert same["agreement"][0] == 1.0
    assert 0 < same["agreement"][1] < 0.25  # four images that agree prove little
    with pytest.raises(SnapvitError, match=r"shape \(4, 3\) cannot be compared with the dense model's \(3, 3\)"):
        fidelity(other, dense[:3])
    with pytest.raises(SnapvitError, match="not finite"):
        fidelity(other * np.nan, dense)


def test_upsampling_is_that_of_torch():
    for small, large in ((14, 224), (5, 35), (1, 8), (16, 16)):
        x = np.random.default_rng(0).normal(size=small).astype(np.float32)
        wanted = torch.nn.functional.interpolate(
            torch.from_numpy(x)[None, None], size=large, mode="linear", align_corners=False
        )
        np.testing.assert_allclose(upsampling(small, large) @ x, wanted[0, 0].numpy(), atol=1e-5)


def test_shares_of_a_patch_count_its_known_pixels():
    mask = np.array([[[0, 0, 1, 1, 9], [0, 2, 1, UNKNOWN, 9]]], np.uint8)  # the last column is covered by no patch
    assert patch_shares(mask, (1, 2), 3).tolist() == [[[0.75, 0, 0.25], [0, 0.75, 0]]]


def test_mean_iou_leaves_out_classes_that_no_mask_shows():
    both, masked, guessed = ([[2.0, 1, 0, 0]], [[4.0, 1, 0, 0]], [[2.0, 2, 1, 0]])
    tally = Tally(*map(np.array, (both, masked, guessed)))
    assert tally.miou() == pytest.approx((2 / 4 + 1 / 2) / 2)
    assert tally.standard_error() == 0


def test_the_error_of_the_mean_iou_is_that_of_drawing_other_images():
    """One class, every image the same size: the IoU is a mean of shares, whose standard error is known."""
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.2, 0.8, (400, 1))
    tally = Tally(100 * shares, np.full((400, 1), 100.0), 100 * shares)
    assert tally.standard_error(seed=1) == pytest.approx(shares.std() / 20, rel=0.15)
    assert tally.standard_error(seed=1) == tally.standard_error(seed=1)


def test_a_segmenter_reads_what_tokens_say():
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 3, (24, 6, 6))
    tokens = (np.eye(3)[coarse] + 0.1 * rng.normal(size=(24, 6, 6, 3))).astype(np.float32)  # the class, in noise
    masks = coarse.repeat(4, 1).repeat(4, 2).astype(np.uint8)
    masks[:, 0, :] = UNKNOWN
    tally = segment(tokens[:16], masks[:16], tokens[16:], masks[16:], 3)
    assert tally.miou() > 0.6  # edges are blurred by upsampling
    assert tally.masked.sum() == 8 * (24 * 24 - 24)
    nothing = segment(rng.normal(size=tokens[:16].shape).astype(np.float32), masks[:16], tokens[16:], masks[16:], 3)
    assert nothing.miou() < 0.35
    with pytest.raises(SnapvitError, match="pixels that count"):
        segment(tokens[:1], np.full_like(masks[:1], UNKNOWN), tokens[1:], masks[1:], 3)
