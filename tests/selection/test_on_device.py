"""A family on a device: timed, chosen from and cut anew there, without torch."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from helpers.shared import ROOT
from snapvit_export.checks.inspect import inspect
from snapvit_export.elastic.folder import Elastic
from snapvit_export.family.folder import read_family, write_manifest
from snapvit_export.family.manifest import Choice, Measurement, verdict_on
from snapvit_export.graph.format import GraphFormat
from snapvit_export.model.ranking import Ranking
from snapvit_export.progress import Silent
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.selection import on_device
from snapvit_export.selection.candidates import Candidates
from snapvit_export.selection.elastic_builder import ElasticBuilder, adopt
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.selection.on_device import noise
from snapvit_export.selection.point import Point

pytestmark = pytest.mark.usefixtures("short_timings")  # what is chosen does not matter here


def test_profile_times_all_variants_and_says_on_what(snapvit, device_folder):
    out = device_folder / "here.json"
    outcome = snapvit("profile", device_folder / "family", "--out", out, "--seconds", 0.1, "--pause", 1)
    assert outcome.code == 0, outcome.err
    found, manifest = FamilyProfile.load(out), read_family(device_folder / "family")
    assert set(found.profiles) == {"dense", "s30", "s60"}
    for name, profile in found.profiles.items():
        assert profile.sha256 == manifest.variant(name).sha256
        assert profile.intervals_ms["p50"][0] <= profile.p50_ms <= profile.intervals_ms["p50"][1]
        assert (len(profile.samples_ms), profile.pause_ms) == (profile.runs, 1)
    assert found.target.device.cpu
    assert "s60" in outcome.out
    printed = snapvit("profile", device_folder / "family", "--out", out, "--seconds", 0.1, "--json")
    assert json.loads(printed.out) == json.loads(out.read_text())


def test_choose_takes_the_densest_of_the_family_and_writes_it_down(snapvit, device_folder):
    family = device_folder / "family"
    before = {path.name for path in family.iterdir()}
    outcome = snapvit("choose", family, "--budget", "95%")
    assert outcome.code == 0, outcome.err
    manifest = read_family(family)
    latencies = {m.variant: m.profile.p50_ms for m in manifest.choice.measurements}
    assert set(latencies) == {"dense", "s30", "s60"}
    assert latencies[manifest.choice.variant] <= manifest.choice.budget_ms or not manifest.choice.decided
    assert manifest.choice.variant in outcome.out
    shipped = {"model.onnx", "run.py", "README.txt", *(["labels.txt"] if manifest.labels else [])}
    assert {path.name for path in family.iterdir()} == before | shipped
    assert snapvit("choose", family, "--budget", "100s").code == 2
    refused = snapvit("choose", family, "--budget", "0.001ms")
    assert (refused.code, "smallest reaches" in refused.error_line) == (1, True)
    assert read_family(family) == manifest


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_family_that_was_exported_anew_meanwhile_is_not_written(snapvit, device_folder, monkeypatch, is_gone):
    family, plain = device_folder / "family", on_device.select_among
    text = (family / "manifest.json").read_text().replace('"command": null', '"command": "another"')

    def meanwhile(*given, **more):
        (family / "manifest.json").unlink() if is_gone else (family / "manifest.json").write_text(text)
        return plain(*given, **more)

    monkeypatch.setattr(on_device, "select_among", meanwhile)
    before = {path.name for path in family.iterdir()}
    outcome = snapvit("choose", family, "--budget", "95%")
    assert outcome.code == 1
    assert "manifest.json: somebody else wrote it meanwhile" in outcome.error_line
    assert {path.name for path in family.iterdir()} == before - ({"manifest.json"} if is_gone else set())
    assert is_gone or (family / "manifest.json").read_text() == text


def test_latencies_taken_here_are_used_again_and_those_of_others_refused(snapvit, device_folder):
    family, out = device_folder / "family", device_folder / "here.json"
    assert snapvit("profile", family, "--out", out, "--seconds", 0.1).code == 0
    outcome = snapvit("choose", family, "--budget", "1000ms", "--profile", out)
    assert outcome.code == 0, outcome.err
    found, choice = FamilyProfile.load(out), read_family(family).choice
    assert {m.variant: m.profile for m in choice.measurements} == found.profiles
    other = json.loads(out.read_text())
    for profile in other["profiles"].values():
        profile["device"]["cpu"] = "another"
    out.write_text(json.dumps(other))
    refused = snapvit("choose", family, "--budget", "1000ms", "--profile", out)
    assert (refused.code, "of another file or device" in refused.error_line) == (1, True)
    assert snapvit("choose", family, "--budget", "1000ms", "--profile", out, "--threads", 2).code == 1


def test_limits_beside_the_budget_are_kept(snapvit, device_folder):
    family = device_folder / "family"
    params = read_family(family).variant("s30").params
    assert snapvit("choose", family, "--budget", "1000ms", "--max-params", params).code == 0
    choice = read_family(family).choice
    assert (choice.variant, choice.next_denser) == ("s30", "dense")
    assert not next(m for m in choice.measurements if m.variant == "dense").fits
    size = read_family(family).variant("s60").size_bytes
    assert snapvit("choose", family, "--budget", "1000ms", "--max-size", f"{size}B", "--at", "p90").code == 0
    assert read_family(family).choice.variant == "s60"
    assert read_family(family).choice.limits.at == "p90"
    for option, text in (("--max-size", "12 apples"), ("--max-params", "-3"), ("--at", "p51")):
        assert snapvit("choose", family, "--budget", "10ms", option, text).code == 2


@pytest.mark.slow  # three choices, each in a new process with a latency model
def test_with_an_elastic_folder_new_variants_are_cut_without_torch(device_folder):
    family = device_folder / "family"
    script = """
