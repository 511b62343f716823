"""Ranking in rounds: what is cut stays cut, so every Plan is still a prefix; and it stops when the answers move."""

import json
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from helpers.models import TINY, make_model
from helpers.programs import python, torchrun
from helpers.rankings import apart_from_time
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import MAX_DIVERGENCE, Rounds, make_settings
from snapvit_export.calibration.images import Images
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.folder import read_family
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.scores import Scores
from snapvit_export.progress import Silent
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank import iterative as iterate
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.rank.iterative import rank_in_rounds
from snapvit_export.prune.rank.rank import score
from snapvit_export.prune.rank.rescored import rescored
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.sublayer_stats import measure_sublayers

FLOPS = (0.8, 0.6, 0.4)
WIDTH, DEPTH = make_settings("default", depth=False), make_settings("default")
FOREVER = float("inf")


def some(model, count: int = 24, seed: int = 0) -> Images:
    size = model.anatomy.image
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *size, 3), np.uint8)
    return Images(pixels, None, model.preprocessing, "noise")


def ranked(model, images, flops=FLOPS, settings=WIDTH, most_moved=FOREVER, **options) -> Ranking:
    return rank_in_rounds(model, images, Rounds(tuple(flops), most_moved), settings, **options)


def plans_of(ranking: Ranking) -> list[Plan]:
    return [msgspec.convert(found["plan"], Plan) for found in ranking.provenance["rounds"]]


@pytest.mark.parametrize("settings", [WIDTH, DEPTH], ids=["width", "depth"])
def test_orders_of_all_rounds_are_nested_and_later_rounds_only_reorder_what_is_kept(settings):
    model = make_model()
    images = some(model)
    fitted, _ = iterate._split(images, settings.seed)
    rankings = [damage_ranking(model, observe(model, fitted, warn=False))[0]]
    rankings += [ranked(model, images, FLOPS[: n + 1], settings) for n in range(3)]
    plans = plans_of(rankings[-1])
    for fraction, plan, (before, after) in zip(FLOPS, plans, pairwise(rankings)):
        assert plan.flops_ratio(model.anatomy) <= fraction
        for i in range(3):
            for own, new, keep, old_curve, curve in (
                (before.head_order(i), after.head_order(i), plan.heads[i], before.damage[i][0], after.damage[i][0]),
                (
                    before.neuron_order(i),
                    after.neuron_order(i),
                    plan.neurons[i],
                    before.damage[i][1],
                    after.damage[i][1],
                ),
            ):
                assert set(own[:keep]) == set(new[:keep])  # the same are kept
                assert (own[keep:] == new[keep:]).all()  # what was cut is as it was
                np.testing.assert_array_equal(curve[keep:], old_curve[keep:])
                assert (np.diff(curve) <= 0).all()
    assert any((a.neuron_order(1) != b.neuron_order(1)).any() for a, b in pairwise(rankings))
    assert [r["flops"] for r in rankings[-1].provenance["rounds"]] == list(FLOPS)


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_over_many_small_rounds_every_plan_is_part_of_the_one_before(seed, depth):
    model = make_model({**TINY, "embed_dim": 16, "depth": 4, "num_heads": 4})
    flops = [round(0.95 - 0.03 * n, 2) for n in range(20)]
    found = ranked(model, some(model, seed=seed), flops, replace(DEPTH, depth=depth, seed=seed))
    plans = plans_of(found)
    assert len(plans) == 20
    for before, after in pairwise([Plan.dense(model.anatomy), *plans]):
        assert before.keeps_all_of(after)
    assert any(before != after for before, after in pairwise(plans))
    assert bool(plans[-1].removed) <= depth
    for plan, fraction in zip(plans, flops):
        plan.check_fits(model.anatomy)
        assert plan.flops_ratio(model.anatomy) <= fraction


