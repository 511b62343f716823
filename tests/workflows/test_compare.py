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
    assert method("paper:search-over=none").evaluations == 0
    assert method("snip+refit:damping=max:0.1").damping == "max:0.1"
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
        (["--recipes", "paper:pca=8:seed=1,paper:seed=1:pca=08"], "names paper:pca=8:seed=1 twice"),
        (["--recipes", "paper:pca=8,snapvit:pca=8"], "snapvit:pca=8 is the same as paper:pca=8"),
        (["--recipes", "paper,paper:pca=192"], "paper:pca=192 is the same as paper. Name one"),
        (["--recipes", "paper:pca=x"], "pca=x is not understood"),
        (["--recipes", "paper:order=variance"], "paper:order=variance: --order has no part in recipe snapvit"),
        (["--recipes", "snip:criterion=lamp"], "snip is a criterion itself"),
        (["--recipes", "paper:criterion=luck"], "no criterion is called 'luck'"),
        (["--recipes", "snip:damping=max:0.1"], "damping is of a correction. Add one, such as snip+elastic"),
        (["--recipes", "lamp:data=x", "--on", "digits"], "lamp:data=x: reads no images"),
        (["--recipes", "paper:data=x"], "calibrates on images of its own"),
        (["--recipes", "paper:cka=on:cka-images=999"], "Give --images 999"),
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


ABLATIONS = [
    "magnitude",
    "magnitude:evaluations=4:search-over=mlp:pca=8",
    "magnitude:evaluations=4:pairs=0.35:0.2/0.1:0:pca=8",
]


def test_ablations_are_rows_by_what_differs_and_resume(compare, tmp_path, monkeypatch):
    given = ["--recipes", ",".join(ABLATIONS), "--sparsity", "0.3", "--images", "16"]
    ranked: list[tuple[object, ...]] = []
    rank = module.rank_and_factor

    def stopping(model, images, settings, **options):
        ranked.append((settings.search_over, len(settings.pairs), settings.evaluations))
        if len(ranked) == 3:
            assert options["checkpoint"].parent == tmp_path / "out"  # though its name has a slash
            raise KeyboardInterrupt
        return rank(model, images, settings, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "rank_and_factor", stopping)
        assert compare(given=given).code == 130
    assert ranked == [("all", 4, 0), ("mlp", 4, 4), ("all", 2, 4)]
    monkeypatch.setattr(module, "rank_and_factor", lambda *a, **b: (ranked.append(a[2].search_over), rank(*a, **b))[1])
    outcome = compare(given=given)
    assert outcome.code == 0, outcome.err
    assert ranked[3:] == ["all"]
    found = Comparison.load(tmp_path / "out")
    assert [c.recipe for c in found.contestants] == ABLATIONS
    assert found.settings[ABLATIONS[1]]["search_over"] == "mlp"
    assert {row[0] for row in methods(found).rows} == set(ABLATIONS)
    assert all(name in outcome.out for name in ABLATIONS)


def test_the_evaluations_of_all_leave_a_method_its_own(compare, tmp_path):
    names = "magnitude:evaluations=3:pca=8,random:evaluations=2:pca=8"
    given = ["--recipes", names, "--sparsity", "0.3", "--images", "16", "--evaluations", "4"]
    assert "none of --recipes searches" in compare(given=given).error_line
    given[1] = "snapvit:criterion=random:pca=8,random:evaluations=2:pca=8:seed=7"
    assert compare(given=given).code == 0
    settings = Comparison.load(tmp_path / "out").settings
    assert [(each["evaluations"], each["seed"]) for each in settings.values()] == [(4, 0), (2, 7)]


def test_a_method_may_calibrate_on_images_of_its_own(compare, made, tmp_path):
    other = make_image_folder(tmp_path / "other", 40)
    own = f"variance:data={other}"
    given = ["--recipes", f"variance,{own}", "--sparsity", "0.3", "--images", "16", "--on", made / "images"]
    outcome = compare("--by", "knn", given=given)
    assert outcome.code == 0, outcome.err
    found = Comparison.load(tmp_path / "out")
    assert found.settings[own]["calibration"]["sha256"] != found.calibration["sha256"]
    assert "calibration" not in found.settings["variance"]


def test_a_comparison_of_an_earlier_version_goes_on(compare, tmp_path, monkeypatch):
    given = ["--recipes", "magnitude", "--sparsity", "0.2", "--images", "16"]
    assert compare(given=given).code == 0
    path = tmp_path / "out" / "compare.json"
    old = json.loads(path.read_text())
    for name in ("search_over", "cka_images"):
        del old["settings"]["magnitude"][name]
    path.write_text(json.dumps(old))
    monkeypatch.setattr(module, "rank_and_factor", lambda *_, **__: pytest.fail("ranked again"))
    assert compare(given=given).code == 0
