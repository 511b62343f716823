"""`ElasticViT` as users of the released code use it: ratios, further and back, corrected from factors or from data."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import snapvit_export as sv
from helpers.images import noise
from helpers.models import make_model, model_of, randomise
from helpers.rankings import random_ranking
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.elastic_vit import ElasticViT
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.stats.observe import observe

GOLDEN = dict(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=10)


@pytest.fixture
def ranking(tiny_model: Model) -> Ranking:
    return random_ranking(tiny_model.anatomy)


@pytest.fixture
def inputs(tiny_model: Model) -> torch.Tensor:
    return torch.from_numpy(next(noise(tiny_model, 4).batches(4)))


@torch.no_grad()
def answers(module: torch.nn.Module, inputs: torch.Tensor) -> np.ndarray:
    return module(inputs).numpy()


def test_two_ratios_give_the_released_codes_models_further_and_back(shared: Path):
    folder = shared / "golden"
    module = VisionTransformer(**GOLDEN).eval()
    module.load_state_dict(load_file(folder / "tiny_vit.safetensors"))
    golden, images = np.load(folder / "tiny_pruned_outputs.npz"), np.load(folder / "inputs.npz")["eval_images"]
    pairs = np.load(folder / "tiny_keep.npz")["pairs"]
    elastic = sv.ElasticViT(module, sv.ElasticImportanceScores.load(folder / "tiny_scores_reference_format.pt"))
    for j in (0, 5, 3, 4, 1, 2):
        mlp, head = map(float, pairs[j])
        logits = answers(elastic.prune(mlp_pruning_ratio=mlp, head_pruning_ratio=head), torch.from_numpy(images))
        assert np.abs(logits - golden[f"logits_{j}"]).max() < 1e-5 * np.abs(logits).max()
    dense = np.load(folder / "dense_outputs.npz")["logits"]
    assert np.abs(answers(elastic.reset(), torch.from_numpy(images)) - dense).max() < 1e-5 * np.abs(dense).max()


def test_factors_a_folder_images_and_a_loader_correct_alike(tiny_model, ranking, inputs, tmp_path):
    images = noise(tiny_model, 24)
    factors = make_factors(tiny_model, ranking, observe(tiny_model, images))
    sv.pack(tiny_model, ranking, tmp_path / "elastic", factors)
    plan = sv.Planner(ranking, tiny_model.anatomy).sparsity(0.4)
    direct = sv.shrink(tiny_model, ranking, plan)
    correct_module(direct, ranking, plan, factors)
    elastic = ElasticViT(tiny_model, ranking)
    uncorrected = answers(elastic.prune(plan), inputs)
    wanted = answers(direct, inputs)
    assert not np.allclose(uncorrected, wanted, rtol=1e-3)
    batches = [(torch.from_numpy(batch), torch.zeros(len(batch))) for batch in images.batches(5)]
    for source in (factors, images, batches):
        assert np.array_equal(
            answers(ElasticViT(tiny_model, ranking).prune(plan).apply_correction(source), inputs), wanted
        )
    stored = answers(elastic.apply_correction(sv.Elastic.load(tmp_path / "elastic")), inputs)
    assert elastic.corrected
    assert np.abs(stored - wanted).max() < 1e-4 * np.abs(wanted).max()  # factors are stored in float32
    assert np.array_equal(answers(elastic.prune(plan), inputs), uncorrected)  # only where it is asked for


def test_factors_stay_and_correct_any_other_plan_without_data(tiny_model, ranking, inputs):
    loader = [torch.from_numpy(batch) for batch in noise(tiny_model, 24).batches(8)]
    elastic = ElasticViT(tiny_model, ranking)
    elastic.prune(mlp_pruning_ratio=0.6, head_pruning_ratio=0.3, apply_correction=True, correction_data_loader=loader)
    back = answers(elastic.reset().prune(0.2, apply_correction=True), inputs)
    direct = ElasticViT(tiny_model, ranking).prune(0.2)
    plain = answers(direct, inputs)
    assert np.array_equal(answers(direct.apply_correction(loader), inputs), back)
    assert not np.array_equal(plain, back)
    damped = answers(ElasticViT(tiny_model, ranking).prune(0.2).apply_correction(loader, "max:10"), inputs)
    assert not np.allclose(damped, back, rtol=1e-3)


def test_a_correction_brings_the_features_nearer_to_the_dense_ones(tiny_model, ranking):
    images = noise(tiny_model, 64)
    inputs = torch.from_numpy(next(images.batches(64)))
    dense = answers(tiny_model.module, inputs)
    elastic = ElasticViT(tiny_model, ranking).prune(0.4)
    before = np.square(answers(elastic, inputs) - dense).mean()
    assert np.square(answers(elastic.apply_correction(images), inputs) - dense).mean() < before


def test_its_parameters_are_those_of_the_present_model(tiny_model, ranking, inputs):
    elastic = ElasticViT(tiny_model, ranking).prune(0.5)
    state = elastic.state_dict()
    assert all(name.startswith("model.") for name in state)
    assert sum(tensor.numel() for tensor in state.values()) == tiny_model.anatomy.params(elastic.plan)
    changed = {name: tensor + 1 for name, tensor in state.items()}
    other = ElasticViT(tiny_model, ranking).prune(0.5)
    other.load_state_dict(changed)
    assert torch.equal(other.blocks[0].mlp.fc1.weight, elastic.blocks[0].mlp.fc1.weight + 1)
    assert np.array_equal(answers(other.prune(0.5), inputs), answers(elastic, inputs))  # from the dense weights again


def test_weights_that_are_loaded_into_it_leave_the_dense_ones_alone(tiny_model, ranking, inputs):
    elastic, before = ElasticViT(tiny_model, ranking), answers(tiny_model.module, inputs)
    elastic.load_state_dict({name: 2 * tensor for name, tensor in elastic.state_dict().items()})
    assert not np.array_equal(answers(elastic, inputs), before)
    assert np.array_equal(answers(tiny_model.module, inputs), before)
    assert np.array_equal(answers(elastic.reset(), inputs), before)


@pytest.mark.parametrize("pruned", [False, True])
def test_moving_and_training_leave_the_dense_weights_alone(tiny_model, ranking, inputs, pruned):
    elastic = ElasticViT(tiny_model, ranking)
    if pruned:
        elastic.prune(0.5)
    elastic.double().train()
    assert answers(elastic, inputs.double()).dtype == np.float64
    assert next(tiny_model.module.parameters()).dtype == torch.float32
    assert not tiny_model.module.training
    smaller = elastic.prune(0.7)
    assert next(smaller.parameters()).dtype == torch.float64
    assert smaller.model.training
    wanted = answers(tiny_model.module, inputs)
    got = answers(elastic.reset().eval(), inputs.double())
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "deit_tiny_distilled_patch16_224"])
def test_it_answers_as_a_timm_model_does(name):
    model = model_of(name)
    elastic = ElasticViT(model, random_ranking(model.anatomy)).prune(0.4)
    inputs = torch.from_numpy(next(noise(model, 3).batches(3)))
    assert len(elastic.blocks) == 3
    assert elastic.num_features == elastic.embed_dim == 48
    assert elastic.head.out_features == 7
    with torch.no_grad():
        tokens = elastic.forward_features(inputs)
        assert tokens.shape == (3, model.anatomy.tokens, 48)
        assert torch.equal(elastic.forward_head(tokens), elastic(inputs))
        assert elastic.forward_head(tokens, pre_logits=True).shape == (3, 48)


def test_a_function_that_makes_the_model_does_as_well(inputs):
    made = []

    def factory() -> torch.nn.Module:
        made.append(randomise(timm.create_model("vit_tiny_patch16_224", **make_model().description.kwargs)))
        return made[-1]

    model = make_model()
    elastic = ElasticViT(factory, random_ranking(model.anatomy))
    for sparsity in (0.2, 0.6, 0.1):
        elastic.prune(sparsity)
    assert len(made) == 1
    assert np.array_equal(answers(elastic.reset(), inputs), answers(made[0], inputs))
    assert elastic.plan == Plan.dense(model.anatomy)


def test_what_cannot_be_meant_is_refused(tiny_model, ranking, inputs, tmp_path):
    elastic = ElasticViT(tiny_model, ranking)
    with pytest.raises(UsageError, match="both say what to cut"):
        elastic.prune(0.5, mlp_pruning_ratio=0.5)
    with pytest.raises(UsageError, match="apply_correction=True"):
        elastic.prune(0.5, correction_data_loader=[inputs])
    with pytest.raises(SnapvitError, match="needs data or factors"):
        elastic.prune(0.5, apply_correction=True)
    with pytest.raises(SnapvitError, match="The largest ratio possible"):
        elastic.prune(mlp_pruning_ratio=0.99)
    assert elastic.plan == Plan.dense(tiny_model.anatomy)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        ([], "gives none"),
        (["a"], "batch 0 of the loader is a str"),
        ([torch.zeros(2, 3, 32, 32), (torch.zeros(2, 3, 16, 16), 0)], r"batch 1 .* \(2, 3, 16, 16\)"),
        ([torch.full((2, 3, 32, 32), torch.nan)], "not finite"),
    ],
)
def test_a_loader_of_something_else_is_refused(tiny_model, ranking, loader, says):
    with pytest.raises(SnapvitError, match=says):
        ElasticViT(tiny_model, ranking).apply_correction(loader)


def test_a_folder_of_something_else_is_refused(tiny_model, ranking, tmp_path):
    factors = make_factors(tiny_model, ranking, observe(tiny_model, noise(tiny_model, 8)))
    sv.pack(tiny_model, ranking, tmp_path / "bare")
    sv.pack(tiny_model, ranking, tmp_path / "whole", factors)
    with pytest.raises(SnapvitError, match="has no factors"):
        ElasticViT(tiny_model, ranking).apply_correction(sv.Elastic.load(tmp_path / "bare"))
    whole = sv.Elastic.load(tmp_path / "whole")
    with pytest.raises(SnapvitError, match="of another ranking"):
        ElasticViT(tiny_model, random_ranking(tiny_model.anatomy, 1)).apply_correction(whole)
    with torch.no_grad():
        tiny_model.module.blocks[2].mlp.fc2.weight[0, 0] += 1
    with pytest.raises(SnapvitError, match="other weights"):
        ElasticViT(tiny_model, ranking).apply_correction(whole)
