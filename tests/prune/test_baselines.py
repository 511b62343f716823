"""Baselines of other authors: each on a toy whose answer is known, and in the frame that all methods share."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from helpers.images import pictures
from snapvit_export.allocation.cut_order import CutOrder
from snapvit_export.allocation.from_scores import ranking_from
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import RECIPES, Rounds, make_settings
from snapvit_export.calibration.images import Images
from snapvit_export.correction.moments import Damping, Moments
from snapvit_export.correction.sparsegpt import left_to_right
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.evaluate.comparison import Comparison
from snapvit_export.family.folder import read_family
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.progress import Silent
from snapvit_export.prune.blocks.timm_blocks import head_shares, neuron_shares
from snapvit_export.prune.correct.policy import Corrector
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank import shots
from snapvit_export.prune.rank.criteria import Batch, make_criterion
from snapvit_export.prune.rank.criteria.fptp import rearranged, swapped
from snapvit_export.prune.rank.criteria.kfac import cost_of_rows
from snapvit_export.prune.rank.criteria.losses import CrossEntropy
from snapvit_export.prune.rank.criteria.nvit import MU
from snapvit_export.prune.rank.iterative import rank_in_rounds
from snapvit_export.prune.rank.rank import rank, score


def batch_of(count: int, classes: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(count) % classes if classes else None
    return Batch(torch.randn(count, 3, 32, 32, generator=generator).to(dtype), labels, 0)


@pytest.fixture(scope="module")
def images() -> Images:
    return pictures(20)


# FPTP


def lost(fisher: np.ndarray, cut) -> float:
    """The quadratic loss of a cut, to second order around a minimum: c^T F c."""
    return float(fisher[np.ix_(cut, cut)].sum())


def best_cut(fisher: np.ndarray, count: int) -> set[int]:
    return set(min(combinations(range(len(fisher)), count), key=lambda cut: lost(fisher, list(cut))))


def test_of_two_that_do_the_same_one_is_cut_and_not_both():
    """Masks 2 and 3 have nearly the same gradients and the smallest scores, but cutting both costs four times."""
    fisher = np.diag([5.0, 6.0, 1.0, 1.1, 1.5, 7.0])
    fisher[2, 3] = fisher[3, 2] = 1.0
    by_score = np.argsort(-np.diag(fisher), kind="stable")
    assert set(by_score[-2:]) == {2, 3}
    assert best_cut(fisher, 2) == {2, 4}
    assert set(swapped(fisher, by_score, by_score[:0], 2)) == {2, 4}
    assert set(rearranged(fisher, [4])[4:]) == {2, 4}


@pytest.mark.parametrize("seed", range(5))
def test_swaps_never_lose_and_end_as_the_published_loop_does(seed):
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(12, 9)) * rng.uniform(0.5, 2, size=9)
    fisher = g.T @ g
    by_score = np.argsort(-np.diag(fisher), kind="stable")
    for count in range(1, 9):
        cut = list(swapped(fisher, by_score, by_score[:0], count))
        assert len(set(cut)) == count
        assert lost(fisher, cut) <= lost(fisher, list(by_score[-count:])) * (1 + 1e-12)
        masked = list(by_score[::-1][:count])  # the loop as published, on the gradients themselves
        for index in by_score[::-1][count:]:
            masked.append(index)
            rest = g[:, masked].sum(1, keepdims=True) - g[:, masked]
            del masked[int(np.square(rest).sum(0).argmin())]
        assert set(cut) == set(masked)


def test_rearranged_cuts_of_several_sizes_are_nested():
    g = np.random.default_rng(1).normal(size=(30, 12))
    fisher = g.T @ g
    widths = [10, 7, 7, 3]
    order = rearranged(fisher, widths)
    assert sorted(order) == list(range(12))
    by_score = np.argsort(-np.diag(fisher), kind="stable")
    kept, before = by_score, by_score[:0]
    for width in (10, 7, 3):
        cut = swapped(fisher, kept, before, len(kept) - width)
        kept = kept[~np.isin(kept, cut)]
        before = np.concatenate([cut, before])
        assert set(order[:width]) == set(kept)


def published_search(head, neuron, per_head: float, per_neuron: float, budget: float) -> tuple[int, int]:
    """Algorithm 1 of the paper: for each number of heads as many neurons as fit, the largest importance kept."""
    head, neuron = np.sort(np.concatenate(head))[::-1], np.sort(np.concatenate(neuron))[::-1]
    found = {}
    for heads in range(1, len(head) + 1):
        neurons = min(int((budget - heads * per_head) / per_neuron), len(neuron))
        if neurons >= 1:
            found[heads, neurons] = head[:heads].sum() + neuron[:neurons].sum()
    return max(found, key=found.__getitem__)


@pytest.mark.parametrize("size", [0.8, 0.6, 0.4])
def test_the_search_of_the_recipe_is_algorithm_1(tiny_model, images, size):
    """The knapsack of summed scores fills the budget as the published loop over the number of heads does."""
    anatomy = tiny_model.anatomy
    ranking = rank(tiny_model, images, replace(RECIPES["fptp"], criterion="fisher-masks"))
    plan = Planner(ranking, anatomy, Protection(heads=0, neurons=0)).flops(size)
    (per_head, per_neuron), *others = anatomy.structure_flops()
    assert set(others) == {(per_head, per_neuron)}
    budget = size * anatomy.block_flops()
    heads, neurons = published_search(ranking.head_scores, ranking.neuron_scores, per_head, per_neuron, budget)
    best = [np.sort(np.concatenate(kind))[::-1] for kind in (ranking.head_scores, ranking.neuron_scores)]
    published = best[0][:heads].sum() + best[1][:neurons].sum()
    ours = sum(
        scores[order[:keep]].sum()
        for scores, order, keep in [
            (kind[i], of(i), counts[i])
            for kind, of, counts in (
                (ranking.head_scores, ranking.head_order, plan.heads),
                (ranking.neuron_scores, ranking.neuron_order, plan.neurons),
            )
            for i in range(len(counts))
        ]
    )
    # one head and one neuron of a block always stay here, which may cost a little of the importance
    assert ours <= published * (1 + 1e-6)
    assert ours >= published * 0.99


def test_rearrangement_changes_which_are_kept_and_not_how_many(tiny_model, images):
    plain = rank(tiny_model, images, replace(RECIPES["fptp"], criterion="fisher-masks"))
    swaps = rank(tiny_model, images, RECIPES["fptp"])
    for size in (0.8, 0.5):
        plans = [Planner(each, tiny_model.anatomy).flops(size) for each in (plain, swaps)]
        assert plans[0] == plans[1]
    assert plain.order_sha256 != swaps.order_sha256
    assert np.allclose(np.sort(plain.neuron_scores[1]), np.sort(swaps.neuron_scores[1]), rtol=1e-4)


# SparseGPT


@pytest.mark.parametrize("part", ["mlp", "attention"])
def test_the_sparsegpt_score_is_the_least_error_when_the_columns_after_it_are_free(tiny_model, part):
    criterion, module = make_criterion("sparsegpt"), tiny_model.module
    block, depth = module.blocks[1], len(module.blocks)
    linear, unit, place = (block.mlp.fc2, 1, 1) if part == "mlp" else (block.attn.proj, 12, 1 + depth)
    sums = criterion.contribution(module, batch_of(8))
    scores = criterion.finish(module, sums, 8)
    got = scores.neurons[1] if part == "mlp" else scores.heads[1]
    moments = Moments(1.0, np.zeros(linear.in_features), (sums[place] / sums[-1]).numpy())
    h, w = Damping().added_to(moments.covariance), linear.weight.detach().double().numpy()
    for s in (0, 2, len(got) - 1):
        own = np.arange(s * unit, (s + 1) * unit)
        after = np.arange((s + 1) * unit, len(h))
        change = np.zeros_like(w)
        change[:, own] = -w[:, own]
        if len(after):  # least squares: the gradient of tr(D H D^T) by the free columns is zero
            change[:, after] = np.linalg.solve(h[np.ix_(after, after)], (w[:, own] @ h[np.ix_(own, after)]).T).T
        least = np.trace(change @ h @ change.T)
        assert np.isclose(got[s], least, rtol=1e-5)
        keep = ~np.isin(np.arange(len(h)), own)
        updated = left_to_right(w, moments, keep) - w
        assert np.isclose(np.trace(updated @ h @ updated.T), least, rtol=1e-8)


def test_the_first_column_has_all_others_to_make_up_for_it(tiny_model):
    """Its score is OBS: the error of an unconstrained least-squares fit without that column."""
    criterion, module = make_criterion("sparsegpt"), tiny_model.module
    sums = criterion.contribution(module, batch_of(8))
    h = Damping().added_to((sums[1] / sums[-1]).numpy())
    root, w = np.linalg.cholesky(h).T, module.blocks[1].mlp.fc2.weight.detach().double().numpy()
    fit = np.linalg.lstsq(root[:, 1:], root @ w.T, rcond=None)[0]
    least = np.square(root[:, 1:] @ fit - root @ w.T).sum()
    assert np.isclose(criterion.finish(module, sums, 8).neurons[1][0], least, rtol=1e-5)


def test_sparsegpt_cuts_the_same_share_of_every_layer(tiny_model, images):
    ranking = rank(tiny_model, images, RECIPES["sparsegpt"])
    planner = Planner(ranking, tiny_model.anatomy)
    for structures in (75, 150, 300):
        plan = planner.without(structures)
        shares = np.array([plan.neurons, plan.heads]) / np.array([tiny_model.anatomy.neurons, tiny_model.anatomy.heads])
        assert np.ptp(shares[0]) <= 1 / 192 + 1e-9
        assert np.ptp(shares[1]) <= 1 / 4 + 1e-9
        assert abs(shares[1].mean() - shares[0].mean()) <= 1 / 4


# LLM Surgeon


def test_the_cost_of_rows_is_the_minimum_of_the_quadratic_that_kfac_is():
    rng = np.random.default_rng(0)
    a, g = (x.T @ x for x in (rng.normal(size=(9, 4)), rng.normal(size=(9, 5))))
    w, rows = rng.normal(size=(5, 4)), [[0, 2], [1, 4]]
    fisher = np.kron(Damping().added_to(g), Damping().added_to(a))  # of W row by row
    got = cost_of_rows(*map(torch.from_numpy, (w, a, g)), torch.tensor(rows))
    for cost, own in zip(got.tolist(), rows):
        cut = np.isin(np.repeat(np.arange(5), 4), own)
        change = np.where(cut, -w.ravel(), 0.0)
        change[~cut] = -np.linalg.solve(fisher[np.ix_(~cut, ~cut)], fisher[np.ix_(~cut, cut)] @ change[cut])
        assert np.isclose(cost, change @ fisher @ change / 2, rtol=1e-9)


def test_kfac_is_the_fisher_information_where_inputs_and_gradients_are_independent():
    """Of n samples an entry of the Fisher differs by about sqrt(9 / n) of the largest; 5 of those are allowed."""
    rng, n = np.random.default_rng(1), 40000
    x, d = rng.normal(size=(n, 3)) @ rng.normal(size=(3, 3)), rng.normal(size=(n, 2)) @ rng.normal(size=(2, 2))
    gradients = (d[:, :, None] * x[:, None]).reshape(n, -1)
    fisher, kfac = gradients.T @ gradients / n, np.kron(d.T @ d / n, x.T @ x / n)
    assert np.abs(fisher - kfac).max() <= 5 * np.sqrt(9 / n) * np.abs(fisher).max()


def test_kfac_sums_are_those_of_recorded_inputs_and_gradients(tiny_model):
    module, batch = tiny_model.module, batch_of(4, classes=5)
    fc2, seen = module.blocks[1].mlp.fc2, {}

    def keep(_, inputs, output):
        output.retain_grad()
        seen["x"], seen["y"] = inputs[0], output

    hook = fc2.register_forward_hook(keep)
    CrossEntropy()(module, batch).sum().backward()
    hook.remove()
    module.zero_grad()
    x, d = seen["x"].detach().flatten(0, 1), seen["y"].grad.flatten(0, 1)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    sums = make_criterion("llm-surgeon-cross-entropy").contribution(module, batch)
    a, g = sums[2 * 3 : 2 * 3 + 2]  # two layers of each MLP, so fc2 of block 1 is the fourth
    assert torch.allclose(a, (x.T @ x).double(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(g, (d.T @ d).double(), rtol=1e-3, atol=1e-3 * float(g.abs().max()))
    assert sums[-1].tolist() == [4.0 * 17] * 12 + [4.0]


def test_of_a_redundant_pair_one_is_cheap_until_the_other_is_cut():
    """Columns 1 and 4 read the same input, so either can do the work of both: only damping makes it cost anything."""
    x, w = np.random.default_rng(2).normal(size=(500, 5)), np.ones((3, 5))
    x[:, 4] = x[:, 1]

    def costs(columns: list[int]) -> np.ndarray:
        a = x[:, columns].T @ x[:, columns] / len(x)
        each = torch.arange(len(columns))[:, None]
        return cost_of_rows(*map(torch.from_numpy, (w[:, columns].T, np.eye(3), a)), each).numpy()

    both, one = costs([0, 1, 2, 3, 4]), costs([0, 1, 2, 3])
    assert set(np.argsort(both)[:2]) == {1, 4}
    assert both[1] < 0.05 * one[1]
    assert np.allclose(both[[0, 2, 3]], one[[0, 2, 3]], rtol=0.05)


# NViT


def test_the_importance_is_the_squared_slope_of_the_loss_along_all_that_a_structure_owns(tiny_model):
    module, batch, step = tiny_model.module.double(), batch_of(4, 5, torch.float64), 1e-5
    block = module.blocks[1]
    found = make_criterion("nvit-cross-entropy").contribution(module, batch)

    @torch.no_grad()
    def loss_with(owned, factor: float) -> float:
        before = [share.tensor.clone() for share in owned]
        for share in owned:
            rows = share.indices(torch.tensor([structure]))
            share.tensor.index_copy_(share.axis, rows, share.tensor.index_select(share.axis, rows) * factor)
        loss = float(CrossEntropy()(module, batch).mean())
        for share, values in zip(owned, before):
            share.tensor.copy_(values)
        return loss

    for owned, place, structure in (([*neuron_shares(block.mlp)], 1, 5), ([*head_shares(block.attn)], 4, 2)):
        slope = (loss_with(owned, 1 + step) - loss_with(owned, 1 - step)) / (2 * step)
        assert np.isclose(float(found[place][structure]), slope**2, rtol=1e-4)


def test_of_equal_importance_the_dearer_structure_goes_first(tiny_model):
    criterion, anatomy = make_criterion("nvit"), tiny_model.anatomy
    sums = [torch.full((n,), 8.0, dtype=torch.float64) for n in (*anatomy.neurons, *anatomy.heads)]
    scores = criterion.finish(tiny_model.module, sums, 12)
    head, neuron = anatomy.structure_flops()[0]
    mean = anatomy.block_flops() / sum(anatomy.heads + anatomy.neurons)
    assert np.allclose(scores.heads[0], 1.0)
    assert np.allclose(scores.neurons[0], 1.0 + MU * (head - neuron) / mean)
    order = CutOrder(scores.heads + scores.neurons, [0] * 6)
    assert order.counts(12) == (0, 0, 0, *anatomy.neurons)


# VBP


def test_vbp_scores_are_variances_and_it_cuts_neurons_alone(tiny_model, images):
    ranking = rank(tiny_model, images, RECIPES["vbp"])
    seen = []
    hook = tiny_model.module.blocks[1].mlp.fc2.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach()))
    with torch.no_grad():
        tiny_model.module(torch.from_numpy(next(images.batches(20))))
    hook.remove()
    assert np.allclose(ranking.neuron_scores[1], seen[0].double().flatten(0, 1).numpy().var(0), rtol=1e-4)
    planner = Planner(ranking, tiny_model.anatomy, ranking.protection)
    assert planner.flops(0.6).heads == planner.sparsest.heads == tiny_model.anatomy.heads
    with pytest.raises(SnapvitError, match="out of reach"):
        planner.flops(0.05)


def first_mlp(module, inputs) -> torch.Tensor:
    """What the MLP of the first block gives."""
    found = []
    hook = module.blocks[0].mlp.register_forward_hook(lambda _, __, y: found.append(y.double()))
    with torch.no_grad():
        module(inputs)
    hook.remove()
    return found[0]


def test_the_bias_takes_over_the_mean_of_what_is_cut(tiny_model, images):
    """A constant neuron can be cut without any change; of others the mean of the layer's output stays."""
    with torch.no_grad():
        tiny_model.module.blocks[0].mlp.fc1.weight[5] = 0
        tiny_model.module.blocks[0].mlp.fc1.bias[5] = 2.0
    ranking = rank(tiny_model, images, RECIPES["vbp"])
    assert ranking.neuron_order(0)[-1] == 5
    inputs = torch.from_numpy(next(images.batches(20)))
    for cut, everywhere in ((1, 1e-5), (60, None)):
        plan = Plan(heads=tiny_model.anatomy.heads, neurons=(192 - cut, 192, 192))
        module, how = Corrector(tiny_model, ranking, "mean", images, Silent()).kept(plan)
        assert how == "mean"
        outputs = [first_mlp(each, inputs) for each in (tiny_model.module, module)]
        size = float(outputs[0].abs().max())
        assert torch.allclose(outputs[0].mean((0, 1)), outputs[1].mean((0, 1)), atol=1e-5 * size)
        if everywhere is not None:
            assert torch.allclose(*outputs, atol=everywhere * size)
        else:
            assert not torch.allclose(*outputs, atol=1e-3 * size)


