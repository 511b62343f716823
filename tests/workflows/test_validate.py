"""`snapvit validate`: each image decoded once, each file run once, the answers in the manifest; bad input in a line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from helpers.families import make_family
from snapvit_export.calibration import folder as folder_source
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.evaluate.pareto import Tradeoff, dominated
from snapvit_export.family.folder import read_family, write_manifest
from snapvit_export.family.validation import Validation
from snapvit_export.prune.models.load import load_model
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.workflows import validate as module
from snapvit_export.workflows.inputs import BUNDLED_NAME

HELD_OUT = 60 - 16


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A family of a tiny model whose cuts are not corrected, its model and its images."""
    folder = tmp_path_factory.mktemp("validate")
    make_family(folder, correct=False, sparsity=[0.3, 0.5])
    for split, count in (("train", 30), ("test", 10)):
        for number in range(count):
            path = folder / "split" / split / f"class{number % 5}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng([number, count]).integers(0, 255, (40, 40, 3), np.uint8)
            Image.fromarray(noise).save(path)
    return folder


@pytest.fixture
def here(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


def test_the_head_judges_what_did_not_calibrate(snapvit, here, made):
    # under the name that the manifest knows the images by
    outcome = snapvit("validate", here / "family", "--data", made / "images")
    assert outcome.code == 0, outcome.err
    assert "left out 16 images that calibrated the family" in outcome.err
    manifest = read_family(here / "family")
    _, held_out = calibration_and_held_out(str(made / "images"), 16, 0, 500)
    images = prepare(held_out, manifest.preprocessing)
    for variant in manifest.variants:
        with OrtSession(here / "family" / variant.file, 1) as session:
            guesses = session.run(next(images.batches(HELD_OUT))).argmax(1)
        assert variant.evaluation.images == HELD_OUT
        assert variant.evaluation.top1 == pytest.approx((guesses == images.labels).mean())
    dense, cut = manifest.variant("dense").evaluation, manifest.variant("s50").evaluation
    assert (dense.agreement, dense.cosine) == (1, pytest.approx(1))
    assert 0 < cut.cosine < 1
    assert cut.standard_errors["cosine"] > 0
    for words in ("variant", "top-1", "agrees", "dominated by", "s50"):
        assert words in outcome.out


def test_images_are_decoded_once_and_files_run_once(snapvit, here, monkeypatch):
    opened: list[Path] = []
    ran: list[tuple[str, int]] = []
    open_image, features = folder_source.open_image, module.open_exported

    def counting(path):
        opened.append(path)
        return open_image(path)

    class Counted:
        def __init__(self, *given):
            self.context, self.name = features(*given), given[0].stem

        def __enter__(self):
            artefact = self.context.__enter__()
            run = artefact.session.run
            monkeypatch.setattr(artefact.session, "run", lambda x: (ran.append((self.name, len(x))), run(x))[1])
            return artefact

        def __exit__(self, *error):
            return self.context.__exit__(*error)

    monkeypatch.setattr(folder_source, "open_image", counting)
    monkeypatch.setattr(module, "open_exported", Counted)
    outcome = snapvit("validate", here / "family", "--data", here / "split", "--by", "head,knn,linear")
    assert outcome.code == 0, outcome.err
    assert len(opened) == len(set(opened)) == 40
    for name in ("dense", "s30", "s50"):
        assert sum(count for variant, count in ran if variant == name) == 40
    found = read_family(here / "family").variant("s30").evaluation
    assert {"top1", "knn", "linear", "agreement", "cosine"} <= set(found.measures)
    assert found.images == 10


def test_latencies_of_the_manifest_are_used_or_taken_anew(snapvit, here):
    family = here / "family"
    before = {v.name: v.profile for v in read_family(family).variants}
    outcome = snapvit("validate", family, "--data", here / "split", "--by", "head")
    assert "latencies are those of the manifest" in outcome.err
    assert {v.name: v.profile for v in read_family(family).variants} == before
    outcome = snapvit("validate", family, "--data", here / "split", "--by", "head", "--measure", "--seconds", 0.1)
    assert outcome.code == 0, outcome.err
    assert all(v.profile != before[v.name] for v in read_family(family).variants)
    assert snapvit("profile", family, "--out", here / "p.json", "--seconds", 0.1).code == 0
    given = FamilyProfile.load(here / "p.json")
    outcome = snapvit("validate", family, "--data", here / "split", "--by", "head", "--profile", here / "p.json")
    assert outcome.code == 0, outcome.err
    assert {v.name: v.profile for v in read_family(family).variants} == given.profiles


def test_latencies_of_another_file_are_refused(snapvit, here):
    family = here / "family"
    assert snapvit("profile", family, "--out", here / "p.json", "--seconds", 0.1).code == 0
    known = json.loads((here / "p.json").read_text())
    known["profiles"]["s30"]["sha256"] = "0" * 64
    (here / "p.json").write_text(json.dumps(known))
    outcome = snapvit("validate", family, "--data", here / "split", "--profile", here / "p.json")
    assert outcome.code == 1
    assert "latencies of s30 are missing or of another file" in outcome.error_line


def test_what_is_dominated_is_flagged_by_the_latencies_that_are_shown(snapvit, here):
    assert snapvit("validate", here / "family", "--data", here / "split").code == 0
    manifest = read_family(here / "family")
    points = {v.name: Tradeoff(manifest.latency(v.name)[0], v.evaluation.top1) for v in manifest.variants}
    wanted = dominated(points)
    assert {v.name: v.dominated_by for v in manifest.variants} == {name: wanted.get(name) for name in points}


def test_a_variant_below_the_least_accuracy_exits_with_1(snapvit, here):
    outcome = snapvit("validate", here / "family", "--data", here / "split", "--min-accuracy", "100%")
    assert outcome.code == 1
    assert "below 100 %: " in outcome.error_line
    assert "Cut less, or lower --min-accuracy" in outcome.error_line
    assert read_family(here / "family").variant("s50").evaluation is not None  # it is written all the same
    assert snapvit("validate", here / "family", "--data", here / "split", "--min-accuracy", "0").code == 0


def test_files_that_were_not_corrected_are_compared_with_torch(snapvit, here):
    family = here / "family"
    manifest = read_family(family)
    blank = tuple(msgspec.structs.replace(v, parity=None) for v in manifest.variants)
    write_manifest(family, msgspec.structs.replace(manifest, variants=blank))
    assert snapvit("validate", family, "--data", here / "split", "--model", here / "model").code == 0
    assert all(0 < v.parity < 1e-4 for v in read_family(family).variants)


def test_another_model_is_not_compared_with(snapvit, here):
    model = load_model(str(here / "model"))
    model.module.head.weight.data += 0.1
    from snapvit_export.prune.models.load import save_model

    save_model(model.module, model.description, here / "other")
    outcome = snapvit("validate", here / "family", "--data", here / "split", "--model", here / "other")
    assert outcome.code == 1
    assert "made from other weights" in outcome.error_line


def test_images_without_labels_tell_how_alike_the_variants_are(snapvit, here):
    flat = here / "flat"
    flat.mkdir()
    for i, path in enumerate(sorted((here / "split").rglob("*.png"))):
        shutil.copy(path, flat / f"{i}.png")
    outcome = snapvit("validate", here / "family", "--data", flat)
    assert outcome.code == 0, outcome.err
    found = read_family(here / "family").variant("s30").evaluation
    assert set(found.measures) == {"agreement", "cosine"}
    assert found.images == 40


def test_some_images_are_left_to_look_at(snapvit, here):
    assert snapvit("validate", here / "family", "--data", here / "split").code == 0
    left = Validation.load(here / "family")
    assert left.images == 10
    assert 0 < len(left.samples) <= 12
    for sample in left.samples:
        assert sample.label.startswith("class")
        assert set(sample.predictions) == {"dense", "s30", "s50"}
        assert sample.title.endswith(".png")
    outcome = snapvit("report", here / "family", "--quiet")
    assert outcome.code == 0, outcome.err
    assert left.samples[0].picture in (here / "family" / "report.html").read_text()


def test_it_runs_without_torch_and_in_another_runtime(here):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'snapvit-export[openvino]'")
    command = ["validate", here / "family", "--data", here / "split", "--runtime", "openvino", "--seconds", "0.1"]
    script = (
        "import sys\n"
        "class Absent:\n"  # not None in sys.modules: scipy looks for torch there
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'timm'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['snapvit', *{[str(word) for word in command]!r}]\n"
        "from snapvit_export.cli.app import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    manifest = read_family(here / "family")
    assert manifest.target.runtime == "openvino"
    assert manifest.variant("s30").evaluation.top1 is not None


def test_what_is_stopped_leaves_the_family_as_it_was_and_goes_on(snapvit, here, monkeypatch):
    before = {path.name: path.read_bytes() for path in (here / "family").iterdir()}

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_latencies", stop)
        assert snapvit("validate", here / "family", "--data", here / "split").code == 130
    left = {path.name: path.read_bytes() for path in (here / "family").iterdir()}
    assert {name: data for name, data in left.items() if not name.startswith(".validation-")} == before
    outcome = snapvit("validate", here / "family", "--data", here / "split")  # goes on with what was kept
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("features are reused from") == 3
    assert "running dense" not in outcome.err
    assert not list((here / "family").glob(".validation-*"))


def test_a_family_that_was_exported_anew_meanwhile_is_not_written(snapvit, here, monkeypatch):
    family, plain = here / "family", module._latencies
    text = (family / "manifest.json").read_text().replace('"command": null', '"command": "another"')

    def meanwhile(*given):
        (family / "manifest.json").write_text(text)
        return plain(*given)

    monkeypatch.setattr(module, "_latencies", meanwhile)
    outcome = snapvit("validate", family, "--data", here / "split")
    assert outcome.code == 1
    assert "manifest.json: somebody else wrote it meanwhile" in outcome.error_line
    assert (family / "manifest.json").read_text() == text
    assert not (family / "validation.json").exists()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--by", "segment"], 2, "validate reads no patch tokens. Segment one model or file"),
        (["--by", "luck"], 2, "--by 'luck' is not a metric"),
        (["--min-accuracy", "70"], 2, "--min-accuracy '70' is not between 0 and 1"),
        (["--min-accuracy", "high"], 2, "--min-accuracy 'high' is not a number"),
        (["--data", "/nowhere"], 1, "/nowhere: no such image folder"),
        (["--profile", "/nowhere.json"], 1, "/nowhere.json: cannot be read"),
        (["--runtime", "abacus"], 2, "no runtime is called 'abacus'"),
        ([], 2, "needs images to be evaluated on. Give --data FOLDER"),
    ],
)
def test_bad_input_is_one_line(snapvit, here, options, code, says):
    outcome = snapvit("validate", here / "family", *options)
    assert outcome.code == code
    assert says in outcome.error_line


def test_the_bundled_model_is_known_by_its_name():
    assert load_model().name == BUNDLED_NAME
