"""`--model-arg` and `--classes`: what a user's own model needs beside its weights."""

import json

import pytest
import timm
from safetensors.torch import save_file

from helpers.images import make_image_folder
from helpers.models import randomise
from snapvit_export.cli.parsing import model_arguments
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.class_names import read_labels

SHAPE = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=3)
ARGUMENTS = [f"--model-arg={name}={SHAPE[name]}" for name in ("embed_dim", "depth", "num_heads")]


def test_values_are_numbers_sizes_truths_and_words():
    given = ["img_size=384", "patch_size=8x16", "mlp_ratio=2.5", "norm_eps=1e-6", "qkv_bias=false", "global_pool=avg"]
    assert model_arguments(given) == {
        "img_size": 384,
        "patch_size": [8, 16],
        "mlp_ratio": 2.5,
        "norm_eps": 1e-6,
        "qkv_bias": False,
        "global_pool": "avg",
    }
    assert model_arguments(None) == {}


@pytest.mark.parametrize("given", [["img_size"], ["img_size="], ["=3"], ["a b=3"], ["depth=2", "depth=3"]])
def test_what_is_not_a_name_and_a_value_is_refused(given):
    with pytest.raises(UsageError, match="--model-arg"):
        model_arguments(given)


@pytest.fixture
def own(tmp_path):
    """A checkpoint of a model that somebody shaped, images, and the names of its classes."""
    module = randomise(timm.create_model("vit_tiny_patch16_224", **SHAPE), scale=0.2)
    save_file(module.state_dict(), tmp_path / "own.safetensors")
    make_image_folder(tmp_path / "images", 24)
    (tmp_path / "names.txt").write_text("ant\ngolden retriever\nn02123045 tabby, tabby cat\n\n")
    return tmp_path


def test_all_commands_take_a_model_of_another_shape(own, snapvit, short_timings):
    model = ["--checkpoint", own / "own.safetensors", *ARGUMENTS]
    common = ["--data", own / "images", "--images", "12", "--quiet"]
    name, family = "vit_tiny_patch16_224", own / "family"
    outcome = snapvit(
        *("export", "--model", name, *model, *common, "--sparsity", "0.3", "--out", family, "--json"),
        *("--classes", own / "names.txt"),
    )
    assert outcome.code == 0, outcome.err
    manifest = json.loads(outcome.out)
    assert manifest["labels"] == ["ant", "golden retriever", "n02123045 tabby, tabby cat"]
    assert manifest["anatomy"]["image"] == [32, 32]
    outcome = snapvit("rank", name, *model, *common, "--out", own / "r.safetensors")
    assert outcome.code == 0, outcome.err
    outcome = snapvit("pack", "--model", name, *model, *common, "--out", own / "elastic", "--no-fidelity")
    assert outcome.code == 0, outcome.err
    outcome = snapvit("evaluate", name, *model, "--data", own / "images", "--by", "knn", "--quiet")
    assert "img_size" not in outcome.err, outcome.err


def test_what_does_not_fit_is_one_line(own, snapvit):
    model = ["--model", "vit_tiny_patch16_224", "--checkpoint", own / "own.safetensors"]
    common = ["--data", own / "images", "--images", "12", "--quiet", "--sparsity", "0.3", "--out", own / "family"]
    for given, says in (
        (["--model-arg", "drop_rate=0.5"], "drop_rate is not an argument that shapes a model"),
        ([*ARGUMENTS, "--classes", own / "gone.txt"], "gone.txt: cannot be read as names of classes"),
    ):
        outcome = snapvit("export", *model, *common, *given)
        assert outcome.code == 1
        assert says in outcome.err
    (own / "names.txt").write_text("ant\nbee\n")
    outcome = snapvit("export", *model, *common, *ARGUMENTS, "--classes", own / "names.txt")
    assert (outcome.code, "names 2 classes, vit_tiny_patch16_224 has 3 outputs" in outcome.err) == (1, True)
    assert not (own / "family").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "names no classes"), ("a\n\nb\n", "line 2: is empty"), ("a\nb\na\n", "line 3: 'a' is on line 1 too")],
)
def test_names_that_say_nothing_are_refused(text, says, tmp_path):
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(SnapvitError, match=says):
        read_labels(tmp_path / "names.txt")