def test_without_the_bound_later_rounds_would_bring_things_back(monkeypatch):
    """The test above would notice: allocated afresh in each round, Plans are not nested."""
    model = make_model({**TINY, "embed_dim": 16, "depth": 4, "num_heads": 4})
    flops = [round(0.95 - 0.03 * n, 2) for n in range(20)]
    monkeypatch.setattr(iterate.RoundsState, "plan", property(lambda found: Plan.dense(found.ranking.anatomy)))
    plans = plans_of(ranked(model, some(model), flops))
    assert not all(before.keeps_all_of(after) for before, after in pairwise(plans))


# --- when it ends


def test_it_stops_when_the_answers_have_moved_too_far():
    model = make_model()
    images = some(model)
    rounds = ranked(model, images).provenance["rounds"]
    limit = (rounds[0]["moved"] + rounds[1]["moved"]) / 2
    assert rounds[0]["moved"] < limit < rounds[1]["moved"]
    stopped = ranked(model, images, most_moved=limit)
    assert [r["kept"] for r in stopped.provenance["rounds"]] == [True, False]
    assert stopped.order_sha256 == ranked(model, images, FLOPS[:1]).order_sha256


def test_images_that_judge_are_fitted_on_by_nothing(monkeypatch):
    model = make_model()
    images, seen = some(model, 20), {"fitted": [], "judged": []}
    refitting, embedding = iterate.refit, iterate._embedding
    watched = lambda name, f, at: lambda *given, **more: (seen[name].append(given[at].pixels), f(*given, **more))[1]  # noqa: E731
    monkeypatch.setattr(iterate, "refit", watched("fitted", refitting, 3))
    monkeypatch.setattr(iterate, "observe", watched("fitted", iterate.observe, 1))
    monkeypatch.setattr(iterate, "_embedding", watched("judged", embedding, 1))
    found = ranked(model, images, FLOPS[:2])
    names = {name: {pixels.tobytes() for part in parts for pixels in part} for name, parts in seen.items()}
    assert (len(names["fitted"]), len(names["judged"])) == (15, 5)
    assert not names["fitted"] & names["judged"]
    assert found.provenance["rounds_settings"]["held_back"] == 5
    assert found.provenance["data"]["images"] == 20
    parts = [iterate._split(images, seed)[1].pixels for seed in (0, 0, 1)]
    assert np.array_equal(parts[0], parts[1])
    assert not np.array_equal(parts[0], parts[2])


def test_without_a_limit_the_usual_one_of_the_divergence_holds():
    model = make_model()
    images = some(model)
    assert Rounds().limit("predictions") == MAX_DIVERGENCE["predictions"]
    for name, usual in MAX_DIVERGENCE.items():
        found = ranked(model, images, (0.9, 0.3), replace(WIDTH, divergence=name), most_moved=None).provenance
        assert found["rounds_settings"]["divergence"] == name
        assert found["rounds_settings"]["most_moved"] == usual
        assert [r["kept"] for r in found["rounds"]] == [r["moved"] <= usual for r in found["rounds"]]
    assert ranked(model, images, (0.9,)).provenance["rounds_settings"]["most_moved"] is None  # JSON knows no infinity


# --- depth


def test_rounds_remove_whole_sub_layers_and_know_their_damage():
    model = make_model()
    images = some(model)
    found = ranked(model, images, (0.5, 0.2, 0.06), DEPTH)
    assert plans_of(found)[-1].removed
    fitted, judges = iterate._split(images, seed=0)
    assert found.sublayers == measure_sublayers(model, fitted)  # nothing is taken from those that judge
    assert len(judges) == len(images) // 4
    assert found.protection == Protection(sublayers=False)
    assert Planner(found, model.anatomy, found.protection).flops(0.06).removed
    without = ranked(model, images, (0.5,), WIDTH)
    assert without.sublayers == found.sublayers  # measured all the same, for an export with depth
    assert without.protection == Protection()


