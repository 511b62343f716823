"""`snapvit recover`: a family before and after, through the command line and all gates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from helpers.families import make_family
from helpers.models import TINY
from helpers.programs import python, torchrun
from helpers.recovery import smooth_pictures, taught
from helpers.timing import short_timings
from snapvit_export.allocation.recipe import correcting_settings
from snapvit_export.errors import SnapvitError, UsageError
from snapvit_export.family.folder import read_family
from snapvit_export.family.manifest import Manifest
from snapvit_export.graph.read import differ_in_weights_alone
from snapvit_export.progress import Silent
from snapvit_export.prune.models.load import load_model, save_model
from snapvit_export.report.variant_words import levers
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.workflows.export import Request, export
from snapvit_export.workflows.recover import RecoverRequest, recover

FAST = {"batch": 8, "micro": 8, "looks": 3, "rate": 2e-3}


def exported(place: Path, images: int = 24, **asked: object) -> Manifest:
    """Export the model and images of a place into its family."""
    settings = correcting_settings("default", True, images=images)
    with short_timings():
        return export(
            Request(
                model=str(place / "model"),
                data=str(place / "images"),
                out=place / "family",
                settings=settings,
                **asked,
            )
        )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family of a tiny model that can be learnt from, beside the model and the pictures."""
    folder = tmp_path_factory.mktemp("recovered")
    model = taught()
    save_model(model.module, model.description, folder / "model")
    source = smooth_pictures(64)
    for i in range(source.count):
        path = folder / "images" / f"class{i % 5}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        source.open(i).save(path)
    exported(folder, sparsity=[0.3, 0.6])
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(made, tmp_path / "made")


def asked(place: Path, **changes: object) -> RecoverRequest:
    settings = dict(data=str(place / "images"), model=str(place / "model"), steps=20, device="cpu", changes=FAST)
    return RecoverRequest(place / "family", **{**settings, **changes})


def outputs(path: Path, place: Path, count: int = 8) -> np.ndarray:
    model = load_model(str(place / "model"))
    paths = sorted((place / "images").rglob("*.png"))[:count]
    pixels = np.stack([model.preprocessing.pixels(Image.open(path)) for path in paths])
    with OrtSession(path, 1) as session:
        return session.run(model.preprocessing.normalise(pixels))


def test_a_recovered_variant_takes_the_place_of_the_old_one(place):
    before = read_family(place / "family")
    old = outputs(place / "family" / "s60.onnx", place)
    manifest = recover(asked(place, variants=["s60"], steps=40), Silent())
    assert read_family(place / "family") == manifest
    variant, was = manifest.variant("s60"), before.variant("s60")
    how = variant.recovered
    assert how is not None
    assert how.after.divergence < how.before.divergence
    assert variant.fidelity == how.after
    assert levers(variant, manifest) == f"{levers(was, before)}, trained"
    assert (how.steps, how.images, how.train, how.recipe) == (40, 48, "linear", "short")
    assert not np.allclose(outputs(place / "family" / "s60.onnx", place), old)
    assert (variant.heads, variant.neurons, variant.tokens) == (was.heads, was.neurons, was.tokens)
    assert manifest.variant("s30") == before.variant("s30")
    assert manifest.variant("dense") == before.variant("dense")
    assert not list(place.glob("*.checkpoint"))


