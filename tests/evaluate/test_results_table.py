"""The table of an evaluation: averages, differences and speed-ups of known numbers, and what may be resumed."""

import json
import math

import msgspec
import numpy as np
import pytest

from snapvit_export.errors import FileFormatError
from snapvit_export.evaluate.published import published_results
from snapvit_export.evaluate.results_table import (
    DENSE,
    CellResult,
    CutSize,
    EvaluationTable,
    SeedInputs,
    results_table,
)
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.prune.models.timm_modules import anatomy_without_weights

DINO = "vit_base_patch16_224.dino"
ANATOMY = anatomy_without_weights(DINO, {})
PAIR = CutSize(pair=(0.35, 0.2))
SETS = {"imagenet-1k": 50000, "pets": 3669}
FLOPS = {DENSE: ANATOMY.flops(), PAIR: ANATOMY.flops() // 2}


def cell(size, data, knn, seed=0, error=0.01, images=None, correction=None) -> CellResult:
    evaluation = Evaluation(source=data, images=images or SETS[data], knn=knn, standard_errors={"knn": error})
    cut = dict(sparsity=0.0, flops_ratio=1.0, params=7, flops=FLOPS[size], correction=correction)
    return CellResult(size=size, seed=seed, data=data, evaluation=evaluation, **cut)


def table_of(*cells: CellResult, **changes) -> EvaluationTable:
    seeds = {str(each.seed) for each in cells}
    inputs = {
        seed: SeedInputs(ranking="r", calibration={"images": 8}, data={name: {} for name in SETS}) for seed in seeds
    }
    made = dict(model=DINO, weights_sha256="w", anatomy=ANATOMY, settings={"by": ["knn"]}, inputs=inputs, results=cells)
    return EvaluationTable(**{**made, **changes})


def of_one_seed(**of_cut):
    dense = cell(DENSE, "imagenet-1k", 0.75, error=0.03), cell(DENSE, "pets", 0.89, error=0.04)
    return table_of(*dense, cell(PAIR, "imagenet-1k", 0.70, **of_cut), cell(PAIR, "pets", 0.80, **of_cut))


def test_averages_differences_and_speed_ups():
    dense, cut = results_table(of_one_seed(), "knn", (DENSE, PAIR), tuple(SETS), (0,)).rows
    assert dense.average.value == pytest.approx(0.82)
    assert dense.average.error == pytest.approx(0.025)  # sqrt(0.03² + 0.04²) / 2
    assert dense.delta is None
    assert cut.delta.value == pytest.approx(-0.07)
    assert cut.delta.error is None
    assert (dense.speed_up, cut.speed_up) == (1, pytest.approx(2))


def test_seeds_are_a_mean_and_the_deviation_of_a_sample():
    seeds = {0: (0.75, 0.70), 13: (0.75, 0.72), 42: (0.75, 0.62)}
    cells = [
        cell(size, "pets", value, seed) for seed, both in seeds.items() for size, value in zip((DENSE, PAIR), both)
    ]
    table = results_table(table_of(*cells), "knn", (DENSE, PAIR), ("pets",), tuple(seeds))
    dense, cut = table.rows
    assert table.errors == "standard deviation over seeds"
    assert cut.values["pets"].value == pytest.approx(0.68)
    assert cut.values["pets"].error == pytest.approx(np.std([0.70, 0.72, 0.62], ddof=1))
    assert cut.values["pets"].by_seed == (0.70, 0.72, 0.62)
    assert cut.delta.by_seed == pytest.approx((-0.05, -0.03, -0.13))
    assert dense.values["pets"].error == 0


def test_the_average_of_seeds_deviates_as_their_averages_do():
    cells = [cell(DENSE, name, value, seed) for seed, value in ((0, 0.5), (1, 0.7)) for name in SETS]
    cells[1] = cell(DENSE, "pets", 0.9, 0)  # what one set gains the other loses
    cells[3] = cell(DENSE, "pets", 0.7, 1)
    (dense,) = results_table(table_of(*cells), "knn", (DENSE,), tuple(SETS), (0, 1)).rows
    assert dense.average.value == pytest.approx(0.7)
    assert dense.average.error == pytest.approx(0, abs=1e-12)
    assert dense.values["pets"].error == pytest.approx(0.2 / math.sqrt(2))


def test_published_values_stand_beside_the_same_model_pair_and_set():
    table = results_table(of_one_seed(), "knn", (DENSE, PAIR), tuple(SETS), (0,))
    assert table.rows[0].published == {"imagenet-1k": pytest.approx(0.7486), "pets": pytest.approx(0.8885)}
    assert table.rows[1].published == {"imagenet-1k": pytest.approx(0.7156), "pets": pytest.approx(0.8506)}
    assert table.published_as == "DINO ViT-B/16"
    assert "results/in1k.md" in table.published_source


@pytest.mark.parametrize("of_cut", [{"correction": "elastic"}, {"images": 1000}])
def test_there_are_none_beside_a_corrected_cut_or_fewer_images(of_cut):
    table = results_table(of_one_seed(**of_cut), "knn", (DENSE, PAIR), tuple(SETS), (0,))
    assert [bool(row.published) for row in table.rows] == [True, False]


def test_there_are_none_for_another_model_or_measure():
    found = of_one_seed()
    other = msgspec.structs.replace(found, model="vit_base_patch16_224")
    assert results_table(other, "knn", (DENSE, PAIR), tuple(SETS), (0,)).published_as is None
    assert published_results().measure == "knn"
    cells = [
        msgspec.structs.replace(c, evaluation=Evaluation(source="x", images=50000, linear=0.7)) for c in found.results
    ]
    linear = results_table(table_of(*cells), "linear", (DENSE, PAIR), tuple(SETS), (0,))
    assert all(not row.published for row in linear.rows)


def test_what_was_not_evaluated_is_no_table():
    with pytest.raises(ValueError, match=r"0.35:0.2 on pets with seed 1 was not evaluated"):
        results_table(of_one_seed(), "knn", (PAIR,), ("pets",), (1,))


def test_sizes_are_named_as_they_were_asked_for():
    sizes = [DENSE, PAIR, CutSize(sparsity=0.3), CutSize(flops=0.72)]
    assert [size.title for size in sizes] == ["dense", "0.35:0.2", "sparsity 0.3", "FLOPs 0.72"]


def test_a_file_gives_the_same_table_back(tmp_path):
    found = of_one_seed()
    found.save(tmp_path)
    assert EvaluationTable.load(tmp_path) == found
    assert EvaluationTable.load(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights_sha256": "v"}, "another model"),
        ({"settings": {"by": ["linear"]}}, "other settings (by)"),
        ({"settings": {"by": ["knn"], "images": 5}}, "other settings (images)"),
        ({"inputs": {"0": SeedInputs(ranking="s", calibration=None, data={})}}, "another ranking"),
        (
            {"inputs": {"0": SeedInputs(ranking="r", calibration={"images": 9}, data={})}},
            "other images to calibrate on",
        ),
        ({"inputs": {"0": SeedInputs(ranking="r", calibration=None, data={"pets": {"x": 1}})}}, "other images of pets"),
        ({"inputs": {"1": SeedInputs(ranking="s", calibration=None, data={})}}, None),
        ({"inputs": {"0": SeedInputs(ranking=None, calibration=None, data={"dtd": {}})}}, None),
    ],
)
def test_only_results_of_the_same_inputs_are_resumed(changes, says):
    assert of_one_seed().difference(msgspec.structs.replace(of_one_seed(), results=(), **changes)) == says


