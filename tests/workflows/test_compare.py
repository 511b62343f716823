"""`snapvit compare`: methods on the same images, kept as they are found, as a table and a picture."""

import json
import sys
from pathlib import Path

import pytest

from helpers.images import make_image_folder
from helpers.models import make_model_folder
from snapvit_export.errors import UsageError
from snapvit_export.evaluate.comparison import Comparison
from snapvit_export.prune import compare as module
from snapvit_export.prune.compare import method
from snapvit_export.report.charts.methods import methods

GIVEN = ["--recipes", "default,magnitude,random+elastic", "--sparsity", "0.2,0.4", "--images", "16"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    make_model_folder(folder / "model")
    make_image_folder(folder / "images")
    return folder


@pytest.fixture
def compare(snapvit, made, tmp_path):
    def run(*options, given=GIVEN):
        places = ["--model", made / "model", "--data", made / "images", "--out", tmp_path / "out"]
        return snapvit("compare", *places, *given, *options)

    return run


def test_every_method_at_every_size_on_the_same_images(compare, tmp_path):
    outcome = compare()
    assert outcome.code == 0, outcome.err
    found = Comparison.load(tmp_path / "out")
    pairs = [(c.recipe, c.asked) for c in found.contestants]
    assert pairs == [(m, s) for m in ("default", "magnitude", "random+elastic") for s in (0.2, 0.4)]
    assert {c.correction for c in found.contestants if c.recipe == "random+elastic"} == {"elastic"}
    assert {c.correction for c in found.contestants if c.recipe == "magnitude"} == {None}
    assert {c.evaluation.images for c in found.contestants} == {60 - 16}
    assert all(c.sparsity >= c.asked - 0.02 for c in found.contestants)
    assert found.measure == "top1"
    assert found.calibration["images"] == 16
    for word in ("method", "sparsity 0.2", "random+elastic", "dense"):
        assert word in outcome.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        f"compare.{kind}" for kind in ("json", "md", "svg", "png")
    )
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "compare.svg").read_text()
    assert (tmp_path / "out" / "compare.md").read_text().count("| ") > 6


def test_what_was_found_before_is_not_done_again(compare, tmp_path, monkeypatch):
    small = ["--recipes", "magnitude,random", "--sparsity", "0.2", "--images", "16"]
    assert compare(given=small).code == 0
    ranked: list[str] = []
    rank = module.rank_and_factor

    def counting(model, images, settings, **options):
        ranked.append(settings.criterion)
        return rank(model, images, settings, **options)

    monkeypatch.setattr(module, "rank_and_factor", counting)
    more = ["--recipes", "magnitude,lamp,random", "--sparsity", "0.2", "--images", "16"]
    outcome = compare(given=more)
    assert outcome.code == 0, outcome.err
    assert ranked == ["lamp"]
    assert {c.recipe for c in Comparison.load(tmp_path / "out").contestants} == {"magnitude", "lamp", "random"}
    shown = [line.split()[0] for line in outcome.out.splitlines() if "±" in line and "dense" not in line]
    assert shown == ["magnitude", "lamp", "random"]
    fewer = compare(given=["--recipes", "lamp", "--sparsity", "0.2", "--images", "16"])
    assert "random" not in fewer.out
    assert len(Comparison.load(tmp_path / "out").contestants) == 3  # what was found is kept
    assert ranked == ["lamp"]


def test_a_folder_of_another_comparison_is_not_overwritten(compare, tmp_path):
    assert compare(given=["--recipes", "random", "--sparsity", "0.2", "--images", "16"]).code == 0
    before = (tmp_path / "out" / "compare.json").read_bytes()
    outcome = compare(given=["--recipes", "random", "--sparsity", "0.2", "--images", "12"])
    assert outcome.code == 1
    assert "compare.json: of another model, images or axis. Choose another --out" in outcome.error_line
    assert (tmp_path / "out" / "compare.json").read_bytes() == before


def test_stopped_and_gone_on_is_the_same(compare, tmp_path, monkeypatch):
    whole = ["--recipes", "magnitude,random", "--flops", "0.8,0.6", "--images", "16", "--json", "--quiet"]
    wanted = json.loads(compare(given=whole).out)
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    rank = module.rank_and_factor

    def stopping(model, images, settings, **options):
        if settings.criterion == "random":
            raise KeyboardInterrupt
        return rank(model, images, settings, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "rank_and_factor", stopping)
        assert compare(given=whole).code == 130
    assert len(Comparison.load(tmp_path / "out").contestants) == 2
    assert json.loads(compare(given=whole).out) == wanted


def test_neighbours_on_another_set(compare, made, tmp_path):
    outcome = compare("--on", made / "images", "--by", "knn", given=["--recipes", "random", "--sparsity", "0.2"])
    assert outcome.code == 0, outcome.err
    found = Comparison.load(tmp_path / "out")
    assert found.measure == "knn"
    assert found.dense.images == 12  # a fifth


def test_names_are_drawn_as_they_are(compare, tmp_path):
    compare(given=["--recipes", "magnitude,random", "--sparsity", "0.2,0.3", "--images", "16"])
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    text = json.dumps(found).replace("magnitude", "</script><b>")
    (tmp_path / "out" / "compare.json").write_text(text)
    chart = methods(Comparison.load(tmp_path / "out"))
    assert {row[0] for row in chart.rows} == {"</script><b>", "random"}
    from snapvit_export.report.draw import svg

    assert b"<b>" not in svg(chart)


def test_a_method_is_a_recipe_or_a_criterion_perhaps_corrected():
    assert method("default").allocation == "joint"
    assert method("lamp").criterion == "lamp"
    assert method("snapvit+sparsegpt").correction == "sparsegpt"
    with pytest.raises(UsageError, match="no recipe or criterion is called 'luck'. Known: default"):
        method("luck")
    with pytest.raises(UsageError, match="snip\\+prayer: no correction is called 'prayer'"):
        method("snip+prayer")


@pytest.mark.parametrize("name", ["vit.onnx", "VIT.ONNX"])
def test_an_onnx_file_is_refused_before_anything_is_loaded(snapvit, made, tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = snapvit("compare", "--model", tmp_path / name, "--data", made / "images", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "compare needs gradients and refits, and those torch" in outcome.error_line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--recipes", "luck"], "no recipe or criterion is called 'luck'"),
        (["--recipes", "lamp,lamp"], "--recipes names lamp twice"),
        (["--recipes", ","], "nothing to compare"),
        (["--sparsity", "0.2", "--flops", "0.5"], "are two measures of size. Give one"),
        (["--sparsity", "1.5"], "1.5"),
        (["--by", "segment"], "--by segment evaluates one model at a time"),
    ],
)
def test_bad_input_is_one_line(compare, options, says, tmp_path):
    outcome = compare(given=options)
    assert outcome.code == 2
    assert says in outcome.error_line
    assert not (tmp_path / "out").exists()
