"""The models of the paper by timm name: known, built at their real sizes, and cut; and how they are read."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from helpers.images import make_image_folder
from helpers.models import randomise
from helpers.rankings import random_ranking
from snapvit_export.allocation.follow_model import FOR_EXTREME, follow_model
from snapvit_export.allocation.planner import PUBLISHED_PAIRS, Planner
from snapvit_export.allocation.recipe import SEARCH_PAIRS, make_settings
from snapvit_export.calibration.presets import Asked, preprocessing_for
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import SnapvitError
from snapvit_export.model.published import PUBLISHED, published
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.catalogue import catalogue
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.models.timm_modules import anatomy_without_weights

SMALL = dict(patch_size=16, embed_dim=48, depth=2, num_heads=4)
SHAPE = [f"--model-arg={name}={value}" for name, value in SMALL.items() if name != "patch_size"]


def test_the_catalogue_has_every_model_of_the_paper_with_its_real_size():
    found = {entry.name: entry for entry in catalogue("paper")}
    assert len(found) == len(PUBLISHED)
    for model in PUBLISHED:
        entry = found.get(model.timm) or found[model.timm.partition(".")[0]]
        assert entry.paper == ("--pool token --image-size 224" if "dinov3" in model.timm else "")
        assert preprocessing_for("x.onnx", entry.input_size, Asked(model.timm)).input_size[1:] == entry.input_size
    giant = found["vit_giantopt_patch16_siglip_256.v2_webli"]
    assert (giant.blocks, giant.heads, round(giant.params / 1e9, 2)) == (40, 16, 1.16)
    assert all(entry.paper is None for entry in catalogue("dinov2"))


def test_the_list_marks_them_and_says_how_the_paper_has_them(snapvit):
    found = snapvit("models", "vit_small_patch16*").out
    assert "DINO *" in found
    assert "* of the SnapViT paper" in found
    assert "DINOv3: there with --pool token --image-size 224" in found
    assert "*" not in snapvit("models", "vit_small_patch14*").out


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.timm)
def test_every_model_of_the_paper_is_planned_at_its_full_size_without_memory(model):
    """Planned and counted on the meta device: shapes are real, values are not. The next test has values."""
    options = {"global_pool": model.pool, "img_size": model.image_size}
    with torch.device("meta"):
        module = timm.create_model(model.timm, **{name: value for name, value in options.items() if value}).eval()
    anatomy = read_anatomy(module, model.timm)
    assert anatomy.image == ((model.image_size or int(timm.get_pretrained_cfg(model.timm).input_size[1])),) * 2
    planner = Planner(random_ranking(anatomy), anatomy)
    for mlp, head in PUBLISHED_PAIRS:
        plan = planner.pair(mlp, head)
        assert sum(plan.heads) == sum(anatomy.heads) - int(sum(anatomy.heads) * head)
        assert sum(plan.neurons) == sum(anatomy.neurons) - int(sum(anatomy.neurons) * mlp)
    assert anatomy.params(plan) < anatomy.params()


KINDS = [  # those left out differ from one of these in width and depth alone
    published(name)
    for name in (
        "vit_small_patch16_224.augreg_in21k_ft_in1k",
        "deit_base_distilled_patch16_224",
        "deit3_huge_patch14_224.fb_in22k_ft_in1k",
        "vit_small_patch16_224.dino",
        "vit_base_patch16_dinov3",
        "vit_huge_plus_patch16_dinov3",
        "vit_giantopt_patch16_siglip_256.v2_webli",
    )
]


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.timm)
def test_every_kind_of_model_of_the_paper_loads_and_is_cut_with_weights(model, tmp_path: Path):
    """Of its own architecture, pooling and norms, at two narrow blocks."""
    shape = {**SMALL, "img_size": 32, "num_classes": 0}
    weights = randomise(timm.create_model(model.timm, **shape)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "w.safetensors")
    given = {**SMALL, "img_size": 64} | ({"global_pool": model.pool} if model.pool else {})
    loaded = load_model(model.timm, tmp_path / "w.safetensors", given)
    assert loaded.anatomy.image == (64, 64)
    ranking = random_ranking(loaded.anatomy)
    small = shrink(loaded, ranking, Planner(ranking, loaded.anatomy).sparsity(0.4))
    inputs = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = small.forward_features(inputs)
        embedding = small.forward_head(tokens, pre_logits=True)
    assert embedding.shape == (2, 48)
    assert np.isfinite(embedding.numpy()).all()
    if model.pool == "token":
        assert torch.equal(embedding, tokens[:, 0])


@pytest.fixture
def deit(tmp_path: Path) -> Path:
    """A checkpoint whose last norm stands before the pooling, and images."""
    module = randomise(timm.create_model("deit_tiny_patch16_224", **SMALL, img_size=32, num_classes=5), scale=0.2)
    save_file(module.state_dict(), tmp_path / "deit.safetensors")
    make_image_folder(tmp_path / "images", 24)
    return tmp_path


def test_the_mean_of_the_patches_is_taken_after_the_norm_that_the_weights_have(deit: Path):
    token = load_model("deit_tiny_patch16_224", deit / "deit.safetensors", SMALL)
    avg = load_model("deit_tiny_patch16_224", deit / "deit.safetensors", {**SMALL, "global_pool": "avg"})
    assert (avg.anatomy.pooling, avg.anatomy.fc_norm, avg.anatomy.final_norm) == ("avg", False, True)
    inputs = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = token.module.forward_features(inputs)
        got = avg.module.forward_head(avg.module.forward_features(inputs), pre_logits=True)
    assert torch.allclose(got, tokens[:, 1:].mean(1), atol=1e-6)
    assert not torch.allclose(got, tokens[:, 0], atol=1e-2)


def test_a_norm_behind_the_pooling_stays_there(tmp_path: Path):
    made = timm.create_model("vit_tiny_patch16_224", **SMALL, img_size=32, num_classes=5, global_pool="avg")
    save_file(randomise(made).state_dict(), tmp_path / "w.safetensors")
    loaded = load_model("vit_tiny_patch16_224", tmp_path / "w.safetensors", {**SMALL, "global_pool": "avg"})
    assert loaded.anatomy.fc_norm
    inputs = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded.module(inputs), made(inputs))


@pytest.mark.parametrize(
    ("name", "pool", "says"),
    [
        ("vit_base_patch16_siglip_224.v2_webli", "token", "pools by attention"),
        ("vit_base_patch16_siglip_224.v2_webli", "avg", "pools by attention"),
        ("deit_base_distilled_patch16_224", "avg", "answers from two tokens"),
        ("vit_base_patch16_siglip_gap_224", "token", "has no class token"),
    ],
)
def test_a_pooling_that_the_weights_do_not_have_is_refused(name, pool, says):
    with pytest.raises(SnapvitError, match=f"{says}.*Leave --pool {pool} out"):
        load_model(name, None, {"global_pool": pool})  # before anything is fetched


def test_pool_and_image_size_reach_the_ranking_the_manifest_and_the_elastic_folder(tmp_path, snapvit, short_timings):
    name = "vit_small_patch16_dinov3"
    module = randomise(timm.create_model(name, **SMALL, img_size=64, num_classes=0), scale=0.2)
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, tmp_path / "w.safetensors")
    make_image_folder(tmp_path / "images", 60)
    model = ["--checkpoint", tmp_path / "w.safetensors", *SHAPE, "--pool", "token", "--image-size", "32"]
    common = ["--data", tmp_path / "images", "--images", "12", "--quiet"]
    family, ranking = tmp_path / "family", tmp_path / "r.safetensors"
    assert snapvit("rank", name, *model, *common, "--recipe", "local", "--out", ranking).code == 0
    anatomy = Ranking.load(ranking).anatomy
    assert (anatomy.pooling, anatomy.image) == ("token", (32, 32))
    given = ["--ranking", ranking, "--no-correct"]
    outcome = snapvit(
        "export", "--model", name, *model, *common[:4], *given, "--sparsity", "0.3", "--out", family, "--json"
    )
    assert outcome.code == 0, outcome.err
    manifest = json.loads(outcome.out)
    assert (manifest["anatomy"]["pooling"], manifest["anatomy"]["image"]) == ("token", [32, 32])
    assert manifest["preprocessing"]["input_size"] == [3, 32, 32]
    outcome = snapvit(
        "validate", family, "--data", tmp_path / "images", "--by", "knn", "--model", name, *model, "--quiet"
    )
    assert outcome.code == 0, outcome.err
    assert snapvit("pack", "--model", name, *model, *given, "--out", tmp_path / "elastic", "--quiet").code == 0
    assert Elastic.load(tmp_path / "elastic").anatomy == anatomy
    outcome = snapvit("evaluate", name, *model, "--data", tmp_path / "images", "--by", "knn", "--quiet")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--pool", "max"], "--pool 'max' is not token"),
        (["--image-size", "big"], "--image-size 'big' is no size in pixels"),
        (["--image-size", "32,64"], "more than one size"),
        (["--pool", "avg", "--model-arg", "global_pool=token"], "--pool says what --model-arg global_pool would"),
        (["--image-size", "32", "--model-arg", "img_size=64"], "--image-size says what --model-arg img_size would"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, says, tmp_path, snapvit):
    outcome = snapvit("rank", "deit_tiny_patch16_224", *given, "--data", "digits", "--out", tmp_path / "r.safetensors")
    assert outcome.code == 2
    assert says in outcome.error_line


# What follows from the model under --recipe paper

ANATOMIES = {
    name: anatomy_without_weights(name, {})
    for name in ("deit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224.v2_webli")
}


@pytest.mark.parametrize(
    ("anatomy", "name", "is_extreme"),
    [
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224", False),
        ("vit_small_patch16_dinov3", "my-own-name", True),  # by what it is
        ("vit_base_patch16_siglip_224.v2_webli", "vit_base_patch16_siglip_224.v2_webli", True),
        ("vit_base_patch16_siglip_224.v2_webli", "vit_base_patch16_siglip_224.webli", False),  # the first SigLIP
        ("vit_base_patch16_siglip_224.v2_webli", "google/siglip2-base-patch16-224", True),
        ("vit_base_patch16_siglip_224.v2_webli", "siglip2-vit-b16", True),
    ],
)
def test_the_published_recipe_searches_more_where_the_paper_does(anatomy, name, is_extreme):
    found = follow_model(make_settings("paper"), name, "", ANATOMIES[anatomy])
    wanted = (500, PUBLISHED_PAIRS, "max:0.1") if is_extreme else (50, SEARCH_PAIRS, "mean:0.01")
    assert (found.evaluations, found.pairs, found.damping) == wanted
    assert found.recipe == "snapvit"


def test_what_was_asked_for_stays_and_so_do_other_recipes():
    name, given = "vit_small_patch16_dinov3", {"evaluations": 50, "damping": "mean:0.01"}
    found = follow_model(make_settings("snapvit", **given), name, name, ANATOMIES[name])
    assert (found.evaluations, found.damping, found.pairs) == (50, "mean:0.01", FOR_EXTREME["pairs"])
    for recipe in ("default", "local"):
        assert follow_model(make_settings(recipe), name, name, ANATOMIES[name]) == make_settings(recipe)


def test_the_ranking_says_what_followed_from_the_model(tmp_path: Path, snapvit):
    name = "vit_small_patch16_dinov3"
    module = randomise(timm.create_model(name, **SMALL, img_size=32, num_classes=0), scale=0.2)
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, tmp_path / "w.safetensors")
    make_image_folder(tmp_path / "images", 16)
    out = tmp_path / "r.safetensors"
    outcome = snapvit(
        *("rank", name, "--checkpoint", tmp_path / "w.safetensors", *SHAPE, "--image-size", "32", "--recipe", "paper"),
        *("--data", tmp_path / "images", "--images", "8", "--evaluations", "3", "--pca", "4", "--out", out),
    )
    assert outcome.code == 0, outcome.err
    assert "recipe snapvit has 3 evaluations on 6 pairs and damping max:0.1" in outcome.err
    made = Ranking.load(out).provenance
    assert made["search_settings"]["evaluations"] == 3  # which was given
    assert made["search_settings"]["pairs"] == [list(pair) for pair in PUBLISHED_PAIRS]
    assert made["damping"] == "max:0.1"


def test_a_search_that_was_declined_does_not_come_back_with_the_model():
    name = "vit_base_patch16_siglip_224.v2_webli"
    found = follow_model(make_settings("paper", search_over="none"), name, name, ANATOMIES[name])
    assert found.evaluations == 0
    assert found.damping == "max:0.1"
