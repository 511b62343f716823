"""A choice across all levers on a device: by the table of the Elastic folder, or by images that are given there."""

import json
import shutil
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from helpers.shared import ROOT
from helpers.timing import DENSE_MS, simulated_ms, simulated_timings
from snapvit_export.calibration.images import in_two_parts, prepare
from snapvit_export.calibration.open_source import open_source
from snapvit_export.elastic.folder import Elastic
from snapvit_export.elastic.format import read_description, write_description
from snapvit_export.family.fidelity import Comparison
from snapvit_export.family.folder import read_family
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.selection.image_meter import LEAST_IMAGES, MOST_RACED, MOST_REPORTED
from snapvit_export.selection.known_profiles import FamilyProfile, pick
from snapvit_export.selection.on_device import TimingOptions, profile_family
from snapvit_export.selection.point import Point
from snapvit_export.selection.table_meter import TableMeter
from snapvit_export.storage.atomic import sha256

WITHOUT_TORCH = """
import sys
for name in ("torch", "timm", "torchvision", "sklearn"):
    sys.modules[name] = None
sys.path.append(sys.argv[1])
from helpers.timing import simulated_timings
from snapvit_export.cli.app import main
from snapvit_export.family.folder import read_family
sys.argv = ["snapvit", *sys.argv[2:]]
with simulated_timings(read_family(sys.argv[2]).anatomy):
    main()
"""


@pytest.fixture
def choose(snapvit, device_folder):
    """Run `snapvit choose` on the family with latencies that are known."""
    family = device_folder / "family"

    def run(*options: object, **simulated: float):
        with simulated_timings(read_family(family).anatomy, **simulated):
            return snapvit("choose", family, *options)

    return run


def files_of(folder) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


def without_table(folder) -> None:
    """Make an Elastic folder what it would have been before there were tables."""
    write_description(folder, msgspec.structs.replace(read_description(folder), fidelity=msgspec.UNSET))
    assert "fidelity" not in json.loads((folder / "elastic.json").read_text())


def true_ms(family, name: str, int8: float = 0.6) -> float:
    manifest = read_family(family)
    variant = manifest.variant(name)
    return simulated_ms(manifest.anatomy, manifest.plan(variant), variant.precision, int8)