# The frame

SMALL = {"nvit": {"step": 150}}  # the tiny model has 588 structures
BASELINES = ("fptp", "sparsegpt", "llm-surgeon", "nvit", "vbp")


@pytest.mark.parametrize("name", BASELINES)
def test_one_ranking_serves_every_size_and_its_file_says_how(tiny_model, images, tmp_path, name):
    made = rank(tiny_model, images, replace(RECIPES[name], **SMALL.get(name, {})))
    made.save(tmp_path / "r.safetensors")
    ranking = Ranking.load(tmp_path / "r.safetensors")
    assert ranking.is_mixed == (name != "fptp")
    assert ranking.provenance["criterion"] == name
    planner = Planner(ranking, tiny_model.anatomy, ranking.protection)
    sizes = (1.0, 0.9, 0.8, 0.7, 0.6, 0.55)
    plans = [planner.flops(size) for size in sizes]
    for size, plan in zip(sizes, plans):
        assert size - 0.1 <= plan.flops_ratio(tiny_model.anatomy) <= size
    if ranking.is_mixed:  # a knapsack may trade a head for neurons
        assert all(before.keeps_all_of(after) for before, after in pairwise(plans))


def test_each_shot_scores_what_the_one_before_left(tiny_model, images, monkeypatch):
    cut: list[Plan] = []
    monkeypatch.setattr(shots, "shrink", lambda model, ranking, plan: cut.append(plan) or shrink(model, ranking, plan))
    anatomy = tiny_model.anatomy
    ranking = rank(tiny_model, images, replace(RECIPES["nvit"], step=150))
    left = [sum(plan.heads + plan.neurons) for plan in cut]
    assert left == [588 - 150, 588 - 300, 588 - 450]
    cut.clear()
    surgeon = rank(tiny_model, images, RECIPES["llm-surgeon"])
    assert np.allclose([plan.sparsity(anatomy) for plan in cut], [0.12, 0.24, 0.36, 0.48], atol=0.03)
    for found, plans in ((surgeon, cut),):
        planner = Planner(found, anatomy)
        assert [planner.without(588 - sum(plan.heads + plan.neurons)) for plan in plans] == plans
    assert ranking.provenance["step"] == 150
    assert surgeon.provenance["shots"] == 5


