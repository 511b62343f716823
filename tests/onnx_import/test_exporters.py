"""Every exporter's file of every family is recognised, and our graph of it gives the outputs of the file."""

import subprocess
import sys
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest

from helpers.models import as_model
from helpers.onnx_files import (
    FAMILIES,
    FROM_FILE,
    FROM_MODULE,
    PARTS,
    TRACED_EAGER_ONLY,
    images_for,
    in_file_order,
    module_of,
)
from snapvit_export.model.tensor_names import stored_shapes
from snapvit_export.onnx_import.gate import require_same_as_original
from snapvit_export.onnx_import.recognise import recognise
from snapvit_export.prune.models.read_anatomy import read_anatomy
from snapvit_export.prune.pack import blueprint

FOLDED = ("ours, portable", "ours, ort")  # biases and LayerScale are in other tensors there
QUICK = [name for name in (*FROM_MODULE, *FROM_FILE) if not name.startswith("captured")]


def every_file() -> list:
    pairs = [(name, exporter) for name in FAMILIES for exporter in QUICK]
    pairs += [(name, exporter) for name in PARTS for exporter in ("traced, eager", *FOLDED)]
    pairs = [(n, e) for n, e in pairs if not (n in TRACED_EAGER_ONLY and e == "traced, SDPA")]
    return [pytest.param(*pair, marks=without_onnxsim(pair[1])) for pair in pairs]


def without_onnxsim(exporter: str):
    missing = exporter == "onnxsim" and find_spec("onnxsim") is None
    return [pytest.mark.skip(reason="onnxsim, of Python 3.11, is not installed")] if missing else []


def anatomy_of(name: str):
    """What timm's module is. Of pooled tokens a file does not tell registers from a class token."""
    return read_anatomy(module_of(name), name)


@pytest.mark.parametrize(("name", "exporter"), every_file())
def test_a_file_is_recognised_and_its_graph_equals_it(name, exporter, exported):
    path = exported(name, exporter)
    found = recognise(path)
    assert {name: tensor.shape for name, tensor in found.dense.items()} == stored_shapes(found.anatomy)
    assert all(tensor.dtype == np.float32 for tensor in found.dense.values())
    result = require_same_as_original(found, path, images_for(found.anatomy))
    assert result.max_abs < (2e-3 if found.is_half else 2e-6)
    assert found.is_half == exporter.startswith("fp16")
    wanted = anatomy_of(name)
    if exporter not in FOLDED:
        assert found.anatomy == wanted
    else:
        assert found.anatomy.same_structures(wanted)
        assert not any(block.layer_scale for block in found.anatomy.blocks)


@pytest.mark.parametrize("name", [*FAMILIES, *PARTS])
def test_tensors_are_those_of_the_module(name, exported):
    module = module_of(name)
    model = as_model(module, name, {})
    wanted = blueprint(model, in_file_order(model.anatomy))
    found = recognise(exported(name, "traced, eager"))
    assert list(found.dense) == list(wanted.dense)
    query = ("pool.latent", "pool.q.weight", "pool.q.bias")  # one constant in the file, which these three make again
    for tensor in set(wanted.dense) - set(query):
        np.testing.assert_allclose(found.dense[tensor], wanted.dense[tensor], rtol=2e-6, atol=1e-6, err_msg=tensor)
    assert found.wiring == msgspec.structs.replace(wanted.wiring)


def captured_files() -> list:
    """Four families at both opsets; half of them takes long enough."""
    pairs = [
        (name, f"captured, opset {opset}") for opset in (18, 23) for name in ("DeiT", "DINOv2", "SigLIP", "DINOv3")
    ]
    quick = (("DeiT", "captured, opset 18"), ("SigLIP", "captured, opset 23"), ("DINOv3", "captured, opset 18"))
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(("name", "exporter"), captured_files())
def test_a_captured_file_is_recognised_and_its_graph_equals_it(name, exporter, exported):
    pytest.importorskip("onnxscript", reason="torch needs onnxscript to capture a model")
    path = exported(name, exporter)
    found = recognise(path)
    assert found.anatomy == anatomy_of(name)
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6


def test_input_output_and_batch_are_named(exported):
    found = recognise(exported("DeiT", "traced, eager"))
    assert (found.input_name, found.output_name, found.batch, found.dtype) == ("pixels", "scores", None, np.float32)
    fixed = recognise(exported("DeiT", "traced, opset 11, batch of 3"))
    assert fixed.batch == 3
    assert fixed.notes == ("the file takes a batch of 3 alone; exported variants take any",)
    assert recognise(exported("DeiT", "fp16")).dtype == np.float16
    assert recognise(exported("DeiT", "fp16 inside")).dtype == np.float32


def test_what_a_file_of_ours_says_of_itself_is_kept(exported):
    found = recognise(exported("DeiT", "ours, ort"))
    assert found.metadata["snapvit.model"] == "ours"
    assert "snapvit.preprocessing" in found.metadata


def test_recognition_and_gate_need_no_torch(exported):
    """On a machine that has none of the packages that the model was made with."""
    path = exported("DINOv3", "traced, eager")
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("torch", "timm", "torchvision", "transformers", "onnxscript", "onnxsim")))
import numpy as np
from snapvit_export.onnx_import.gate import require_same_as_original
from snapvit_export.onnx_import.recognise import recognise
found = recognise({str(path)!r})
images = np.random.default_rng(0).standard_normal((2, 3, *found.anatomy.image)).astype(np.float32)
print(require_same_as_original(found, {str(path)!r}, images).max_abs < 1e-5)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "True", result.stderr
