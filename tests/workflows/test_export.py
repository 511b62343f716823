"""`snapvit export`, end to end and with bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec import UNSET
from safetensors.torch import load_file, save_file

from helpers.images import make_image_folder
from helpers.models import make_model_folder
from helpers.rankings import random_ranking
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import Settings, make_settings
from snapvit_export.checks.inspect import inspect
from snapvit_export.family.folder import read_family
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models import load
from snapvit_export.prune.models.load import load_model
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.storage.temporary import temporary_folder
from snapvit_export.workflows.export import Request
from snapvit_export.workflows.pack import PackRequest
from snapvit_export.workflows.prepared import split_images


@pytest.fixture
def run_in_full(snapvit, tiny_folder, image_folder, tmp_path):
    """Export the tiny model into tmp_path/out, timed as a user would have it."""

    def call(*extra: object):
        arguments = ["--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "out"]
        recipe = () if "--ranking" in extra else ("--recipe", "local")
        return snapvit("export", *arguments, *recipe, *extra)

    return call


@pytest.fixture
def run(run_in_full, short_timings):
    """The same, for tests that assert nothing about a latency."""
    return run_in_full


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"tiny-model", "pictures"}


def test_a_request_has_one_answer_for_depth_and_tells_the_name_of_its_settings():
    assert Request(depth=False).settings.depth is False
    assert Request().settings == make_settings("default")
    assert [Request(settings=make_settings(name)).settings.recipe for name in ("snapvit", "local")] == [
        "snapvit",
        "local",
    ]
    assert Request(settings=Settings()).settings.recipe == "custom"
    assert PackRequest(correct=False).settings.correction is None


@pytest.mark.slow  # a whole search for a budget, timed long enough to be decided
def test_a_relative_budget_is_met_and_proved(run_in_full, tmp_path, monkeypatch):
    # Milliseconds, not microseconds: large enough that what is cut decides the latency, not the overhead of a call.
    medium = dict(img_size=96, patch_size=8, embed_dim=192, depth=4, num_heads=6, num_classes=5)
    folder = make_model_folder(tmp_path / "tiny-model", medium)
    levers = ("--levers", "width,depth")
    outcome = run_in_full("--model", folder, "--budget", "60%", "--json", "--recipe", "default", *levers)
    assert outcome.code == 0, outcome.err
    printed = json.loads(outcome.out)
    manifest = read_family(tmp_path / "out")
    assert printed == json.loads((tmp_path / "out" / "manifest.json").read_text())
    choice = manifest.choice
    by_name = {measurement.variant: measurement for measurement in choice.measurements}
    chosen = by_name[choice.variant]
    assert choice.budget_ms < by_name["dense"].profile.p50_ms
    assert chosen.fits or not choice.decided
    if choice.decided:
        assert chosen.latency_ms <= choice.budget_ms < by_name[choice.next_denser].latency_ms
    assert by_name[choice.next_denser].flops > chosen.flops
    assert chosen.correction == manifest.variant(choice.variant).correction == "refit"
    assert manifest.variant(choice.variant).profile.sha256 == manifest.variant(choice.variant).sha256
    expected = {"manifest.json", "ranking.safetensors", "weights.bin", "dense.onnx"}
    expected |= {"model.onnx", "run.py", "README.txt", *(["labels.txt"] if manifest.labels else [])}
    listed = {weights.file for weights in manifest.weights}
    assert {p.name for p in (tmp_path / "out").iterdir()} == expected | listed | {
        f"{name}.onnx" for name in (choice.variant, choice.next_denser)
    }
    assert listed == {file for variant in manifest.variants for file in variant.weights}  # nothing that no graph reads


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int8-static"])
def test_fewer_bits_are_exported_timed_and_told(run, precision, tmp_path):
    outcome = run("--sparsity", "0.3", "--precision", precision)
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    assert manifest.target.precision == precision
    for variant in manifest.variants:
        assert variant.precision == precision
        assert 0.95 < variant.precision_cosine <= 1.0000001
        assert variant.profile.p50_ms > 0
        said = {p.key: p.value for p in onnx.load(tmp_path / "out" / variant.file).metadata_props}
        assert said["snapvit.precision"] == precision
        assert variant.int8_sum_bits == (UNSET if precision == "fp16" else 16)
        assert json.loads(said["snapvit.recipe"])["name"] == "local"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "manifest.json", "ranking.safetensors", "weights.bin", "dense.onnx", "s30.onnx",
    }  # fmt: skip


def test_graphs_for_device_programs_take_bytes_and_a_fixed_batch(run, tmp_path, image_folder):
    outcome = run("--sparsity", "0.3", "--uint8-input", "--static-batch", "--batch", 3, "--flavour", "portable")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    height, width = manifest.anatomy.image
    graph = onnx.load(tmp_path / "out" / "s30.onnx", load_external_data=False).graph
    given = graph.input[0].type.tensor_type
    assert given.elem_type == onnx.TensorProto.UINT8
    assert [d.dim_value for d in given.shape.dim] == [3, height, width, 3]
    assert (manifest.input.type, manifest.input.layout, manifest.input.batch) == ("uint8", "NHWC", 3)
    assert manifest.variant("s30").evaluation is not None  # in runs of three, the last filled up
    pixels = np.random.default_rng(0).integers(0, 256, (4, height, width, 3), np.uint8)
    assert run("--sparsity", "0.3", "--flavour", "portable").code == 0
    with OrtSession(tmp_path / "out" / "s30.onnx", 1) as session:
        wanted = session.run(manifest.preprocessing.normalise(pixels))
    assert run("--sparsity", "0.3", "--uint8-input", "--static-batch", "--batch", 3).code == 0
    with OrtSession(tmp_path / "out" / "s30.onnx", 1) as session:
        assert np.abs(session.run(pixels) - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_explicit_plans_make_exactly_those_variants(run, tmp_path, tiny_model):
    outcome = run("--sparsity", "0.1,0.3", "--flops", "0.72", "--params", "0.8", "--pair", "0.35:0.2")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    assert manifest.choice is None
    assert {v.name for v in manifest.variants} == {"dense", "s10", "s30", "flops72", "params80", "pair35-20"}
    planner = Planner(Ranking.load(tmp_path / "out" / "ranking.safetensors"), tiny_model.anatomy)
    plan = planner.pair(0.35, 0.2)
    pair = manifest.variant("pair35-20")
    assert (pair.heads, pair.neurons) == (plan.heads, plan.neurons)
    assert manifest.variant("flops72").flops_ratio <= 0.72
    assert manifest.variant("params80").params <= 0.8 * manifest.variant("dense").params
    for column in ("variant", "levers", "p50 ms", "MB", "top-1, %"):
        assert column in outcome.out
    assert "s30" in outcome.out


def test_the_files_run_with_any_batch_and_say_what_they_are(run, tmp_path):
    assert run("--sparsity", "0.5").code == 0
    manifest = read_family(tmp_path / "out")
    path = tmp_path / "out" / manifest.variant("s50").file
    graph = onnx.load(path)
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    assert metadata["snapvit.model"] == "tiny"
    assert json.loads(metadata["snapvit.preprocessing"])["crop_pct"] == 1
    held = sum(int(np.prod(t.dims)) for t in graph.graph.initializer if t.data_type == 1)
    assert 0.98 < held / manifest.variant("s50").params <= 1  # but for the biases that are folded into others
    with OrtSession(path, 1) as session:
        assert session.run(np.zeros((4, 3, 32, 32), np.float32)).shape == (4, 5)


def test_single_files_need_nothing_beside_them(run, tmp_path):
    assert run("--sparsity", "0.5", "--single-file").code == 0
    manifest = read_family(tmp_path / "out")
    names = {"manifest.json", "ranking.safetensors", "dense.onnx", "s50.onnx"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert manifest.weights == manifest.variant("s50").weights == ()
    alone = tmp_path / "alone.onnx"
    alone.write_bytes((tmp_path / "out" / "s50.onnx").read_bytes())
    assert manifest.variant("s50").size_bytes == alone.stat().st_size
    with OrtSession(alone, 1) as session:
        assert np.isfinite(session.run(np.zeros((1, 3, 32, 32), np.float32))).all()
    assert run("--sparsity", "0.5").code == 0
    shared = read_family(tmp_path / "out").variant("s50")
    assert shared.weights == ("weights.bin",)
    assert shared.size_bytes == pytest.approx(alone.stat().st_size, rel=0.1)


def test_the_flavour_that_is_asked_for_is_kept(run, tmp_path):
    for flavour, opset in (("portable", 17), ("ort", 23)):
        assert run("--sparsity", "0.5", "--flavour", flavour).code == 0
        loaded = onnx.load(tmp_path / "out" / "s50.onnx", load_external_data=False)
        assert loaded.opset_import[0].version == opset
    outcome = run("--sparsity", "0.5", "--flavour", "vanilla")
    assert outcome.code == 2
    assert "no flavour is called 'vanilla'. Known: portable, ort" in outcome.error_line


def test_accuracy_is_reported_on_pictures_that_did_not_calibrate(run, tmp_path):
    assert run("--sparsity", "0.2").code == 0
    evaluation = read_family(tmp_path / "out").variant("dense").evaluation
    assert evaluation.images == 60 - 16
    assert 0 <= evaluation.top1 <= 1


def test_no_accuracy_is_invented_when_classes_do_not_suit(run, tmp_path, image_folder):
    for path in (image_folder / "class4").iterdir():
        path.rename(image_folder / "class3" / path.name)
    (image_folder / "class4").rmdir()
    outcome = run("--sparsity", "0.2")
    assert outcome.code == 0
    assert read_family(tmp_path / "out").variant("dense").evaluation is None


def test_a_ranking_is_reused_and_a_foreign_one_refused(run, tmp_path, tiny_model):
    random_ranking(tiny_model.anatomy, seed=9).save(tmp_path / "mine.safetensors")
    assert run("--sparsity", "0.3", "--ranking", tmp_path / "mine.safetensors").code == 0
    used = Ranking.load(tmp_path / "out" / "ranking.safetensors")
    assert np.array_equal(used.neuron_scores[0], random_ranking(tiny_model.anatomy, seed=9).neuron_scores[0])
    Ranking(used.head_scores[:2], used.neuron_scores[:2]).save(tmp_path / "short.safetensors")
    outcome = run("--sparsity", "0.3", "--ranking", tmp_path / "short.safetensors")
    assert outcome.code == 1
    assert "the ranking orders 2 blocks" in outcome.error_line


def test_a_ranking_with_damage_curves_is_allocated_jointly(run, tmp_path, tiny_model):
    made, rng = random_ranking(tiny_model.anatomy), np.random.default_rng(0)
    losses = [(rng.random(4), rng.random(192)) for _ in range(3)]
    damage = tuple(tuple(np.append(np.cumsum(-np.sort(-kind)[::-1])[::-1], 0) for kind in block) for block in losses)
    orders = [made.head_order(i) for i in range(3)], [made.neuron_order(i) for i in range(3)]
    ranking = Ranking.from_orders(*orders, damage, anatomy=tiny_model.anatomy)  # type: ignore[arg-type]
    ranking.save(tmp_path / "curves.safetensors")
    outcome = run("--flops", "0.72", "--ranking", tmp_path / "curves.safetensors", "--no-correct")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    plan = Planner(ranking, tiny_model.anatomy).flops(0.72)
    asked = manifest.variant("flops72")
    assert (asked.heads, asked.neurons) == (plan.heads, plan.neurons)
    assert Ranking.load(tmp_path / "out" / "ranking.safetensors").damage is not None


def test_the_default_recipe_repairs_what_it_keeps_and_says_so(run, tmp_path):
    assert run("--flops", "0.7", "--recipe", "default", "--evaluations", 13).code == 0
    manifest = read_family(tmp_path / "out")
    dense, cut = manifest.variant("dense"), manifest.variant("flops70")
    assert (dense.corrected, dense.correction) == (False, None)
    assert (cut.corrected, cut.correction) == (True, "refit")
    assert manifest.recipe["name"] == "default"
    assert manifest.recipe["correction"] == "refit"
    assert manifest.recipe["allocation"] == "joint"
    assert manifest.recipe["search"]["best_fitness"] <= manifest.recipe["search"]["start_fitness"]
    assert run("--flops", "0.7", "--recipe", "default").code == 0
    assert "search" not in read_family(tmp_path / "out").recipe  # unless asked for


def test_the_weights_are_hashed_once(run, monkeypatch):
    hashed, fingerprint = [], load.weights_fingerprint
    monkeypatch.setattr(load, "weights_fingerprint", lambda module: hashed.append(module) or fingerprint(module))
    assert run("--sparsity", "0.3", "--recipe", "default", "--evaluations", 0).code == 0
    assert len(hashed) == 1  # for the ranking, the statistics and the check of both


@pytest.mark.parametrize("correction", ["elastic", "sequential", "sparsegpt", "refit"])
def test_every_correction_changes_the_file_and_is_named(run, tmp_path, tiny_model, correction):
    random_ranking(tiny_model.anatomy).save(tmp_path / "r.safetensors")
    given = ("--flops", "0.6", "--ranking", tmp_path / "r.safetensors")
    assert run(*given, "--no-correct").code == 0
    plain = read_family(tmp_path / "out").variant("flops60")
    assert run(*given, "--correction", correction).code == 0
    mended = read_family(tmp_path / "out").variant("flops60")
    assert (plain.corrected, mended.corrected, mended.correction) == (False, True, correction)
    assert (plain.heads, plain.neurons) == (mended.heads, mended.neurons)
    assert plain.sha256 != mended.sha256


def test_a_given_ranking_and_this_export_each_say_what_they_were_made_with(run, snapvit, tmp_path, image_folder):
    ranked = ("rank", tmp_path / "tiny-model", "--data", image_folder, "--images", 20, "--evaluations", 0)
    assert snapvit(*ranked, "--out", tmp_path / "r.safetensors").code == 0
    here = ("--ranking", tmp_path / "r.safetensors", "--images", 7, "--seed", 3, "--damping", "max:0.5")
    outcome = run("--flops", "0.6", *here)
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("fewer tokens than the widest layer") == 1
    recipe = read_family(tmp_path / "out").recipe
    assert (recipe["correction"], recipe["damping"], recipe["seed"]) == ("refit", "max:0.5", 3)
    assert recipe["data"]["images"] == 7
    assert (recipe["ranking"]["damping"], recipe["ranking"]["data"]["images"]) == ("mean:0.01", 20)


def test_the_released_recipe_corrects_nothing_unless_asked(run, tmp_path):
    assert run("--flops", "0.7").code == 0  # `local` is the released scoring
    assert not read_family(tmp_path / "out").variant("flops70").corrected


def test_corrections_that_make_no_sense(run, tmp_path):
    both = run("--flops", "0.7", "--no-correct", "--correction", "elastic")
    assert (both.code, "contradict" in both.error_line) == (2, True)
    unknown = run("--flops", "0.7", "--correction", "prayer")
    assert (unknown.code, "no correction is called 'prayer'" in unknown.error_line) == (2, True)
    assert leftovers(tmp_path) == set()


def test_constant_pictures_and_one_picture_still_give_finite_files(snapvit, tiny_folder, tmp_path):
    from PIL import Image

    (tmp_path / "grey").mkdir()
    for i in range(4):
        Image.new("RGB", (40, 40), (128, 128, 128)).save(tmp_path / "grey" / f"{i}.png")
    for images in (1, 4):
        outcome = snapvit(
            "export", "--model", tiny_folder, "--data", tmp_path / "grey", "--images", images, "--flops", "0.6",
            "--out", tmp_path / "out",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        assert "fewer tokens than the widest layer has columns" in outcome.err
    with OrtSession(tmp_path / "out" / "flops60.onnx", 1) as session:
        assert np.isfinite(session.run(np.zeros((1, 3, 32, 32), np.float32))).all()


def test_a_checkpoint_of_somebody_else_is_left_alone(run, tmp_path, tiny_model):
    random_ranking(tiny_model.anatomy).save(tmp_path / "mine.safetensors")
    (tmp_path / "out.checkpoint").write_text("mine")
    assert run("--sparsity", "0.3", "--ranking", tmp_path / "mine.safetensors").code == 0
    assert (tmp_path / "out.checkpoint").read_text() == "mine"


@pytest.mark.parametrize("command", ["export", "pack", "rank"])
def test_a_file_of_somebody_else_in_the_place_of_a_checkpoint_is_refused_at_the_start(
    snapvit, tiny_folder, tmp_path, command
):
    (tmp_path / "out.checkpoint").write_text("mine")
    model = [tiny_folder] if command == "rank" else ["--model", tiny_folder]
    asked = ["--sparsity", "0.3"] if command == "export" else []
    outcome = snapvit(command, *model, *asked, "--data", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "out.checkpoint: is there already, and not a checkpoint that snapvit made" in outcome.error_line
    assert "Choose another --out" in outcome.error_line
    assert "emove" not in outcome.error_line
    assert (tmp_path / "out.checkpoint").read_text() == "mine"


def test_a_family_that_a_killed_export_was_replacing_is_put_back_and_replaced(run, tmp_path):
    out = tmp_path / "out"
    assert run("--sparsity", "0.3").code == 0
    with temporary_folder(tmp_path, "out.replaced") as aside:
        pass
    aside.mkdir()
    out.rename(aside / "old")  # between its two renames
    outcome = run("--sparsity", "0.5")
    assert outcome.code == 0, outcome.err
    assert [variant.name for variant in read_family(out).variants] == ["dense", "s50"]
    assert leftovers(tmp_path) == {"out"}


def test_the_same_seed_gives_the_same_files(run, tmp_path):
    assert run("--sparsity", "0.3", "--seed", "4").code == 0
    first = read_family(tmp_path / "out").variant("s30").sha256
    assert run("--sparsity", "0.3", "--seed", "4").code == 0  # and an old family is replaced
    assert read_family(tmp_path / "out").variant("s30").sha256 == first


def test_quiet_says_nothing_but_the_answer(run):
    outcome = run("--sparsity", "0.3", "--quiet", "--json")
    assert outcome.err == ""
    assert json.loads(outcome.out)["dense"] == "dense"


def test_a_budget_the_dense_model_meets_returns_it(run, tmp_path):
    outcome = run("--budget", "5000ms")
    assert outcome.code == 0
    assert "nothing had to be cut" in outcome.out
    choice = read_family(tmp_path / "out").choice
    assert (choice.variant, choice.next_denser) == ("dense", None)


def test_an_impossible_budget_says_the_smallest_reachable_and_writes_nothing(run, tmp_path):
    outcome = run("--budget", "0.001ms")
    assert outcome.code == 1
    assert "the smallest reaches" in outcome.error_line
    assert leftovers(tmp_path) == set()


@pytest.mark.parametrize("budget", ["10", "-3ms", "abc", "0ms"])
def test_bad_budgets(run, budget, tmp_path):
    outcome = run(f"--budget={budget}")
    assert outcome.code == 2
    assert budget in outcome.error_line
    assert leftovers(tmp_path) == set()


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("--sparsity", "1.5", 2),
        ("--sparsity", "-0.1", 2),
        ("--sparsity", "x", 2),
        ("--sparsity", "0.999", 1),
        ("--flops", "0", 2),
        ("--flops", "0.0001", 1),
        ("--pair", "0.3", 2),
        ("--pair", "0.99:0", 1),
        ("--pair", "nan:0", 2),
        ("--sparsity", "nan", 2),
        ("--params", "inf", 2),
    ],
)
def test_bad_plans(run, option, value, code, tmp_path):
    outcome = run(f"{option}={value}")
    assert outcome.code == code
    assert value.split(":")[0] in outcome.error_line
    assert leftovers(tmp_path) == set()


def test_nothing_asked(run):
    outcome = run()
    assert outcome.code == 2
    assert "--budget 10ms" in outcome.error_line


@pytest.mark.parametrize("option", ["--threads=0", "--batch=0", "--images=0", "--seed=-1", "--nonsense"])
def test_options_that_make_no_sense(run, option):
    outcome = run("--budget", "10ms", option)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("no_such_model", "timm knows no model"),
        ("swin_tiny_patch4_window7_224", "not a plain ViT"),
        ("resnet18", "ResNet"),
    ],
)
def test_bad_models(snapvit, image_folder, tmp_path, model, says):
    outcome = snapvit("export", "--budget", "10ms", "--model", model, "--data", image_folder, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert says in outcome.error_line
    assert model in outcome.error_line
    assert leftovers(tmp_path) == set()


def test_a_model_without_images_asks_for_them(snapvit, tmp_path):
    outcome = snapvit("export", "--budget", "10ms", "--model", "deit_tiny_patch16_224", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "--data FOLDER" in outcome.error_line


def test_bad_images(run, snapvit, tiny_folder, image_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for data, says in ((tmp_path / "nowhere", "no such image folder"), (tmp_path / "empty", "holds no images")):
        outcome = snapvit(
            "export", "--budget", "10ms", "--model", tiny_folder, "--data", data, "--out", tmp_path / "out"
        )
        assert outcome.code == 1
        assert says in outcome.error_line
        assert str(data) in outcome.error_line
    for path in image_folder.rglob("*.png"):
        path.write_bytes(b"not a picture")
    outcome = run("--budget", "10ms")
    assert outcome.code == 1
    assert "cannot be read as an image" in outcome.error_line
    assert leftovers(tmp_path) == {"empty"}


def test_data_may_be_given_several_times(run, tmp_path, image_folder):
    np.savez(tmp_path / "grey.npz", images=np.random.default_rng(0).integers(0, 255, (30, 20, 20), np.uint8))
    outcome = run("--sparsity", "0.3", "--data", tmp_path / "grey.npz")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    used = manifest.recipe["data"]
    assert (used["source"], used["images"]) == (f"{image_folder} + {tmp_path / 'grey.npz'}", 16)
    assert manifest.variant("dense").evaluation is None  # several sources have no common labels


def test_a_few_unreadable_images_are_named_and_counted(run, tmp_path, image_folder):
    for path in list(image_folder.rglob("*.png"))[:2]:
        path.write_bytes(b"not a picture")
    outcome = run("--sparsity", "0.3", "--images", 60)
    assert outcome.code == 0, outcome.err
    used = read_family(tmp_path / "out").recipe["data"]
    assert (used["images"], used["unreadable"]) == (58, 2)
    line = next(line for line in outcome.err.splitlines() if "unreadable images: " in line)
    assert line.count(".png") == 2


def test_bad_sources(snapvit, tiny_folder, tmp_path):
    np.savez(tmp_path / "x.npz", images=np.zeros((4, 3, 8, 8), np.float32))
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "gone.txt").write_text("a.png\nb.png\nc.png\nd.png\n")  # three to calibrate on, one held out
    for name, says in (("x.npz", "float32"), ("x.txt", "names no images"), ("gone.txt", "3 of 3 images unreadable")):
        arguments = ["--budget", "10ms", "--model", tiny_folder, "--data", tmp_path / name]
        outcome = snapvit("export", *arguments, "--out", tmp_path / "out")
        assert outcome.code == 1
        assert says in outcome.error_line
    assert leftovers(tmp_path) == {"x.npz", "x.txt", "gone.txt"}


def test_bad_checkpoints(snapvit, tiny_folder, image_folder, tmp_path):
    checkpoint = tmp_path / "w.safetensors"
    arguments = ["export", "--budget", "10ms", "--model", "vit_tiny_patch16_224", "--data", image_folder]
    arguments += ["--out", tmp_path / "out", "--checkpoint", checkpoint]
    checkpoint.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{broken}")
    outcome = snapvit(*arguments)
    assert outcome.code == 1
    assert "not a readable checkpoint" in outcome.error_line
    save_file(load_file(tiny_folder / "model.safetensors"), checkpoint)
    outcome = snapvit(*arguments)
    assert outcome.code == 1
    assert "shape" in outcome.error_line
    assert leftovers(tmp_path) == {"w.safetensors"}


def test_foreign_and_unwritable_places(run, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    outcome = run("--budget", "10ms")
    assert outcome.code == 1
    assert "not ours (thesis.txt)" in outcome.error_line
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    outcome = run("--budget", "10ms", "--out", "/proc/snapvit-out")  # nobody can write there, not even root
    assert outcome.code == 1
    assert "/proc/snapvit-out: cannot be written" in outcome.error_line


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    outcome = run("--sparsity", "0.3")
    assert outcome.code == 1
    assert "the disk is full" in outcome.error_line
    assert leftovers(tmp_path) == set()


def test_a_damaged_ranking(run, tmp_path, tiny_model):
    random_ranking(tiny_model.anatomy).save(tmp_path / "r.safetensors")
    data = bytearray((tmp_path / "r.safetensors").read_bytes())
    data[-3] ^= 0xFF
    (tmp_path / "r.safetensors").write_bytes(data)
    outcome = run("--sparsity", "0.3", "--ranking", tmp_path / "r.safetensors")
    assert outcome.code == 1
    assert "damaged" in outcome.error_line
    assert leftovers(tmp_path) == {"r.safetensors"}


@pytest.mark.slow  # programs started and stopped at several moments
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(stop, tmp_path, tmp_path_factory):
    ranking = tmp_path_factory.mktemp("given") / "r.safetensors"  # given, so that there is no search to resume
    random_ranking(load_model().anatomy).save(ranking)
    command = [sys.executable, "-m", "snapvit_export.cli", "export", "--budget", "10ms", "--images", "16"]
    command += ["--no-correct", "--levers", "width", "--ranking", str(ranking)]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "building dense" in line:
            break
    assert any(path.name.startswith(".out.") for path in tmp_path.iterdir())  # it had begun
    time.sleep(0.3)
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("board", "precisions"),
    [("jetson-orin-nano", {"fp16", "int8-static"}), ("jetson-thor", {"fp16", "int8-static", "fp8"})],
)
def test_a_family_for_a_board_is_a_spread_in_its_precisions_that_nothing_times(
    snapvit, tmp_path, tiny_folder, board, precisions
):
    images = make_image_folder(tmp_path / "images")
    asked = ["export", "--for", board, "--model", tiny_folder, "--data", images, "--images", 16]
    outcome = snapvit(*asked, "--out", tmp_path / "family", "--quiet")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "family")
    assert {variant.precision for variant in manifest.variants} == precisions
    assert len(manifest.variants) > 4
    assert manifest.target.runtime == "tensorrt"
    assert manifest.choice is None
    assert all(variant.profile is None and variant.fidelity is not None for variant in manifest.variants)
    assert all(inspect(tmp_path / "family" / variant.file).opset == 19 for variant in manifest.variants)
    assert f"snapvit profile {tmp_path / 'family'} --target jetson://user@board --budget 10ms" in outcome.out


def test_for_says_what_other_options_would(snapvit, tmp_path):
    for more, says in (
        (("--card", "cpu"), "--card is what --for says of the device. Give one of them"),
        (("--runtime", "tensorrt"), "--runtime is what --for says of the device"),
        (("--budget", "10ms"), "which only the device can do"),
    ):
        refused = snapvit("export", "--for", "jetson-thor", *more, "--out", tmp_path / "family")
        assert (refused.code, says in refused.error_line) == (2, True), refused.error_line
    assert snapvit("export", "--for", "toaster").code == 2


def test_of_a_folder_with_splits_the_training_split_calibrates_and_the_test_split_reports(tmp_path, tiny_folder):
    for split in ("train", "test"):
        make_image_folder(tmp_path / "data" / split)
    request = Request(
        model=str(tiny_folder),
        data=str(tmp_path / "data"),
        out=tmp_path / "family",
        sparsity=[0.3],
        settings=make_settings("default", images=16),
    )
    calibration, _, held_out = split_images(request)
    assert calibration.count == 16
    assert held_out.count == 60
    assert all("/train/" in calibration.title(i) for i in range(calibration.count))
    assert all("/test/" in held_out.title(i) for i in range(held_out.count))
    assert (
        list(held_out.classes)
        == list(calibration.classes)
        == sorted(p.name for p in (tmp_path / "data/train").iterdir())
    )


def test_where_accuracy_cannot_be_measured_the_export_says_why(snapvit, tmp_path, tiny_folder):
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, path in enumerate(sorted(make_image_folder(tmp_path / "images").rglob("*.png"))):
        path.rename(flat / f"{i}.png")
    asked = ["export", "--sparsity", 0.3, "--model", tiny_folder, "--data", flat, "--images", 16]
    outcome = snapvit(*asked, "--out", tmp_path / "family")
    assert outcome.code == 0, outcome.err
    assert "no accuracy is measured, only fidelity" in outcome.err
    assert "has no labels" in outcome.err
