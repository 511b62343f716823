"""Families for OpenVINO through the commands: exported, chosen from and timed, in fp32 and in int8."""

import json

import pytest

from helpers.models import make_model_folder
from snapvit_export.family.folder import read_family

pytest.importorskip("openvino", reason="needs OpenVINO: pip install 'snapvit-export[openvino]'")
pytest.importorskip("nncf", reason="needs NNCF: pip install 'snapvit-export[openvino]'")


pytestmark = pytest.mark.usefixtures("short_timings")  # what is chosen does not matter here


@pytest.mark.slow  # in int8, NNCF takes seconds for each of four nets
@pytest.mark.parametrize(("precision", "suffix"), [("fp32", ".onnx"), ("int8", ".xml")])
def test_a_family_for_openvino_is_exported_chosen_from_and_timed(
    snapvit, tiny_folder, image_folder, tmp_path, precision, suffix
):
    out = tmp_path / "family"
    words = ["export", "--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", out]
    words += ["--runtime", "openvino", "--precision", precision, "--sparsity", "0.4"]
    outcome = snapvit(*words)
    assert outcome.code == 0, outcome.err
    manifest = read_family(out)
    assert manifest.target.runtime == "openvino"
    assert {variant.file for variant in manifest.variants} == {f"dense{suffix}", f"s40{suffix}"}
    assert all(variant.profile.p50_ms > 0 for variant in manifest.variants)
    if precision == "int8":
        assert all(variant.precision_cosine > 0.9 for variant in manifest.variants)
        assert all(variant.weights == (f"{variant.name}.bin",) for variant in manifest.variants)
    chosen = snapvit("choose", out, "--budget", "1000ms")
    assert chosen.code == 0, chosen.err
    assert read_family(out).choice.variant == "dense"
    beside = "its answers where it was exported" if precision == "int8" else "its graph in ONNX Runtime"
    assert f"Compared with {beside}: least cosine" in chosen.out
    timed = snapvit("profile", out, "--seconds", 0.1, "--out", tmp_path / "p.json", "--json")
    assert json.loads(timed.out)["target"]["runtime"] == "openvino"
    other = snapvit("choose", out, "--budget", "1000ms", "--runtime", "onnxruntime")
    assert (other.code, "made for OpenVINO" in other.err) == ((2, True) if precision == "int8" else (0, False))
    assert snapvit(*words).code == 0  # an own folder is replaced


@pytest.mark.slow  # NNCF takes seconds for each of some six nets
def test_a_budget_in_int8_is_met_without_a_latency_model(snapvit, image_folder, tmp_path):
    out = tmp_path / "family"
    shape = dict(img_size=128, patch_size=8, embed_dim=96, depth=3, num_heads=6, num_classes=5)  # most of it can be cut
    model = make_model_folder(tmp_path / "model", shape)
    words = ["export", "--model", model, "--data", image_folder, "--images", 16, "--out", out]
    outcome = snapvit(*words, "--runtime", "openvino", "--precision", "int8", "--budget", "85%", "--static-batch",
                      "--levers", "width,depth")  # fmt: skip
    assert outcome.code == 0, outcome.err
    manifest = read_family(out)
    assert manifest.choice.model is None
    assert manifest.input.batch == 1
    assert manifest.choice.variant.startswith(("t", "smallest"))  # FLOPs stand for latency
    assert manifest.variant(manifest.choice.variant).file.endswith(".xml")
    assert "Compared with the fp32 graph that it was made of, in ONNX Runtime: least cosine" in outcome.out
    assert "Compared with its graph" not in outcome.out


def test_what_int8_for_openvino_cannot_be_is_refused(snapvit, tmp_path):
    words = ["export", "--runtime", "openvino", "--precision", "int8", "--sparsity", "0.3", "--out", tmp_path / "out"]
    for option in (["--single-file"], ["--flavour", "ort"]):
        outcome = snapvit(*words, *option)
        assert (outcome.code, "written in its own format" in outcome.error_line) == (2, True)


def test_a_family_for_onnx_runtime_is_timed_in_openvino_too(snapvit, tiny_folder, image_folder, tmp_path):
    out = tmp_path / "family"
    words = ["export", "--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", out]
    assert snapvit(*words, "--sparsity", "0.4", "--flavour", "portable").code == 0
    outcome = snapvit("choose", out, "--budget", "1000ms", "--runtime", "openvino")
    assert outcome.code == 0, outcome.err
    assert read_family(out).target.runtime == "openvino"
