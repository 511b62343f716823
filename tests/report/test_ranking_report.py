"""The report of a ranking alone: its Plans are the Planner's, every format is written, and no string becomes markup."""

import json
import re

import msgspec
import numpy as np
import pytest

from helpers.report_factory import (
    DEPTH,
    HEADS,
    HIDDEN,
    HOSTILE,
    make_manifest,
    make_rounds,
    make_search,
    make_sublayers,
)
from snapvit_export.allocation.planner import Planner
from snapvit_export.errors import SnapvitError
from snapvit_export.model.ranking import Ranking
from snapvit_export.report.charts.ranking import ranking_charts
from snapvit_export.report.charts.scores import scores
from snapvit_export.report.draw import svg
from snapvit_export.report.markdown import ranking_markdown
from snapvit_export.report.ranking_data import QUANTILES, RankingReport, collect_ranking
from snapvit_export.report.ranking_page import ranking_page
from snapvit_export.report.ranking_text import headline
from snapvit_export.report.write import is_ranking, is_report

TIMING = [{"processes": 2, "threads": 1, "device": "cpu", "seconds": {"scores": 61.0, "search": 120.5}}]
PROVENANCE = {"allocation": "pairs", "criterion": "snip", "seed": 3, "data": {"source": "photos", "images": 40}}
RECORD = {"search": make_search(), "sublayers": make_sublayers(), "timing": TIMING}


def make_ranking(model: str = "vit", provenance: dict | None = None, kept: int = HIDDEN) -> Ranking:
    """Scores that fall with depth over many powers of ten, some of them 0."""
    rng = np.random.default_rng(0)
    by_depth = 10.0 ** -np.arange(DEPTH)
    neurons = [np.float32(scale * rng.random(HIDDEN)) for scale in by_depth]
    neurons[3][:100] = 0
    heads = [np.float32(scale * rng.random(HEADS)) for scale in by_depth]
    return Ranking(heads, neurons, model, make_manifest(1).anatomy, {**PROVENANCE, **(provenance or {})})


@pytest.fixture
def report() -> RankingReport:
    return collect_ranking(make_ranking(provenance=RECORD))


def test_plans_are_those_of_the_planner(report):
    ranking = make_ranking()
    planner = Planner(ranking, ranking.anatomy)
    assert [plan.name for plan in report.plans] == ["dense", *(f"{n} % cut" for n in (10, 20, 30, 40, 50, 60))]
    for row, widths, sparsity in zip(report.plans[1:], report.widths[1:], (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)):
        plan = planner.sparsity(sparsity)
        assert (widths.heads, widths.neurons) == (plan.heads, plan.neurons)
        assert (row.sparsity, row.heads, row.neurons) == (
            plan.sparsity(ranking.anatomy),
            sum(plan.heads),
            sum(plan.neurons),
        )
        assert row.flops_ratio == plan.flops_ratio(ranking.anatomy)
    assert "from 5 % (block 4) to 100 % (block 0) of their neurons" in headline(report)


def test_sizes_that_are_asked_for_are_shown_and_refused_out_of_reach():
    ranking = make_ranking()
    asked = collect_ranking(ranking, sparsity=[0.3, 0.1], flops=[0.5, 0.8], pairs=[(0.35, 0.2)])
    names = ["dense", "10 % cut", "30 % cut", "80 % FLOPs", "50 % FLOPs", "35:20 %"]
    assert [plan.name for plan in asked.plans] == names
    assert asked.widths[-1].neurons == Planner(ranking, ranking.anatomy).pair(0.35, 0.2).neurons
    with pytest.raises(SnapvitError, match="out of reach"):
        collect_ranking(ranking, sparsity=[0.99])


def test_usual_sizes_out_of_reach_are_left_out_and_named():
    ranking = make_ranking(provenance={"protection": {"neurons": 0.6, "heads": 0.6}})
    shown = collect_ranking(ranking)
    assert shown.out_of_reach == ("50 % cut", "60 % cut")
    assert len(shown.plans) == 5
    assert "Out of reach" in ranking_page(shown)


def test_scores_are_quantiles_of_those_above_zero(report):
    ranking = make_ranking()
    third = next(block for block in report.scores if (block.block, block.kind) == (3, "neurons"))
    assert (third.structures, third.positive) == (HIDDEN, HIDDEN - 100)
    above = ranking.neuron_scores[3][100:].astype(np.float64)
    assert third.quantiles == pytest.approx(np.quantile(above, QUANTILES))
    chart = scores(report, "neurons")
    assert [row[0] for row in chart.rows] == [str(i) for i in range(DEPTH)]
    values = chart.spec["data"]["values"]
    assert values[3]["count"] == f"{HIDDEN}, 100 of them score 0 or less"
    low, high = chart.spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert all(low <= row[f"q{q}"] <= high for row in values for q in (10, 25, 50, 75, 90))


def test_a_block_without_a_score_above_zero_has_no_bar():
    ranking = make_ranking()
    flat = [np.zeros(HEADS, np.float32) for _ in range(DEPTH)]
    shown = collect_ranking(Ranking(flat, ranking.neuron_scores, "vit", ranking.anatomy))
    assert scores(shown, "heads") is None
    assert "scores-heads" not in {chart.name for chart in ranking_charts(shown)}
    assert "plot-scores-neurons" in ranking_page(shown)


