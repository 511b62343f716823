"""Latencies from elsewhere that contradict themselves: `fleet` and `choose --profile` say so in one line."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.shared import ROOT
from snapvit_export.checks.comparison import Compared
from snapvit_export.errors import FileFormatError
from snapvit_export.storage.json import from_json

ARCHIVE = ROOT / "tests" / "fixtures" / "before_the_move" / "files.tar.xz"
GPU = {"name": "GPU", "software": {}, "power_mode": "MAXN", "clocks_mhz": {}, "temperatures_c": {}, "memory_bytes": 1}


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


def zeros(profile: dict) -> None:
    profile.update(p50_ms=0.0, p90_ms=0.0, p99_ms=0.0, samples_ms=[0.0] * profile["runs"])


def one_run(profile: dict) -> None:
    ms, ends = profile["samples_ms"][0], [profile["samples_ms"][0]] * 2
    profile.update(p50_ms=ms, p90_ms=ms, p99_ms=ms, samples_ms=[ms], runs=1, burst=1)
    profile.update(intervals_ms={"p50": ends, "p90": ends, "p99": ends})


AGREE = {"cosine": 0.99999, "least_cosine": 0.99999, "asked": 0.99999, "images": 8, "passed": True}


def compared(**figures: object) -> Callable[[dict], None]:
    return lambda profile: profile.update(compared={**AGREE, **figures})


@pytest.mark.parametrize(
    "figures", [{"least_cosine": 0.99}, {"least_cosine": 0.89, "left_out": 1}, {"least_cosine": None}, {"top1": 0.875}]
)
def test_answers_that_are_said_to_agree_have_the_figures_for_it(figures):
    assert from_json(json.dumps(AGREE), Compared, "x").passed
    assert from_json(json.dumps({**AGREE, "least_cosine": 0.9, "left_out": 1, "top1": 1.0}), Compared, "x").passed
    assert not from_json(json.dumps({**AGREE, **figures, "passed": False}), Compared, "x").passed
    with pytest.raises(FileFormatError, match="said to agree, and its figures do not"):
        from_json(json.dumps({**AGREE, **figures}), Compared, "x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (zeros, "Expected `float` > 0"),
        (lambda p: p.update(samples_ms=[]), "0 samples are not"),
        (lambda p: p["samples_ms"].pop(), "samples are not"),
        (lambda p: p.update(samples_ms=p["samples_ms"] * 2), "samples are not"),
        (lambda p: p.update(burst=10**6), "in bursts of 1000000"),
        (lambda p: p.update(p50_ms=1e-6, samples_ms=[1e-6] * p["runs"]), "ms by its samples"),
        (lambda p: p.update(intervals_ms={}), "has no interval"),
        (one_run, "are of 1 runs, and p50 needs 40"),
        (compared(least_cosine=0.9), "said to agree, and its figures do not"),
    ],
)
@pytest.mark.parametrize("of", ["dense", None])
def test_a_profile_that_contradicts_itself_is_refused_by_fleet_and_choose(snapvit, old, tmp_path, change, says, of):
    written = json.loads((old / "profile.json").read_text())
    written["target"]["device"]["accelerator"] = GPU
    for name, profile in written["profiles"].items():
        if of in (None, name):
            change(profile)
    path = tmp_path / "orin.json"
    path.write_text(json.dumps(written))
    before = (old / "family" / "manifest.json").read_bytes()
    for words in (
        ("fleet", old / "family", "--budget", f"{path}=10ms"),
        ("choose", old / "family", "--budget", "10ms", "--profile", path),
    ):
        outcome = snapvit(*words)
        assert outcome.code == 1
        assert says in outcome.error_line
    assert (old / "family" / "manifest.json").read_bytes() == before


def test_what_was_compared_with_less_asked_is_judged_by_what_is_asked_now(snapvit, old, tmp_path):
    """By an agent of another version, or with a file that somebody has edited: in fp32, 0.99999 is asked."""
    family = shutil.copytree(old / "family", tmp_path / "family")
    written = json.loads((old / "profile.json").read_text())
    written["target"]["device"]["accelerator"] = GPU
    for profile in written["profiles"].values():
        compared(asked=0.5)(profile)
    (wrong,) = sorted(set(written["profiles"]) - {"dense"})[-1:]
    compared(asked=0.5, least_cosine=0.98)(written["profiles"][wrong])
    path = tmp_path / "orin.json"
    path.write_text(json.dumps(written))
    outcome = snapvit("choose", family, "--budget", "1000ms", "--profile", path)
    assert outcome.code == 0, outcome.err
    says = f"{wrong}: does not answer as its graph does: least cosine 0.980000 of 8 images; at least 0.99999 is asked"
    assert f"{says}. It is not chosen" in " ".join(outcome.err.split())
    choice = json.loads((family / "manifest.json").read_text())["choice"]
    assert wrong not in {row["variant"] for row in choice["measurements"]}
    picked = json.loads(snapvit("fleet", family, "--budget", f"{path}=1000ms", "--json").out)
    assert picked[0]["left_out"] == [wrong]
    compared(asked=0.5, least_cosine=0.98)(written["profiles"]["dense"])
    path.write_text(json.dumps(written))
    outcome = snapvit("choose", family, "--budget", "1000ms", "--profile", path)
    assert outcome.code == 1
    assert "dense: did not answer as its graph does where it was timed: least cosine 0.98" in outcome.error_line


def test_latencies_of_a_runtime_that_does_not_take_the_dense_model_are_refused(snapvit, old, tmp_path):
    written = json.loads((old / "profile.json").read_text())
    written["target"]["device"]["accelerator"] = GPU
    written["target"]["runtime"] = "onnxruntime-cuda"
    path = tmp_path / "orin.json"
    path.write_text(json.dumps(written))
    manifest_path = old / "family-int8" / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    assert {variant["precision"] for variant in manifest["variants"]} == {"int8-dynamic"}
    outcome = snapvit("choose", old / "family-int8", "--budget", "10ms", "--profile", path)
    assert outcome.code == 1
    assert "onnxruntime-cuda, which does not take dense" in outcome.error_line


def test_a_family_whose_dense_variant_has_another_name_is_refused_before_it_is_compared(snapvit, old, tmp_path):
    path = old / "family" / "manifest.json"
    whole = path.read_text()
    manifest = json.loads(whole)
    manifest["dense"] = next(v["name"] for v in manifest["variants"] if v["name"] != "dense")
    path.write_text(json.dumps(manifest))
    try:
        for words in (("fleet", old / "family", "--budget", "cpu=10ms"), ("choose", old / "family", "--budget", "9ms")):
            outcome = snapvit(*words)
            assert outcome.code == 1
            assert "calls the dense variant" in outcome.error_line
    finally:
        path.write_text(whole)
