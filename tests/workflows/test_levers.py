"""`snapvit export` with levers: what a budget or FLOPs may use, families of several precisions, and bad input."""

from pathlib import Path

import numpy as np
import pytest

from helpers.models import make_model_folder
from snapvit_export.allocation.levers import LEVERS
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.family.folder import read_family
from snapvit_export.model.plan import Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.profiling.conditions import Conditions
from snapvit_export.profiling.profile import to_profile
from snapvit_export.profiling.sampling import Samples
from snapvit_export.profiling.timer import Timer
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.selection.candidates import Candidates
from snapvit_export.selection.race import LEADERS
from snapvit_export.selection.space import FILLED
from snapvit_export.storage.atomic import sha256
from snapvit_export.workflows.export import Request

PRECISION_MS = {"fp32": 20.0, "int8-dynamic": 10.0, "int8-static": 25.0}


@pytest.fixture
def run(snapvit, tiny_folder, image_folder, tmp_path, short_timings):
    """Export the tiny model by the default recipe into tmp_path/out."""

    def call(*extra: object):
        arguments = ["--model", tiny_folder, "--data", image_folder, "--images", 12, "--out", tmp_path / "out"]
        return snapvit("export", *arguments, *extra)

    return call


@pytest.fixture
def timed_by_precision(monkeypatch):
    """All files of a precision take the same time, int8-dynamic half of that of fp32."""

    def time(self, files, *_, **__):
        conditions = Conditions(noise=0.0, drift=0.0, waited=0.0, others=None)
        run = {}
        for name, file in files.items():
            taken = (PRECISION_MS[file.precision] * np.random.default_rng(0).normal(1, 1e-4, 64)).tolist()
            samples = Samples(8, taken, taken)
            run[name] = to_profile(
                samples, target=self.target, sha256=file.sha256, device=self.device, conditions=conditions
            )
        return run

    monkeypatch.setattr(Timer, "time", time)


def written(tmp_path: Path) -> bool:
    return (tmp_path / "out").exists() or any(path.name.startswith(".out.") for path in tmp_path.iterdir())


def test_a_budget_may_use_all_levers_and_other_targets_and_published_recipes_width_and_depth():
    assert Request(budget="60%").used_levers == LEVERS
    assert Request(budget="60%", mixes_precisions=False).used_levers == ("tokens", "width", "depth")
    assert Request(budget="60%", depth=False).used_levers == ("precision", "tokens", "width")
    assert Request(sparsity=[0.3]).used_levers == Request(flops=[0.3]).used_levers == ("width", "depth")
    assert Request(budget="60%", settings=make_settings("snapvit")).used_levers == ("width",)
    assert Request(budget="60%", levers=("width", "tokens")).used_levers == ("tokens", "width")
    assert Request(budget="60%", levers=("width",)).settings.depth is False


def test_width_and_depth_alone_give_plans_of_the_planners_own_steps(run, tmp_path):
    medium = dict(img_size=96, patch_size=8, embed_dim=96, depth=4, num_heads=6, num_classes=5)
    folder = make_model_folder(tmp_path / "medium", medium)
    outcome = run("--model", folder, "--budget", "60%", "--levers", "width,depth")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    choice, anatomy = manifest.choice, manifest.anatomy
    assert choice.levers == ("width", "depth")
    ranking = Ranking.load(tmp_path / "out" / "ranking.safetensors")
    planner = Planner(ranking, anatomy, Protection(sublayers=False), corrected=True)
    steps = planner.steps_of(lambda plan: choice.model.costs(anatomy, plan))
    kept = [variant for variant in manifest.variants if variant.name.startswith("t")]
    assert kept
    for variant in kept:
        assert manifest.plan(variant) in steps.values()
    assert {m.precision for m in choice.measurements} == {"fp32"}
    assert not any({"tokens", "precision"} & set(m.levers) for m in choice.measurements)


def test_a_mix_meets_its_flops_and_loses_no_more_on_the_images_of_the_race_than_width_alone(run, tmp_path, monkeypatch):
    raced, plain = {True: {}, False: {}}, Candidates.losses

    def seen(self, points, few):
        found = plain(self, points, few)
        raced[few].update({points[place].plan: values.mean() for place, values in found.items()})
        widths.update({points[place].plan for place in found if (place.grid, place.width) == (0, FILLED)})
        return found

    widths = set()  # what width alone would be
    monkeypatch.setattr(Candidates, "losses", seen)
    outcome = run("--levers", "tokens,width", "--flops", "0.5")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    assert {variant.name for variant in manifest.variants} == {"dense", "flops50"}
    assert manifest.variant("flops50").flops_ratio <= 0.5
    written, (alone,) = manifest.plan(manifest.variant("flops50")), widths
    assert raced[False][written] == min(raced[False].values())
    leaders = sorted(raced[True], key=raced[True].get)[:LEADERS]
    assert set(raced[False]) == set(leaders)  # so what is not among them lost more on the first images
    assert written != alone or alone in leaders


