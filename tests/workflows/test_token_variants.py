"""Variants with fewer tokens, end to end: exported, described, checked and evaluated at their own image size."""

import json
import shutil
from pathlib import Path

import onnx
import pytest
import timm
from msgspec import UNSET

from helpers.families import make_family
from helpers.models import TINY, description, make_model
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.allocation.tokens import SCHEDULES
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.checks.inspect import inspect
from snapvit_export.evaluate.exported_model import read_info, top1
from snapvit_export.family.folder import read_family
from snapvit_export.family.manifest import Manifest
from snapvit_export.family.validation import Validation
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.load import save_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.workflows.export import Request, export
from snapvit_export.workflows.inputs import MOST_HELD_OUT

NAMES = ("flops60-tokens75-res64", "flops60-tokens75-res48x64", "flops60-tokens50-res64", "flops60-tokens50-res48x64")
SIZES = {"res64": (64, 64), "res48x64": (48, 64)}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The family, beside its model and images; none of its weights were corrected."""
    folder = tmp_path_factory.mktemp("made")
    kwargs = {**TINY, "img_size": 80, "depth": 4}
    make_family(folder, correct=False, kwargs=kwargs, tokens=[0.75, 0.5], resolution=[64, (48, 64)], flops=[0.6])
    return folder


@pytest.fixture
def here(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


@pytest.fixture(scope="module")
def manifest(made) -> Manifest:
    return read_family(made / "family")


@pytest.fixture
def run(snapvit, tiny_folder, image_folder, tmp_path, short_timings):
    def call(*extra: object):
        arguments = ["--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "out"]
        return snapvit("export", *arguments, "--no-correct", *extra)

    return call


def input_shape(path: Path) -> list[int]:
    given = onnx.load(path, load_external_data=False).graph.input[0].type.tensor_type
    return [d.dim_value for d in given.shape.dim]


def test_every_combination_is_one_variant_that_meets_all(manifest):
    assert {v.name for v in manifest.variants} == {"dense", *NAMES}
    anatomy, schedule = manifest.anatomy, SCHEDULES[manifest.recipe["token_schedule"]["name"]]
    for name in NAMES:
        variant = manifest.variant(name)
        plan, (_, tokens, size) = manifest.plan(variant), name.split("-")
        assert variant.image_size == SIZES[size] == anatomy.image_of(plan)
        patches = SIZES[size][0] * SIZES[size][1] // 64
        assert variant.tokens[-1] == 1 + round(int(tokens[6:]) / 100 * patches)
        assert variant.tokens == anatomy.tokens_after(plan)
        sized = Plan(heads=plan.heads, neurons=plan.neurons, grid=plan.grid)
        assert plan.merged == schedule.counts(anatomy, sized, int(tokens[6:]) / 100)
        assert variant.flops_ratio == plan.flops_ratio(anatomy) <= 0.6
        assert variant.flops == anatomy.flops(plan)
        assert variant.parity < 1e-4
        assert variant.profile.p50_ms > 0
    dense = manifest.variant("dense")
    assert (dense.tokens, dense.image_size) == ((101,) * 4, (80, 80))
    assert manifest.plan(dense) == Plan.dense(anatomy)


def test_graphs_take_and_tell_their_own_size(made, manifest):
    for variant in manifest.variants:
        path = made / "family" / variant.file
        assert input_shape(path)[1:] == [3, *variant.image_size]
        info, _ = read_info(path)
        assert info.preprocessing == manifest.preprocessing_of(variant)
        found = inspect(path)
        assert found.tokens == variant.tokens
        assert found.plan == manifest.plan(variant)


def test_accuracy_is_that_of_images_read_in_the_variants_own_size(made, manifest):
    held_out = calibration_and_held_out(str(made / "images"), 16, 0, MOST_HELD_OUT)[1]
    outputs = {}
    for variant in manifest.variants:
        images = prepare(held_out, manifest.preprocessing_of(variant))
        with OrtSession(made / "family" / variant.file, 1) as session:
            assert variant.evaluation.top1 == top1(session.run, images).top1
            outputs[variant.name] = session.run(next(images.batches(8)))
    assert len({each.tobytes() for each in outputs.values()}) == len(manifest.variants)


def test_the_modules_that_it_was_cut_from_give_the_same(snapvit, here, made, manifest):
    outcome = snapvit("validate", here / "family", "--data", made / "images", "--model", made / "model")
    assert outcome.code == 0, outcome.err
    validated = read_family(here / "family")
    for variant in validated.variants:
        assert variant.parity < 1e-4
        before = manifest.variant(variant.name).evaluation
        assert variant.evaluation.top1 == before.top1
        assert (variant.tokens, variant.image_size) == (
            manifest.variant(variant.name).tokens,
            manifest.variant(variant.name).image_size,
        )
    for text in ("101", "65 -> 33", "49 -> 37", "64x64", "48x64", "80x80"):
        assert text in outcome.out
    first, most = Validation.load(here / "family").merged
    assert first.variant in NAMES
    assert most.variant in NAMES[2:]
    for shown in (first, most):
        assert len(shown.images) == 3
        merged = manifest.plan(manifest.variant(shown.variant)).merged
        after = manifest.variant(shown.variant).tokens
        drawn = [step.block for step in shown.images[0].steps]
        assert drawn == [i for i in range(4) if merged[i]]
        assert [step.tokens for step in shown.images[0].steps] == [after[i] for i in drawn]
    assert snapvit("report", here / "family").code == 0
    assert "Patches that are merged" in (here / "family/report.html").read_text()


def test_a_single_file_is_evaluated_at_its_own_size(snapvit, made):
    file = made / "family" / f"{NAMES[-1]}.onnx"
    held_out = calibration_and_held_out(str(made / "images"), 16, 0, MOST_HELD_OUT)[1]
    outcome = snapvit("evaluate", file, "--data", made / "images", "--by", "head", "--json")
    assert outcome.code == 0, outcome.err
    info, _ = read_info(file)
    images = prepare(held_out, info.preprocessing)
    assert len(images) < json.loads(outcome.out)["images"] == 60  # the whole folder
    with OrtSession(file, 1) as session:
        whole = prepare(calibration_and_held_out(str(made / "images"), 60, 0, 1)[0], info.preprocessing)
        assert json.loads(outcome.out)["top1"] == pytest.approx(top1(session.run, whole).top1)


def test_a_device_times_and_chooses_among_sizes(snapvit, here, short_timings):
    outcome = snapvit("profile", here / "family", "--seconds", "0.1", "--json", "--out", here / "profile.json")
    assert outcome.code == 0, outcome.err
    assert set(json.loads(outcome.out)["profiles"]) == {"dense", *NAMES}
    outcome = snapvit("choose", here / "family", "--budget", "10000ms")
    assert outcome.code == 0, outcome.err
    assert read_family(here / "family").choice.variant == "dense"
    for variant in read_family(here / "family").variants:
        assert variant.tokens is not UNSET
    outcome = snapvit("fleet", here / "family", "--budget", f"{here / 'profile.json'}=10000ms")
    assert outcome.code == 0, outcome.err
    assert "dense" in outcome.out


def test_tables_show_tokens_where_they_differ(snapvit, here, made):
    told = snapvit("inspect", made / "family" / f"{NAMES[2]}.onnx").out
    assert "tokens" in told
    assert "65 -> " in told
    found = json.loads(snapvit("inspect", made / "family" / f"{NAMES[2]}.onnx", "--json").out)
    assert found["tokens"][-1] == 33
    assert snapvit("report", here / "family", "--format", "md,json,html", "--out", here / "report").code == 0
    for path in (here / "report").iterdir():
        text = path.read_text()
        assert ("65 -> 33" in text or "65 -&gt; 33" in text) == (path.suffix != ".json"), path
        assert "48x64" in text or path.suffix == ".json", path


def test_tokens_and_sizes_alone_keep_the_dense_width(run, tmp_path):
    for asked, names in (
        (("--tokens", "0.75,0.5"), {"tokens75", "tokens50"}),
        (("--resolution", "24,32,16x24"), {"res24", "res32", "res16x24"}),
    ):
        outcome = run(*asked)
        assert outcome.code == 0, outcome.err
        found = read_family(tmp_path / "out")
        assert {v.name for v in found.variants} == {"dense", *names}
        for variant in found.variants:
            assert (variant.heads, variant.neurons) == (found.anatomy.heads, found.anatomy.neurons)
            assert (variant.correction, variant.sparsity) == (None, 0)
        assert all(name in outcome.out for name in names)
    assert found.plan(found.variant("res32")) == Plan.dense(found.anatomy)  # its own size


def test_widths_without_tokens_stay_variants_of_their_own(run, tmp_path):
    outcome = run("--sparsity", "0.3", "--flops", "0.6")
    assert outcome.code == 0, outcome.err
    assert {v.name for v in read_family(tmp_path / "out").variants} == {"dense", "s30", "flops60"}
    assert not any("tokens" in line for line in outcome.out.splitlines() if str(tmp_path) not in line)
    outcome = run("--sparsity", "0.3", "--flops", "0.6", "--params", "0.9", "--pair", "0.2:0.2", "--tokens", "0.75")
    assert outcome.code == 0, outcome.err
    names = {f"{width}-tokens75" for width in ("s30", "flops60", "params90", "pair20-20")}
    found = read_family(tmp_path / "out")
    assert {v.name for v in found.variants} == {"dense", *names}
    assert {v.tokens[-1] for v in found.variants if v.name != "dense"} == {13}
    assert found.variant("s30-tokens75").sparsity >= 0.3


def test_variants_asked_for_take_part_in_the_choice_of_a_budget(run, tmp_path):
    outcome = run("--budget", "10000ms", "--tokens", "0.5", "--resolution", "24")
    assert outcome.code == 0, outcome.err
    found = read_family(tmp_path / "out")
    assert found.choice.variant == "dense"
    assert {v.name for v in found.variants} == {"dense", "tokens50-res24"}
    assert found.variant("tokens50-res24").tokens[-1] == 5
    assert "tokens50-res24" in outcome.out


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int8-static"])
def test_fewer_bits_and_fewer_tokens_together(run, precision, tmp_path):
    outcome = run("--tokens", "0.5", "--resolution", "24", "--precision", precision)
    assert outcome.code == 0, outcome.err
    variant = read_family(tmp_path / "out").variant("tokens50-res24")
    assert 0.9 < variant.precision_cosine <= 1.0000001
    assert variant.evaluation is not None


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_openvino_runs_them_as_onnx_runtime_does(run, precision, tmp_path):
    pytest.importorskip("nncf")
    outcome = run("--tokens", "0.5", "--resolution", "24", "--runtime", "openvino", "--precision", precision)
    assert outcome.code == 0, outcome.err  # a gate compares the two
    assert read_family(tmp_path / "out").variant("tokens50-res24").profile.p50_ms > 0


def test_graphs_that_take_bytes_take_them_in_their_own_size(run, tmp_path):
    outcome = run("--resolution", "24x16", "--tokens", "0.75", "--uint8-input", "--static-batch", "--batch", 3)
    assert outcome.code == 0, outcome.err
    assert input_shape(tmp_path / "out" / "tokens75-res24x16.onnx") == [3, 24, 16, 3]
    assert input_shape(tmp_path / "out" / "dense.onnx") == [3, 32, 32, 3]


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (("--tokens", "0"), 2, "token fraction 0 is not above 0 and at most 1"),
        (("--tokens", "1.5"), 2, "token fraction 1.5 is not above 0 and at most 1"),
        (("--tokens", "nan"), 2, "--tokens 'nan' is not a number"),
        (("--tokens", "half"), 2, "--tokens 'half' is not a number"),
        (("--tokens", "0.01"), 1, "token fraction 0.01 is out of reach: 2 blocks leave at least"),
        (("--tokens", "0.5", "--flops", "0.001"), 1, "FLOPs fraction 0.001 with tokens 0.5 is out of reach"),
        (
            ("--tokens", "0.5", "--resolution", "24", "--sparsity", "0.999"),
            1,
            "sparsity 0.999 with tokens 0.5 and 24x24 pixels is out of reach",
        ),
        (("--resolution", "20"), 2, "resolution 20 is no multiple of the patch, 8 pixels. Take 16 or 24"),
        (("--resolution", "24x30"), 2, "resolution 24x30 is no multiple of the patch, 8 pixels. Take 24 or 32"),
        (("--resolution", "40"), 2, "resolution 40 is larger than the model's own 32x32"),
        (("--resolution", "4"), 2, "resolution 4 is smaller than one patch of 8 pixels. Take at least 8"),
        (("--resolution", "0"), 2, "a resolution of 0 pixels is no size of an image"),
        (("--resolution", "small"), 2, "--resolution 'small' is no size in pixels"),
        (("--resolution", "24x"), 2, "--resolution '24x' is no size in pixels"),
        (("--resolution", "8", "--tokens", "0.5"), 1, "the model's tokens cannot be merged: it has one patch"),
    ],
)
def test_bad_input_is_one_line_before_any_work(run, tmp_path, monkeypatch, asked, code, said):
    monkeypatch.setattr("snapvit_export.prune.rank.rank.rank_and_factor", lambda *_, **__: pytest.fail("it ranked"))
    outcome = run(*asked)
    assert (outcome.code, said in outcome.error_line) == (code, True), outcome.err
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_are_refused(snapvit, image_folder, tmp_path):
    made = make_model()
    merging = Plan.dense(made.anatomy).with_tokens((4, 2, 0))
    save_model(shrink(made, Ranking.flat(made.anatomy), merging), made.description, tmp_path / "merging")
    kwargs = {**TINY, "img_size": [32, 64]}
    sized = made.description.preprocessing.at((32, 64))
    wide = timm.create_model("vit_tiny_patch16_224", **kwargs)
    save_model(wide, description(kwargs=kwargs, preprocessing=sized), tmp_path / "wide")
    for folder, asked, said in (
        ("merging", ("--tokens", "0.5"), "merges tokens already"),
        ("wide", ("--resolution", "32"), "the model takes 32x64 pixels, which is no square. Write height and width"),
    ):
        outcome = snapvit(
            "export", "--model", tmp_path / folder, "--data", image_folder, "--out", tmp_path / "out", *asked
        )
        assert outcome.code in (1, 2)
        assert said in outcome.error_line
        assert not (tmp_path / "out").exists()


def test_what_is_cut_is_refitted_on_images_of_its_own_size(made, tmp_path, short_timings):
    given = dict(model=str(made / "model"), data=str(made / "images"), out=tmp_path / "out")
    found = export(Request(**given, resolution=[64], settings=make_settings("default", images=16)))
    assert found.variant("res64").correction is None  # nothing was cut: it is the dense model on smaller images
    found = export(Request(**given, resolution=[64], flops=[0.4], settings=make_settings("default", images=16)))
    assert found.variant("flops40-res64").correction == "refit"
    assert found.variant("flops40-res64").image_size == (64, 64)


def test_what_merges_is_refitted_too(made, tmp_path, short_timings):
    given = dict(model=str(made / "model"), data=str(made / "images"), out=tmp_path / "out")
    settings = make_settings("default", images=16)
    found = export(Request(**given, resolution=[64], tokens=[0.5], flops=[0.3], settings=settings))
    assert found.variant("flops30-tokens50-res64").correction == "refit"
    assert found.variant("flops30-tokens50-res64").image_size == (64, 64)