import sys
for name in ("torch", "timm", "torchvision", "sklearn"):
    sys.modules[name] = None
sys.path.append(sys.argv[3])
from helpers.timing import short_timings
from snapvit_export.cli.app import main
sys.argv = ["snapvit", "choose", sys.argv[1], "--budget", "75%", "--elastic", sys.argv[2], "--json", "-q"]
sys.argv += ["--levers", "width,depth"]
with short_timings():
    main()
"""
    call = [sys.executable, "-c", script, str(family), str(device_folder / "elastic"), str(ROOT / "tests")]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest = read_family(family)  # all hashes hold
    assert json.loads(done.stdout)["choice"]["variant"] == manifest.choice.variant
    chosen = manifest.variant(manifest.choice.variant)
    assert chosen.name.startswith(("t", "sparsest"))
    assert chosen.correction == "elastic"
    assert manifest.choice.model.nets >= 6
    images = np.random.default_rng(0).standard_normal((2, 3, 96, 96)).astype(np.float32)
    with OrtSession(family / chosen.file, 1) as session:
        assert np.isfinite(session.run(images)).all()
    assert not [path.name for path in family.iterdir() if path.name.startswith(".")]
    for _ in range(2):  # names of earlier choices may come again for other Plans, since every latency model is new
        again = subprocess.run(call, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        manifest = read_family(family)
        kept = manifest.variant(manifest.choice.variant)
        told = inspect(family / kept.file)
        assert (told.plan.heads, told.plan.neurons) == (kept.heads, kept.neurons)


def test_token_variants_are_cut_from_an_elastic_folder_and_adopted(device_folder, tmp_path):
    family, packed = device_folder / "family", Elastic.load(device_folder / "elastic")
    manifest = read_family(family)
    plan = packed.planner.with_tokens(0.5, (8, 10)).flops(0.3)
    builder = ElasticBuilder(
        packed, manifest, manifest.target.target, GraphFormat("ort"), partial(noise, manifest, 4), tmp_path, Silent()
    )
    built = adopt(
        family, builder.build("flops30-tokens50-res64x80", Point(plan, "fp32"), keep=True)
    )  # both flavours agree
    candidates = Candidates(manifest.anatomy, manifest.target.target, Silent(), built=[built])
    (variant,) = candidates.described([built.name])
    assert (variant.image_size, variant.tokens[-1]) == ((64, 80), 41)
    assert variant.plan_of(manifest.anatomy) == plan
    with OrtSession(family / variant.file, 1) as session:
        assert np.isfinite(session.run(noise(manifest, 2, (64, 80)))).all()


def test_an_elastic_folder_of_other_weights_is_refused_before_anything_is_timed(snapvit, device_folder):
    before = json.loads((device_folder / "family" / "manifest.json").read_text())
    weights = device_folder / "model" / "model.safetensors"
    changed = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    save_file(changed, weights)
    flat = Ranking.load(device_folder / "family" / "ranking.safetensors")
    without = {key: value for key, value in flat.provenance.items() if key != "weights_sha256"}
    replace(flat, provenance=without).save(device_folder / "same-order.safetensors")
    pack = ["--model", device_folder / "model", "--data", device_folder / "images", "--images", 16]
    packed = snapvit(
        "pack", *pack, "--ranking", device_folder / "same-order.safetensors", "--out", device_folder / "other"
    )
    assert packed.code == 0, packed.err
    outcome = snapvit("choose", device_folder / "family", "--budget", "75%", "--elastic", device_folder / "other")
    assert (outcome.code, "of other weights than" in outcome.error_line) == (1, True), outcome.err
    assert json.loads((device_folder / "family" / "manifest.json").read_text()) == before


def test_a_family_is_timed_as_it_was_made_for_unless_told_otherwise(snapvit, device_folder):
    path = device_folder / "family" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["target"]["threads"] = 2
    path.write_text(json.dumps(manifest))
    for options, threads in (((), 2), (("--threads", 1), 1)):
        outcome = snapvit(
            "profile", device_folder / "family", "--out", device_folder / "p.json", "--seconds", 0.1, *options
        )
        assert outcome.code == 0, outcome.err
        assert FamilyProfile.load(device_folder / "p.json").target.threads == threads


def test_an_elastic_folder_of_another_ranking_is_refused(snapvit, device_folder):
    manifest = json.loads((device_folder / "family" / "manifest.json").read_text())
    pack = ["--model", device_folder / "model", "--data", device_folder / "images", "--images", 16, "--recipe", "local"]
    assert snapvit("pack", *pack, "--out", device_folder / "other").code == 0
    outcome = snapvit("choose", device_folder / "family", "--budget", "75%", "--elastic", device_folder / "other")
    assert outcome.code == 1
    assert "of another model or ranking" in outcome.error_line
    assert json.loads((device_folder / "family" / "manifest.json").read_text()) == manifest


def test_a_fleet_gets_one_variant_for_each_device(snapvit, device_folder, monkeypatch):
    monkeypatch.chdir(device_folder)
    assert snapvit("profile", "family", "--out", "fast.json", "--seconds", 0.1).code == 0
    fast = json.loads(Path("fast.json").read_text())
    for profile in fast["profiles"].values():  # a device that takes a tenth of the time
        for key in ("p50_ms", "p90_ms", "p99_ms"):
            profile[key] /= 10
        profile["samples_ms"] = [ms / 10 for ms in profile["samples_ms"]]
    Path("fast.json").write_text(json.dumps(fast))
    own = {v.name: v.profile.p50_ms for v in read_family("family").variants}
    budget = (own["s60"] + own["s30"]) / 2
    outcome = snapvit("fleet", "family", "--budget", f"cpu={budget:.4f}ms,fast.json={budget:.4f}ms", "--json")
    assert outcome.code == 0, outcome.err
    picks = {pick["device"]: pick for pick in json.loads(outcome.out)}
    assert (picks["cpu"]["variant"], picks["cpu"]["next_denser"]) == ("s60", "s30")
    assert (picks["fast.json"]["variant"], picks["fast.json"]["next_denser"]) == ("dense", None)
    Path("family").rename("snapvit-family")  # where a family is by default
    assert "fast.json" in snapvit("fleet", "--budget", f"fast.json={budget:.4f}ms").out
    for text, code, says in (
        ("10ms", 2, "does not name a device"),
        ("cpu=10ms,cpu=3ms", 2, "names cpu twice"),
        ("nowhere.json=10ms", 1, "nowhere.json: cannot be read"),
        ("cpu=0.0001ms", 1, "no variant fits"),
    ):
        refused = snapvit("fleet", "--budget", text)
        assert (refused.code, says in refused.error_line) == (code, True), refused.error_line


def with_choice(folder: Path, **intervals: tuple[float, float]) -> Choice:
    """Give a family a choice at 10 ms whose variants have these intervals; profiles stay as they were timed."""
    manifest = read_family(folder)
    rows = []
    for variant in manifest.variants:
        low, high = intervals[variant.name]
        verdict = verdict_on((low, high), 10.0)
        row = {name: getattr(variant, name) for name in ("sparsity", "params", "flops", "size_bytes", "profile")}
        row |= {"latency_ms": (low + high) / 2, "between_ms": (low, high), "evaluation": None}
        rows.append(Measurement(variant=variant.name, fits=verdict == "fits", verdict=verdict, **row))
    chosen = next(row.variant for row in rows if row.verdict != "no")
    choice = Choice(variant=chosen, budget_ms=10.0, next_denser=None, decided=False, measurements=tuple(rows))
    write_manifest(folder, msgspec.structs.replace(manifest, choice=choice))
    return choice


def test_a_fleet_gives_the_answer_of_the_choice_for_the_same_budget(snapvit, device_folder):
    """Its latencies are those of all runs, not of the last one: by the last one every variant here takes less."""
    family = device_folder / "family"
    with_choice(family, dense=(12.0, 13.0), s30=(9.5, 9.9), s60=(7.0, 8.0))
    outcome = snapvit("fleet", family, "--budget", "cpu=10ms", "--json")
    assert outcome.code == 0, outcome.err
    (pick,) = json.loads(outcome.out)
    assert (pick["variant"], pick["verdict"], pick["next_denser"]) == ("s30", "fits", "dense")
    assert pick["latency_ms"] == pytest.approx(9.7)


def test_where_nothing_surely_fits_the_best_that_may_fit_is_taken_unless_strict(snapvit, device_folder):
    family = device_folder / "family"
    with_choice(family, dense=(12.0, 13.0), s30=(10.2, 10.6), s60=(9.8, 10.1))
    (pick,) = json.loads(snapvit("fleet", family, "--budget", "cpu=10ms", "--json").out)
    assert (pick["variant"], pick["verdict"]) == ("s60", "unsure")
    refused = snapvit("fleet", family, "--budget", "cpu=10ms", "--strict")
    assert refused.code == 1
    assert "no variant surely fits 10 ms: s60 takes 9.80 to 10.10 ms" in refused.error_line


def test_bad_requests_get_one_line(snapvit, device_folder):
    for arguments, code, says in (
        (("profile", device_folder / "nowhere"), 1, "manifest.json: cannot be read"),
        (("profile", device_folder / "family", "--pin", "x"), 2, "not a list of cores"),
        (("profile", device_folder / "family", "--target", "http://x"), 2, "neither local nor ssh://"),
        (
            ("choose", device_folder / "family", "--budget", "10ms", "--elastic", device_folder / "images"),
            1,
            "elastic.json",
        ),
    ):
        outcome = snapvit(*arguments)
        assert (outcome.code, says in outcome.error_line) == (code, True), outcome.err
