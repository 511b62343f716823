"""ONNX files of other tools go in at the front door: export, rank, pack and evaluate, without torch."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch_export import to_onnx

from helpers.models import TINY, make_model
from helpers.programs import python
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.calibration.presets import Asked, by_model, distinct_normalisations, preprocessing_for
from snapvit_export.elastic.folder import Elastic
from snapvit_export.errors import UsageError
from snapvit_export.family.folder import read_family
from snapvit_export.graph.writer import Blueprint
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.onnx_import.recognise import recognise
from snapvit_export.onnx_rank.rank import rank
from snapvit_export.progress import Silent
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.rank.rank import rank_and_factor
from snapvit_export.runtimes.ort import OrtSession

PLAIN = ("--mean", "0.5,0.5,0.5", "--std", "0.5", "--resize", "32")
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "timm")))
from snapvit_export.cli.app import main
main()
"""


HALF = preprocessing_for("x", (32, 32), Asked("vit_base_patch16_224"))  # mean and deviation of 0.5


def colours() -> np.ndarray:
    """Images of a colour each, with some noise."""
    rng = np.random.default_rng(0)
    noise, shade = rng.integers(0, 64, (80, 32, 32, 3)), rng.integers(0, 190, (80, 1, 1, 3))
    return (noise + shade).astype(np.uint8)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A tiny ViT with five classes as torch's own exporter writes it, and the module."""
    folder = tmp_path_factory.mktemp("foreign")
    model = make_model(TINY)
    with torch.no_grad():  # so that its answers differ
        images = torch.from_numpy(HALF.normalise(colours()))
        model.module.head.bias -= model.module(images).mean(0)
    path = folder / "vit.onnx"
    path.write_bytes(to_onnx(model.module, model.anatomy, {}))
    return path, model


@pytest.fixture
def run(snapvit, foreign, image_folder, tmp_path, short_timings):
    def call(command: str, *extra: object, out: str | None = "out"):
        names = ["--model", foreign[0]] if command in ("export", "pack") else [foreign[0]]
        more = [] if out is None else ["--out", tmp_path / out]
        return snapvit(command, *names, "--data", image_folder, "--images", 12, *more, *extra)

    return call