def test_a_shot_orders_what_is_left_by_the_smaller_model(tiny_model, images):
    settings = replace(RECIPES["nvit"], step=300)
    once = ranking_from(score(tiny_model, images, settings, Silent()), "mixed", "tiny", tiny_model.anatomy)
    plan = Planner(once, tiny_model.anatomy).without(300)
    module = shrink(tiny_model.module, once, plan)
    again = score(Model(module, read_anatomy(module, "x"), tiny_model.description), images, settings, Silent())
    found = rank(tiny_model, images, settings)
    for i, keep in enumerate(plan.neurons):
        chosen = np.sort(once.neuron_order(i)[:keep])
        assert (found.neuron_order(i)[:keep] == chosen[np.argsort(-again.neurons[i], kind="stable")]).all()
        assert (found.neuron_order(i)[keep:] == once.neuron_order(i)[keep:]).all()


def test_interrupted_shots_go_on_and_end_in_the_same_ranking(tiny_model, images, tmp_path, monkeypatch):
    settings = RECIPES["llm-surgeon"]
    whole = rank(tiny_model, images, settings)
    state = tmp_path / "state"
    seen: list[Plan] = []

    def stopping(model, ranking, plan):
        seen.append(plan)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return shrink(model, ranking, plan)

    monkeypatch.setattr(shots, "shrink", stopping)
    with pytest.raises(KeyboardInterrupt):
        rank(tiny_model, images, settings, checkpoint=state)
    again = rank(tiny_model, images, settings, checkpoint=state)
    assert len(seen) == 5  # the third again, and the fourth
    assert again.order_sha256 == whole.order_sha256