def test_joined_tables_have_the_results_and_inputs_of_both():
    before = table_of(cell(DENSE, "pets", 0.8))
    inputs = {"0": SeedInputs(ranking=None, calibration=None, data={"dtd": {}})}
    joined = msgspec.structs.replace(before, inputs=inputs, results=()).joined(before, ["knn"])
    assert joined.results == before.results
    assert set(joined.inputs["0"].data) == {"dtd", *SETS}
    assert (joined.inputs["0"].ranking, joined.inputs["0"].calibration) == ("r", {"images": 8})


def test_results_without_a_measure_that_is_wanted_are_found_anew():
    start = msgspec.structs.replace(of_one_seed(), results=())
    assert start.joined(of_one_seed(), ["knn", "linear"]).results == ()


@pytest.mark.parametrize("inputs", [{}, {"1": {}}, {"0": {"ranking": None, "calibration": None, "data": {}}}])
def test_a_file_with_results_of_unknown_inputs_is_refused(tmp_path, inputs):
    of_one_seed().save(tmp_path)
    path = tmp_path / "evaluation.json"
    changed = {**json.loads(path.read_text()), "inputs": inputs}
    path.write_text(json.dumps(changed))
    with pytest.raises(FileFormatError, match="evaluation.json: not a valid EvaluationTable"):
        EvaluationTable.load(tmp_path)
