"""`snapvit evaluate`: the bundled model, real models on real pictures, features kept and taken back, bad requests."""

import shutil
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.models import make_model, randomise
from helpers.rankings import random_ranking
from snapvit_export.calibration.dataset import open_dataset
from snapvit_export.calibration.images import Images
from snapvit_export.evaluate.evaluator import EvalOptions, Evaluator
from snapvit_export.evaluate.features import Features
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.progress import Silent
from snapvit_export.prune.models.extractor import TorchExtractor
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.storage.json import from_json


def read(outcome) -> Evaluation:
    assert outcome.code == 0, outcome.err
    return from_json(outcome.out, Evaluation, "stdout")


def evaluated(extractor, data, options):
    """One model by itself."""
    return Evaluator.prepare(extractor, data, options, Silent()).evaluate(extractor)


@pytest.fixture
def splits(tmp_path):
    """Thirty pictures of each of two colours to learn from, and ten to test on."""
    rng = np.random.default_rng(0)
    for split, each in (("train", 15), ("test", 5)):
        for name, level in (("dark", 40), ("light", 200)):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for i in range(each):
                noise = rng.integers(-30, 30, (40, 50, 3))
                Image.fromarray((level + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{i}.jpg")
                half = np.ones((40, 50), np.uint8)
                half[:, 25:] = 2
                Image.fromarray(half).save(folder / f"{i}.png")
    return tmp_path / "set"


def test_the_bundled_model_knows_its_digits(snapvit):
    found = read(snapvit("evaluate", "--by", "head", "--images", 120, "--json", "--quiet"))
    assert found.top1 >= 0.95
    assert found.top5 >= found.top1
    assert (found.images, found.source, found.knn) == (120, "digits", None)
    drawn = (120 * found.top1 + 2) / 124
    assert found.error("top1") == pytest.approx((drawn * (1 - drawn) / 120) ** 0.5)


def test_a_table_has_a_row_for_each_measure(snapvit, tiny_folder, splits):
    outcome = snapvit("evaluate", tiny_folder, "--data", splits, "--by", "linear,knn,segment", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line.split("  ")[0].strip() for line in outcome.out.splitlines()]
    assert [row for row in rows if row in ("k-NN", "linear probe", "mIoU", "top-1")] == ["k-NN", "linear probe", "mIoU"]
    assert "±" in outcome.out
    assert str(splits / "test") in outcome.out.replace("\n", "")


def test_even_random_features_tell_dark_from_light(snapvit, tiny_folder, splits):
    found = read(snapvit("evaluate", tiny_folder, "--data", splits, "--json", "--quiet"))
    assert found.measures == ("knn",)  # five outputs without names do not suit two classes
    assert found.knn > 0.8
    assert found.images == 10


def test_features_are_the_pre_logits_embedding(tiny_model):
    extractor, pixels = TorchExtractor(tiny_model), np.random.default_rng(0).integers(0, 255, (40, 32, 32, 3), np.uint8)
    images = Images(pixels, None, tiny_model.preprocessing, "noise")
    features, logits = extractor.features(images)
    module, batch = tiny_model.module, torch.from_numpy(tiny_model.preprocessing.normalise(pixels))
    with torch.no_grad():
        np.testing.assert_allclose(logits, module(batch).numpy(), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(module.head(torch.from_numpy(features)).numpy(), logits, rtol=1e-3, atol=1e-3)
        tokens = module.norm(module.blocks(module._pos_embed(module.patch_embed(batch))))
    assert extractor.tokens(images).shape == (40, 4, 4, 48)
    np.testing.assert_allclose(
        extractor.tokens(images).reshape(40, 16, 48), tokens[:, 1:].numpy(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_tiny_patch16_224", dict(global_pool="avg", fc_norm=True, class_token=False)),
        ("vit_tiny_patch16_224", dict(num_classes=0, reg_tokens=2)),
    ],
)
def test_other_families_give_features_and_tokens_too(architecture, changes):
    import timm

    kwargs = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=5) | changes
    module = randomise(timm.create_model(architecture, **kwargs))
    plain = make_model()
    extractor = TorchExtractor(Model(module, read_anatomy(module, "x"), plain.description))
    images = Images(np.full((3, 32, 32, 3), 99, np.uint8), None, plain.preprocessing, "grey")
    features, logits = extractor.features(images)
    assert features.shape == (3, 48)
    assert (logits is None) == (kwargs["num_classes"] == 0)
    tokens = extractor.tokens(images)
    assert tokens.shape == (3, 4, 4, 48)
    if architecture.startswith("deit"):
        both = module.forward_features(torch.from_numpy(plain.preprocessing.normalise(images.pixels)))[:, :2]
        np.testing.assert_allclose(features, both.mean(1).detach().numpy(), rtol=1e-3, atol=1e-3)


def test_features_are_kept_and_taken_back_only_for_the_same(snapvit, tiny_folder, splits, tmp_path):
    kept = tmp_path / "f.safetensors"
    command = ("evaluate", tiny_folder, "--data", splits, "--by", "knn,linear", "--features", kept, "--json")
    first = snapvit(*command)
    written = kept.read_bytes()
    assert "running tiny" in first.err
    stored = Features.load(kept)
    assert (len(stored.train), len(stored.test), stored.classes) == (30, 10, ("dark", "light"))
    again = snapvit(*command)
    assert "features are reused from" in again.err
    assert "running tiny" not in again.err
    assert (again.out, kept.read_bytes()) == (first.out, written)

    for suffix in ("jpg", "png"):
        (splits / "test" / "dark" / f"0.{suffix}").unlink()
    fewer = snapvit(*command)
    assert "is of other weights or images and will be replaced" in fewer.err
    assert read(fewer).images == len(Features.load(kept).test) == 9

    kept.write_bytes(b"somebody's work")
    assert "f.safetensors: is there already, and not a file of features" in snapvit(*command).error_line
    assert kept.read_bytes() == b"somebody's work"


def test_a_ranking_cuts_the_model_that_is_evaluated(snapvit, tiny_folder, tiny_model, splits, tmp_path):
    random_ranking(tiny_model.anatomy).save(tmp_path / "r.safetensors")
    kept = {}
    for name, options in (("dense", ()), ("s", ("--sparsity", 0.5)), ("f", ("--flops", 0.6))):
        ranking = ("--ranking", tmp_path / "r.safetensors") if options else ()
        file = tmp_path / f"{name}.safetensors"
        assert snapvit("evaluate", tiny_folder, "--data", splits, *ranking, *options, "--features", file).code == 0
        kept[name] = Features.load(file)
    assert len({features.made_by.weights_sha256 for features in kept.values()}) == 3
    assert not np.allclose(kept["s"].test.features, kept["dense"].test.features)


def test_without_training_images_only_the_head_is_asked(tiny_model, splits):
    data = open_dataset(str(splits))
    alone = type(data)(data.name, None, None, data.test)
    from snapvit_export.errors import SnapvitError

    with pytest.raises(SnapvitError, match="has no training images, which --by knn needs"):
        evaluated(TorchExtractor(tiny_model), alone, EvalOptions(by=("knn",)))
    with pytest.raises(SnapvitError, match="nothing can be evaluated. Give --classes FILE"):
        evaluated(TorchExtractor(tiny_model), alone, EvalOptions())


def flat(folder):
    """The same pictures without classes."""
    for path in [*folder.rglob("*.jpg"), *folder.rglob("*.png")]:
        shutil.move(path, path.parent.parent / f"{path.parent.name}-{path.name}")
    for path in [*folder.glob("*/dark"), *folder.glob("*/light")]:
        path.rmdir()
    return folder


class Brightness:
    """Another kind of extractor than torch: an image is its mean colour against grey, a token that of its patch."""

    name, weights_sha256, runtime, batch = "brightness", "none", "numpy", 4
    preprocessing, labels, outputs = make_model().preprocessing, (), 0

    def features(self, images, progress):
        return self.tokens(images, progress).mean((1, 2)), None

    def tokens(self, images, progress):
        patches = images.pixels.reshape(len(images), 4, 8, 4, 8, 3).mean((2, 4))  # (N, 4, 4, 3)
        return ((patches - 125) / 16).astype(np.float32)


def test_any_extractor_is_evaluated(splits):
    for path in splits.rglob("*.png"):  # a mask of what is bright
        picture = np.asarray(Image.open(path.with_suffix(".jpg")).convert("L"))
        Image.fromarray(np.where(picture > 125, 2, 1).astype(np.uint8)).save(path)
    found = evaluated(
        Brightness(), open_dataset(str(splits)), EvalOptions(by=("knn", "linear", "segment", "in-context"))
    )
    assert (found.knn, found.linear) == (1, 1)
    assert found.miou > 0.7
    assert found.in_context > 0.9
    assert found.images == 10


def test_masks_need_no_labels(snapvit, tiny_folder, splits):
    found = read(snapvit("evaluate", tiny_folder, "--data", flat(splits), "--by", "segment", "--json", "--quiet"))
    assert found.measures == ("miou",)
    assert found.error("miou") > 0


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--by", "guessing"], 2, "--by 'guessing' is not a metric. Known: head, knn, linear, segment, in-context"),
        (["--by", "knn", "--classes", "c.txt"], 2, "--classes names the outputs of the head, which is not evaluated"),
        (["--by", "segment", "--features", "f"], 2, "--features keeps embeddings, and --by segment needs none"),
        (["--sparsity", "0.3"], 2, "cut along a ranking. Give --ranking FILE"),
        (["--ranking", "r", "--sparsity", "0.3", "--flops", "0.5"], 2, "Give either --sparsity 0.3 or --flops 0.6"),
        (["--ranking", "r"], 2, "Give either --sparsity 0.3 or --flops 0.6"),
        (["--ranking", "r", "--sparsity", "1.5"], 2, "1.5"),
        (["--ranking", "absent", "--sparsity", "0.3"], 1, "absent: cannot be read"),
        (["--by", "segment", "--ignore", "255,x"], 2, "--ignore '255,x' is not understood"),
        (["--by", "segment", "--segmenter", "slow"], 2, "--segmenter 'slow' is not known. Known: quick, paper"),
        (["--by", "in-context", "--features", "f"], 2, "--by in-context needs none"),
        (["--by", "head"], 1, "the data has 2 classes, the head 5 outputs without names. Give --classes FILE"),
        (["--classes", "absent"], 1, "absent: cannot be read as names of classes"),
        (["--by", "knn", "--images", "4"], 1, "4 training images, and k-NN needs 20"),
        (["--by", "segment", "--ignore", "1,2"], 1, "masks need at least two classes"),
    ],
)
def test_requests_that_make_no_sense_are_one_line(options, code, says, snapvit, tiny_folder, splits):
    outcome = snapvit("evaluate", tiny_folder, "--data", splits, *options)
    assert (outcome.code, says in outcome.error_line) == (code, True), outcome.err


