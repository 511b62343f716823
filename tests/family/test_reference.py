"""The reference of a family: real images and the answers to them, small, hashed, and checked on reading."""

import json
import shutil

import numpy as np
import pytest

from helpers.families import make_family
from helpers.images import make_image_folder
from helpers.models import TINY, make_model_folder
from snapvit_export.checks.comparison import compare, to_dense
from snapvit_export.errors import FileFormatError
from snapvit_export.family.folder import own_files, read_family
from snapvit_export.family.reference import as_inputs
from snapvit_export.runtimes import jetson_agent
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.target import Target
from snapvit_export.workflows.export import Request


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A family in int8, with a variant of smaller images and one that merges tokens."""
    folder = tmp_path_factory.mktemp("made")
    precision = dict(target=precise("int8-dynamic"))
    return make_family(
        folder, correct=False, head=30.0, resolution=[32, 16], tokens=[1.0, 0.5], reference=True, **precision
    )


def precise(precision):
    return Target(runtime="onnxruntime", precision=precision, batch=1, threads=1)


@pytest.fixture
def family(made, tmp_path):
    return shutil.copytree(made, tmp_path / "family")


def change(family, edit) -> None:
    manifest = json.loads((family / "manifest.json").read_text())
    edit(manifest)
    (family / "manifest.json").write_text(json.dumps(manifest))


def test_every_variant_has_the_answers_of_its_own_graph_to_images_of_its_size(made):
    manifest = read_family(made)
    reference = manifest.reference
    assert (reference.images, reference.kind, reference.outputs) == (8, "scores", 5)
    assert set(reference.answers) == {variant.name for variant in manifest.variants}
    assert {of.image_size for of in reference.pixels} == {(32, 32), (16, 16)}
    for variant in manifest.variants:
        size = variant.image_of(manifest.anatomy)
        inputs = as_inputs(reference.pixels_at(made, size), manifest.preprocessing_of(variant), as_bytes=False)
        with OrtSession(made / variant.file, 1) as session:
            found = np.concatenate([session.run(image[None]) for image in inputs])  # as it will be run
        np.testing.assert_allclose(reference.answers_of(made, variant.name), found, rtol=1e-5, atol=1e-5)
    dense, own = reference.dense_answers(made), reference.answers_of(made, "dense")
    assert reference.dense.file == "reference.fp32"
    assert 0.9 < to_dense(dense, own, scores=True) < 1 - 1e-9  # in fp32, not in int8


def test_images_are_those_of_the_data(made):
    reference = read_family(made).reference
    pixels = reference.pixels_at(made, (32, 32))
    assert reference.source.endswith("images")
    assert len({image.tobytes() for image in pixels}) == 8
    other = reference.pixels_at(made, (24, 24))  # which no variant takes: resized
    assert other.shape == (8, 24, 24, 3)


def test_a_reference_is_small_and_belongs_to_the_family(made):
    manifest = read_family(made)
    files = {each.file for each in manifest.reference.files}
    assert files <= set(own_files(made))
    assert sum((made / name).stat().st_size for name in files) == 8 * (32 * 32 + 16 * 16) * 3 + 160 * (
        len(manifest.variants) + 1
    )


def test_a_family_in_fp32_has_the_dense_answers_once(tmp_path):
    family = make_family(tmp_path, correct=False, sparsity=[0.3], reference=True)
    reference = read_family(family).reference
    assert reference.dense == reference.answers["dense"]
    assert not (family / "reference.fp32").exists()


def test_what_does_not_belong_together_is_refused(family):
    whole = json.loads((family / "manifest.json").read_text())["reference"]
    name = next(name for name in whole["answers"] if name != "dense")
    for edit, says in (
        (lambda r: r.update(images=9), "has not the bytes of 9 images"),
        (lambda r: r["answers"].update(other=r["answers"]["dense"]), "no variant is called other"),
        (lambda r: r["pixels"].pop(0), "there are no reference images in the size of"),
        (lambda r: r["pixels"].append(r["pixels"][0]), "listed twice"),
        (lambda r: r["answers"][name].update(undecided=[8]), "names an image that is not there"),
        (lambda r: r["answers"][name].update(file="weights.bin"), "is both a reference and something else"),
        (lambda r: r["answers"][name].update(file="../x"), "does not begin with a dot"),
        (lambda r: r.update(more=1), "unknown field"),
    ):
        changed = json.loads(json.dumps(whole))
        edit(changed)
        change(family, lambda manifest, changed=changed: manifest.update(reference=changed))
        with pytest.raises(FileFormatError, match=says):
            read_family(family)


def test_a_damaged_file_is_refused_and_an_older_family_still_loads(family):
    path = family / "dense.answers"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4] + b"xxxx")
    with pytest.raises(FileFormatError, match="dense.answers: damaged"):
        read_family(family)
    path.unlink()
    with pytest.raises(FileFormatError, match="dense.answers: missing"):
        read_family(family)
    change(family, lambda manifest: manifest.pop("reference"))
    assert read_family(family).reference is None


def test_images_whose_merges_rounding_decides_are_told(made):
    manifest = read_family(made)
    merging = [variant for variant in manifest.variants if len(set(manifest.tokens_of(variant))) > 1]
    assert merging
    for variant in manifest.variants:
        told = manifest.reference.undecided(variant.name)
        assert told.shape == (8,)
        assert variant in merging or not told.any()


def test_arrays_are_compared_as_the_agent_compares():
    random = np.random.default_rng(0)
    wanted = random.normal(size=(8, 20)).astype(np.float32)
    found = wanted + random.normal(0, 0.05, wanted.shape).astype(np.float32)
    told = compare(wanted, found, "fp16", scores=True)
    plain = jetson_agent.compare(wanted.tolist(), found.tolist(), True, 0.9995)
    assert told.passed is plain["passed"] is False
    assert told.least_cosine == pytest.approx(plain["least_cosine"])
    assert compare(wanted, found, "int8-static", scores=True).passed
    assert (
        compare(wanted, wanted * np.nan, "fp16", scores=True).told == "its answers to 8 images are not finite numbers"
    )


def test_a_new_export_replaces_the_reference_of_the_one_before(tmp_path):
    family = make_family(tmp_path, correct=False, sparsity=[0.3], resolution=[16], reference=True)
    before = {each.file for each in read_family(family).reference.files}
    assert "reference-16x16.rgb" in before
    make_family(tmp_path, correct=False, sparsity=[0.6], reference=True)
    assert not (family / "reference-16x16.rgb").exists()
    assert (family / "reference-32x32.rgb").exists()
    make_family(tmp_path, correct=False, sparsity=[0.6])  # timed here in ONNX Runtime, which nothing is compared with
    assert read_family(family).reference is None
    assert not [*family.glob("*.rgb"), *family.glob("*.answers")]


@pytest.mark.parametrize(
    ("runtime", "asked", "written"),
    [
        ("onnxruntime", {}, False),
        ("onnxruntime", {"elsewhere": True}, True),
        ("onnxruntime", {"reference": True}, True),
        ("openvino", {}, True),
        ("openvino", {"reference": False}, False),
        ("onnxruntime-cuda", {}, True),
        ("tensorrt", {"build_only": True}, True),
        ("tensorrt", {"build_only": True, "reference": False}, False),
    ],
)
def test_images_go_into_the_folder_only_where_answers_are_compared_later(runtime, asked, written):
    request = Request(target=Target(runtime=runtime, precision="fp32", batch=1, threads=1), **asked)
    assert request.writes_reference is written


def test_an_export_says_how_many_images_lie_in_the_folder(snapvit, short_timings, tmp_path):
    make_model_folder(tmp_path / "model", TINY, 1.0)
    make_image_folder(tmp_path / "images")
    words = ("export", "--model", tmp_path / "model", "--data", tmp_path / "images", "--images", "16")
    words += ("--sparsity", "0.3", "--recipe", "local", "--runtime", "openvino", "--precision", "fp32")
    outcome = snapvit(*words, "--out", tmp_path / "with")
    assert outcome.code == 0, outcome.err
    assert "It holds 8 of the images, to compare answers with; --no-reference leaves them out" in outcome.out
    assert list((tmp_path / "with").glob("*.rgb"))
    outcome = snapvit(*words, "--no-reference", "--out", tmp_path / "without")
    assert outcome.code == 0, outcome.err
    assert "of the images" not in outcome.out
    assert read_family(tmp_path / "without").reference is None
    assert not [*(tmp_path / "without").glob("*.rgb"), *(tmp_path / "without").glob("*.answers")]
