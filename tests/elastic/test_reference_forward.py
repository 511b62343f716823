"""An Elastic folder holds everything: numpy alone computes from it what the sliced module computes, in every family."""

import numpy as np
import pytest
import torch

from helpers.models import FAMILIES, as_model, randomise, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from helpers.reference_forward import Reference
from snapvit_export.elastic.folder import Elastic
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import pack


def check(module, name, folder, plan=None) -> None:
    model = as_model(module, name, {})
    ranking = random_ranking(model.anatomy, seed=1)
    pack(model, ranking, folder)
    elastic = Elastic.load(folder)
    images = torch.randn(2, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))
    for each in (Plan.dense(model.anatomy), plan or uneven_plan(model.anatomy)):
        with torch.no_grad():
            wanted = shrink(module, ranking, each)(images).numpy()
        got = Reference(elastic, each)(images.numpy().astype(np.float64))
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() <= 1e-4 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_numpy_equals_the_sliced_module(name, tmp_path):
    module, _ = small(name)
    check(module, name, tmp_path / "elastic")


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("vit_tiny_patch16_224", {"global_pool": "avg"}),  # with fc_norm instead of the final one
        ("vit_tiny_patch16_224", {"global_pool": "max", "reg_tokens": 2}),
        ("vit_tiny_patch16_224", {"global_pool": "avgmax", "class_token": False}),
        ("vit_tiny_patch16_224", {"qk_norm": True, "no_embed_class": True, "reg_tokens": 3}),
        ("vit_tiny_patch16_224", {"global_pool": "map", "pool_include_prefix": True}),
        ("vit_tiny_patch16_224", {"pos_embed": "none", "scale_attn_norm": True}),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}),
        ("deit_tiny_distilled_patch16_224", {"no_embed_class": False}),
        ("vit_small_patch16_dinov3", {"dynamic_img_size": True}),
        ("vit_small_patch16_dinov3", {"global_pool": "token"}),
        ("vit_small_patch16_dinov3", {"global_pool": "map", "attn_pool_num_heads": 4}),
        ("vit_medium_patch16_rope_reg1_gap_256", {}),  # EVA without class token
    ],
)
def test_less_usual_joints_too(name, extra, tmp_path):
    module, _ = small(name, **extra)
    check(module, name, tmp_path / "elastic")


def test_a_model_without_a_classifier_gives_its_features(tmp_path):
    for name in ("vit_small_patch14_reg4_dinov2", "deit_tiny_distilled_patch16_224"):
        import timm

        kwargs = dict(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=4, num_classes=0)
        check(randomise(timm.create_model(name, **kwargs)), name, tmp_path / name)


def test_norms_may_differ_in_eps(tmp_path):
    module, _ = small("vit_tiny_patch16_224")
    module.norm.eps = 0.5
    module.blocks[1].norm2.eps = 0.25
    check(module, "odd", tmp_path / "elastic")
    assert Elastic.load(tmp_path / "elastic").description.wiring.eps == {"final_norm": 0.5, "blocks.1.norm2": 0.25}


def test_what_is_left_of_a_pruned_model_can_be_packed(tmp_path):
    module, _ = small("vit_small_patch16_dinov3")
    anatomy = read_anatomy(module, "x")
    once = shrink(module, random_ranking(anatomy), Plan(heads=(3, 3, 3), neurons=(20, 21, 22)))
    check(once, "pruned", tmp_path / "elastic", Plan(heads=(2, 1, 3), neurons=(4, 21, 1)))
