"""Models that lack sub-layers, saved and loaded, are models like others: ranked, cut, corrected, packed, exported."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.graphs import FLAVOURS, close, run, writer_of
from helpers.images import inputs_of, some_images
from helpers.models import deep
from helpers.rankings import random_ranking
from helpers.reference_forward import Reference
from snapvit_export.allocation.costs import flops_costs
from snapvit_export.allocation.knapsack import Allocator
from snapvit_export.allocation.planner import Planner, check_reach
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.family.folder import read_family
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.latency_model import fit
from snapvit_export.profiling.sample_plans import sample_plans
from snapvit_export.progress import Silent
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.correct.policy import Corrector
from snapvit_export.prune.models.load import Model, as_model, load_model, save_model
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint, corrected_layers, pack
from snapvit_export.prune.rank.criteria import CRITERIA
from snapvit_export.prune.rank.rank import rank, rank_and_factor
from snapvit_export.prune.rank.search.candidate_runner import CandidateRunner
from snapvit_export.prune.rank.search.cka import cka_covariance
from snapvit_export.prune.stats.observe import observe

MODELS = [
    "deit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "vit_base_patch16_siglip_224",
    "vit_base_patch32_clip_224",  # a norm before the blocks: what the first attention leaves has no place there
    "eva02_tiny_patch14_224",
    "vit_small_patch16_dinov3",
]
LACKS = {  # blocks without attention, blocks without MLP
    "its first attention": ({0}, set()),
    "its first block": ({0}, {0}),
    "its last block": ({2}, {2}),
    "an attention and two MLPs": ({1}, {1, 2}),
}


def lacking(name: str, case: str, folder) -> Model:
    """A model cut to three heads and some neurons a block, without some sub-layers, through its folder."""
    model = deep(name)
    attention, mlps = LACKS[case]
    heads = tuple(0 if i in attention else 3 for i in range(3))
    plan = Plan(heads=heads, neurons=tuple(0 if i in mlps else 40 for i in range(3)))
    cut = shrink(model, random_ranking(model.anatomy, seed=1), plan)
    save_model(cut, as_model(model.module).description, folder)
    again = load_model(str(folder))
    assert again.description.plan == plan
    return again


def smaller(model: Model) -> Plan:
    """Less of everything, and one more MLP gone."""
    there = [i for i, n in enumerate(model.anatomy.neurons) if n]
    neurons = tuple(0 if i == there[-1] and len(there) > 1 else n // 2 for i, n in enumerate(model.anatomy.neurons))
    return Plan(heads=tuple(max(n - 1, 0) for n in model.anatomy.heads), neurons=neurons)


def outputs(module, images) -> np.ndarray:
    with torch.no_grad():
        return module(inputs_of(images)).numpy()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", LACKS)
def test_it_is_cut_again_in_torch_as_graph_and_from_an_elastic_folder(name, case, tmp_path):
    model, images = lacking(name, case, tmp_path / "short"), some_images()
    ranking = random_ranking(model.anatomy, seed=2)
    factors = make_factors(model, ranking, observe(model, images, warn=False))
    pack(model, ranking, tmp_path / "elastic", factors)
    elastic = Elastic.load(tmp_path / "elastic")
    drawn = blueprint(model, ranking)
    for plan in (Plan.dense(model.anatomy), smaller(model)):
        with torch.no_grad(), masked(model.module, ranking, plan) as silenced:
            wanted = silenced(inputs_of(images)).numpy()
        module = shrink(model.module, ranking, plan)
        assert close(outputs(module, images), wanted)
        if plan == Plan.dense(model.anatomy):
            assert close(wanted, outputs(model.module, images))
        got = Reference(elastic, plan, False)(inputs_of(images).numpy().astype(np.float64))
        assert np.abs(got - wanted).max() <= 2e-4 * max(1, np.abs(wanted).max())
        made = corrected_layers(module, ranking, plan, drawn.dense)
        for flavour in FLAVOURS:
            path = writer_of(drawn, tmp_path, flavour).write(flavour, plan, made, format=GraphFormat(flavour)).graph
            assert close(run(path, inputs_of(images).numpy()), wanted), flavour
        correct_module(module, ranking, plan, factors)
        wanted = outputs(module, images)
        got = Reference(elastic, plan, True)(inputs_of(images).numpy().astype(np.float64))
        assert np.abs(got - wanted).max() <= 2e-4 * max(1, np.abs(wanted).max())
        path = GraphWriter(drawn, tmp_path).write("corrected", plan, elastic.corrected_layers(plan)).graph
        assert close(run(path, inputs_of(images).numpy()), wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["elastic", "sequential", "sparsegpt", "refit"])
def test_every_correction_brings_it_closer_to_what_it_was(name, way, tmp_path):
    model, images = lacking(name, "its first attention", tmp_path / "short"), some_images(24)
    ranking, _ = rank_and_factor(model, images, make_settings("default", images=24))
    plan = Plan(heads=model.anatomy.heads, neurons=tuple(n // 2 for n in model.anatomy.neurons))
    module, how = Corrector(model, ranking, way, images, Silent()).kept(plan)
    assert how == way
    wanted = outputs(model.module, images)
    plain = np.square(outputs(shrink(model, ranking, plan), images) - wanted).mean()
    assert np.square(outputs(module, images) - wanted).mean() < plain
    made = corrected_layers(module, ranking, plan, (drawn := blueprint(model, ranking)).dense)
    path = GraphWriter(drawn, tmp_path).write("x", plan, made).graph
    assert close(run(path, inputs_of(images).numpy()), outputs(module, images))


@pytest.mark.parametrize("case", LACKS)
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_base_patch16_siglip_224"])
def test_the_default_ranking_knows_only_what_is_there(name, case, tmp_path):
    model, images = lacking(name, case, tmp_path / "short"), some_images(16)
    ranking = rank(model, images, make_settings("default", images=16))
    ranking.save(tmp_path / "r")
    ranking = Ranking.load(tmp_path / "r")
    attention, mlps = LACKS[case]
    for i, (heads, neurons) in enumerate(ranking.damage):
        assert (heads.tolist() == [0.0]) == (i in attention)
        assert (neurons.tolist() == [0.0]) == (i in mlps)
    gone = {(s.block, s.part) for s in ranking.sublayers if s.damage == s.divergence == s.turned == 0}
    assert gone == set(Plan.dense(model.anatomy).removed)
    for protection in (ranking.protection, Protection()):
        planner = Planner(ranking, model.anatomy, protection)
        for plan in planner.steps().values():
            plan.check_fits(model.anatomy)
    check_reach(model.anatomy, ranking.protection, sparsity=[0.3], flops=[0.5], params=[0.95])
    least = Protection().least(model.anatomy)
    best = Allocator(ranking.damage, flops_costs(model.anatomy), least).within(0.7 * model.anatomy.block_flops())
    assert best.flops_ratio(model.anatomy) <= 0.7


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_scores_what_is_there(criterion, tmp_path):
    model = lacking("deit_tiny_patch16_224", "an attention and two MLPs", tmp_path / "short")
    images = some_images(8)
    images = replace(images, labels=np.arange(8) % 7)
    ranking = rank(model, images, make_settings("local", criterion=criterion))
    assert (ranking.heads, ranking.neurons) == (model.anatomy.heads, model.anatomy.neurons) == ((3, 0, 3), (40, 0, 0))
    assert Planner(ranking, model.anatomy).pair(0.5, 0.3).neurons == (20, 0, 0)


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("case", LACKS)
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_the_search_computes_what_the_model_does(name, case, engine, tmp_path):
    model, images = lacking(name, case, tmp_path / "short"), some_images(5)
    runner = CandidateRunner(model, images, engine)  # its gate compares it with the module
    ranking, plan = random_ranking(model.anatomy, seed=2), smaller(model)
    module = shrink(model, ranking, plan)
    with torch.no_grad():
        wanted = module.forward_head(module.forward_features(inputs_of(images)), pre_logits=True)
    torch.testing.assert_close(runner.embedding(*runner.weights(ranking, plan)), wanted, rtol=1e-3, atol=1e-3)
    covariance = cka_covariance(model, images)
    assert covariance.shape == (3 + sum(model.anatomy.heads),) * 2
    assert np.isfinite(covariance).all()


@pytest.mark.parametrize("case", LACKS)
def test_a_latency_model_is_fitted_to_nets_that_the_model_can_be(case, tmp_path):
    anatomy = lacking("deit_tiny_patch16_224", case, tmp_path / "short").anatomy
    for without in (False, True):
        plans = sample_plans(anatomy, without)
        for plan in plans:
            plan.check_fits(anatomy)
        times = [1 + 0.1 * sum(plan.heads) + 0.01 * sum(plan.neurons) for plan in plans]
        assert fit(anatomy, list(zip(plans, times))).mean_error < 0.2


@pytest.mark.parametrize("recipe", ["default", "local"])
def test_the_command_exports_a_saved_model_again(snapvit, image_folder, tiny_model, tmp_path, recipe):
    plan = Plan(heads=(0, 3, 4), neurons=(100, 0, 150))
    cut = shrink(tiny_model, random_ranking(tiny_model.anatomy), plan)
    save_model(cut, tiny_model.description, tmp_path / "short")
    given = ["export", "--model", tmp_path / "short", "--data", image_folder, "--images", 16, "--recipe", recipe]
    outcome = snapvit(*given, "--sparsity", "0.2,0.5", "--out", tmp_path / "family", "--json")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "family")
    assert manifest.anatomy.heads == plan.heads
    assert manifest.variant("s50").heads[0] == 0 == manifest.variant("s50").neurons[1]
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert close(run(tmp_path / "family" / "dense.onnx", images.numpy()), cut(images).numpy())
    ranking = tmp_path / "family" / "ranking.safetensors"
    again = snapvit(*given[:-2], "--flops", 0.6, "--ranking", ranking, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    packed = ["pack", "--model", tmp_path / "short", "--data", image_folder, "--images", 16, "--ranking", ranking]
    assert snapvit(*packed, "--out", tmp_path / "elastic").code == 0
    assert Elastic.load(tmp_path / "elastic").corrects


def test_a_budget_is_met_by_a_saved_model(snapvit, image_folder, tiny_model, tmp_path):
    cut = shrink(tiny_model, random_ranking(tiny_model.anatomy), Plan(heads=(0, 3, 0), neurons=(100, 0, 150)))
    save_model(cut, tiny_model.description, tmp_path / "short")
    given = ["export", "--model", tmp_path / "short", "--data", image_folder, "--images", 16]
    outcome = snapvit(*given, "--budget", "1000ms", "--out", tmp_path / "family", "--json")
    assert outcome.code == 0, outcome.err
    assert read_family(tmp_path / "family").choice.variant == "dense"


def test_a_ranking_of_nothing_and_one_of_the_whole_model_are_refused(tiny_model, tmp_path):
    nothing = (np.zeros(0, np.float32),) * 2
    with pytest.raises(FileFormatError, match="at least one head or neuron"):
        Ranking(nothing, nothing)
    cut = shrink(tiny_model, random_ranking(tiny_model.anatomy), Plan(heads=(0, 3, 0), neurons=(100, 0, 150)))
    with pytest.raises(SnapvitError, match="12 heads.*the model has 3 blocks with 3 heads"):
        shrink(cut, Ranking.flat(tiny_model.anatomy), Plan.dense(tiny_model.anatomy))