def test_a_model_that_lacks_sub_layers_can_be_observed():
    model = make_model()
    images = some(model, 4)
    ranking = damage_ranking(model, observe(model, images, warn=False))[0]
    plan = Plan(heads=(4, 0, 2), neurons=(0, 0, 100))
    module = refit(model, ranking, plan, images)
    statistics = observe(Model(module, read_anatomy(module, "short"), model.description), images, warn=False)
    assert [m.width for m in statistics.proj] == [48, 0, 24]
    assert [m.width for m in statistics.fc2] == [0, 0, 100]
    given = []
    hook = module.blocks[2].mlp.fc2.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].double()))
    with torch.no_grad():
        module(torch.from_numpy(next(images.batches(4))))
    hook.remove()
    assert statistics.fc2[2].covariance.shape == (100, 100)
    assert np.isfinite(statistics.fc2[2].mean).all()
    assert given[0].shape[-1] == 100


# --- scores


@pytest.mark.parametrize("order", ["criterion", "product"])
def test_scores_are_made_again_on_the_smaller_model(order, monkeypatch):
    model = make_model()
    images, widths = some(model), []
    scoring = iterate.score
    monkeypatch.setattr(
        iterate, "score", lambda small, *rest: (widths.append(small.anatomy.neurons), scoring(small, *rest))[1]
    )
    settings = make_settings("default", order=order, criterion="divergence")
    found = ranked(model, images, (0.7, 0.4), settings)
    plans = plans_of(found)
    assert widths == [model.anatomy.neurons, *(plan.neurons for plan in plans)]
    assert not plans[-1].removed  # scores are made of models that have all sub-layers
    assert found.provenance["criterion"] == "divergence"


@pytest.mark.parametrize("recipe", ["idap", "local"])
def test_rounds_by_scores_alone_are_nested_too(recipe):
    model = make_model({**TINY, "embed_dim": 16, "depth": 4, "num_heads": 4})
    flops = [round(0.95 - 0.03 * n, 2) for n in range(20)]
    images, settings = some(model), make_settings(recipe)
    found = ranked(model, images, flops, settings)
    plans = plans_of(found)
    assert found.damage is None
    assert (found.sublayers is not None) == settings.depth
    for before, after in pairwise([Plan.dense(model.anatomy), *plans]):
        assert before.keeps_all_of(after)
    planner = Planner(found, model.anatomy)  # of the last order, along whose line all of them lie
    assert [planner.flops(fraction) for fraction in flops] == plans
    fitted, _ = iterate._split(images, settings.seed)
    once = ranked(model, images, flops[:1], settings)
    for i, order in enumerate(Ranking.neuron_order(once, i) for i in range(4)):
        first = Ranking(*_scores(model, fitted, settings)).neuron_order(i)
        keep = plans[0].neurons[i]
        assert set(order[:keep]) == set(first[:keep])
        assert (order[keep:] == first[keep:]).all()
    smaller = shrink(model.module, once, plans[0])
    small = Model(smaller, read_anatomy(smaller, "x"), model.description)
    own = Ranking(*_scores(small, fitted, settings)).neuron_order(2)
    chosen = np.sort(once.neuron_order(2)[: plans[0].neurons[2]])
    assert (once.neuron_order(2)[: len(chosen)] == chosen[own]).all()


def _scores(model, images, settings):
    scores = score(model, images, settings, Silent())
    return scores.heads, scores.neurons


def test_places_keep_ties_and_put_what_is_cut_behind():
    before = Ranking(tuple(np.ones(2, np.float32) for _ in range(2)), (np.array([3, 1, 2, 1.0]), np.array([5, 1.0])))
    plan = Plan(heads=(2, 1), neurons=(2, 1))
    new = rescored(before, plan, Scores((np.ones(2), np.ones(1)), (np.array([0.0, 9.0]), np.array([0.0]))))
    assert [block.tolist() for block in new.neuron_scores] == [[4, 2, 5, 1], [3, 0]]
    assert [block.tolist() for block in new.head_scores] == [[3, 2], [1, 0]]


# --- refusals


@pytest.mark.parametrize("flops", [(), (0.5, 0.7), (0.5, 0.5)])
def test_rounds_that_do_not_fall_are_refused(flops):
    with pytest.raises(UsageError, match="falling fractions"):
        Rounds(flops)


@pytest.mark.parametrize("most", [float("nan"), -0.1])
def test_a_limit_that_is_none_is_refused(most):
    with pytest.raises(UsageError, match="an output divergence is never"):
        Rounds((0.5,), most)


