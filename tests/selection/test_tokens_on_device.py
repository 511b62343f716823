"""Variants of fewer tokens and smaller images, cut on a device from an Elastic folder, without torch."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.shared import ROOT
from snapvit_export.allocation.tokens import DEFAULT, SCHEDULES
from snapvit_export.checks.gates import require_same_graph
from snapvit_export.checks.inspect import inspect
from snapvit_export.correction.cholesky import Factors
from snapvit_export.correction.moments import Damping
from snapvit_export.elastic.folder import Elastic
from snapvit_export.family.folder import read_family
from snapvit_export.graph.format import GraphFormat, cropped
from snapvit_export.graph.read import read_graph
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.progress import Silent
from snapvit_export.prune.blocks.merging import outputs_and_matches
from snapvit_export.prune.correct.elastic import correct_module
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.selection.elastic_builder import ElasticBuilder
from snapvit_export.selection.on_device import noise
from snapvit_export.selection.point import Point
from snapvit_export.storage.atomic import sha256

pytestmark = pytest.mark.usefixtures("short_timings")  # what is chosen does not matter here

WITHOUT_TORCH = """
import sys
for name in ("torch", "timm", "torchvision", "sklearn"):
    sys.modules[name] = None
sys.path.append(sys.argv[1])
from helpers.timing import short_timings
from snapvit_export.cli.app import main
sys.argv = ["snapvit", *sys.argv[2:]]
with short_timings():
    main()