def test_with_a_table_all_levers_are_used_without_torch_and_the_most_faithful_is_chosen(device_folder):
    family, elastic = device_folder / "family", device_folder / "elastic"
    before = files_of(family)
    call = [sys.executable, "-c", WITHOUT_TORCH, ROOT / "tests", "choose", family, "--budget", "45%"]
    call += ["--elastic", elastic, "--json"]
    done = subprocess.run([*map(str, call)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest, packed = read_family(family), Elastic.load(elastic)  # all hashes hold
    choice = manifest.choice
    assert json.loads(done.stdout)["choice"]["levers"] == list(choice.levers)
    assert set(choice.levers) >= {"precision", "tokens", "width"}
    chosen = manifest.variant(choice.variant)
    assert 0.85 * 0.45 * DENSE_MS < true_ms(family, chosen.name) <= 0.45 * DENSE_MS
    found = {m.variant: m for m in choice.measurements}
    assert chosen.fidelity.estimated
    estimate = TableMeter(manifest.anatomy, packed.fidelity).estimate(Point(manifest.plan(chosen), chosen.precision))
    assert chosen.fidelity == estimate
    fitting = [m.fidelity.divergence for m in found.values() if m.fits]
    assert len(fitting) >= 2
    assert chosen.fidelity.divergence == min(fitting)
    assert choice.alternatives  # what a single lever reaches
    assert all(found[other.variant].fits for other in choice.alternatives)
    assert not found[choice.next_denser].fits
    assert {name: hashed for name, hashed in files_of(family).items() if name in before} == before | {
        "manifest.json": sha256(family / "manifest.json")
    }
    assert not [name for name in files_of(family) if name.startswith(".")]


def test_variants_of_another_precision_share_one_more_weight_file(choose, device_folder):
    family, elastic = device_folder / "family", device_folder / "elastic"
    before = {weights.file for weights in read_family(family).weights}
    outcome = choose("--budget", "65%", "--elastic", elastic, "--levers", "precision")
    assert outcome.code == 0, outcome.err
    manifest = read_family(family)
    first = manifest.variant(manifest.choice.variant)
    assert (first.name, first.precision, first.weights) == ("dense-int8", "int8-dynamic", ("weights-int8-dynamic.bin",))
    assert manifest.choice.levers == ("precision",)
    assert {weights.file for weights in manifest.weights} - before == {"weights-int8-dynamic.bin"}
    there = files_of(family)
    outcome = choose("--budget", "33%", "--elastic", elastic, "--levers", "precision,width", int8=0.35)
    assert outcome.code == 0, outcome.err
    manifest = read_family(family)
    second = manifest.variant(manifest.choice.variant)
    assert second.precision == "int8-dynamic"
    assert "weights-int8-dynamic.bin" in second.weights
    assert files_of(family)["weights-int8-dynamic.bin"] == there["weights-int8-dynamic.bin"]
    assert second.name != first.name
    assert true_ms(family, second.name, int8=0.35) <= 0.33 * DENSE_MS
    images = np.random.default_rng(0).standard_normal((2, 3, 96, 96)).astype(np.float32)
    with OrtSession(family / second.file, 1) as session:
        assert np.isfinite(session.run(images)).all()


def test_a_precision_that_is_not_faster_here_is_dropped_with_its_ratio(choose, device_folder):
    outcome = choose("--budget", "60%", "--elastic", device_folder / "elastic", int8=1.1)
    assert outcome.code == 0, outcome.err
    choice = read_family(device_folder / "family").choice
    (dropped,) = choice.dropped
    assert (dropped.precision, dropped.ratio) == ("int8-dynamic", pytest.approx(1.1, rel=0.01))
    assert {m.precision for m in choice.measurements if m.fits} == {"fp32"}
    assert not (device_folder / "family" / "weights-int8-dynamic.bin").exists()


def test_by_images_the_fidelity_is_that_of_the_files_on_them(choose, device_folder):
    family = device_folder / "family"
    without_table(device_folder / "elastic")  # images need none
    outcome = choose("--budget", "50%", "--elastic", device_folder / "elastic", "--data", device_folder / "images")
    assert outcome.code == 0, outcome.err
    manifest = read_family(family)
    choice = manifest.choice
    assert set(choice.levers) >= {"precision", "tokens", "width"}
    source = open_source(str(device_folder / "images"))
    raced, reported = in_two_parts(source, (MOST_RACED, MOST_REPORTED), LEAST_IMAGES)
    assert raced.count + reported.count == source.count == 60

    def outputs(variant):
        images = prepare(reported, manifest.preprocessing_of(variant))
        with OrtSession(family / variant.file, 1) as session:
            return np.concatenate([session.run(inputs) for inputs in images.batches(1)])

    dense = outputs(manifest.variant("dense"))
    for variant in manifest.variants:
        found, told = Comparison.of(outputs(variant), dense, classifies=True).fidelity(), variant.fidelity
        assert (told.estimated, told.images) == (False, 40)
        # One image at a time sums in another order than eight do: rounding of float32, far below the noise of images.
        assert told.divergence == pytest.approx(found.divergence, rel=1e-3, abs=1e-6), variant.name
    assert manifest.variant("dense").fidelity.divergence == 0
    fitting = [m.fidelity for m in choice.measurements if m.fits]
    best, chosen = min(f.divergence for f in fitting), manifest.variant(choice.variant).fidelity
    assert chosen.divergence - best <= chosen.standard_error + min(f.standard_error for f in fitting)
    assert true_ms(family, choice.variant) <= 0.5 * DENSE_MS
    assert manifest.variant(choice.variant).evaluation is not None  # the folders have as many classes as the model


def test_images_decide_among_the_variants_of_a_family_too(choose, device_folder):
    family = device_folder / "family"
    before = files_of(family)
    outcome = choose("--budget", "90%", "--data", device_folder / "images", "--prefer", "accuracy")
    assert outcome.code == 0, outcome.err
    manifest = read_family(family)
    fitting = {m.variant: m.evaluation.top1 for m in manifest.choice.measurements if m.fits}
    assert set(fitting) == {"s30", "s60"}
    assert manifest.choice.prefer == "accuracy"
    assert fitting[manifest.choice.variant] >= max(fitting.values()) - 0.1  # standard error of 40 images
    assert set(files_of(family)) == set(before) | {"model.onnx", "run.py", "README.txt"}


def test_an_older_elastic_folder_cuts_widths_and_says_why(choose, device_folder):
    without_table(device_folder / "elastic")
    outcome = choose("--budget", "60%", "--elastic", device_folder / "elastic")
    assert outcome.code == 0, outcome.err
    assert "has no fidelity table, so only heads, neurons and sub-layers are cut" in outcome.err
    manifest = read_family(device_folder / "family")
    assert set(manifest.choice.levers) <= {"width", "depth"}
    for measurement in manifest.choice.measurements:
        assert measurement.precision == "fp32"
        assert measurement.image_size == manifest.anatomy.image
    assert 0.9 * 0.6 * DENSE_MS < true_ms(device_folder / "family", manifest.choice.variant) <= 0.6 * DENSE_MS


def test_levers_that_are_not_asked_for_are_not_used(choose, device_folder):
    outcome = choose("--budget", "55%", "--elastic", device_folder / "elastic", "--levers", "tokens")
    assert outcome.code == 0, outcome.err
    manifest = read_family(device_folder / "family")
    new = [m for m in manifest.choice.measurements if m.variant not in ("dense", "s30", "s60")]
    assert new
    assert {lever for m in new for lever in m.levers} == {"tokens"}


def test_bad_requests_get_one_line_and_nothing_is_written(snapvit, device_folder):
    family, elastic = device_folder / "family", device_folder / "elastic"
    old, empty = shutil.copytree(elastic, device_folder / "old"), device_folder / "empty"
    without_table(old)
    empty.mkdir()
    before = files_of(family)
    for options, code, said in (
        (("--levers", "width"), 2, "Give --elastic"),
        (("--elastic", elastic, "--levers", "size"), 2, "no lever is called 'size'"),
        (("--elastic", old, "--levers", "tokens"), 2, "--levers tokens: the Elastic folder has no fidelity table"),
        (("--elastic", old, "--levers", "precision"), 2, "no fidelity table. Give --data FOLDER"),
        (("--elastic", elastic, "--prefer", "accuracy"), 2, "needs images with labels"),
        (("--prefer", "speed"), 2, "neither fidelity nor accuracy"),
        (("--elastic", elastic, "--data", empty), 1, "empty"),
        (("--data", device_folder / "nowhere"), 1, "nowhere"),
    ):
        outcome = snapvit("choose", family, "--budget", "60%", *options)
        assert (outcome.code, said in outcome.error_line) == (code, True), (options, outcome.err)
    assert files_of(family) == before


def test_variants_that_a_runtime_does_not_take_are_left_out_and_named(choose, snapvit, device_folder):
    family, out = device_folder / "family", device_folder / "here.json"
    assert choose("--budget", "65%", "--elastic", device_folder / "elastic", "--levers", "precision").code == 0
    with simulated_timings(read_family(family).anatomy):
        outcome = snapvit("profile", family, "--runtime", "openvino", "--out", out)
        assert outcome.code == 0, outcome.err
        assert "left out, since openvino does not compute in their precision: dense-int8" in outcome.err
        assert set(FamilyProfile.load(out).profiles) == {"dense", "s30", "s60"}
        outcome = snapvit("choose", family, "--runtime", "openvino", "--budget", "75%", "--profile", out)
    assert outcome.code == 0, outcome.err
    manifest = read_family(family)
    assert manifest.choice.variant in ("s30", "s60")
    assert "dense-int8" in {variant.name for variant in manifest.variants}
    assert manifest.variant("dense-int8").profile is None  # it was not timed in this runtime


def test_mixed_precisions_are_timed_as_such_and_their_latencies_taken_again(choose, snapvit, device_folder):
    family, out = device_folder / "family", device_folder / "here.json"
    assert choose("--budget", "65%", "--elastic", device_folder / "elastic", "--levers", "precision").code == 0
    with simulated_timings(read_family(family).anatomy):
        assert snapvit("profile", family, "--out", out).code == 0
        profiles = FamilyProfile.load(out).profiles
        assert {name: profile.precision for name, profile in profiles.items()} == {
            "dense": "fp32",
            "s30": "fp32",
            "s60": "fp32",
            "dense-int8": "int8-dynamic",
        }
        outcome = snapvit("choose", family, "--budget", "65%", "--profile", out)
    assert outcome.code == 0, outcome.err
    choice = read_family(family).choice
    assert {m.variant: m.profile for m in choice.measurements} == profiles
    assert choice.variant in ("dense-int8", "s60")


def test_a_fleet_gets_the_most_faithful_where_all_are_known_and_the_densest_otherwise(device_folder):
    from snapvit_export.budget import Budget
    from snapvit_export.progress import Silent

    manifest = read_family(device_folder / "family")
    fidelity = Elastic.load(device_folder / "elastic")
    meter = TableMeter(manifest.anatomy, fidelity.fidelity)
    with simulated_timings(manifest.anatomy):
        timed = profile_family(device_folder / "family", TimingOptions(), Silent())
    divergences = {"dense": 0.0, "s30": 0.5, "s60": 0.1}  # as if the smaller one had been refitted better

    def with_fidelity(known):
        variants = []
        for variant in manifest.variants:
            found = meter.estimate(Point(manifest.plan(variant), variant.precision))
            found = msgspec.structs.replace(found, divergence=divergences[variant.name])
            precision = "int8-dynamic" if variant.name == "s60" else "fp32"  # of widths alone the densest is taken
            fidelity = found if variant.name in known else None
            variants.append(msgspec.structs.replace(variant, fidelity=fidelity, precision=precision))
        return msgspec.structs.replace(manifest, variants=tuple(variants))

    for known, wanted in ((("dense", "s30", "s60"), "s60"), (("dense", "s60"), "s30")):
        found = pick("here", timed, with_fidelity(known), Budget.parse("95%"), "p50")
        assert (found.variant, found.next_denser) == (wanted, "dense")
