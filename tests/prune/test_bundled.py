"""The bundled model: small, good, and the whole way works with it and nothing else."""

import json
from importlib import resources
from pathlib import Path

import pytest
from torch_export import to_onnx

from snapvit_export.calibration.digits import digit_source
from snapvit_export.calibration.images import prepare
from snapvit_export.evaluate.exported_model import top1
from snapvit_export.family.folder import read_family
from snapvit_export.prune.models.load import load_model
from snapvit_export.runtimes.ort import OrtSession
from snapvit_export.selection import decide
from snapvit_export.workflows import prepared

FOLDER = Path(str(resources.files("snapvit_export.bundled")))


def test_it_is_small_and_in_half_precision():
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size < 8_000_000
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert {entry["dtype"] for entry in header.values()} == {"F16"}


@pytest.mark.slow  # 500 images of 112 pixels through the dense model
def test_it_is_at_least_95_percent_right_on_digits_it_has_never_seen():
    model = load_model()
    images = prepare(digit_source("held-out"), model.preprocessing)
    with OrtSession(to_onnx(model.module, model.anatomy, {}), threads=2) as session:
        evaluation = top1(session.run, images)
    assert evaluation.images == 500
    assert evaluation.top1 >= 0.95


@pytest.mark.slow  # a search for a budget with a model large enough to time: some eight variants are built and timed
def test_the_whole_way_with_the_bundled_model(snapvit, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "MOST_REPORTED", 100)  # of 500: every finalist is compared on all of them
    monkeypatch.setattr(decide, "MOST_RUNS", 3)  # it may say that it is in doubt
    outcome = snapvit("export", "--budget", "50%", "--images", "32", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    manifest = read_family(tmp_path / "out")
    chosen = manifest.variant(manifest.choice.variant)
    dense = manifest.variant("dense")
    assert dense.evaluation.images == 100
    assert chosen.flops < dense.flops or chosen.precision != "fp32"
    assert dense.evaluation.top1 >= 0.95
    assert chosen.evaluation.top1 >= 0.6  # far above the 10 % of guessing
    assert chosen.profile.p50_ms < dense.profile.p50_ms
    assert chosen.fidelity.images == 100
    decided = next(each for each in manifest.choice.measurements if each.variant == chosen.name)
    assert f"{decided.verdict}, chosen" in outcome.out  # the one that decided
    assert decided.verdict == "fits" or manifest.choice.doubt is not None  # three runs beside other tests may not tell
