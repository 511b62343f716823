"""Whole sub-layers removed: nothing of them is left in a module, and what they added on average is not lost."""

import re
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from helpers.corrections import corrected
from helpers.graphs import FLAVOURS, close, run, writer_of
from helpers.images import HALF, inputs_of, make_image_folder, some_images
from helpers.models import FAMILIES, as_model, make_model_folder, small
from helpers.plans import anatomy_of, line
from helpers.rankings import random_ranking
from helpers.reference_forward import Reference
from snapvit_export.allocation.costs import flops_costs
from snapvit_export.allocation.depth import WHOLE, DepthAllocator, Removal
from snapvit_export.allocation.knapsack import Allocator
from snapvit_export.allocation.planner import STAGES, Planner
from snapvit_export.allocation.recipe import RECIPES, make_settings
from snapvit_export.calibration.images import Images
from snapvit_export.checks.inspect import inspect
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.folder import read_family
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.sublayer import SubLayer
from snapvit_export.progress import Silent
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.correct.policy import Corrector
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.correct.sequential import correct_in_sequence
from snapvit_export.prune.elastic_vit import ElasticViT
from snapvit_export.prune.models.load import ModelDescription, load_model, save_model
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint, corrected_layers, pack
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.rank.rank import rank
from snapvit_export.prune.rank.search.candidate_runner import CandidateRunner
from snapvit_export.prune.rank.search.damage_fitness import DamageFitness
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.output_divergence import OutputDivergence
from snapvit_export.selection import candidates
from snapvit_export.storage.json import as_builtins

SOME = ["deit_tiny_patch16_224", "deit3_small_patch16_224", "vit_base_patch16_siglip_224", "vit_small_patch16_dinov3"]