def test_the_page_has_every_part(report):
    text = ranking_page(report)
    for name in ("heads", "neurons", "sublayers", "search", "scores-heads", "scores-neurons"):
        assert text.count(f'id="plot-{name}"') == 1
    assert "Time in 2 processes of 1 thread, cpu" in text
    assert ">181.50 s<" in text
    assert "http://" not in re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL).replace(
        "http://www.w3.org", ""
    )
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    bare = ranking_page(collect_ranking(make_ranking()))
    assert 'id="plot-search"' not in bare
    assert 'id="plot-sublayers"' not in bare
    assert "Time in" not in bare


def test_rounds_that_recover_are_drawn_and_their_places_are_no_amounts():
    shown = collect_ranking(make_ranking(provenance=make_rounds()))
    text = ranking_page(shown)
    for name in ("rounds-gflops", "rounds-params"):
        assert text.count(f'id="plot-{name}"') == 1
    assert "places in the order of removal" in text
    by_damage = ranking_page(collect_ranking(make_ranking(provenance={**make_rounds(), "allocation": "joint"})))
    assert 'id="plot-rounds-gflops"' in by_damage
    for text in (by_damage, ranking_page(collect_ranking(make_ranking()))):
        assert "places in the order of removal" not in text


def test_scores_stay_amounts_where_the_first_round_lost_too_much():
    rounds = make_rounds()
    rounds["rounds"] = [{**rounds["rounds"][0], "kept": False}]
    assert "places in the order of removal" not in ranking_page(collect_ranking(make_ranking(provenance=rounds)))


def test_scores_of_shots_are_said_to_be_places():
    shots = {"allocation": "mixed", "shots": 5, "step": None}
    assert "places in the order of removal" in ranking_page(collect_ranking(make_ranking(provenance=shots)))


def test_no_string_of_the_file_becomes_markup():
    evil = {"criterion": HOSTILE, "data": {"source": HOSTILE, "images": HOSTILE}, HOSTILE: HOSTILE}
    timing = [{**TIMING[0], "device": HOSTILE, "seconds": {HOSTILE: 1.0}}]
    shown = collect_ranking(make_ranking(HOSTILE, {**evil, "timing": timing}))
    for text in (ranking_page(shown), ranking_markdown(shown, {"a": HOSTILE})):
        assert "<img" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    for chart in ranking_charts(shown):
        assert b"<img" not in svg(chart)


def test_markdown_has_a_row_for_each_plan_and_the_time(report):
    text = ranking_markdown(report, {"Heads kept in each block": "r_heads.svg"})
    assert text.count("\n| ") == 9  # two of them the head
    assert "](<r_heads.svg>)" in text
    assert "Took 182 s (3.0 min): scores 61, search 120; 2 processes of 1 thread." in text


@pytest.fixture
def file(tmp_path):
    make_ranking(provenance=RECORD).save(tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


def test_the_command_writes_every_format_beside_the_ranking(snapvit, file):
    outcome = snapvit("report", file, "--format", "html,md,json,svg", "--sparsity", "0.2,0.5")
    assert outcome.code == 0, outcome.err
    assert "At 50 % cut, blocks keep from" in outcome.out
    plots = ("heads", "neurons", "sublayers", "search", "scores-heads", "scores-neurons")
    names = {f"mine.{kind}" for kind in ("html", "md", "json", "safetensors")} | {f"mine_{p}.svg" for p in plots}
    assert {path.name for path in file.parent.iterdir()} == names
    assert all(is_report(path) for path in file.parent.iterdir() if path != file)
    found = msgspec.json.decode((file.parent / "mine.json").read_bytes(), type=RankingReport)
    assert [plan.name for plan in found.plans] == ["dense", "20 % cut", "50 % cut"]
    again = snapvit("report", file, "--json", "--flops", "0.6")  # over the page of before
    assert [plan["name"] for plan in json.loads(again.out)["plans"]] == ["dense", "60 % FLOPs"]


def test_the_command_draws_png(snapvit, file, tmp_path):
    assert snapvit("report", file, "--out", tmp_path / "to", "--format", "png").code == 0
    assert (tmp_path / "to" / "mine_neurons.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (["--budget", "10ms"], "--budget is for the report of a family", 2),
        (["--beside", "x"], "--beside is for the report of a family", 2),
        (["--sparsity", "0.99"], "mine.safetensors: sparsity 0.99 is out of reach", 1),
        (["--sparsity", "7"], "sparsity 7 is not a fraction", 2),
    ],
)
def test_bad_options_are_one_line(snapvit, file, options, says, code):
    outcome = snapvit("report", file, *options)
    assert outcome.code == code
    assert says in outcome.error_line
    assert [path.name for path in file.parent.iterdir()] == ["mine.safetensors"]


def test_somebody_elses_file_is_not_overwritten(snapvit, file):
    (file.parent / "mine.html").write_text("precious")
    outcome = snapvit("report", file)
    assert outcome.code == 1
    assert "not a report that snapvit made" in outcome.error_line
    assert (file.parent / "mine.html").read_text() == "precious"
    assert snapvit("report", file, "--force").code == 0


def test_a_ranking_of_an_unknown_model_says_what_to_do(snapvit, tmp_path):
    Ranking(([1.0, 2.0],), ([1.0, 2.0],), "imported").save(tmp_path / "r")
    outcome = snapvit("report", tmp_path / "r")
    assert outcome.code == 1
    assert "snapvit import-scores FILE --model NAME" in outcome.error_line


def test_a_damaged_ranking_is_refused_and_another_file_is_no_ranking(snapvit, file, tmp_path):
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    outcome = snapvit("report", file)
    assert outcome.code == 1
    assert "damaged" in outcome.error_line
    (tmp_path / "x.txt").write_text("x")
    assert not is_ranking(tmp_path / "x.txt")
    assert not is_ranking(tmp_path)
    assert snapvit("report", tmp_path / "x.txt").code in (1, 2)