def test_a_family_of_two_precisions_is_written_and_read_back(run, tmp_path, timed_by_precision):
    outcome = run("--budget", "15ms", "--levers", "precision")
    assert outcome.code == 0, outcome.err
    out = tmp_path / "out"
    manifest = read_family(out)
    choice = manifest.choice
    chosen, dense = manifest.variant(choice.variant), manifest.variant("dense")
    assert (chosen.precision, dense.precision, choice.next_denser) == ("int8-dynamic", "fp32", "dense")
    assert manifest.target.precision == "fp32"
    assert manifest.target_of(chosen).precision == "int8-dynamic"
    assert [(each.precision, each.ratio) for each in choice.dropped] == [("int8-static", pytest.approx(1.25, rel=0.01))]
    listed = {weights.file: weights.sha256 for weights in manifest.weights}
    assert set(listed) == {*chosen.weights, *dense.weights}
    assert not set(chosen.weights) & set(dense.weights)
    assert all(sha256(out / name) == value for name, value in listed.items())
    files = {"manifest.json", "ranking.safetensors", *listed, chosen.file, dense.file}
    files |= {"model.onnx", "run.py", "README.txt", *(["labels.txt"] if manifest.labels else [])}
    assert {path.name for path in out.iterdir()} == files  # nothing of the precision that was dropped
    outputs = []
    for variant in (chosen, dense):
        with OrtSession(out / variant.file, 1) as session:
            outputs.append(session.run(np.full((1, 3, 32, 32), 0.1, np.float32)))
    assert 0 < np.abs(outputs[0] - outputs[1]).max() < np.abs(outputs[1]).max()


def test_a_precision_that_is_given_is_kept(run, tmp_path, timed_by_precision):
    outcome = run("--budget", "30ms", "--precision", "fp32")
    assert outcome.code == 0, outcome.err
    choice = read_family(tmp_path / "out").choice
    assert (choice.levers, choice.dropped) == (("tokens", "width", "depth"), ())
    assert {m.precision for m in choice.measurements} == {"fp32"}


def test_every_variant_has_its_fidelity_without_labels_and_the_stages_their_seconds(run, tmp_path):
    np.savez(tmp_path / "grey.npz", images=np.random.default_rng(0).integers(0, 255, (30, 20, 20), np.uint8))
    outcome = run("--sparsity", "0.3", "--data", tmp_path / "grey.npz")  # two sources have no common labels
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    assert all(variant.evaluation is None for variant in manifest.variants)
    dense, cut = manifest.variant("dense").fidelity, manifest.variant("s30").fidelity
    assert (dense.divergence, dense.agreement) == (0, 1)
    assert cut.divergence > 0
    assert cut.images == dense.images > 12
    assert {"ranking", "building", "comparing", "timing"} <= set(manifest.seconds)
    assert all(seconds >= 0 for seconds in manifest.seconds.values())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--levers", "speed"), "no lever is called 'speed'. Known: precision, tokens, width, depth, or all"),
        (("--levers", ","), "--levers names none"),
        (("--prefer", "beauty"), "--prefer 'beauty' is neither fidelity nor accuracy"),
    ],
)
def test_bad_levers_and_preferences_are_one_line_before_any_work(run, tmp_path, asked, says):
    outcome = run("--budget", "60%", *asked)
    assert (outcome.code, says in outcome.error_line) == (2, True), outcome.err
    assert not written(tmp_path)


def test_accuracy_without_labels_is_refused_in_one_line(run, tmp_path):
    np.savez(tmp_path / "grey.npz", images=np.random.default_rng(0).integers(0, 255, (30, 20, 20), np.uint8))
    outcome = run("--budget", "60%", "--prefer", "accuracy", "--data", tmp_path / "grey.npz")
    assert (outcome.code, "--prefer accuracy needs images with labels" in outcome.error_line) == (2, True), outcome.err
    assert not written(tmp_path)


def test_too_few_images_to_compare_candidates_on_are_refused_in_one_line(run, tmp_path, image_folder):
    for path in list(image_folder.rglob("*.png"))[1:]:
        path.unlink()
    outcome = run("--budget", "60%")
    assert (outcome.code, "no image left to compare candidates on" in outcome.error_line) == (2, True), outcome.err
    assert "--levers width,depth" in outcome.error_line
    assert not written(tmp_path)


def test_precision_alone_cannot_save_flops(run, tmp_path):
    outcome = run("--levers", "precision", "--flops", "0.5")
    assert (outcome.code, "precision does not change FLOPs" in outcome.error_line) == (2, True), outcome.err
    assert not written(tmp_path)