@pytest.mark.slow  # three processes import torch
def test_two_processes_recover_a_family_as_one_does(place, tmp_path):
    other = shutil.copytree(place, tmp_path / "other")
    manifests = []
    for folder, launch in ((place, python), (other, lambda *words: torchrun(2, *words))):
        done = launch(
            *("-m", "snapvit_export.cli", "recover", folder / "family", "--variant", "s60", "--epochs", "3"),
            *("--data", folder / "images", "--model", folder / "model", "--batch", "16", "--rate", "0.002"),
            *("--device", "cpu", "--quiet"),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        manifests.append(read_family(folder / "family"))
    one, two = (manifest.variant("s60").recovered for manifest in manifests)
    assert one.steps == two.steps == 9
    assert one.after.divergence == pytest.approx(two.after.divergence, rel=1e-3)
    found = [outputs(folder / "family" / "s60.onnx", folder) for folder in (place, other)]
    np.testing.assert_allclose(*found, atol=1e-4)


def test_crops_are_as_small_as_asked(place, monkeypatch):
    drawn = []

    def noting(size, area, rng):
        drawn.append(area)
        return (0.0, 0.0, float(size[0]), float(size[1]))

    monkeypatch.setattr("snapvit_export.prune.recover.augment.random_box", noting)
    recover(asked(place, variants=["s60"], steps=1, crop=0.35), Silent())
    assert set(drawn) == {(0.35, 1.0)}


def test_latencies_stay_where_only_weights_are_new(place):
    before = read_family(place / "family").variant("s60")
    shutil.copytree(place / "family", place / "old")
    after = recover(asked(place, variants=["s60"], steps=40), Silent()).variant("s60")
    assert before.profile is not None
    assert after.recovered.same_graph
    assert after.profile == msgspec.structs.replace(before.profile, sha256=after.sha256)
    assert differ_in_weights_alone(place / "old" / "s60.onnx", place / "family" / "s60.onnx")
    assert not differ_in_weights_alone(place / "old" / "s60.onnx", place / "family" / "s30.onnx")


@pytest.mark.parametrize("train", ["norms", "all"])
def test_norms_cost_kilobytes_and_all_has_weights_of_its_own(place, train):
    before = read_family(place / "family").variant("s60")
    sizes = {name: (place / "family" / name).stat().st_size for name in (before.file, *before.weights)}
    rate = {"norms": 1e-2, "all": 5e-4}[train]
    manifest = recover(asked(place, variants=["s60"], train=train, steps=80, changes={**FAST, "rate": rate}), Silent())
    after = manifest.variant("s60")
    assert after.recovered is not None, train
    graph, old = (place / "family" / after.file).stat().st_size, sizes[before.file]
    if train == "norms":
        assert "weights.bin" in after.weights
        assert 0 < graph - old < 20_000
        corrected = [name for name in after.weights if name.startswith("corrected")]
        assert (
            sum((place / "family" / name).stat().st_size for name in corrected)
            == sizes[next(name for name in before.weights if name.startswith("corrected"))]
        )
    else:
        assert "weights.bin" not in after.weights
    assert {"weights.bin"} <= {file.file for file in manifest.weights}


def test_variants_of_other_tokens_and_images_are_recovered_as_they_run(place):
    exported(place, sparsity=[0.4], tokens=[0.5], resolution=[24])
    name = next(v.name for v in read_family(place / "family").variants if v.name != "dense")
    manifest = recover(asked(place, variants=[name], train="all", steps=30), Silent())
    variant = manifest.variant(name)
    assert variant.recovered is not None
    assert variant.image_size == (24, 24)
    assert variant.tokens[-1] < 10
    assert variant.recovered.after.divergence < variant.recovered.before.divergence


def test_sizes_that_learn_together_share_one_weight_file(place):
    before = read_family(place / "family")
    manifest = recover(asked(place, elastic=True, steps=60), Silent())
    found = [variant for variant in manifest.variants if variant.recovered is not None]
    assert found
    for variant in found:
        assert "weights-recovered.bin" in variant.weights
        assert "weights.bin" not in variant.weights
        assert variant.recovered.after.divergence < variant.recovered.before.divergence
        assert variant.recovered.together == ("s30", "s60")
        assert variant.recovered.same_graph  # so that its latency is that of before
        was = before.variant(variant.name).profile
        assert variant.profile == msgspec.structs.replace(was, sha256=variant.sha256)
    assert manifest.variant("dense").weights == ("weights.bin",)
    read_family(place / "family")


def test_a_training_that_does_harm_changes_nothing(place):
    before = read_family(place / "family")
    notes = []

    class Noting(Silent):
        def note(self, text):
            notes.append(text)

    manifest = recover(asked(place, variants=["s60"], changes={**FAST, "rate": 5.0, "warm_up": 0.0}), Noting())
    assert manifest.variants == before.variants
    assert any("stays as it was" in note for note in notes)


def test_the_chosen_model_is_shipped_anew(place):
    from snapvit_export.target import Target

    target = Target(runtime="onnxruntime", precision="fp32", batch=1, threads=1)
    manifest = exported(place, budget="1000ms", sparsity=[0.6], levers=("width",), target=target)
    choice = msgspec.structs.replace(manifest.choice, variant="s60")
    from snapvit_export.family.folder import write_manifest
    from snapvit_export.family.shipped import write_shipped

    write_manifest(place / "family", write_shipped(place / "family", msgspec.structs.replace(manifest, choice=choice)))
    recovered = recover(asked(place, steps=40), Silent())  # the chosen one
    assert recovered.variant("s60").recovered is not None
    assert np.allclose(
        outputs(place / "family" / "model.onnx", place), outputs(place / "family" / "s60.onnx", place), atol=1e-4
    )
    found = {m.variant: m for m in recovered.choice.measurements}["s60"]
    assert found.fidelity == recovered.variant("s60").fidelity
    assert recovered.latency("s60") == (found.latency_ms, found.between_ms)


def test_the_command_says_what_it_brought(snapvit, place):
    outcome = snapvit(
        *("recover", place / "family", "--data", place / "images", "--model", place / "model", "--variant", "s60"),
        *("--epochs", 10, "--batch", 8, "--rate", 0.002, "--device", "cpu"),
    )
    assert outcome.code == 0, outcome.err
    assert "s60" in outcome.out
    assert "Latencies are as before" in outcome.out
    assert "few" in outcome.err


def test_json_is_the_manifest(snapvit, place):
    outcome = snapvit(
        *("recover", place / "family", "--data", place / "images", "--model", place / "model", "--variant", "s60"),
        *("--epochs", 2, "--batch", 8, "--device", "cpu", "--json"),
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["model"] == "tiny"
    assert any("loss" in json.loads(line).get("status", "") for line in outcome.err.splitlines())


def test_what_makes_no_sense_is_refused_before_any_work(place):
    refused = {
        "no variant is called 's99'": dict(variants=["s99"]),
        "dense cuts nothing": dict(variants=["dense"]),
        "nothing was chosen": {},
        "Give one of them": dict(variants=["s60"], elastic=True),
        "has no weights for torch": dict(variants=["s60"], model=None),
        "no recipe of a recovery": dict(recipe="slow"),
        "nothing is called 'some'": dict(train="some"),
        "--minutes and --epochs": dict(minutes=1, steps=None, epochs=2),
    }
    before = read_family(place / "family")
    for said, changes in refused.items():
        with pytest.raises(UsageError, match=said):
            recover(asked(place, **changes), Silent())
    with pytest.raises(SnapvitError, match="no CUDA device"):
        recover(asked(place, variants=["s60"], device="cuda"), Silent())
    assert read_family(place / "family") == before


def test_too_few_images_and_missing_labels_are_refused(place, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted((place / "images").rglob("*.png"))[:10]:
        shutil.copy(path, few / path.name)
    with pytest.raises(SnapvitError, match="10 images are too few"):
        recover(asked(place, variants=["s60"], data=str(few)), Silent())
    for path in (place / "images").rglob("*.png"):
        shutil.copy(path, few / path.name)
    with pytest.raises(UsageError, match="labels of the model's classes are needed"):
        recover(asked(place, variants=["s60"], data=str(few), labels=True), Silent())


def test_another_model_than_the_familys_is_refused(place, tmp_path):
    model = taught(scale=0.1)
    save_model(model.module, model.description, tmp_path / "other")
    with pytest.raises(SnapvitError, match="other weights"):
        recover(asked(place, variants=["s60"], model=str(tmp_path / "other")), Silent())


def test_a_ranking_is_exported_first(place, short_timings):
    manifest = recover(
        RecoverRequest(
            place / "family" / "ranking.safetensors",
            data=str(place / "images"),
            model=str(place / "model"),
            elastic=True,
            steps=4,
            device="cpu",
            out=place / "new",
            changes=FAST,
        ),
        Silent(),
    )
    assert len(manifest.variants) > 3
    assert read_family(place / "new") == manifest


def test_a_family_of_noise_keeps_what_it_has(tmp_path):
    """A model of large random weights is chaotic: training finds nothing, and nothing is lost."""
    family = make_family(tmp_path, kwargs=TINY, sparsity=[0.5])
    before = read_family(family)
    request = RecoverRequest(
        family, data=str(tmp_path / "images"), model=str(tmp_path / "model"), variants=["s50"], steps=3, changes=FAST
    )
    after = recover(request, Silent())
    for variant in after.variants:
        old = before.variant(variant.name)
        assert variant == old or variant.recovered.after.divergence < variant.recovered.before.divergence


def test_a_variant_in_int8_is_quantised_again(place):
    from snapvit_export.target import Target

    exported(place, sparsity=[0.6], target=Target(runtime="onnxruntime", precision="int8-dynamic", batch=1, threads=1))
    manifest = recover(asked(place, variants=["s60"], steps=40), Silent())
    variant = manifest.variant("s60")
    assert variant.recovered is not None
    assert variant.precision == "int8-dynamic"
    assert variant.precision_cosine > 0.9
    assert variant.recovered.same_graph


def test_a_killed_recovery_goes_on(place, monkeypatch):
    from snapvit_export.prune.rank.checkpoint import Checkpoint

    whole = shutil.copytree(place, place.parent / "whole")
    wanted = recover(asked(whole, variants=["s60"], steps=40), Silent())
    saves, plain = [], Checkpoint.save

    def save(self, *arguments):
        plain(self, *arguments)
        saves.append(self.path)
        if len(saves) == 2:
            raise MemoryError  # whatever ends it

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Checkpoint, "save", save)
        recover(asked(place, variants=["s60"], steps=40), Silent())
    assert saves[-1].is_file()
    found = recover(asked(place, variants=["s60"], steps=40), Silent())
    ours, theirs = found.variant("s60"), wanted.variant("s60")
    assert ours.weights == theirs.weights  # named by their contents
    assert ours.recovered.after == theirs.recovered.after


def test_a_full_disk_is_one_line_and_leaves_the_family(place, monkeypatch):
    import errno

    from snapvit_export.workflows import recovered_family

    before = {path.name: path.read_bytes() for path in (place / "family").iterdir() if path.is_file()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recovered_family.shutil, "copy2", full)
    with pytest.raises(SnapvitError, match="the disk is full"):
        recover(asked(place, variants=["s60"], steps=40), Silent())
    assert {path.name: path.read_bytes() for path in (place / "family").iterdir() if path.is_file()} == before
    assert list(place.glob("*.checkpoint"))  # what was learnt is not lost


def test_a_family_that_was_calibrated_on_all_images_needs_others(place):
    exported(place, sparsity=[0.6], images=64)
    with pytest.raises(SnapvitError, match="export again with --images 48"):
        recover(asked(place, variants=["s60"]), Silent())