def test_data_that_does_not_suit_is_one_line(snapvit, tiny_folder, image_folder, splits):
    assert "needs images to be evaluated on. Give --data" in snapvit("evaluate", tiny_folder).error_line
    no_masks = snapvit("evaluate", tiny_folder, "--data", image_folder, "--by", "segment")
    assert "has no mask. Give --data a folder with masks" in no_masks.error_line
    unlabelled = snapvit("evaluate", tiny_folder, "--data", flat(splits), "--by", "linear")
    assert "has no labels, which --by linear needs" in unlabelled.error_line
    assert "has no labels, so nothing can be evaluated" in snapvit("evaluate", tiny_folder, "--data", splits).error_line


@pytest.fixture
def deit(shared):
    return load_deit(shared)


@cache
def load_deit(shared):
    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    return TorchExtractor(model)


def some_classes(folder, goal, classes):
    """A copy of the first classes of a data set."""
    for split in folder.iterdir():
        for path in sorted(split.iterdir())[:classes]:
            shutil.copytree(path, goal / split.name / path.name)
    return open_dataset(str(goal))


def test_deit_tells_the_classes_of_cifar10_apart(deit, shared, tmp_path):
    data = some_classes(shared / "data" / "cifar10", tmp_path / "cifar10", classes=4)
    found = evaluated(deit, data, EvalOptions(images=72))
    assert found.measures == ("knn",)
    assert found.knn > 0.5  # chance is 0.25


def test_the_head_of_deit_is_judged_among_200_classes(deit, shared):
    data = open_dataset(str(shared / "data" / "tiny-imagenet"))
    assert len(data.test.classes) == 200
    names = shared / "data" / "imagenet-sample" / "classes.txt"
    found = evaluated(deit, data, EvalOptions(by=("head",), classes=names, images=60))
    assert found.top1 > 0.4  # of pictures 64 pixels wide; chance is 0.005
    assert found.top5 > found.top1


def test_deit_sees_where_the_pet_is(deit, shared, tmp_path):
    data = some_classes(shared / "data" / "pets", tmp_path / "pets", classes=3)
    found = evaluated(deit, data, EvalOptions(by=("segment",), images=40, ignore=(255, 3)))
    assert found.miou > 0.75  # a constant guess has less than a half
    assert 0 < found.error("miou") < 0.05
