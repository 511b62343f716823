"""Token merging in torch: equal to a slow reference in which no token leaves its place, whatever else is cut."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import EVERY_KIND, FAMILIES, as_model, model_of, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from helpers.reference_merging import MergingReference
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Plan
from snapvit_export.prune.blocks.merging import Groups, MergingBlock, holder_of, match
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.elastic_vit import ElasticViT
from snapvit_export.prune.models.load import Model, load_model, save_model
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import pack


def plans_of(anatomy) -> dict[str, Plan]:
    """What merging must go together with; 16 patches, or 12."""
    neurons = anatomy.neurons
    uneven, dense = uneven_plan(anatomy), Plan.dense(anatomy)
    return {
        "dense": dense.with_tokens((3, 4, 2)),
        "all that can": dense.with_tokens((8, 4, 2)),
        "pruned heads": uneven.with_tokens((5, 0, 3)),
        "no attention between": Plan(heads=(3, 0, 2), neurons=neurons).with_tokens((5, 0, 3)),
        "no attention first": Plan(heads=(0, 2, 4), neurons=neurons).with_tokens((0, 6, 1)),
        "no MLPs": Plan(heads=(4, 1, 4), neurons=(0, 5, 0)).with_tokens((2, 3, 4)),
        "a smaller image": uneven.with_tokens((3, 2, 1), grid=(3, 4)),
    }


def packed(name: str, folder, **extra) -> tuple[Model, Elastic]:
    module, _ = small(name, **extra)
    model = as_model(module, name, {})
    pack(model, random_ranking(model.anatomy, seed=1), folder)
    return model, Elastic.load(folder)


def images_of(anatomy, plan: Plan, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, *anatomy.image_of(plan), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(module: torch.nn.Module, images: torch.Tensor) -> np.ndarray:
    """In double precision, so that rounding decides nothing between cosines that are nearly equal."""
    found = module.double()(images.double()).numpy()
    module.float()
    return found


@pytest.mark.parametrize(("name", "extra"), EVERY_KIND, ids=[f"{n} {e}" for n, e in EVERY_KIND])
def test_merging_equals_a_reference_in_which_no_token_leaves_its_place(name, extra, tmp_path):
    model, elastic = packed(name, tmp_path / "elastic", **extra)
    unmerged: dict[Plan, np.ndarray] = {}
    for title, plan in plans_of(model.anatomy).items():
        images = images_of(model.anatomy, plan)
        reference = MergingReference(elastic, plan)
        wanted = reference(images.numpy().astype(np.float64))
        module = shrink(model, elastic.ranking, plan)
        got = outputs(module, images)
        assert got.shape == wanted.shape
        scale = max(1, np.abs(wanted).max())
        assert np.abs(got - wanted).max() <= 1e-5 * scale, title
        assert read_anatomy(module, name) == model.anatomy.with_counts(plan)
        assert all(len(left) == model.anatomy.patches_of(plan) - sum(plan.merged) for left in reference.left)
        without = plan.with_tokens(grid=plan.grid)
        if without not in unmerged:
            unmerged[without] = outputs(shrink(model, elastic.ranking, without), images)
        assert np.abs(got - unmerged[without]).max() > 1e-4 * scale, title  # merging matters


def test_one_precision_is_enough_where_no_cosines_are_nearly_equal(tmp_path):
    model, elastic = packed("deit_tiny_patch16_224", tmp_path / "elastic")
    plan = Plan.dense(model.anatomy).with_tokens((3, 4, 2))
    images = images_of(model.anatomy, plan)
    wanted = MergingReference(elastic, plan)(images.numpy().astype(np.float64))
    with torch.no_grad():
        got = shrink(model, elastic.ranking, plan)(images).numpy()
    assert np.abs(got - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())


def test_groups_are_the_patches_of_the_reference(tmp_path):
    model, elastic = packed("vit_small_patch14_reg4_dinov2", tmp_path / "elastic")
    plan = Plan.dense(model.anatomy).with_tokens((7, 3, 2))
    images = images_of(model.anatomy, plan, count=3)
    reference = MergingReference(elastic, plan)
    reference(images.numpy().astype(np.float64))
    module = shrink(model, elastic.ranking, plan)
    outputs(module, images)
    groups, prefix = holder_of(module).groups, model.anatomy.prefix
    for image, left in enumerate(reference.left):
        assert groups.sizes[image].tolist() == [1] * prefix + [len(patches) for patches in left]
        for token, patches in enumerate(left):
            assert groups.places[image, patches].tolist() == [prefix + token] * len(patches)


def test_images_of_a_batch_do_not_see_each_other(tmp_path):
    model = model_of("vit_small_patch16_dinov3")
    plan = Plan.dense(model.anatomy).with_tokens((4, 3, 2))
    module = shrink(model, random_ranking(model.anatomy), plan)
    images = images_of(model.anatomy, plan, count=4)
    together, alone = outputs(module, images), [outputs(module, image[None])[0] for image in images]
    assert np.allclose(together, alone, rtol=0, atol=1e-9 * np.abs(together).max())


def test_equal_cosines_are_taken_in_the_order_of_the_tokens():
    basis = torch.eye(4)
    metric = torch.stack([basis[0], basis[1], basis[0], basis[0], basis[1], basis[0], basis[2]])[None]
    found = match(metric)  # A: e0 e0 e1 e2 in places 0 2 4 6, B: e1 e0 e0 in places 1 3 5
    assert found.best.tolist() == [[1, 1, 0, 0]]
    assert found.order.tolist() == [[0, 1, 2, 3]]


@cache
def merging_block() -> MergingBlock:
    """A block that merges, whose keys have nothing to do with the tokens."""
    model = model_of("deit_tiny_patch16_224")
    plan = Plan.dense(model.anatomy).with_tokens((1, 0, 0))
    return blocks_of(shrink(model, random_ranking(model.anatomy), plan))[0]


def random_groups(seed: int, prefix: int, patches: int, merges: list[int]) -> tuple[Groups, torch.Tensor]:
    """Groups after some merges by random keys, and the tokens (2, T, 6) that went in."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, prefix + patches, 6, generator=generator, dtype=torch.float64)
    block, groups, x = merging_block(), Groups(prefix), tokens
    for merged in merges:
        block.merged = merged
        y = torch.randn(2, x.shape[1], 48, generator=generator)
        x = groups.merge(x, block, y, {})
    assert torch.allclose(groups.average(tokens), x)
    return groups, tokens


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(2, 12), st.integers(0, 100), st.data())
def test_average_and_spread_agree_with_the_groups(prefix, patches, seed, data):
    merges, left = [], patches
    for _ in range(data.draw(st.integers(1, 3))):
        merges.append(data.draw(st.integers(0, left // 2)))
        left -= merges[-1]
    groups, tokens = random_groups(seed, prefix, patches, merges)
    if not any(merges):
        assert groups.average(tokens) is tokens
        assert groups.spread(tokens) is tokens
        return
    means = groups.average(tokens)
    assert means.shape == (2, prefix + left, 6)
    assert torch.equal(means[:, :prefix], tokens[:, :prefix])
    back = groups.spread(means)
    assert back.shape == tokens.shape
    assert torch.equal(back[:, :prefix], tokens[:, :prefix])
    assert torch.allclose(groups.average(back), means)  # a group of equal tokens has their mean
    for image in range(2):
        for patch in range(patches):
            members = [p for p in range(patches) if groups.places[image, p] == groups.places[image, patch]]
            mean = tokens[image, [prefix + p for p in members]].mean(0)
            assert torch.allclose(back[image, prefix + patch], mean)
    assert int(groups.sizes[0, prefix:].sum()) == patches


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_token_variants_come_back_from_their_files(name, tmp_path):
    model = model_of(name)
    ranking = random_ranking(model.anatomy, seed=1)
    plans = plans_of(model.anatomy)
    for title in ("pruned heads", "no attention first", "a smaller image"):
        plan = plans[title]
        module = shrink(model, ranking, plan)
        save_model(module, model.description, tmp_path / title)
        loaded = load_model(str(tmp_path / title))
        images = images_of(model.anatomy, plan)
        with torch.no_grad():
            assert torch.equal(loaded.module(images), module(images)), title
        assert loaded.description.plan == plan
        assert loaded.anatomy == model.anatomy.with_counts(plan)
        assert loaded.preprocessing.input_size == (3, *model.anatomy.image_of(plan))


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_smaller_images_give_what_timm_gives_for_them(name):
    model = model_of(name)
    plan = Plan.dense(model.anatomy).with_tokens(grid=(3, 2))
    images = images_of(model.anatomy, plan)
    with torch.no_grad():
        got = shrink(model, random_ranking(model.anatomy), plan)(images)
        model.module.set_input_size(img_size=(48, 32))
        wanted = model.module(images)
    assert (got - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max())


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_an_elastic_model_takes_tokens_away_and_gives_them_back(name):
    model = model_of(name)
    ranking = random_ranking(model.anatomy)
    elastic, dense = ElasticViT(model, ranking), Plan.dense(model.anatomy)
    images = images_of(model.anatomy, dense)
    with torch.no_grad():
        whole = elastic(images)
        for plan in (
            dense.with_tokens((3, 2, 1)),
            dense.with_tokens(grid=(2, 3)),
            dense.with_tokens((2, 0, 1), (3, 3)),
        ):
            inputs = images_of(model.anatomy, plan)
            got = elastic.prune(plan)(inputs)
            assert elastic.plan == plan
            assert torch.equal(got, shrink(model, ranking, plan)(inputs))
        assert torch.equal(elastic.prune(dense)(images), whole)
    assert elastic.model is model.module


def test_the_dense_model_is_left_unchanged():
    model = model_of("vit_small_patch14_reg4_dinov2")
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    shrink(model, random_ranking(model.anatomy), Plan.dense(model.anatomy).with_tokens((3, 2, 1), (3, 3)))
    assert all(torch.equal(value, before[key]) for key, value in model.module.state_dict().items())
    assert not any(isinstance(block, MergingBlock) for block in blocks_of(model.module))
    assert "pool" not in model.module.__dict__


def test_a_model_that_merges_is_not_cut_again():
    model = model_of("deit_tiny_patch16_224")
    plan = Plan.dense(model.anatomy).with_tokens((3, 0, 0))
    merged = shrink(model, random_ranking(model.anatomy), plan)
    with pytest.raises(SnapvitError, match="merges tokens already. Cut the model that it was made from"):
        shrink(merged, random_ranking(model.anatomy), Plan.dense(model.anatomy))


def test_a_model_of_smaller_images_is_cut_again():
    model = model_of("deit_tiny_patch16_224")
    ranking = random_ranking(model.anatomy)
    once = shrink(model, ranking, Plan.dense(model.anatomy).with_tokens(grid=(3, 3)))
    plan = uneven_plan(model.anatomy)
    images = images_of(model.anatomy, plan.with_tokens(grid=(3, 3)))
    with torch.no_grad():
        twice, at_once = (
            shrink(once, ranking, plan)(images),
            shrink(model, ranking, plan.with_tokens(grid=(3, 3)))(images),
        )
    assert torch.equal(twice, at_once)