def test_an_export_by_flops_has_a_dense_graph_that_is_the_file_itself(run, foreign, tmp_path):
    (tmp_path / "out.checkpoint").write_text("mine")  # an ONNX file is ranked without one
    outcome = run("export", *PLAIN, "--flops", "0.6")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "out.checkpoint").read_text() == "mine"
    assert "differ by" in outcome.err
    manifest = read_family(tmp_path / "out")
    assert manifest.model == "vit"
    assert [variant.name for variant in manifest.variants] == ["dense", "flops60"]
    cut = manifest.variant("flops60")
    assert (cut.corrected, cut.correction, cut.parity) == (True, "elastic", None)
    assert cut.flops_ratio <= 0.6
    images = np.random.default_rng(0).normal(size=(3, 3, 32, 32)).astype(np.float32)
    with OrtSession(tmp_path / "out" / "dense.onnx", 1) as session, torch.no_grad():
        wanted = foreign[1].module(torch.from_numpy(images)).numpy()
        assert np.abs(session.run(images) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_a_budget_chooses_across_the_levers_and_ships_one_file(run, tmp_path):
    outcome = run("export", *PLAIN, "--budget", "70%")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    assert manifest.choice is not None
    assert set(manifest.choice.levers) == {"precision", "tokens", "width", "depth"}
    assert manifest.shipped is not None
    assert (tmp_path / "out" / manifest.shipped.file).is_file()


@pytest.mark.slow  # a new Python that imports everything but torch, and a whole export in it
def test_all_of_it_runs_where_torch_and_timm_are_not_installed(foreign, image_folder, tmp_path):
    program = tmp_path / "without.py"
    program.write_text(WITHOUT_TORCH)
    asked = ("--data", image_folder, "--images", "12", *PLAIN, "-q")
    done = python(program, "rank", foreign[0], *asked, "--out", tmp_path / "r.safetensors")
    assert done.returncode == 0, done.stderr
    made = ("--model", foreign[0], "--ranking", tmp_path / "r.safetensors")
    done = python(program, "export", *made, *asked, "--flops", "0.6", "--out", tmp_path / "family")
    assert done.returncode == 0, done.stderr
    done = python(program, "pack", *made, *asked, "--out", tmp_path / "elastic")
    assert done.returncode == 0, done.stderr
    assert read_family(tmp_path / "family").variant("flops60").corrected
    assert Elastic.load(tmp_path / "elastic").corrects


def test_a_ranking_of_a_file_is_used_again_and_one_of_other_weights_is_refused(run, tmp_path):
    assert run("rank", *PLAIN, out="r.safetensors").code == 0
    ranking = Ranking.load(tmp_path / "r.safetensors")
    assert ranking.sublayers is not None
    outcome = run("export", *PLAIN, "--ranking", tmp_path / "r.safetensors", "--flops", "0.6")
    assert outcome.code == 0, outcome.err
    other = Ranking(
        ranking.head_scores,
        ranking.neuron_scores,
        "other",
        ranking.anatomy,
        {**ranking.provenance, "weights_sha256": "0" * 64},
        ranking.damage,
    )
    other.save(tmp_path / "other.safetensors")
    outcome = run("export", *PLAIN, "--ranking", tmp_path / "other.safetensors", "--flops", "0.6", out="again")
    assert outcome.code == 1
    assert "other weights" in outcome.error_line


def test_a_packed_file_gives_any_plan_without_images(run, foreign, tmp_path):
    outcome = run("pack", *PLAIN)
    assert outcome.code == 0, outcome.err
    packed = Elastic.load(tmp_path / "out")
    plan = packed.planner.flops(0.6)
    assert plan != Plan.dense(packed.anatomy)
    assert packed.weights(plan)["blocks.0.fc2.weight"].shape[0] == plan.neurons[0]


def test_a_ranking_alone_packs_a_file_without_images(run, snapvit, foreign, tmp_path):
    assert run("rank", *PLAIN, out="r.safetensors").code == 0
    asked = (
        "--model",
        foreign[0],
        "--ranking",
        tmp_path / "r.safetensors",
        "--no-correct",
        "--out",
        tmp_path / "packed",
    )
    outcome = snapvit("pack", *asked, *PLAIN)
    assert outcome.code == 0, outcome.err
    assert "not compared with the file" in outcome.err
    assert not Elastic.load(tmp_path / "packed").corrects


def test_evaluating_a_file_is_evaluating_the_model(run, snapvit, foreign, image_folder, tmp_path):
    outcome = run("evaluate", *PLAIN, "--by", "head", "--json", out=None)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    images = sorted(image_folder.rglob("*.png"))
    assert found["images"] <= len(images)
    assert 0 <= found["top1"] <= 1


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_file_whose_name_is_in_capitals_is_evaluated_too(snapvit, foreign, image_folder, tmp_path, runtime):
    capitals = tmp_path / "VIT.ONNX"
    capitals.write_bytes(foreign[0].read_bytes())
    given = ["--data", image_folder, *PLAIN, "--by", "head", "--json", "--runtime", runtime]
    found, wanted = (snapvit("evaluate", path, *given) for path in (capitals, foreign[0]))
    assert (found.code, wanted.code) == (0, 0), found.err
    assert json.loads(found.out)["top1"] == json.loads(wanted.out)["top1"]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ([], "does not say how its images are prepared. Give --preprocessing"),
        (["--mean", "0.5", "--std", "0.5"], "all of --mean, --std and --resize"),
        ([*PLAIN, "--preprocessing", "deit_tiny_patch16_224"], "says what --mean would"),
        (["--preprocessing", "deit_tiny_patch16_22"], "Did you mean"),
        (["--mean", "0.5,0.5", "--std", "0.5", "--resize", "32"], "--mean needs one number"),
        (["--mean", "0.5,0.5,x", "--std", "0.5", "--resize", "32"], "--mean 'x' is not a number"),
        (["--mean", "0.5", "--std", "0", "--resize", "32"], "give no preprocessing"),
        (["--mean", "0.5", "--std", "0.5", "--resize", "16"], "--resize 16 is smaller"),
        (["--mean", "0.5", "--std", "0.5", "--resize", "wide"], "--resize 'wide' is not understood"),
        ([*PLAIN, "--recipe", "paper"], "default recipe alone"),
        ([*PLAIN, "--correction", "sequential"], "without it"),
        ([*PLAIN, "--correction", "refit"], "without it"),
        ([*PLAIN, "--checkpoint", "x.pth"], "has its own weights"),
        ([*PLAIN, "--output", "nothing"], "nothing"),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_one_line_and_writes_nothing(run, tmp_path, extra, says):
    outcome = run("export", "--flops", "0.6", *extra)
    assert outcome.code in (1, 2)
    assert says in outcome.error_line
    assert not (tmp_path / "out").exists()


def test_names_of_classes_come_from_a_file_with_a_line_for_each(run, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("ant\nbee\ncat\ndog\nelk\n")
    assert run("export", *PLAIN, "--flops", "0.6", "--classes", names).code == 0
    assert read_family(tmp_path / "out").labels == ("ant", "bee", "cat", "dog", "elk")
    names.write_text("ant\nbee\n")
    outcome = run("export", *PLAIN, "--flops", "0.6", "--classes", names, out="again")
    assert outcome.code == 1
    assert "names.txt" in outcome.error_line


def test_another_mean_and_deviation_that_suits_the_labels_better_is_told(snapvit, foreign, tmp_path, short_timings):
    """Images are sorted into folders by what the model says of them with one preprocessing; another is given."""
    pixels = colours()
    with torch.no_grad():
        said = foreign[1].module(torch.from_numpy(HALF.normalise(pixels))).argmax(1).tolist()
    assert len(set(said)) >= 2
    for number, (image, label) in enumerate(zip(pixels, said)):
        folder = tmp_path / "images" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    for label in range(5):
        (tmp_path / "images" / str(label)).mkdir(exist_ok=True)
    names = tmp_path / "names.txt"
    names.write_text("0\n1\n2\n3\n4\n")
    asked = ("--model", foreign[0], "--data", tmp_path / "images", "--flops", "0.6", "--classes", names)
    far = ("--mean", "0.05", "--std", "0.1", "--resize", "32")
    wrong = snapvit("export", *asked, *far, "--out", tmp_path / "a")
    assert wrong.code == 0, wrong.err
    assert "Is the preprocessing right?" in wrong.err
    right = snapvit("export", *asked, *PLAIN, "--out", tmp_path / "b")
    assert "Is the preprocessing right?" not in right.err


def test_presets_are_those_of_timm():
    from timm.models import get_pretrained_cfg

    assert len(by_model()) > 100
    for name in ("deit_tiny_patch16_224", "vit_base_patch16_224.augreg_in21k_ft_in1k", "vit_base_patch16_siglip_224"):
        known, config = by_model()[name], get_pretrained_cfg(name)
        assert (known.mean, known.std) == (tuple(config.mean), tuple(config.std))
        assert (known.interpolation, known.crop_pct) == (config.interpolation, config.crop_pct)
    assert {(preset.mean, preset.std) for preset in distinct_normalisations().values()} >= {
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }


def test_resizing_by_numbers():
    squashed = preprocessing_for("x", (32, 48), Asked(None, [0.5], [0.5], "squash:bilinear"))
    assert (squashed.crop_mode, squashed.crop_pct, squashed.interpolation) == ("squash", 1.0, "bilinear")
    cropped = preprocessing_for("x", (224, 224), Asked(None, [0.5, 0.4, 0.3], [0.5], "256"))
    assert (cropped.crop_mode, cropped.crop_pct, cropped.interpolation) == ("center", 0.875, "bicubic")
    for side in range(224, 700):
        share = preprocessing_for("x", (224, 224), Asked(None, [0.5], [0.5], str(side))).crop_pct
        assert int(224 / share) == side
    assert (cropped.mean, cropped.std) == ((0.5, 0.4, 0.3), (0.5, 0.5, 0.5))
    with pytest.raises(UsageError, match="neither a file that ends in .json nor a known model"):
        preprocessing_for("x", (224, 224), Asked("qwertz"))


@pytest.mark.slow  # DeiT-Tiny's real weights are ranked twice: in torch, and from the file in ONNX Runtime
def test_the_real_model_from_a_file_is_cut_to_the_variant_that_timm_gives(shared, tmp_path):
    model = load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")
    path = tmp_path / "deit.onnx"
    path.write_bytes(to_onnx(model.module, model.anatomy, {}))
    found = recognise(path)
    drawn = Blueprint("deit", found.anatomy, found.wiring, model.preprocessing, (), found.dense)
    source, _ = calibration_and_held_out(str(shared / "data" / "imagenet-sample"), 48, 0, 0)
    images = prepare(source, model.preprocessing)
    ours, _ = rank(drawn, images, make_settings("default"), Silent())
    theirs, _ = rank_and_factor(model, images, make_settings("default"))
    for flops in (0.8, 0.6, 0.4):
        one, other = (
            Planner(each, model.anatomy, each.protection, corrected=True).flops(flops) for each in (ours, theirs)
        )
        assert one.removed == other.removed
        assert one.heads == other.heads
        apart = np.abs(np.subtract(one.neurons, other.neurons))
        assert apart.max() <= 0.01 * max(other.neurons)  # rounding may decide between two neurons of nearly equal worth
