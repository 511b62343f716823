"""DeiT-Tiny's real weights by every exporter: the same anatomy, and the same top answer on real images."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from helpers.onnx_files import FROM_FILE, FROM_MODULE
from snapvit_export.calibration.images import calibration_and_held_out, prepare
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import Blueprint, GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.onnx_import.gate import original_outputs, require_same_as_original
from snapvit_export.onnx_import.recognise import recognise
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.runtimes.ort import OrtSession

TAKES_LONG = [pytest.mark.slow]  # torch captures a model in ten seconds and more


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("deit")


@pytest.fixture
def deit(shared) -> Model:
    return load_model("deit_tiny_patch16_224", shared / "data" / "deit_tiny_patch16_224.safetensors")


def exported_by(exporter: str, model: Model, folder: Path) -> Path:
    path = folder / exporter.replace(" ", "_").replace(",", "") / "deit.onnx"
    if not path.exists():
        path.parent.mkdir()
        if exporter in FROM_MODULE:
            FROM_MODULE[exporter](model.module, path)
        else:
            FROM_FILE[exporter](exported_by("traced, eager", model, folder), path)
    return path


def exporters() -> list:
    without = [
        pytest.mark.skipif(find_spec("onnxsim") is None, reason="onnxsim is not installed: it needs Python 3.11")
    ]
    marks = {"onnxsim": without, "captured, opset 18": TAKES_LONG, "captured, opset 23": TAKES_LONG}
    return [pytest.param(name, marks=marks.get(name, [])) for name in (*FROM_MODULE, *FROM_FILE)]


@pytest.mark.parametrize("exporter", exporters())
def test_the_real_model_is_recognised_with_the_same_answers(exporter, deit, files, shared, tmp_path):
    path = exported_by(exporter, deit, files)
    found = recognise(path)
    if exporter.startswith("ours"):
        assert found.anatomy.same_structures(deit.anatomy)
    else:
        assert found.anatomy == deit.anatomy
        assert found.anatomy.params() == sum(parameter.numel() for parameter in deit.module.parameters())
    seen, _ = calibration_and_held_out(str(shared / "data" / "imagenet-sample"), 16, 0, 8)
    images = next(prepare(seen, deit.preprocessing).batches(16))
    require_same_as_original(found, path, images)
    answers = emitted_outputs(found, deit.preprocessing, tmp_path, images).argmax(1)
    np.testing.assert_array_equal(answers, original_outputs(found, path, images).argmax(1))


def emitted_outputs(found, preprocessing: Preprocessing, folder: Path, images: np.ndarray) -> np.ndarray:
    drawn = Blueprint("deit", found.anatomy, found.wiring, preprocessing, (), found.dense)
    graph = GraphWriter(drawn, folder).write("dense", Plan.dense(found.anatomy), format=GraphFormat("ort")).graph
    with OrtSession(graph, 1) as session:
        return session.run(images)