@pytest.mark.parametrize("allocation", ["summed", "mixed", "uniform"])
def test_what_an_allocation_by_scores_cannot_do_is_refused(allocation):
    for changes in ({"evaluations": 5}, {"depth": True}):
        with pytest.raises(UsageError, match=f"--allocation {allocation}"):
            make_settings("local", allocation=allocation, **changes)


@pytest.mark.parametrize("changes", [{"shots": 0}, {"step": 0}, {"shots": 3, "allocation": "uniform"}])
def test_shots_that_make_no_sense_are_refused(changes):
    with pytest.raises(UsageError, match="shot"):
        make_settings("llm-surgeon", **changes)


def test_rounds_are_refused_where_shots_are_what_there_is(tiny_model, images):
    with pytest.raises(UsageError, match="rounds go without --allocation mixed"):
        rank_in_rounds(tiny_model, images, Rounds((0.8,)), RECIPES["nvit"])


def test_all_baselines_stand_in_one_comparison(snapvit, tiny_folder, image_folder, tmp_path):
    names = ("fptp", "fptp-cross-entropy", *BASELINES[1:], "vbp+refit")
    places = ["--model", tiny_folder, "--data", image_folder, "--out", tmp_path / "out", "--images", 16]
    outcome = snapvit("compare", *places, "--recipes", ",".join(names), "--flops", "0.7")
    assert outcome.code == 0, outcome.err
    found = Comparison.load(tmp_path / "out")
    corrected = {c.recipe: c.correction for c in found.contestants}
    assert corrected == dict.fromkeys(names) | {"sparsegpt": "sparsegpt", "vbp": "mean", "vbp+refit": "refit"}
    assert all(0.6 <= c.flops_ratio <= 0.7 for c in found.contestants)


def test_the_command_ranks_by_a_baseline_and_export_cuts_by_it(snapvit, tiny_folder, image_folder, tmp_path):
    file = tmp_path / "r.safetensors"
    ranked = snapvit("rank", tiny_folder, "--data", image_folder, "--images", 16, "--recipe", "vbp", "--out", file)
    assert ranked.code == 0, ranked.err
    assert Ranking.load(file).protection.heads == 1
    given = ["--model", tiny_folder, "--data", image_folder, "--images", 16, "--ranking", file, "--flops", "0.7"]
    outcome = snapvit("export", *given, "--correction", "mean", "--out", tmp_path / "family")
    assert outcome.code == 0, outcome.err
    cut = next(v for v in read_family(tmp_path / "family").variants if v.heads == (4, 4, 4) and sum(v.neurons) < 576)
    assert cut.correction == "mean"
