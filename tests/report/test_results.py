"""The printed table of an evaluation: whole at every width, with the published values below ours."""

import re

import pytest

from snapvit_export.evaluate.published import published_results
from snapvit_export.evaluate.results_table import (
    DENSE,
    CellResult,
    CutSize,
    EvaluationTable,
    SeedInputs,
    TableReport,
    results_table,
)
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.prune.models.timm_modules import anatomy_without_weights
from snapvit_export.report.results import print_results, results_markdown, titles_of

DINO = "vit_base_patch16_224.dino"
SIZES = (DENSE, CutSize(pair=(0.35, 0.2)), CutSize(pair=(0.65, 0.5)))
SETS = published_results().sets


def report(model=DINO, sizes=SIZES, sets=tuple(SETS), correction=None) -> TableReport:
    anatomy = anatomy_without_weights(DINO, {})
    results = []
    for i, size in enumerate(sizes):
        for j, name in enumerate(sets):
            evaluation = Evaluation(
                source=name, images=SETS.get(name, 9), knn=0.901 - 0.1 * i - 0.01 * j, standard_errors={"knn": 0.003}
            )
            cut = dict(sparsity=0.1 * i, flops_ratio=1.0, params=7, flops=anatomy.flops() // (i + 1))
            results.append(
                CellResult(
                    size=size, seed=0, data=name, evaluation=evaluation, correction=correction if i else None, **cut
                )
            )
    found = EvaluationTable(
        model=model,
        weights_sha256="w",
        anatomy=anatomy,
        settings={"correction": correction},
        inputs={"0": SeedInputs(ranking="r", calibration=None, data={name: {} for name in sets})},
        results=tuple(results),
    )
    return TableReport(evaluation=found, tables=(results_table(found, "knn", sizes, sets, (0,)),))


def rows_of(text: str, label: str) -> str:
    """What stands in the rows of that label, block after block."""
    return " ".join(line.strip().removeprefix(label) for line in text.splitlines() if line.strip().startswith(label))


def test_a_row_for_each_pair_and_a_column_for_each_set_with_the_published_values_below(capsys):
    print_results(report(), width=200)
    out = capsys.readouterr().out
    titles = out.splitlines()[1].split()
    assert titles == ["MLP:heads", *SETS, "average", "Δ", "speed-up"]
    cut = re.findall(r"\d\.\d\dx|[+\-]?\d+\.\d(?: ± \d+\.\d)?", rows_of(out, "0.35:0.2"))
    assert cut == [*(f"{80.1 - j:.1f} ± 0.3" for j in range(7)), "77.1 ± 0.1", "-10.0", "2.00x"]
    published = [line.split() for line in out.splitlines() if line.strip().startswith("published ")]
    assert published[1][1:] == ["24.8", "91.5", "72.6", "94.4", "71.6", "85.1", "63.2", "71.9"]
    assert "published: DINO ViT-B/16, by its released ranking, uncorrected." in out
    assert "No latency was measured." in out


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 200])
def test_every_number_is_shown_at_every_width_and_no_line_is_longer(capsys, width):
    print_results(report(), width=width)
    out = capsys.readouterr().out
    table = out.split(f"{DINO}:")[0]
    assert max(map(len, table.splitlines())) <= width
    for title in (*SETS, "average", "speed-up"):
        assert table.split().count(title) == 1
    for j in range(7):
        assert f"{90.1 - j:.1f} ± 0.3" in rows_of(table, "dense")
    assert "3.00x" in rows_of(table, "0.65:0.5")


@pytest.mark.parametrize(("width", "blocks"), [(80, 3), (100, 2), (140, 1)])
def test_columns_go_on_below_and_what_sums_up_stays_together(capsys, width, blocks):
    print_results(report(), width=width)
    titles = [line.split() for line in capsys.readouterr().out.splitlines() if "MLP:heads" in line]
    assert len(titles) == blocks
    assert titles[-1][-3:] == ["average", "Δ", "speed-up"]


def test_a_corrected_cut_stands_alone_beside_the_dense_published_value(capsys):
    print_results(report(correction="elastic"), width=200)
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.strip().startswith("published ")]) == 1
    assert "Correction: elastic." in out


def test_another_model_has_no_word_of_published_values(capsys):
    print_results(report(model="x"), width=200)
    assert "published" not in capsys.readouterr().out


def test_one_set_needs_no_average(capsys):
    print_results(report(sizes=(DENSE, CutSize(flops=0.5)), sets=("pets",)), width=200)
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["size", "oxford-pets", "Δ", "speed-up"]
    assert "Δ: the value less the dense model's, in points." in out


def test_markdown_has_the_same_cells():
    text = results_markdown(report())
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == f"| MLP:heads | {' | '.join(SETS)} | average | Δ | speed-up |"
    assert lines[2].startswith("| dense | 90.1 ± 0.3 | 89.1 ± 0.3 |")
    assert lines[3].startswith("| published | 26.3 | 95.6 |")
    assert len(lines) == 2 + 2 * 3


def test_data_sets_have_short_names_unless_two_are_alike():
    assert titles_of(["/data/pets", "cifar10"]) == ["oxford-pets", "cifar10"]
    assert titles_of(["/a/pets", "/b/pets"]) == ["/a/pets", "/b/pets"]
