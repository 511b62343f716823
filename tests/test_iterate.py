"""Ranking in rounds: what is cut stays cut, so every Plan is still a prefix; and it stops when the answers move."""

from itertools import pairwise

import numpy as np
import pytest
from conftest import make_model

from snapvit_export.calibration.images import Images
from snapvit_export.errors import UsageError
from snapvit_export.plan import Planner
from snapvit_export.prune.damage import damage_ranking
from snapvit_export.prune.iterate import rank_in_rounds
from snapvit_export.prune.observe import observe
from snapvit_export.ranking import Ranking

ROUNDS = (0.8, 0.6, 0.4)


def some(model, count: int = 24) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), np.uint8)
    return Images(pixels, None, model.preprocessing, "noise")


def test_orders_of_all_rounds_are_nested_and_later_rounds_only_reorder_what_is_kept():
    model = make_model()
    images = some(model)
    rankings = [damage_ranking(model, observe(model, images, warn=False))[0]]
    rankings += [rank_in_rounds(model, images, ROUNDS[: n + 1]) for n in range(3)]
    for fraction, (before, after) in zip(ROUNDS, pairwise(rankings)):
        plan = Planner(before, model.anatomy).flops(fraction)
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
    assert [r["flops"] for r in rankings[-1].provenance["rounds"]] == list(ROUNDS)


def test_it_stops_when_the_answers_have_moved_too_far():
    model = make_model()
    images = some(model)
    rounds = rank_in_rounds(model, images, ROUNDS).provenance["rounds"]
    limit = (rounds[0]["moved"] + rounds[1]["moved"]) / 2
    assert rounds[0]["moved"] < limit < rounds[1]["moved"]
    stopped = rank_in_rounds(model, images, ROUNDS, most_moved=limit)
    assert [r["kept"] for r in stopped.provenance["rounds"]] == [True, False]
    assert stopped.order_sha256 == rank_in_rounds(model, images, ROUNDS[:1]).order_sha256


@pytest.mark.parametrize("flops", [(), (0.5, 0.7), (0.5, 0.5)])
def test_rounds_that_do_not_fall_are_refused(flops):
    with pytest.raises(UsageError, match="falling fractions"):
        rank_in_rounds(make_model(), some(make_model()), flops)


def test_the_command_ranks_in_rounds_and_stops(snapvit, tiny_folder, image_folder, tmp_path):
    given = ["rank", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "r"]
    assert snapvit(*given, "--rounds", "0.8,0.6").code == 0
    found = Ranking.load(tmp_path / "r")
    assert [round_["flops"] for round_ in found.provenance["rounds"]] == [0.8, 0.6]
    moved = found.provenance["rounds"][0]["moved"]
    outcome = snapvit(*given, "--rounds", "0.8,0.6", "--most-moved", moved / 2)
    assert outcome.code == 0, outcome.err
    assert "stopped at 0.8 of the FLOPs" in outcome.err
    assert [round_["kept"] for round_ in Ranking.load(tmp_path / "r").provenance["rounds"]] == [False]
    out = tmp_path / "family"
    assert (
        snapvit(
            "export",
            "--model",
            tiny_folder,
            "--data",
            image_folder,
            "--ranking",
            tmp_path / "r",
            "--images",
            16,
            "--flops",
            0.6,
            "--out",
            out,
        ).code
        == 0
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--most-moved", 1], "--most-moved ends a ranking in rounds"),
        (["--rounds", "0.5,0.7"], "rounds need falling fractions"),
        (["--rounds", "0.7", "--evaluations", 5], "rounds order by statistics"),
        (["--rounds", "0.7", "--recipe", "local"], "rounds order by statistics"),
    ],
)
def test_rounds_that_make_no_sense_are_one_line(snapvit, tiny_folder, image_folder, tmp_path, options, says):
    outcome = snapvit("rank", tiny_folder, "--data", image_folder, "--out", tmp_path / "r", *options)
    assert outcome.code == 2
    assert says in outcome.error_line