"""


def test_variants_of_fewer_tokens_are_cut_without_torch_and_equal_torch(device_folder):
    family, elastic = device_folder / "family", device_folder / "elastic"
    before = read_family(family)
    asked = ["--elastic", elastic, "--tokens", "0.75,0.5", "--resolution", "64,48x64", "--budget", "1000ms", "--json"]
    call = [sys.executable, "-c", WITHOUT_TORCH, ROOT / "tests", "choose", family, *asked]
    done = subprocess.run([*map(str, call)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest = read_family(family)  # all hashes hold
    new = {f"tokens{percent}-res{size}" for percent in (75, 50) for size in ("64", "48x64")}
    assert {variant.name for variant in manifest.variants} == {v.name for v in before.variants} | new
    assert {found["name"] for found in json.loads(done.stdout)["variants"]} >= new
    assert [w.sha256 for w in manifest.weights][:1] == [w.sha256 for w in before.weights][:1]  # the shared file
    model, ranking = load_model(str(device_folder / "model")), Ranking.load(family / "ranking.safetensors")
    for name in new:
        variant = manifest.variant(name)
        plan, size = manifest.plan(variant), variant.image_size
        assert variant.profile is not None
        assert (variant.heads, variant.neurons) == (manifest.anatomy.heads, manifest.anatomy.neurons)
        assert plan.merged == Elastic.load(elastic).merging.counts(manifest.anatomy, plan, int(name[6:8]) / 100)
        assert (variant.correction, inspect(family / variant.file).plan) == (None, plan)
        images = noise(manifest, 4, size)
        assert images.shape == (4, 3, *size)
        wanted = outputs_and_matches(shrink(model, ranking, plan), torch.from_numpy(images))
        require_same_graph(name, *wanted, family / variant.file, images)
    assert not [path.name for path in family.iterdir() if path.name.startswith(".")]
    assert set(manifest.reference.answers) == {variant.name for variant in manifest.variants}
    assert manifest.reference.pixels_at(family, (48, 64)).shape == (8, 48, 64, 3)  # resized, and kept
    assert (family / "reference-48x64.rgb").is_file()


def test_the_same_variants_are_not_cut_twice_and_others_get_other_names(snapvit, device_folder):
    family = device_folder / "family"
    asked = ("--elastic", device_folder / "elastic", "--budget", "1000ms", "--tokens", "0.5")
    assert snapvit("choose", family, *asked).code == 0
    first = read_family(family).variant("tokens50")
    outcome = snapvit("choose", family, *asked, "--resolution", "96,64")  # 96 is the model's own
    assert outcome.code == 0, outcome.err
    found = read_family(family)
    assert {v.name for v in found.variants} == {"dense", "s30", "s60", "tokens50", "tokens50-res64"}
    assert found.variant("tokens50").sha256 == first.sha256
    assert {m.variant for m in found.choice.measurements} >= {"tokens50", "tokens50-res64"}


def test_what_no_variant_can_have_is_refused_in_one_line_and_nothing_is_written(snapvit, device_folder):
    family, elastic = device_folder / "family", device_folder / "elastic"
    before = {path.name: sha256(path) for path in family.iterdir()}
    for options, code, said in (
        (("--tokens", "0.5"), 2, "Give --elastic"),
        (("--resolution", "64"), 2, "Give --elastic"),
        (("--elastic", elastic, "--tokens", "1.5"), 2, "token fraction 1.5"),
        (("--elastic", elastic, "--tokens", "half"), 2, "not a number"),
        (("--elastic", elastic, "--tokens", "0.01"), 1, "out of reach"),
        (("--elastic", elastic, "--resolution", "100"), 2, "100"),
        (("--elastic", elastic, "--resolution", "66"), 2, "66"),
        (("--elastic", elastic, "--resolution", "big"), 2, "no size in pixels"),
    ):
        outcome = snapvit("choose", family, "--budget", "90%", *options)
        assert (outcome.code, said in outcome.error_line) == (code, True), (options, outcome.err)
    assert {path.name: sha256(path) for path in family.iterdir()} == before


def test_cut_heads_and_neurons_are_corrected_from_the_stream_with_all_tokens_and_the_file_says_so(
    device_folder, tmp_path
):
    manifest, packed = read_family(device_folder / "family"), Elastic.load(device_folder / "elastic")
    anatomy, scratch = manifest.anatomy, tmp_path / "scratch"
    scratch.mkdir()
    builder = ElasticBuilder(
        packed,
        manifest,
        manifest.target.target,
        GraphFormat("ort"),
        lambda image: noise(manifest, 4, image),
        scratch,
        Silent(),
    )
    width = Plan(heads=(4, 5, 3, 6), neurons=(200, 300, 384, 100))
    merged = width.with_tokens(grid=(8, 8))
    merged = merged.with_tokens(SCHEDULES[DEFAULT].counts(anatomy, merged, 0.5), (8, 8))
    model = load_model(str(device_folder / "model"))
    proj, fc2 = ([packed.factor(i, layer) for i in range(len(anatomy.blocks))] for layer in ("proj", "fc2"))
    factors = Factors(tuple(proj), tuple(fc2), packed.ranking.order_sha256, Damping(), images=16)
    for plan, says in ((width, {}), (merged, {"snapvit.correction_tokens": "all"})):
        built = builder.build("cut", Point(plan, "fp32"), keep=True)
        assert (built.correction, built.plan) == ("elastic", plan)
        told = {entry.key: entry.value for entry in read_graph(built.path).metadata_props}
        assert {key: told[key] for key in told if key.startswith("snapvit.correction_")} == says
        images = noise(manifest, 4, anatomy.image_of(plan))
        module = shrink(model, packed.ranking, plan)
        correct_module(module, packed.ranking, plan, factors)
        wanted = outputs_and_matches(module, torch.from_numpy(images))
        require_same_graph("cut", *wanted, built.path, images)


def test_timers_crop_their_images_to_those_of_a_file():
    pixels = np.arange(2 * 8 * 6 * 3, dtype=np.uint8).reshape(2, 8, 6, 3)
    assert np.array_equal(cropped(pixels, (4, 2)), pixels[:, :4, :2])
    floats = pixels.transpose(0, 3, 1, 2).astype(np.float32)
    assert np.array_equal(cropped(floats, (4, 2)), floats[:, :, :4, :2])
    assert cropped(floats, (4, 2)).flags.c_contiguous


def test_a_latency_model_with_tokens_is_fitted_on_a_device(device_folder, tmp_path):
    from snapvit_export.profiling.timer import Timer
    from snapvit_export.runtimes.session import device_for
    from snapvit_export.selection.candidates import Candidates

    manifest, packed = read_family(device_folder / "family"), Elastic.load(device_folder / "elastic")
    target = manifest.target.target
    builder = ElasticBuilder(
        packed, manifest, target, GraphFormat("ort"), lambda image: noise(manifest, 4, image), tmp_path, Silent()
    )
    timer = Timer(target, device_for(target.runtime), noise(manifest, target.batch))
    candidates = Candidates(manifest.anatomy, target, Silent(), builder, timer)
    model = candidates.latency_model("fp32", tokens=True)
    assert model.tokens is not None
    dense = Plan.dense(manifest.anatomy)
    assert model.predict_ms(dense.with_tokens(grid=(6, 6))) < model.predict_ms(dense)
    assert not list(tmp_path.glob(".fit*"))
