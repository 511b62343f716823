"""Rankings from statistics, the search on top of them, and the refit of what is kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.images import noise, pictures
from helpers.models import FAMILIES, model_of
from helpers.plans import uneven_plan
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import ORDERS, Settings, make_settings
from snapvit_export.correction.moments import Damping
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.model.plan import Plan
from snapvit_export.model.scores import Scores
from snapvit_export.prune.correct import refit as refitting
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.rank.rank import rank
from snapvit_export.prune.rank.search.candidate_runner import CandidateRunner
from snapvit_export.prune.rank.search.damage_fitness import DamageFitness
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.output_divergence import OutputDivergence, default_divergence
from snapvit_export.prune.stats.stream import capture_input


def scores_of(model, seed: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    heads, neurons = (
        tuple(rng.random(n, dtype=np.float32) for n in sizes) for sizes in (model.anatomy.heads, model.anatomy.neurons)
    )
    return Scores(heads, neurons)


def embedding(module, images) -> torch.Tensor:
    with torch.no_grad():
        parts = [
            module.forward_head(module.forward_features(torch.from_numpy(batch)), pre_logits=True)
            for batch in images.batches(8)
        ]
    return torch.cat(parts)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_gives_curves_that_say_what_correction_leaves(tiny_model, order):
    images = pictures(40)
    statistics = observe(tiny_model, images)
    ranking, factors = damage_ranking(tiny_model, statistics, order, scores_of(tiny_model))
    assert ranking.damage is not None
    block = tiny_model.module.blocks[1]
    keep = 50
    weight, _ = factors.fc2[1].corrected(keep)
    full = block.mlp.fc2.weight.detach().double().numpy()
    kept = ranking.neuron_order(1)[:keep]
    lost = full.copy()
    lost[:, kept] -= weight
    s = factors.damping.added_to(statistics.fc2[1].covariance)
    assert ranking.damage[1][1][keep] == pytest.approx(np.trace(lost @ s @ lost.T), rel=1e-6)


def test_a_greedy_order_does_less_damage_than_one_by_random_scores(tiny_model):
    statistics = observe(tiny_model, pictures(40))
    by_scores, _ = damage_ranking(tiny_model, statistics, "criterion", scores_of(tiny_model))
    backward, _ = damage_ranking(tiny_model, statistics, "backward")
    for worse, better in zip(by_scores.damage, backward.damage):
        assert better[1][60:150].sum() < 0.9 * worse[1][60:150].sum()


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("name", ["predictions", "neighbours", "cosine"])
def test_the_fitness_is_that_of_the_corrected_module(tiny_model, engine, name):
    images = pictures(13)
    statistics = observe(tiny_model, images)
    ranking, factors = damage_ranking(tiny_model, statistics)
    runner = CandidateRunner(tiny_model, images, engine)
    divergence = OutputDivergence(name, tiny_model, runner.dense)
    fitness = DamageFitness(runner, ranking, factors, divergence, (0.7, 0.5))
    found = fitness.per_image(np.ones(6))
    assert found.shape == (2, 13)
    for fraction, row in zip((0.7, 0.5), found):
        plan = Planner(ranking, tiny_model.anatomy).flops(fraction)
        module = shrink(tiny_model.module, ranking, plan)
        correct_module(module, ranking, plan, factors)
        z, dense = embedding(module, images), embedding(tiny_model.module, images)
        reference = by_hand(name, tiny_model.module.head, z, dense)
        np.testing.assert_allclose(row, reference, rtol=2e-3, atol=1e-5)
    halves = [fitness.per_image(np.ones(6), range(0, 2)), fitness.per_image(np.ones(6), range(2, runner.chunks))]
    np.testing.assert_allclose(np.concatenate(halves, axis=1), found, rtol=1e-4, atol=1e-7)


def by_hand(name: str, head, z: torch.Tensor, dense: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        if name == "cosine":
            return 1 - torch.nn.functional.cosine_similarity(z, dense).numpy()
        if name == "predictions":
            p, q = head(dense).softmax(1), head(z).softmax(1)
        else:
            a, b = (torch.nn.functional.normalize(x, dim=1) for x in (dense, z))
            p, q = ((x @ a.T / 0.07).fill_diagonal_(float("-inf")).softmax(1) for x in (a, b))
        return torch.where(p > 0, p * (p.log() - q.log()), 0).sum(1).numpy()


def test_the_dense_plan_diverges_by_nothing(tiny_model):
    images = pictures(9)
    ranking, factors = damage_ranking(tiny_model, observe(tiny_model, images))
    runner = CandidateRunner(tiny_model, images, "torch")
    for name in ("predictions", "neighbours", "cosine"):
        fitness = DamageFitness(runner, ranking, factors, OutputDivergence(name, tiny_model, runner.dense))
        assert np.abs(fitness.of_plan(Plan.dense(tiny_model.anatomy))).max() < 1e-6


def test_predictions_need_a_classifier(tiny_model):
    headless = replace(tiny_model, anatomy=replace_classes(tiny_model.anatomy, 0))
    assert default_divergence(tiny_model) == "predictions"
    assert default_divergence(headless) == "neighbours"
    with pytest.raises(SnapvitError, match="makes no predictions"):
        OutputDivergence("predictions", headless, torch.zeros(3, 48))
    with pytest.raises(UsageError, match="no divergence is called 'kl'"):
        OutputDivergence("kl", tiny_model, torch.zeros(3, 48))  # type: ignore[arg-type]


def replace_classes(anatomy, classes: int):
    import msgspec

    return msgspec.structs.replace(anatomy, classes=classes)


def joint(**changes) -> Settings:
    return replace(make_settings("default", images=24), **{"evaluations": 26, "flops": (0.7,), **changes})


def test_a_search_weights_the_curves_and_never_ends_worse(tiny_model):
    images = pictures(24)
    plain = rank(tiny_model, images, joint(evaluations=0))
    searched = rank(tiny_model, images, joint())
    found = searched.provenance["search"]
    assert found["best_fitness"] < found["start_fitness"]
    assert searched.order_sha256 == plain.order_sha256
    factors = np.reshape(found["factors"], (3, 2))
    for i in range(3):
        for kind in (0, 1):
            np.testing.assert_allclose(searched.damage[i][kind], factors[i, kind] * plain.damage[i][kind], rtol=1e-6)


def test_an_interrupted_joint_search_goes_on_to_the_same_ranking(tiny_model, tmp_path, monkeypatch):
    images = pictures(24)
    whole = rank(tiny_model, images, joint())
    from snapvit_export.prune.rank.search.snes import LogSNES

    told = LogSNES.tell

    def stop_after_two(self, points, losses):
        told(self, points, losses)
        monkeypatch.setattr(LogSNES, "tell", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))

    monkeypatch.setattr(LogSNES, "tell", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        rank(tiny_model, images, joint(), checkpoint=tmp_path / "state")
    assert (tmp_path / "state").exists()
    monkeypatch.setattr(LogSNES, "tell", told)
    resumed = rank(tiny_model, images, joint(), checkpoint=tmp_path / "state")
    assert resumed.provenance["search"]["factors"] == whole.provenance["search"]["factors"]
    for a, b in zip(resumed.damage, whole.damage):
        np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(order="sideways"), "no order is called 'sideways'"),
        (dict(allocation="free"), "no allocation is called 'free'"),
        (dict(correction="prayer"), "no correction is called 'prayer'"),
        (dict(search_images=0), "cannot compare candidates"),
        (dict(cka=True, optimiser="xnes"), "--cka has no part in recipe default"),
        (dict(criterion="magnitude"), "--criterion has no part in recipe default .* Give --recipe local"),
        (dict(pairs=((0.1, 0.1),)), "--pairs has no part"),
    ],
)
def test_settings_that_make_no_sense(changes, says):
    with pytest.raises(UsageError, match=says):
        make_settings("default", **changes)


def test_options_of_one_way_are_refused_in_the_other_and_taken_where_they_count():
    with pytest.raises(UsageError, match="--search-images has no part in recipe local .* Give --allocation joint"):
        make_settings("local", search_images=10)
    assert make_settings("default", order="product", criterion="taylor").criterion == "taylor"
    assert make_settings("default", allocation="pairs", criterion="lamp", evaluations=9, pca=8).pca == 8


def test_a_size_that_protection_forbids_is_refused_before_any_work(tiny_model):
    with pytest.raises(SnapvitError, match="out of reach"):
        rank(tiny_model, pictures(8), joint(flops=(0.01,)))


def error(module, images, goal: torch.Tensor) -> float:
    return float((embedding(module, images) - goal).square().mean() / goal.square().mean())


def test_on_other_images_a_refit_comes_nearer_to_the_dense_model_than_the_elastic_correction(tiny_model):
    images, others = pictures(64), pictures(64, seed=1)
    statistics = observe(tiny_model, images)
    ranking, factors = damage_ranking(tiny_model, statistics)
    plan = Planner(ranking, tiny_model.anatomy).flops(0.6)
    goal = embedding(tiny_model.module, others)
    elastic = shrink(tiny_model.module, ranking, plan)
    correct_module(elastic, ranking, plan, factors)
    refitted = refit(tiny_model, ranking, plan, images)
    assert error(refitted, others, goal) < error(elastic, others, goal)


def test_a_refit_without_pull_or_damping_is_the_sequential_correction(tiny_model):
    from snapvit_export.prune.correct.sequential import correct_in_sequence

    images = pictures(16)
    ranking, _ = damage_ranking(tiny_model, observe(tiny_model, images))
    plan = uneven_plan(tiny_model.anatomy)
    one, other = (
        refit(tiny_model, ranking, plan, images, Damping(fraction=1e-7), pull=0.0),
        correct_in_sequence(tiny_model, ranking, plan, images, Damping(fraction=1e-7)),
    )
    torch.testing.assert_close(embedding(one, images), embedding(other, images), rtol=1e-3, atol=1e-4)


def test_a_refit_of_everything_kept_changes_nothing(tiny_model):
    images = pictures(8)
    ranking, _ = damage_ranking(tiny_model, observe(tiny_model, images))
    whole = refit(tiny_model, ranking, Plan.dense(tiny_model.anatomy), images)
    torch.testing.assert_close(embedding(whole, images), embedding(tiny_model.module, images), rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_is_refitted_and_better_on_other_images_than_if_only_cut(name):
    model = model_of(name)
    both = noise(model, 48)
    images, others = both.first(24), replace(both, pixels=both.pixels[24:])
    statistics = observe(model, images)
    ranking, factors = damage_ranking(model, statistics)
    plan = uneven_plan(model.anatomy)
    goal = embedding(model.module, others)
    cut = shrink(model.module, ranking, plan)
    refitted = refit(model, ranking, plan, images)
    assert error(refitted, others, goal) < 0.5 * error(cut, others, goal)
    again = make_factors(model, ranking, statistics)
    np.testing.assert_allclose(again.fc2[0].lower, factors.fc2[0].lower, rtol=1e-6, atol=1e-9)


def test_a_layer_that_keeps_everything_keeps_what_calibration_never_saw(tiny_model):
    """A neuron that is silent on the calibration images may speak on others: only the pull may touch its layer."""
    tiny_model.module.blocks[2].mlp.fc1.weight.data[5] = 0
    tiny_model.module.blocks[2].mlp.fc1.bias.data[5] = 0  # gelu(0) = 0: constant on all images
    images = pictures(16)
    ranking, _ = damage_ranking(tiny_model, observe(tiny_model, images))
    dense = Plan.dense(tiny_model.anatomy)
    plan = Plan(heads=dense.heads, neurons=(100, *dense.neurons[1:]))
    untouched = refit(tiny_model, ranking, plan, images, pull=0.0)
    for i in (1, 2):
        for name in ("attn.proj", "mlp.fc2"):
            before, after = (m.get_submodule(f"blocks.{i}.{name}") for m in (tiny_model.module, untouched))
            torch.testing.assert_close(after.weight, before.weight)
    pulled = refit(tiny_model, ranking, plan, images)
    column = pulled.blocks[2].mlp.fc2.weight[:, 5]
    torch.testing.assert_close(column, tiny_model.module.blocks[2].mlp.fc2.weight[:, 5])


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit3_small_patch16_224"])  # without and with LayerScale
def test_what_the_kept_columns_can_foretell_is_taken_back_whole(name, monkeypatch):
    """The first fc2 loses nothing itself; it can undo, by weight and bias, an error of proj that it can see."""
    model = model_of(name)
    images = noise(model, 60)
    dense = Plan.dense(model.anatomy)
    ranking, _ = damage_ranking(model, observe(model, images))
    plan = Plan(heads=(2, *dense.heads[1:]), neurons=dense.neurons)
    monkeypatch.setattr(refitting, "PULL_DAMPING", Damping(fraction=1e-9))
    alike = [None] * 3

    def missing(pull: float) -> tuple[float, float]:
        """What the stream lacks after the first block: the spread of it that its fc2 could give, and its mean."""
        module = refit(model, ranking, plan, images, Damping(fraction=1e-9), pull, token_weights=alike)
        x = torch.from_numpy(next(images.batches(60)))
        with torch.no_grad():
            streams = [m.blocks[0](m.norm_pre(m._pos_embed(m.patch_embed(x)))) for m in (model.module, module)]
            hidden = capture_input(module.blocks[0].mlp.fc2, lambda: module.forward_features(x))
        t, a = (v.flatten(0, 1).double() for v in (streams[0] - streams[1], hidden))
        mean, t, a = t.mean(0), t - t.mean(0), a - a.mean(0)
        fitted = a @ torch.linalg.lstsq(a, t).solution
        return float(fitted.square().mean() / streams[0].square().mean()), float(mean.abs().max())

    spread, mean = missing(0.0)
    after, after_mean = missing(1.0)
    assert spread > 1e-5  # there was something to take back
    assert after < 1e-3 * spread
    assert after_mean < 0.01 * mean


def test_where_a_norm_runs_over_what_is_cut_a_refit_fits_what_the_cut_layer_sees(monkeypatch):
    model = model_of("eva02_base_patch14_224")
    both = noise(model, 96)
    images, others = both.first(48), replace(both, pixels=both.pixels[48:])
    ranking, _ = damage_ranking(model, observe(model, images))
    plan, goal = uneven_plan(model.anatomy), embedding(model.module, others)
    seen = error(refit(model, ranking, plan, images), others, goal)
    monkeypatch.setattr(refitting, "_has_norm", lambda part: False)
    assert seen < 0.95 * error(refit(model, ranking, plan, images), others, goal)


@pytest.mark.parametrize("cut", [True, False])
def test_values_that_are_not_finite_stop_a_refit_at_their_layer(tiny_model, cut):
    images = pictures(16)
    ranking, _ = damage_ranking(tiny_model, observe(tiny_model, images))
    neuron = ranking.neuron_order(2)[-1 if cut else 0]
    tiny_model.module.blocks[2].mlp.fc1.bias.data[neuron] = float("nan")
    with pytest.raises(SnapvitError, match=r"blocks.2.mlp.fc2: its (in|out)put holds values that are not finite"):
        refit(tiny_model, ranking, Plan(heads=(2, 4, 3), neurons=(100, 100, 100)), images)


def test_tokens_that_are_passed_over_in_a_batch_do_not_stop_a_refit(tiny_model):
    images = pictures(400)
    ranking, _ = damage_ranking(tiny_model, observe(tiny_model, images))
    one_patch = torch.zeros(tiny_model.anatomy.tokens).index_fill(0, torch.tensor([5]), 1.0)
    small = refit(tiny_model, ranking, uneven_plan(tiny_model.anatomy), images, token_weights=[one_patch] * 3)
    assert torch.isfinite(embedding(small, images.first(8))).all()


def test_a_refit_needs_images(tiny_model):
    ranking, _ = damage_ranking(tiny_model, observe(tiny_model, pictures(8)))
    with pytest.raises(SnapvitError, match="a refit needs images"):
        refit(tiny_model, ranking, uneven_plan(tiny_model.anatomy), pictures(8).first(0))