def short_plan(anatomy) -> Plan:
    """The first attention, the second MLP and all of the third block are gone, or as much of it as may."""
    return Plan(heads=(0, 3, 0), neurons=(anatomy.neurons[0] // 2, 0, 0))


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_module_without_sub_layers_equals_the_masked_one_and_is_saved_and_loaded(name, tmp_path):
    module, kwargs = small(name)
    anatomy = read_anatomy(module, name)
    ranking, plan = random_ranking(anatomy, seed=1), short_plan(anatomy)
    short = shrink(module, ranking, plan)
    images = torch.randn(2, 3, *anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), masked(module, ranking, plan):
        wanted = module(images)
    with torch.no_grad():
        got = short(images)
    assert (got - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max())
    assert read_anatomy(short, name) == anatomy.with_counts(plan)
    assert sum(p.numel() for p in short.parameters()) == anatomy.params(plan)
    left = {key.split(".")[2] for key in short.state_dict() if key.startswith("blocks.2.")}
    assert left <= {"attention_added", "mlp_added"}
    assert not {"norm1", "attn", "ls1", "gamma_1"} & {
        k.split(".")[2] for k in short.state_dict() if k.startswith("blocks.0.")
    }
    described = ModelDescription(name="short", architecture=name, kwargs=kwargs, preprocessing=HALF)
    save_model(short, described, tmp_path / "short")
    again = load_model(str(tmp_path / "short"))
    assert again.description.plan == plan
    with torch.no_grad():
        assert torch.equal(again.module(images), got)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", [None, "elastic", "sequential", "sparsegpt", "refit"])
def test_every_correction_gives_a_module_whose_graphs_say_the_same(name, way, tmp_path):
    model = as_model(small(name)[0], name, {})
    ranking, plan = random_ranking(model.anatomy, seed=1), short_plan(model.anatomy)
    images = some_images()
    module, _ = Corrector(model, ranking, way, images, Silent()).kept(plan)
    anatomy = model.anatomy if way in (None, "sparsegpt") else model.anatomy.with_output_biases()
    assert read_anatomy(module, name) == anatomy.with_counts(plan)
    with torch.no_grad():
        wanted = module(inputs_of(images)).numpy()
    drawn = blueprint(model, ranking)
    made = corrected_layers(module, ranking, plan, drawn.dense)
    for flavour in FLAVOURS:
        path = writer_of(drawn, tmp_path, flavour).write(flavour, plan, made, format=GraphFormat(flavour)).graph
        assert close(run(path, inputs_of(images).numpy()), wanted), flavour


@pytest.mark.parametrize("name", SOME)
def test_an_elastic_folder_gives_the_corrected_weights_of_such_plans(name, tmp_path):
    model = as_model(small(name)[0], name, {})
    ranking, plan = random_ranking(model.anatomy, seed=1), short_plan(model.anatomy)
    images = some_images()
    factors = make_factors(model, ranking, observe(model, images))
    pack(model, ranking, tmp_path / "elastic", factors)
    elastic = Elastic.load(tmp_path / "elastic")
    for with_correction in (False, True):
        module = shrink(model.module, ranking, plan)
        if with_correction:
            correct_module(module, ranking, plan, factors)
        with torch.no_grad():
            wanted = module(inputs_of(images)).numpy()
        got = Reference(elastic, plan, with_correction)(inputs_of(images).numpy().astype(np.float64))
        assert np.abs(got - wanted).max() <= 2e-4 * max(1, np.abs(wanted).max())
        made = elastic.corrected_layers(plan) if with_correction else None
        written = GraphWriter(blueprint(model, ranking), tmp_path).write("x", plan, made)
        assert close(run(written.graph, inputs_of(images).numpy()), wanted)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", ["elastic", "sequential", "refit"])
def test_a_sub_layer_that_always_gives_the_same_is_replaced_exactly(name, way):
    module, _ = small(name)
    for block in blocks_of(module)[1:]:
        for parameter in block.mlp.parameters():  # hidden units that see nothing: a constant, and not a small one
            if parameter is not block.mlp.fc2.weight and parameter.ndim == 2:
                parameter.data.zero_()
    model = as_model(module, name, {})
    ranking, images = random_ranking(model.anatomy), some_images()
    plan = Plan(heads=model.anatomy.heads, neurons=(model.anatomy.neurons[0], 0, 0))
    short, _ = Corrector(model, ranking, way, images, Silent()).kept(plan)
    with torch.no_grad():
        wanted, got = module(inputs_of(images)), short(inputs_of(images))
        plain = shrink(module, ranking, plan)(inputs_of(images))
    scale = float(wanted.abs().max())
    assert (got - wanted).abs().max() <= 1e-4 * scale
    if any(block.mlp.fc1.bias is not None for block in blocks_of(module)[1:] if hasattr(block.mlp, "fc1")):
        assert (plain - wanted).abs().max() > 1e-2 * scale  # so that equality above means something


def test_refit_puts_the_mean_that_it_saw_in_the_place_of_what_is_gone():
    model = as_model(small("deit3_small_patch16_224")[0], "x", {})
    ranking, images = random_ranking(model.anatomy), some_images(8)
    plan = Plan(heads=(4, 4, 4), neurons=(*model.anatomy.neurons[:2], 0))
    short = refit(model, ranking, plan, images, pull=0.0, token_weights=[None] * 3)
    found = []
    last = blocks_of(model.module)[2]
    hook = last.ls2.register_forward_hook(lambda _, __, y: found.append(y))
    with torch.no_grad():
        model.module(inputs_of(images))
    hook.remove()
    mean = found[0].flatten(0, 1).mean(0)
    proj = blocks_of(short)[2].attn.proj
    held = (proj.bias - last.attn.proj.bias) * last.ls1.gamma
    assert blocks_of(short)[2].mlp_added is None  # the layer before it holds the mean
    torch.testing.assert_close(held, mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(proj.weight, last.attn.proj.weight)


def test_layers_after_a_removed_one_give_back_a_part_of_what_it_did():
    model = as_model(small("deit_tiny_patch16_224")[0], "x", {})
    ranking, images = random_ranking(model.anatomy), some_images(24)
    plan = Plan(heads=(4, 0, 4), neurons=model.anatomy.neurons)
    wanted = model.module.forward_features(inputs_of(images)).detach()

    def error(module) -> float:
        with torch.no_grad():
            return float((module.forward_features(inputs_of(images)) - wanted).square().mean())

    plain = error(shrink(model.module, ranking, plan))
    mean = error(refit(model, ranking, plan, images, pull=0.0))
    assert error(refit(model, ranking, plan, images)) < mean < plain


def test_what_cuts_the_path_from_image_to_output_is_refused():
    token = as_model(small("deit_tiny_patch16_224")[0], "x", {})
    ranking = random_ranking(token.anatomy)
    without = Plan(heads=(0, 0, 0), neurons=token.anatomy.neurons)
    with pytest.raises(SnapvitError, match="no attention, so the class token would never see the image"):
        shrink(token.module, ranking, without)
    shrink(token.module, ranking, Plan(heads=(0, 0, 1), neurons=(0, 0, 0)))
    pooled = as_model(small("vit_base_patch16_siglip_224")[0], "x", {})
    shrink(pooled.module, random_ranking(pooled.anatomy), Plan(heads=(0, 0, 0), neurons=pooled.anatomy.neurons))
    with pytest.raises(SnapvitError, match="nothing of the blocks is left"):
        Plan(heads=(0, 0, 0), neurons=(0, 0, 0)).check_fits(pooled.anatomy)


def test_elastic_vit_removes_sub_layers_and_brings_them_back():
    module, _ = small("deit_tiny_patch16_224")
    anatomy = read_anatomy(module, "x")
    elastic = ElasticViT(module, random_ranking(anatomy))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        dense = elastic(images)
        assert not torch.allclose(elastic.prune(short_plan(anatomy))(images), dense)
        assert torch.equal(elastic.prune(Plan.dense(anatomy))(images), dense)


@pytest.mark.parametrize(
    "options",
    [
        *(["--recipe", name] for name in RECIPES),
        ["--recipe", "local", "--criterion", "magnitude"],
        ["--order", "criterion", "--criterion", "divergence"],
        ["--rounds", "0.8"],
    ],
    ids=" ".join,
)
def test_every_recipe_ranks_a_saved_model_without_sub_layers(snapvit, image_folder, tiny_model, tmp_path, options):
    ranking = random_ranking(tiny_model.anatomy)
    short = shrink(tiny_model.module, ranking, short_plan(tiny_model.anatomy))
    save_model(short, tiny_model.description, tmp_path / "short")
    out = tmp_path / "r.safetensors"
    few = ["--pca", 8, "--population", 4] if options[-1] == "snapvit" else []
    if options[-1] in ("snapvit", "search"):
        few += ["--evaluations", 6]
    images = [] if options[-1] == "magnitude" else ["--data", image_folder, "--images", 16]
    given = [*images, "--out", out, *options, *few]
    outcome = snapvit("rank", tmp_path / "short", *given)
    assert outcome.code == 0, outcome.err
    model, found = load_model(str(tmp_path / "short")), Ranking.load(out)
    assert (found.heads, found.neurons) == (model.anatomy.heads, model.anatomy.neurons)
    assert found.heads[0] == 0 == len(found.head_order(0))
    plan = Planner(found, model.anatomy, found.protection).sparsity(0.3)
    plan.check_fits(model.anatomy)
    assert plan.sparsity(model.anatomy) >= 0.3


def test_the_released_correction_keeps_the_bias_of_what_is_gone():
    model = as_model(small("deit_tiny_patch16_224")[0], "x", {})
    ranking, images = random_ranking(model.anatomy), some_images()
    plan = Plan(heads=(4, 4, 0), neurons=model.anatomy.neurons)
    alone = corrected(model, ranking, plan, observe(model, images), correction="sparsegpt")
    walked = correct_in_sequence(model, ranking, plan, images, correction="sparsegpt")
    with torch.no_grad():
        wanted = shrink(model.module, ranking, plan)(inputs_of(images))
        for module in (alone, walked):
            torch.testing.assert_close(module(inputs_of(images)), wanted)


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
def test_the_search_judges_candidates_without_sub_layers_as_they_are(engine):
    model = as_model(small("deit_tiny_patch16_224")[0], "x", {})
    images = some_images(5)
    ranking, factors = damage_ranking(model, observe(model, images, warn=False))
    runner = CandidateRunner(model, images, engine)
    for plan in (short_plan(model.anatomy), Plan(heads=(3, 0, 1), neurons=(0, 20, 0))):
        for made in (None, factors):
            module = shrink(model.module, ranking, plan)
            if made is not None:
                correct_module(module, ranking, plan, made)
            with torch.no_grad():
                wanted = module.forward_head(module.forward_features(inputs_of(images)), pre_logits=True)
            fitness = DamageFitness(runner, ranking, made, OutputDivergence("cosine", model, runner.dense))
            torch.testing.assert_close(fitness.embedding(plan), wanted, rtol=1e-3, atol=1e-3)


def ends(ranking) -> list[tuple[float, float]]:
    return [(heads[0], neurons[0]) for heads, neurons in ranking.damage]


def test_plans_along_the_line_are_nested_also_where_sub_layers_go():
    model = as_model(small("deit_tiny_patch16_224")[0], "x", {})
    ranking, _ = damage_ranking(model, observe(model, some_images(), warn=False))
    protection = Protection(sublayers=False)
    least, removable = protection.least(model.anatomy), protection.removable(model.anatomy, ends(ranking))
    plans = line(Allocator(ranking.damage, flops_costs(model.anatomy), least, removable=removable))
    assert all(denser.keeps_all_of(sparser) for denser, sparser in pairwise(plans))
    assert len(plans[-1].removed) == 5  # of six sub-layers
    for plan in plans:
        plan.check_fits(model.anatomy)


def test_export_removes_sub_layers_where_width_does_not_reach(snapvit, tiny_folder, image_folder, tmp_path):
    given = ["export", "--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "out"]
    assert "protection leaves at least 0.1226" in snapvit(*given, "--flops", 0.06, "--no-depth").error_line
    outcome = snapvit(*given, "--flops", 0.06, "--json")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    variant = manifest.variant("flops6")
    assert 0 in (*variant.heads, *variant.neurons)
    assert any(variant.heads)
    assert manifest.plan(variant).removed == inspect(tmp_path / "out" / "flops6.onnx").plan.removed
    assert len(manifest.recipe["sublayers"]) == 6


def test_idap_cuts_width_and_then_sub_layers_along_one_nested_line(tiny_model, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), np.uint8)
    images = Images(pixels, None, tiny_model.preprocessing, "noise")
    ranking = rank(tiny_model, images, make_settings("idap", images=16))
    assert ranking.provenance["criterion"] == "divergence"
    ranking.save(tmp_path / "r")
    ranking = Ranking.load(tmp_path / "r")
    planner = Planner(ranking, tiny_model.anatomy, ranking.protection)
    steps = list(planner.steps().values())
    assert all(denser.keeps_all_of(sparser) for denser, sparser in pairwise(steps))
    assert len(planner.sparsest.removed) == 5  # of six: one attention stays
    for fraction in (0.9, 0.6, 0.4, 0.2, 0.1, 0.04):
        plan = planner.flops(fraction)
        plan.check_fits(tiny_model.anatomy)
        assert plan.flops_ratio(tiny_model.anatomy) <= fraction
    assert planner.flops(0.2).removed
    plain = Ranking(ranking.head_scores, ranking.neuron_scores)
    with pytest.raises(UsageError, match="measured damage, which the ranking lacks"):
        Planner(plain, tiny_model.anatomy, ranking.protection)


def test_the_stages_of_a_ranking_by_scores_come_one_after_the_other(tiny_model):
    """In twelve blocks: width to the first limit, 4 of 24 sub-layers, the rest of the width, all sub-layers but one."""
    anatomy = msgspec.structs.replace(tiny_model.anatomy, blocks=tiny_model.anatomy.blocks * 4)
    damages = np.random.default_rng(3).random(24)
    measured = [
        SubLayer(block=i // 2, part=("attention", "mlp")[i % 2], divergence=0, turned=0, damage=float(d))
        for i, d in enumerate(damages)
    ]
    scores = random_ranking(anatomy)
    ranking = Ranking(scores.head_scores, scores.neuron_scores, provenance={"sublayers": as_builtins(measured)})
    planner, width = (Planner(ranking, anatomy, Protection(sublayers=kept)) for kept in (False, True))
    line = [planner._at(position) for position in np.linspace(0, 1, 401)]
    assert all(denser.keeps_all_of(sparser) for denser, sparser in pairwise(line))
    gone = np.array([len(plan.removed) for plan in line])
    assert set(gone.tolist()) == set(range(24))
    first, last = width._at(STAGES[1][0]), width.sparsest

    def is_without(plan: Plan, whole: Plan) -> bool:
        """Whether it has the widths of `whole` wherever it has anything."""
        pairs = zip(plan.heads + plan.neurons, whole.heads + whole.neurons)
        return all(a in (0, b) for a, b in pairs)

    assert line[0] == Plan.dense(anatomy)
    assert all(plan.keeps_all_of(first) for plan, n in zip(line, gone) if n == 0)
    assert all(is_without(plan, first) for plan, n in zip(line, gone) if 0 < n < 4)
    assert all(is_without(plan, last) for plan, n in zip(line, gone) if n > 4)
    assert line[100] == first
    assert is_without(line[200], first)
    assert is_without(line[300], last)
    assert (gone[100], gone[200], gone[300]) == (0, 4, 4)
    least = sorted(measured, key=lambda s: s.damage)
    for plan, n in zip(line, gone):
        if n <= 4:
            assert set(plan.removed) == {(s.block, s.part) for s in least[:n]}
    for fraction in (0.95, 0.8, 0.6, 0.3, 0.1, 0.02):
        plan = planner.flops(fraction)
        assert plan.flops_ratio(anatomy) <= fraction
        assert planner.params(max(fraction, 0.2)).keeps_all_of(planner.sparsest)


def test_the_end_of_a_curve_counts_more_and_most_where_the_loss_was_measured_to_matter():
    damage = tuple((np.array([4.0, 1, 0]), np.array([8.0, 3, 1, 0])) for _ in range(2))
    plain = Removal.of(damage, None).curves
    assert [(h[0], n[0]) for h, n in plain] == [(4 * WHOLE, 8 * WHOLE)] * 2
    assert all((h[1:] == [1, 0]).all() and (n[1:] == [3, 1, 0]).all() for h, n in plain)
    moved = {(0, "attention"): 0.4, (0, "mlp"): 8.0, (1, "attention"): 0.4, (1, "mlp"): 0.1}  # typical: 0.1 of the end
    measured = [SubLayer(block=i, part=part, divergence=0, turned=0, damage=d) for (i, part), d in moved.items()]
    ends = [(h[0], n[0]) for h, n in Removal.of(damage, measured).curves]
    assert ends == [(4 * WHOLE, pytest.approx(80 * WHOLE)), (4 * WHOLE, 8 * WHOLE)]


def test_losing_all_late_attentions_counts_for_more_than_each_of_them_where_it_was_measured_to_be():
    damage = tuple((np.array([4.0, 1, 0]), np.array([8.0, 3, 1, 0])) for _ in range(3))
    onward = (9.0, 3.2, 0.4)  # the answers move by 0.1 for a unit of damage

    def measured(weight: float = 1.0) -> list[SubLayer]:
        parts = [(i, part) for i in range(3) for part in ("attention", "mlp")]
        told = {"divergence": 0, "turned": 0, "weight": weight}
        return [
            SubLayer(block=i, part=part, damage=0.4 if part == "attention" else 0.8, onward=together, **told)
            for (i, part), together in zip(parts, [x for o in onward for x in (o, None)])
        ]

    removal = Removal.of(damage, measured())
    assert removal.beyond == (pytest.approx(32 - 4 - 4), 0, 0)  # two of them together; the last one alone; none
    half = tuple((heads / 2, neurons / 2) for heads, neurons in damage)
    assert Removal.of(half, measured(0.5)).beyond == pytest.approx([12, 0, 0])
    assert Removal.of(damage, None).beyond is None
    anatomy = anatomy_of([2] * 3, [3] * 3)
    cases = DepthAllocator(removal, flops_costs(anatomy), Plan(heads=(1,) * 3, neurons=(1,) * 3), anatomy)
    assert cases.damage(Plan(heads=(2, 0, 0), neurons=(3,) * 3)) == pytest.approx(32)
    assert cases.damage(Plan(heads=(0, 0, 2), neurons=(3,) * 3)) == 8


def test_a_search_weights_the_loss_of_a_whole_sub_layer_as_its_curve(tiny_model, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), np.uint8)
    images = Images(pixels, None, tiny_model.preprocessing, "noise")
    plain = rank(tiny_model, images, make_settings("default", images=16))
    factors = np.array([[0.2, 1.0], [5.0, 0.3], [1.0, 2.0]])

    def ends(ranking) -> np.ndarray:
        return np.array([(h[0], n[0]) for h, n in Removal.of(ranking.damage, ranking.sublayers).curves])

    assert (ends(plain) > 1.01 * WHOLE * np.array([(h[0], n[0]) for h, n in plain.damage])).any()  # some count for more
    weighted = plain.weighted(factors)
    np.testing.assert_allclose(ends(weighted), ends(plain) * factors)
    np.testing.assert_allclose(ends(weighted.weighted(1 / factors)), ends(plain))
    assert [s.damage for s in weighted.sublayers] == [s.damage for s in plain.sublayers]  # still as it was measured
    weighted.save(tmp_path / "r")
    np.testing.assert_array_equal(ends(Ranking.load(tmp_path / "r")), ends(weighted))
    costs = flops_costs(tiny_model.anatomy)

    def plans(ranking) -> list[Plan]:
        planner = Planner(ranking, tiny_model.anatomy, ranking.protection)
        return [planner.within(costs, f * costs.of(Plan.dense(tiny_model.anatomy))) for f in (0.5, 0.2, 0.08)]

    assert plans(plain.weighted(np.full((3, 2), 0.25))) == plans(plain)  # a factor for all changes nothing
    searched = rank(tiny_model, images, make_settings("default", images=16, evaluations=20, flops=(0.2,)))
    by = np.reshape(searched.provenance["search"]["factors"], (3, 2))
    assert (by != 1).any()
    np.testing.assert_allclose(ends(searched), ends(plain) * by)


@pytest.mark.slow  # two exports that time their way to the smallest net
def test_an_impossible_budget_names_the_floor_that_depth_reaches(snapvit, tmp_path, monkeypatch):
    """Width alone keeps a part of every sub-layer; with depth the smallest is smaller by more than noise."""
    monkeypatch.setattr(candidates, "FIT_SECONDS", 0.1)
    make_model_folder(
        tmp_path / "model", dict(img_size=96, patch_size=8, embed_dim=96, depth=6, num_heads=6, num_classes=5)
    )
    make_image_folder(tmp_path / "images")
    given = ["export", "--model", tmp_path / "model", "--data", tmp_path / "images", "--images", 16]
    floors = []
    for levers in ("width", "width,depth"):
        outcome = snapvit(*given, "--out", tmp_path / "out", "--budget", "0.5%", "--levers", levers)
        assert outcome.code == 1
        floors.append(float(re.search(r"the smallest reaches ([0-9.]+) ms", outcome.error_line)[1]))
    assert floors[1] < 0.8 * floors[0], floors
