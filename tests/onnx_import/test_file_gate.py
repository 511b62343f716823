"""The gate between a foreign file and our graph of it."""

import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

from helpers.onnx_files import images_for
from snapvit_export.errors import GateFailed
from snapvit_export.onnx_import.gate import original_outputs, require_same_as_original
from snapvit_export.onnx_import.recognise import recognise


def changed(found, name: str, factor: float = 1.01):
    return replace(found, dense={**found.dense, name: found.dense[name] * np.float32(factor)})


@pytest.mark.parametrize(
    "exporter", ["traced, eager", "traced, opset 11, batch of 3", "ORT extended", "weights outside"]
)
@pytest.mark.parametrize("block", [0, 2])
def test_a_difference_names_both_files_the_first_block_and_the_number(exporter, block, exported):
    path = exported("DeiT", exporter)
    found = recognise(path)
    wrong = changed(found, f"blocks.{block}.fc1.weight")
    with pytest.raises(GateFailed) as caught:
        require_same_as_original(wrong, path, images_for(found.anatomy))
    pattern = (
        rf"{re.escape(str(path))} and dense\.onnx, our graph of it: outputs differ by \d\.\d\de-0\d of the largest "
        rf"value \(allowed 0\.0001\); the first block that differs is {block}, by \d\.\d\de-0\d of its largest value"
    )
    assert re.fullmatch(pattern, str(caught.value)), caught.value
    assert sorted(each.name for each in path.parent.iterdir() if each.name.startswith(".")) == []


def test_a_file_in_fp16_is_held_to_the_cosine_of_fp16(exported):
    path = exported("DeiT", "fp16")
    found = recognise(path)
    assert found.is_half
    assert require_same_as_original(found, path, images_for(found.anatomy)).cosine > 0.9999
    with pytest.raises(GateFailed, match=r"the cosine of outputs is 0\.\d+ \(at least 0\.9999 is asked in fp16\); the"):
        require_same_as_original(changed(found, "blocks.1.fc1.weight", 1.3), path, images_for(found.anatomy))


def test_weights_in_fp16_that_are_cast_to_fp32_are_held_to_fp32(exported, tmp_path):
    """Only what computes in fp16 gets its tolerance."""
    model = onnx.load(exported("DeiT", "traced, eager"))
    casts = []
    for tensor in list(model.graph.initializer):
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.ndim == 2:
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float16), f"{name}.half"))
            casts.append(onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=onnx.TensorProto.FLOAT))
    for cast in reversed(casts):
        model.graph.node.insert(0, cast)
    path = tmp_path / "x.onnx"
    onnx.save(model, path)
    found = recognise(path)
    assert casts
    assert not found.is_half
    assert require_same_as_original(found, path, images_for(found.anatomy)).max_abs < 2e-6


def test_a_fixed_batch_takes_any_number_of_images(exported):
    path = exported("DeiT", "traced, opset 11, batch of 3")
    found = recognise(path)
    for count in (1, 3, 5):
        images = images_for(found.anatomy, count)
        assert original_outputs(found, path, images).shape == (count, 7)
        require_same_as_original(found, path, images)


def test_values_that_are_not_finite_are_not_equal(exported):
    path = exported("DeiT", "traced, eager")
    found = recognise(path)
    images = images_for(found.anatomy)
    images[0, 0, 0, 0] = np.nan
    with pytest.raises(GateFailed, match="gives values that are not finite numbers"):
        require_same_as_original(found, path, images)
