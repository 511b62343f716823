"""`snapvit evaluate` of several sizes, data sets and seeds: the numbers, what is kept, and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from helpers.models import make_model, make_model_folder
from helpers.rankings import random_ranking
from snapvit_export.evaluate.evaluator import Evaluator
from snapvit_export.evaluate.features import Features
from snapvit_export.evaluate.results_table import DENSE, CutSize, EvaluationTable
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.correct.policy import Corrector
from snapvit_export.prune.models.load import load_model
from snapvit_export.workflows import evaluate_table as module
from snapvit_export.workflows.evaluate_table import SeedData
from snapvit_export.workflows.table_request import TableRequest

PAIR = CutSize(pair=(0.35, 0.2))


def make_set(folder, seed, splits=(("train", 12), ("test", 8))):
    """Noisy pictures that are a little darker or lighter: no model gets them all right."""
    rng = np.random.default_rng(seed)
    for split, each in splits:
        for name, level in (("dark", 118), ("light", 138)):
            (folder / split / name).mkdir(parents=True)
            for i in range(each):
                picture = level + rng.integers(-90, 90, (40, 50, 3))
                Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / split / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    make_model_folder(folder / "model")
    make_set(folder / "one", 1)
    make_set(folder / "two", 2)
    for seed in (0, 13):
        random_ranking(make_model().anatomy, seed).save(folder / f"r{seed}.safetensors")
    return folder


@pytest.fixture
def evaluate(snapvit, made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)

    def run(*options, data="one,two", cut=("--pair", "0.35:0.2", "--ranking", "r0.safetensors")):
        where = ("--data", data, "--out", tmp_path / "out")
        return snapvit("evaluate", "model", *where, *cut, *options)

    return run


@pytest.fixture
def counted(monkeypatch):
    """The data sets that models were run over."""
    names = []
    evaluate = Evaluator.evaluate

    def counting(self, extractor, progress=None):
        names.append(self.data.name)
        return evaluate(self, extractor, progress)

    monkeypatch.setattr(Evaluator, "evaluate", counting)
    return names


def found_in(folder) -> EvaluationTable:
    return EvaluationTable.load(folder / "out")


def test_each_cell_is_what_evaluating_it_alone_gives(evaluate, snapvit, tmp_path):
    outcome = evaluate("--flops", "0.6", "--json", "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    table = json.loads(outcome.out)["tables"][0]
    assert [list(row["size"]) for row in table["rows"]] == [[], ["pair"], ["flops"]]  # dense, and those asked for
    alone = {}
    for name in ("one", "two"):
        for i, cut in enumerate(([], ["--ranking", "r0.safetensors", "--flops", "0.6"])):
            single = snapvit("evaluate", "model", "--data", name, "--by", "knn", "--json", "--quiet", *cut)
            alone[name, i] = json.loads(single.out)
    for name in ("one", "two"):
        for i, row in enumerate((table["rows"][0], table["rows"][2])):
            assert row["values"][name]["value"] == alone[name, i]["knn"]
            assert row["values"][name]["error"] == pytest.approx(alone[name, i]["standard_errors"]["knn"])
    dense, cut = table["rows"][0], table["rows"][1]
    mean = (dense["values"]["one"]["value"] + dense["values"]["two"]["value"]) / 2
    assert dense["average"]["value"] == pytest.approx(mean)
    assert cut["delta"]["value"] == pytest.approx(cut["average"]["value"] - mean)
    anatomy = make_model().anatomy
    assert cut["speed_up"] == pytest.approx(anatomy.flops() / cut["flops"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evaluation.json", "evaluation.md"]


def test_the_table_is_printed_dense_first(evaluate, tmp_path):
    outcome = evaluate("--quiet")
    rows = [line.split()[0] for line in outcome.out.splitlines() if "x " in line]
    assert rows == ["dense", "0.35:0.2"]
    assert f"Written to {tmp_path / 'out'}: evaluation.json, evaluation.md" in outcome.out
    assert "| 0.35:0.2 | " in (tmp_path / "out" / "evaluation.md").read_text()


def test_the_correction_is_that_of_factors_made_once_from_images_that_are_not_evaluated(evaluate, made, monkeypatch):
    seen, observed = [], []
    kept, factors = Corrector.kept, Corrector.factors

    def watching(self, plan):
        seen.append(self)
        return kept(self, plan)

    def counting(self, plan):
        observed.append(len(self._factors))
        return factors(self, plan)

    monkeypatch.setattr(Corrector, "kept", watching)
    monkeypatch.setattr(Corrector, "factors", counting)
    cut = ("--pair", "0.35:0.2,0.5:0.25", "--ranking", "r0.safetensors")
    outcome = evaluate("--correction", "elastic", "--damping", "max:0.1", "--json", cut=cut)
    assert outcome.code == 0, outcome.err
    assert len(set(map(id, seen))) == 1
    assert observed == [0, 1]  # made for the first size, there for the second
    assert (seen[0].damping.kind, seen[0].damping.fraction) == ("max", 0.1)
    assert seen[0].images.source == "one/train"
    assert len(seen[0].images) == 24
    rows = json.loads(outcome.out)["tables"][0]["rows"]
    assert [row["correction"] for row in rows] == [None, "elastic", "elastic"]


def test_a_corrected_model_is_evaluated_with_its_corrected_weights(evaluate, made, tmp_path, monkeypatch):
    hashes = []
    features = Evaluator.features

    def hashing(self, extractor, progress) -> Features:
        hashes.append(extractor.weights_sha256)
        return features(self, extractor, progress)

    monkeypatch.setattr(Evaluator, "features", hashing)
    assert evaluate("--correction", "elastic", data="one").code == 0
    model, ranking = load_model(str(made / "model")), Ranking.load(made / "r0.safetensors")
    request = TableRequest("model", data=["one"], sizes=[PAIR], ranking=made / "r0.safetensors", correction="elastic")
    images = module.read_images([SeedData.opened(request, 0).calibration], model.preprocessing, module.Silent())[0]
    from snapvit_export.allocation.planner import Planner
    from snapvit_export.prune.models.extractor import cut_extractor

    plan = Planner(ranking, model.anatomy).pair(0.35, 0.2)
    small, _ = Corrector(model, ranking, "elastic", images, module.Silent()).kept(plan)
    assert hashes == [model.weights_sha256, cut_extractor(small, model).weights_sha256]


def test_what_was_found_before_is_not_evaluated_again(evaluate, counted, tmp_path):
    assert evaluate(data="one").code == 0
    assert counted == ["one", "one"]
    more = ("--pair", "0.35:0.2,0.5:0.25", "--ranking", "r0.safetensors")
    outcome = evaluate("--json", cut=more)
    assert outcome.code == 0, outcome.err
    assert counted[2:] == ["two", "two", "one", "two"]
    assert len(json.loads(outcome.out)["evaluation"]["results"]) == 6
    fewer = evaluate("--json", data="two", cut=())
    assert len(counted) == 6
    assert [row["size"] for row in json.loads(fewer.out)["tables"][0]["rows"]] == [{}]
    assert len(found_in(tmp_path).results) == 6  # what was found is kept


def test_stopped_and_gone_on_is_the_same(evaluate, tmp_path, monkeypatch):
    wanted = json.loads(evaluate("--json", "--quiet", "--correction", "refit").out)
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    evaluate_one, done = Evaluator.evaluate, []

    def stopping(self, extractor, progress=None):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(self)
        return evaluate_one(self, extractor, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", stopping)
        outcome = evaluate("--json", "--quiet", "--correction", "refit")
    assert outcome.code == 130
    assert "run the same command again to continue" in outcome.err
    assert len(found_in(tmp_path).results) == 3
    assert json.loads(evaluate("--json", "--quiet", "--correction", "refit").out) == wanted


@pytest.mark.parametrize(
    ("options", "cut", "says"),
    [
        (["--images", "22"], None, "other settings (images)"),
        (["--correction", "elastic"], None, "other settings (correction)"),
        ([], ("--pair", "0.35:0.2", "--ranking", "r13.safetensors"), "another ranking"),
    ],
)
def test_results_of_other_settings_are_refused_or_begun_anew(evaluate, tmp_path, options, cut, says):
    assert evaluate(data="one").code == 0
    before = (tmp_path / "out" / "evaluation.json").read_bytes()
    again = {"data": "one"} if cut is None else {"data": "one", "cut": cut}
    outcome = evaluate(*options, **again)
    assert outcome.code == 1
    assert f"evaluation.json: is of {says}. Choose another --out, or give --force to begin anew" in outcome.error_line
    assert (tmp_path / "out" / "evaluation.json").read_bytes() == before
    assert evaluate(*options, "--force", **again).code == 0
    assert (tmp_path / "out" / "evaluation.json").read_bytes() != before


def test_a_data_set_that_changed_is_another_one(evaluate, made, tmp_path):
    folder = make_set(tmp_path / "three", 3)
    assert evaluate(data=str(folder)).code == 0
    (folder / "test" / "dark" / "0.png").unlink()
    assert "is of other images of" in evaluate(data=str(folder)).error_line


def test_seeds_give_a_mean_and_a_deviation_and_each_has_its_ranking(evaluate, counted, tmp_path):
    cut = ("--pair", "0.35:0.2", "--ranking", "r{seed}.safetensors")
    outcome = evaluate("--seeds", "0,13", "--json", data="one", cut=cut)
    assert outcome.code == 0, outcome.err
    table = json.loads(outcome.out)["tables"][0]
    assert (table["seeds"], table["errors"]) == ([0, 13], "standard deviation over seeds")
    each = [found_in(tmp_path).found(PAIR, seed, "one").evaluation.knn for seed in (0, 13)]
    quantity = table["rows"][1]["values"]["one"]
    assert quantity["by_seed"] == each
    assert quantity["value"] == pytest.approx(np.mean(each))
    assert quantity["error"] == pytest.approx(np.std(each, ddof=1))
    alone = evaluate("--seed", "13", "--json", data="one", cut=cut)
    assert json.loads(alone.out)["tables"][0]["rows"][1]["values"]["one"]["value"] == each[1]
    assert len(counted) == 3  # the dense model once: no seed decides anything of it


def test_without_a_ranking_one_is_made_of_images_that_are_not_evaluated_and_kept(evaluate, tmp_path, monkeypatch):
    cut = ("--pair", "0.35:0.2", "--recipe", "local", "--calibration-images", "8")
    outcome = evaluate("--json", "--seeds", "0,13", data="one", cut=cut)
    assert outcome.code == 0, outcome.err
    rankings = [Ranking.load(tmp_path / "out" / f"ranking-{seed}.safetensors") for seed in (0, 13)]
    assert [ranking.provenance["data"]["source"] for ranking in rankings] == ["one/train"] * 2
    assert [ranking.provenance["data"]["images"] for ranking in rankings] == [8, 8]
    assert rankings[0].order_sha256 != rankings[1].order_sha256
    monkeypatch.setattr("snapvit_export.prune.rank.rank.rank_and_factor", None)  # no part in what follows
    more = ("--pair", "0.35:0.2,0.5:0.25", *cut[2:])
    assert evaluate("--seeds", "0,13", data="one", cut=more).code == 0


def test_images_that_are_evaluated_never_calibrate(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    both = tmp_path / "both.txt"
    files = sorted(made.joinpath("one").rglob("*.png"))
    both.write_text("".join(f"{path}\n" for path in files))
    common = dict(data=["one", "two"], sizes=[PAIR], ranking=made / "r0.safetensors", correction="elastic")
    request = TableRequest("model", calibrate=str(both), **common)
    calibration = SeedData.opened(request, 0).calibration
    titles = {calibration.title(i) for i in range(calibration.count)}
    assert titles == {str(path) for path in files if "/train/" in str(path)}


def test_a_source_that_is_evaluated_whole_cannot_calibrate(evaluate):
    outcome = evaluate("--correction", "elastic", "--calibrate", "one/test")
    assert outcome.code == 1
    assert "one/test: all of its images are evaluated, so none may calibrate. Give --calibrate" in outcome.error_line


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--correction", "prayer"], 2, "no correction is called 'prayer'. Known: none, refit"),
        (["--damping", "much", "--correction", "elastic"], 2, "damping 'much'"),
        (["--seeds", "0,x"], 2, "--seeds 'x' is no seed"),
        (["--seeds", "0,0"], 2, "--seeds names 0 twice"),
        (["--seeds", "0,13"], 2, "--seeds would all give the same"),
        (["--pair", "0.35"], 2, "--pair is given twice"),
        (["--sparsity", "1.2"], 2, "1.2"),
        (["--sparsity", "0.2,nan"], 2, "is not a number"),
        (["--classes", "c.txt"], 2, "Add head to --by"),
        (["--features", "f"], 2, "--features keeps those of one model"),
        (["--flops", "0.0001"], 1, "out of reach"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(evaluate, tmp_path, options, code, says):
    outcome = evaluate(*options)
    assert (outcome.code, says in outcome.error_line) == (code, True), outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "says"), [("one,", "has an empty name"), ("one,one", "--data names one twice"), ("one,absent", "absent")]
)
def test_bad_lists_of_data_sets_are_one_line(evaluate, tmp_path, data, says):
    outcome = evaluate(data=data)
    assert outcome.code in (1, 2)
    assert says in outcome.error_line
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_comma_in_its_name_is_one_data_set(evaluate, tmp_path):
    folder = make_set(tmp_path / "a,b", 4)
    outcome = evaluate("--json", data=str(folder), cut=())
    assert json.loads(outcome.out)["tables"][0]["data"] == [str(folder)]


def test_files_of_others_are_not_written_over(evaluate, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluation.md").write_text("mine")
    assert "evaluation.md: is there already" in evaluate().error_line
    assert (tmp_path / "out" / "evaluation.md").read_text() == "mine"


def test_files_are_evaluated_one_by_one(snapvit, made, monkeypatch):
    monkeypatch.chdir(made)
    outcome = snapvit("evaluate", "vit.onnx", "--data", "one,two")
    assert (outcome.code, "a table is of a model in torch" in outcome.error_line) == (2, True)


def test_without_training_images_nothing_can_calibrate(evaluate, tmp_path):
    only = make_set(tmp_path / "set", 5, (("val", 4), ("test", 4)))
    outcome = evaluate("--correction", "elastic", "--by", "head", data=str(only))
    assert outcome.code == 2
    assert "has no training images to calibrate on. Give --calibrate SOURCE" in outcome.error_line


def test_several_measures_give_a_table_each(evaluate):
    outcome = evaluate("--by", "knn,linear", "--json", data="one")
    tables = json.loads(outcome.out)["tables"]
    assert [table["measure"] for table in tables] == ["knn", "linear"]
    assert DENSE.title == "dense"
