"""Every family: its anatomy explains each parameter, and sliced = masked = ONNX, whatever each block keeps."""

import numpy as np
import pytest
import timm
import torch
from torch_export import to_onnx

from helpers.models import FAMILIES, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.errors import ModelNotUnderstood, SnapvitError
from snapvit_export.model.plan import Plan
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.elastic_vit import ElasticViT
from snapvit_export.prune.models.load import ModelDescription, load_model, save_model
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.runtimes.ort import OrtSession


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_sliced_equals_masked_and_is_truly_smaller(name):
    module, _ = small(name)
    anatomy = read_anatomy(module, name)
    ranking, plan = random_ranking(anatomy, seed=1), uneven_plan(anatomy)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    sliced = shrink(module, ranking, plan)
    images = torch.randn(3, 3, *anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense = module(images)
        with masked(module, ranking, plan):
            reference = module(images)
        assert torch.equal(module(images), dense)  # masking is undone
        got = sliced(images)
    assert not torch.allclose(dense, reference, atol=1e-2)  # the cut matters, so equality below means something
    assert (got - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())
    assert sum(p.numel() for p in sliced.parameters()) == anatomy.params(plan)
    assert read_anatomy(sliced, name) == anatomy.with_counts(plan)
    for tensor in (*sliced.parameters(), *sliced.buffers()):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    for part in sliced.modules():
        if isinstance(part, torch.nn.Linear):
            assert (part.out_features, part.in_features) == tuple(part.weight.shape)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_onnx_equals_torch_at_several_batch_sizes(name):
    module, _ = small(name)
    anatomy = read_anatomy(module, name)
    plan = uneven_plan(anatomy)
    sliced = shrink(module, random_ranking(anatomy), plan)
    data = to_onnx(sliced, anatomy.with_counts(plan), {"snapvit.model": name})
    with OrtSession(data, threads=1) as session:
        for batch in (1, 3):
            images = torch.randn(batch, 3, *anatomy.image)
            with torch.no_grad():
                wanted = sliced(images).numpy()
            assert np.abs(session.run(images.numpy()) - wanted).max() <= 1e-4 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_pruned_model_is_saved_and_loaded_again(name, tmp_path):
    module, kwargs = small(name)
    anatomy = read_anatomy(module, name)
    sliced = shrink(module, random_ranking(anatomy), uneven_plan(anatomy))
    preprocessing = Preprocessing(input_size=(3, 64, 64), mean=(0.5,) * 3, std=(0.5,) * 3)
    described = ModelDescription(name="mine", architecture=name, kwargs=kwargs, preprocessing=preprocessing)
    save_model(sliced, described, tmp_path / "mine")
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["model.json", "model.safetensors"]
    again = load_model(str(tmp_path / "mine"))
    images = torch.randn(2, 3, *anatomy.image)
    with torch.no_grad():
        assert torch.equal(again.module(images), sliced(images))
    assert again.anatomy == anatomy.with_counts(uneven_plan(anatomy))
    assert again.preprocessing == preprocessing


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_pruned_model_can_be_pruned_further(name):
    module, _ = small(name)
    anatomy = read_anatomy(module, name)
    once = shrink(module, random_ranking(anatomy), Plan(heads=(3, 3, 3), neurons=(20, 21, 22)))
    middle = read_anatomy(once, name)
    ranking, plan = random_ranking(middle, seed=2), Plan(heads=(2, 1, 3), neurons=(4, 21, 1))
    twice = shrink(once, ranking, plan)
    images = torch.randn(2, 3, *anatomy.image)
    with torch.no_grad():
        with masked(once, ranking, plan):
            reference = once(images)
        assert torch.allclose(twice(images), reference, atol=1e-5 * max(1, float(reference.abs().max())))


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_224",
        "deit3_large_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "deit_base_distilled_patch16_224",
        "vit_so400m_patch14_siglip_224",
        "vit_so400m_patch14_siglip_384",  # 384 is not a multiple of 14: the rest of the image is not seen
        "eva02_large_patch14_224",
        "vit_base_patch16_dinov3",
    ],
)
def test_the_anatomy_of_real_sizes_explains_every_parameter(name):
    with torch.device("meta"):
        module = timm.create_model(name)
    assert read_anatomy(module, name).params() == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "SwinTransformer is not a plain ViT"),
        ("convnext_atto", "ConvNeXt is not a plain ViT"),
        ("resnet18", "ResNet is not a plain ViT"),
        ("vit_relpos_small_patch16_224", "VisionTransformerRelPos is not a plain ViT"),
        ("vit_base_patch16_rope_mixed_224", "AttentionRope is not plain"),
        ("vit_small_patch16_18x2_224", "ParallelThingsBlock is not a plain pre-norm block"),
        ("vit_base_r50_s16_224", "HybridEmbed is not a plain patch embedding"),
    ],
)
def test_what_is_not_understood_is_refused_by_name_with_the_reason(name, reason):
    with torch.device("meta"):
        module = timm.create_model(name)
    with pytest.raises(ModelNotUnderstood) as refused:
        read_anatomy(module, name)
    assert str(refused.value).startswith(name)
    assert reason in str(refused.value)


def test_a_parameter_that_nothing_explains_is_refused():
    module, _ = small("deit_tiny_patch16_224")
    module.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ModelNotUnderstood, match="has .* parameters"):
        read_anatomy(module, "odd")


def test_plans_and_rankings_of_other_models_are_refused():
    module, _ = small("deit_tiny_patch16_224")
    anatomy = read_anatomy(module, "x")
    ranking = random_ranking(anatomy)
    with pytest.raises(SnapvitError, match="keeps 5 heads of 4"):
        shrink(module, ranking, Plan(heads=(5, 1, 1), neurons=(1, 1, 1)))
    bigger, _ = small("deit_tiny_patch16_224", mlp_ratio=2)
    with pytest.raises(SnapvitError, match="another model"):
        shrink(bigger, ranking, uneven_plan(anatomy))


def test_elastic_vit_goes_up_and_down_from_one_set_of_weights():
    module, _ = small("deit_tiny_patch16_224")
    anatomy = read_anatomy(module, "x")
    elastic = ElasticViT(module, random_ranking(anatomy))
    images = torch.randn(2, 3, 64, 64)
    plans = [Plan(heads=(4, 3, 2), neurons=(100, 50, 60)), Plan(heads=(1, 1, 1), neurons=(9, 9, 9))]
    with torch.no_grad():
        dense = elastic(images)
        first, least = (elastic.prune(plan)(images) for plan in plans)
        assert torch.equal(elastic.prune(plans[0])(images), first)  # up again
        assert not torch.allclose(first, least)
        assert torch.equal(elastic.prune(Plan.dense(anatomy))(images), dense)
        assert not torch.allclose(elastic.prune(0.5)(images), dense)
        assert elastic.plan.sparsity(anatomy) >= 0.5
        assert torch.equal(elastic.prune(0.0)(images), dense)
    assert [block.attn.num_heads for block in blocks_of(elastic.prune(plans[1]).model)] == [1, 1, 1]