@pytest.mark.parametrize("settings", [WIDTH, DEPTH], ids=["width", "depth"])
def test_a_round_out_of_reach_is_refused_before_the_first(settings, monkeypatch):
    monkeypatch.setattr(iterate, "refit", lambda *_, **__: pytest.fail("a round was begun"))
    model = make_model()
    with pytest.raises(SnapvitError, match="FLOPs fraction 0.001 is out of reach"):
        ranked(model, some(model), (0.8, 0.001), settings)


def test_too_few_images_to_judge_are_refused():
    model = make_model()
    with pytest.raises(UsageError, match="15 images are too few for rounds"):
        ranked(model, some(model, 15))


def test_a_model_without_sub_layers_is_ranked_in_rounds_too():
    model = make_model()
    ranking = Ranking.flat(model.anatomy)
    module = shrink(model.module, ranking, Plan(heads=(4, 0, 4), neurons=(192,) * 3))
    short = Model(module, read_anatomy(module, "short"), model.description)
    found = ranked(short, some(model))
    assert found.heads == (4, 0, 4)
    assert all(each["plan"]["heads"][1] == 0 for each in found.provenance["rounds"])


# --- going on


class Stop(Exception):
    pass


@pytest.mark.parametrize("settings", [WIDTH, DEPTH], ids=["width", "depth"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_interrupted_rounds_go_on_and_end_in_the_same_ranking(after, settings, tmp_path, monkeypatch):
    model = make_model()
    images, flops = some(model), (0.5, 0.2, 0.06) if settings.depth else FLOPS
    whole = ranked(model, images, flops, settings)
    refits, path = [], tmp_path / "c"

    def stopping(*given, **more):
        if len(refits) == after:
            raise Stop
        refits.append(given[2])
        return refit(*given, **more)

    monkeypatch.setattr(iterate, "refit", stopping)
    with pytest.raises(Stop):
        ranked(model, images, flops, settings, checkpoint=path)
    done = len(refits)
    refits.clear()
    monkeypatch.setattr(iterate, "refit", lambda *given, **more: (refits.append(given[2]), refit(*given, **more))[1])
    monkeypatch.setattr(iterate, "measure_sublayers", lambda *_, **__: pytest.fail("measured again"))
    again = ranked(model, images, flops, settings, checkpoint=path)
    assert (done, len(refits)) == (after, 3 - after)
    for name in ("a", "b"):
        (whole if name == "a" else again).save(tmp_path / name)
    assert apart_from_time(tmp_path / "a") == apart_from_time(tmp_path / "b")


def test_what_other_rounds_began_is_not_gone_on_with(tmp_path, monkeypatch):
    model = make_model()
    monkeypatch.setattr(iterate, "refit", lambda *_, **__: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        ranked(model, some(model), checkpoint=tmp_path / "c")
    for change, says in (
        (dict(most_moved=0.5), "most_moved was null, now it is 0.5"),
        (dict(flops=(0.7,)), "rounds_settings.flops was"),
        (dict(settings=replace(WIDTH, seed=1)), "seed was 0, now it is 1"),
    ):
        with pytest.raises(SnapvitError, match=says):
            ranked(model, some(model), **change, checkpoint=tmp_path / "c")


def test_an_interrupted_command_says_that_it_goes_on(snapvit, tiny_folder, image_folder, tmp_path, monkeypatch):
    given = ["rank", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "r"]
    given += ["--rounds", "0.8,0.6", "--most-moved", "inf"]
    monkeypatch.setattr(iterate, "refit", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    outcome = snapvit(*given)
    assert outcome.code == 130
    assert "run the same command again to continue" in outcome.error_line
    assert not (tmp_path / "r").exists()
    monkeypatch.setattr(iterate, "refit", refit)
    assert snapvit(*given).code == 0
    assert [found["flops"] for found in Ranking.load(tmp_path / "r").provenance["rounds"]] == [0.8, 0.6]
    assert not (tmp_path / "r.checkpoint").exists()


# --- the command


def test_the_command_ranks_in_rounds_and_stops(snapvit, tiny_folder, image_folder, tmp_path):
    given = ["rank", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "r"]
    outcome = snapvit(*given, "--rounds", "0.8,0.6", "--most-moved", "inf", "--divergence", "cosine")
    assert outcome.code == 0, outcome.err
    assert "damage without" in outcome.out  # the sub-layers are told
    found = Ranking.load(tmp_path / "r")
    assert [round_["flops"] for round_ in found.provenance["rounds"]] == [0.8, 0.6]
    assert found.provenance["rounds_settings"]["divergence"] == "cosine"
    moved = found.provenance["rounds"][0]["moved"]
    outcome = snapvit(*given, "--rounds", "0.8,0.6", "--most-moved", moved / 2, "--divergence", "cosine", "--force")
    assert outcome.code == 0, outcome.err
    assert "stopped at 0.8 of the FLOPs" in outcome.err
    assert [round_["kept"] for round_ in Ranking.load(tmp_path / "r").provenance["rounds"]] == [False]


@pytest.mark.parametrize("depth", ["--depth", "--no-depth"])
def test_an_export_may_remove_sub_layers_by_a_ranking_in_rounds(snapvit, tiny_folder, image_folder, tmp_path, depth):
    common = ["--data", image_folder, "--images", 16]
    rounds = ["--rounds", "0.8,0.6", "--most-moved", "inf", depth]
    assert snapvit("rank", tiny_folder, *common, "--out", tmp_path / "r", *rounds).code == 0
    out = tmp_path / "family"
    given = ["--model", tiny_folder, *common, "--ranking", tmp_path / "r", "--flops", "0.05", "--depth", "--out", out]
    outcome = snapvit("export", *given)
    assert outcome.code == 0, outcome.err
    found = next(variant for variant in read_family(out).variants if variant.name == "flops5")
    assert 0 in found.heads + found.neurons


@pytest.mark.slow  # every process imports torch anew
def test_of_two_processes_one_does_the_rounds_and_speaks(tiny_folder, image_folder, tmp_path):
    def arguments(out: str) -> list[str]:
        base = ["-m", "snapvit_export.cli", "rank", tiny_folder, "--data", image_folder, "--images", 16, "--json"]
        return [str(part) for part in (*base, "--rounds", "0.8,0.6", "--most-moved", "inf", "--out", tmp_path / out)]

    one, two = python(*arguments("one")), torchrun(2, *arguments("two"))
    for done in (one, two):
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(json.loads(done.stdout)["rounds"]) == 2  # one answer, not two
    assert two.stderr.count('"phase": "refitting block by block", "done": 0') == one.stderr.count(
        '"phase": "refitting block by block", "done": 0'
    )
    assert apart_from_time(tmp_path / "one") == apart_from_time(tmp_path / "two")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--most-moved", 1], "--most-moved ends a ranking in rounds"),
        (["--rounds", "0.5,0.7"], "rounds need falling fractions"),
        (["--rounds", "0.7", "--evaluations", 5], "rounds go without a search"),
        (["--rounds", "0.7", "--recipe", "snapvit"], "rounds go without a search"),
        (["--rounds", "0.7", "--engine", "torch"], "rounds have none"),
        (["--rounds", "0.7,nan"], "--rounds 'nan' is not a number"),
        (["--rounds", "0.7", "--most-moved", "nan"], "--most-moved nan is not a finite number"),
        (["--rounds", "0.7", "--most-moved=-1"], "an output divergence is never -1"),
        (["--rounds", "0.7", "--divergence", "nonsense"], "no divergence is called 'nonsense'"),
        (["--rounds", "0.7", "--images", 12], "12 images are too few for rounds"),
    ],
)
def test_rounds_that_make_no_sense_are_one_line(snapvit, tiny_folder, image_folder, tmp_path, options, says):
    outcome = snapvit("rank", tiny_folder, "--data", image_folder, "--out", tmp_path / "r", *options)
    assert outcome.code == 2
    assert says in outcome.error_line
