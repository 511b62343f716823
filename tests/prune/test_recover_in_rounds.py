"""Ranking in rounds that recover: what is cut stays cut, the trained model goes on, and too much lost ends it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from helpers.models import TINY, make_model
from helpers.recovery import Lesson, taught
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import Rounds, make_settings
from snapvit_export.errors import UsageError
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.rounds import RecoveredRounds
from snapvit_export.model.sublayer import SubLayer
from snapvit_export.model.timing import untimed_part
from snapvit_export.prune.models.load import load_model, save_model
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.recover import in_rounds
from snapvit_export.prune.recover.in_rounds import Lessons, Limit, after_removed, rank_and_recover
from snapvit_export.prune.recover.settings import TrainingSettings

TRAINING = TrainingSettings(train="all", steps=4, batch=8, micro=8, rate=1e-3, looks=2)
FLOPS = (0.8, 0.6)
ANY = Limit(1.0)


@pytest.fixture(scope="module")
def lesson() -> Lesson:
    return Lesson(pictures=32)


def lessons_of(lesson: Lesson, columns=None) -> Lessons:
    measured = lesson.held_out.only(range(8))
    return Lessons(lesson.pictures(TRAINING), lesson.images, lesson.held_out.only(range(8, 12)), measured, columns)


def ranked(lesson: Lesson, recipe: str, flops=FLOPS, limit: Limit = ANY, training=TRAINING, columns=None, **options):
    settings = make_settings(recipe, True)
    made = {"of": recipe, "flops": list(flops)}
    given = (lesson.model, lessons_of(lesson, columns), Rounds(tuple(flops)), settings, training, limit)
    return rank_and_recover(*given, made=made, **options)


def plans_of(ranking: Ranking) -> list[Plan]:
    return [msgspec.convert(found["plan"], Plan) for found in ranking.provenance["rounds"]]


@pytest.mark.parametrize("recipe", ["idap", "default"])
def test_each_round_cuts_what_the_last_one_trained(lesson, recipe, monkeypatch):
    flops, cuts = (0.85, 0.6, 0.35), []
    name = "shrink" if recipe == "idap" else "refit"
    plain = getattr(in_rounds, name)
    monkeypatch.setattr(in_rounds, name, lambda *given, **more: (cuts.append(given[0]), plain(*given, **more))[1])
    ranking, model = ranked(lesson, recipe, flops)
    plans, anatomy = plans_of(ranking), lesson.model.anatomy
    for before, after in pairwise([Plan.dense(anatomy), *plans]):
        assert before.keeps_all_of(after)
    for plan, fraction in zip(plans, flops):
        assert fraction - 0.25 < plan.flops_ratio(anatomy) <= fraction
    assert model.anatomy == read_anatomy(model.module, "trained")
    assert (model.anatomy.heads, model.anatomy.neurons) == (plans[-1].heads, plans[-1].neurons)
    modules = [getattr(cut, "module", cut) for cut in cuts]
    assert modules[0] is lesson.model.module
    sizes = [read_anatomy(module, "cut").neurons for module in modules]
    assert sizes == [anatomy.neurons, *(plan.neurons for plan in plans[:-1])]
    for step in ranking.provenance["rounds"]:
        assert step["after"]["divergence"] is not None
        assert step["gflops"] < lesson.model.anatomy.flops() / 1e9


def test_idap_cuts_depth_after_width_and_measures_sub_layers_again():
    """The line of the stages: a fifth of the neurons, then sub-layers."""
    model = make_model({**TINY, "embed_dim": 16, "depth": 4, "num_heads": 4})
    for name, tensor in model.module.named_parameters():
        tensor.data = torch.ones_like(tensor) if "norm" in name and name.endswith("weight") else tensor.data * 0.3
    lesson = Lesson(model, pictures=32)
    flops = (0.95, 0.9, 0.85, 0.7, 0.5, 0.35)
    ranking, _ = ranked(lesson, "idap", flops, training=replace(TRAINING, steps=1, looks=1))
    plans = plans_of(ranking)
    for before, after in pairwise([Plan.dense(model.anatomy), *plans]):
        assert before.keeps_all_of(after)
    first = next(i for i, plan in enumerate(plans) if plan.removed)
    assert first > 0
    width = sum(plans[first - 1].neurons) / sum(model.anatomy.neurons)
    assert 0.75 < width < 0.95  # up to a fifth of the neurons, and then depth
    line = Planner(ranking, model.anatomy, Protection(sublayers=False))
    for fraction, plan in zip(flops, plans):
        assert set(plan.removed) <= set(plans[-1].removed)
        assert line.flops(fraction).flops_ratio(model.anatomy) <= fraction


def test_recovering_brings_back_what_a_cut_has_lost(lesson):
    training = replace(TRAINING, steps=40, looks=4)
    ranking, model = ranked(lesson, "idap", (0.4,), training=training)
    (step,) = ranking.provenance["rounds"]
    assert step["after"]["divergence"] < step["before"]["divergence"]
    assert step["best_step"] > 0
    assert not torch.equal(model.module.head.weight, lesson.model.module.head.weight)


@pytest.mark.parametrize(("recipe", "phases"), [("idap", {"scores"}), ("default", {"statistics", "ordering"})])
def test_the_time_of_every_phase_is_told(lesson, recipe, phases):
    (timing,) = ranked(lesson, recipe, (0.8,))[0].timings
    assert set(timing.seconds) >= phases | {"cutting", "measuring", "recovering"}
    assert timing.seconds["recovering"] > 0


def test_it_stops_where_more_is_lost_than_may_be(lesson):
    ranking, model = ranked(lesson, "idap", (0.8, 0.1, 0.05), limit=Limit(0.0, by_labels=False))
    steps = ranking.provenance["rounds"]
    lost = [1 - step["after"]["agreement"] for step in steps]
    assert all(step["kept"] == (drop <= 0) for step, drop in zip(steps, lost))
    assert all(step["kept"] for step in steps[:-1])
    kept = [plan for plan, step in zip(plans_of(ranking), steps) if step["kept"]]
    last = kept[-1] if kept else Plan.dense(lesson.model.anatomy)
    assert (model.anatomy.heads, model.anatomy.neurons) == (last.heads, last.neurons)
    assert (model is lesson.model) == (not kept)


def test_with_labels_the_drop_is_of_the_accuracy(lesson):
    with torch.no_grad():
        inputs = torch.from_numpy(next(lesson.held_out.batches(12)))
        answers = lesson.model.module(inputs).argmax(1).numpy()[:8]
    truth = lesson.held_out.labels[:8]
    dense = float((answers == truth).mean())
    ranking, _ = ranked(lesson, "idap", (0.8,), limit=Limit(1.0, by_labels=True), columns=np.arange(5))
    assert ranking.provenance["before_rounds"]["top1"] == dense
    assert ranking.provenance["rounds"][0]["after"]["top1"] is not None
    strict = Limit(0.0, by_labels=True)
    ranking, _ = ranked(lesson, "idap", (0.8,), limit=strict, columns=np.arange(5))
    (step,) = ranking.provenance["rounds"]
    assert step["kept"] == (step["after"]["top1"] >= dense)


def test_outputs_that_are_no_numbers_end_it(lesson, monkeypatch):
    plain = in_rounds.outputs_of
    monkeypatch.setattr(
        in_rounds,
        "outputs_of",
        lambda module, *rest: plain(module, *rest) * (1 if module is lesson.model.module else np.nan),
    )
    ranking, model = ranked(lesson, "idap", FLOPS)
    (step,) = ranking.provenance["rounds"]
    assert not step["kept"]
    assert step["after"] == {"divergence": None, "agreement": None, "top1": None}
    assert model is lesson.model


class Killed(Exception):
    pass


@pytest.mark.parametrize(("recipe", "after"), [("idap", 5), ("default", 1)])
def test_an_interrupted_run_ends_with_the_same_bits(lesson, recipe, after, tmp_path, monkeypatch):
    """Killed in the training of the second round, and in that of the first."""
    wanted, whole = ranked(lesson, recipe)
    saves, plain = [], in_rounds.Checkpoint.save

    def save(self, *arguments):
        plain(self, *arguments)
        saves.append(self.path.name)
        if len(saves) == after + 1:
            raise Killed

    path = tmp_path / "r.checkpoint"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(in_rounds.Checkpoint, "save", save)
        ranked(lesson, recipe, checkpoint=path)
    assert saves[-1] == ("r.checkpoint.round1" if after == 1 else "r.checkpoint.round2")
    found, again = ranked(lesson, recipe, checkpoint=path)
    for name, ranking in (("a", wanted), ("b", found)):
        replace(ranking, provenance=untimed_part(ranking.provenance)).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    state = again.module.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.module.state_dict().items())
    assert [each.name for each in tmp_path.glob("*.round*")] == []


def test_removed_sub_layers_come_first_in_the_order_of_removal():
    def layers(*damages):
        parts = ("attention", "mlp", "attention", "mlp")
        return [
            SubLayer(block=i // 2, part=part, divergence=0, turned=0, damage=damage)
            for i, (part, damage) in enumerate(zip(parts, damages))
        ]

    before, again = layers(0.2, 0.1, 0.4, 0.3), layers(0.0, 0.0, 0.05, 0.6)
    found = after_removed(before, again, Plan(heads=(0, 2), neurons=(0, 8)))
    order = sorted(found, key=lambda s: s.damage)
    assert [(s.block, s.part) for s in order] == [(0, "mlp"), (0, "attention"), (1, "attention"), (1, "mlp")]
    assert [s.damage for s in found[:2]] == [0.2, 0.1]


@pytest.mark.parametrize("recipe", ["nvit", "vbp", "sparsegpt", "fptp"])
def test_allocations_that_rounds_do_not_have_are_refused(lesson, recipe):
    with pytest.raises(UsageError, match="rounds go without --allocation"):
        ranked(lesson, recipe)


@pytest.mark.parametrize("drop", [-0.1, 1.5, float("nan")])
def test_a_drop_that_is_no_share_is_refused(drop):
    with pytest.raises(UsageError, match="is no share"):
        Limit(drop)


# --- the command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds")
    model = taught()
    save_model(model.module, model.description, folder / "model")
    source = Lesson(pictures=48).source
    for i in range(source.count):
        path = folder / "images" / f"class{i % 5}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        source.open(i).save(path)
    return folder


def test_the_command_writes_a_ranking_a_model_and_a_table(snapvit, place, tmp_path):
    given = ["rank", place / "model", "--data", place / "images", "--recipe", "idap", "--out", tmp_path / "r"]
    rounds = ["--rounds", "0.8,0.6", "--recover", "--epochs", 1, "--max-drop", 1]
    outcome = snapvit(*given, *rounds)
    assert outcome.code == 0, outcome.err
    assert "30 images to train on are few" in outcome.err
    assert "recovered" in outcome.out
    assert "r-recovered" in outcome.out
    ranking = Ranking.load(tmp_path / "r")
    trained = load_model(str(tmp_path / "r-recovered"))
    assert trained.anatomy.neurons == plans_of(ranking)[-1].neurons
    settings = ranking.provenance["rounds_settings"]
    assert (settings["max_drop"], settings["by"], settings["held_back"], settings["stopping"]) == (
        1.0,
        "agreement",
        12,
        6,
    )
    assert RecoveredRounds.of(ranking.provenance, ranking.anatomy) is not None
    assert {path.name for path in tmp_path.iterdir()} == {"r", "r-recovered"}
    outcome = snapvit(*given, *rounds[:-1], 0.5)
    assert outcome.code == 1
    assert "rounds_settings differs" in outcome.error_line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--recover"], "Give --rounds"),
        (["--rounds", "0.8", "--recover", "--train", "some"], "Known: norms, linear, all"),
        (["--rounds", "0.8", "--recover", "--epochs", 0], "Give --epochs above 0"),
        (["--rounds", "0.8", "--recover", "--images", 20], "20 images are too few"),
    ],
)
def test_what_makes_no_sense_is_one_line(snapvit, place, tmp_path, options, says):
    given = ["rank", place / "model", "--data", place / "images", "--recipe", "idap", "--out", tmp_path / "r"]
    outcome = snapvit(*given, *options)
    assert outcome.code == 2
    assert says in outcome.error_line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_refused_before_any_work(snapvit, place, tmp_path):
    (tmp_path / "r-recovered").mkdir()
    (tmp_path / "r-recovered" / "thesis.txt").write_text("mine")
    given = ["rank", place / "model", "--data", place / "images", "--recipe", "idap", "--out", tmp_path / "r"]
    outcome = snapvit(*given, "--rounds", "0.8", "--recover")
    assert outcome.code == 1
    assert "holds files that are not ours" in outcome.error_line
