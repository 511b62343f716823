"""Two hundred damaged files: each is refused in one line, or still the model that it says."""

import random
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers.onnx_files import images_for
from snapvit_export.errors import SnapvitError
from snapvit_export.onnx_import.gate import require_same_as_original
from snapvit_export.onnx_import.recognise import recognise

SEEDS, BATCHES = 200, 4
SOURCES = [("DeiT", "traced, SDPA"), ("DINOv3", "traced, eager"), ("SigLIP", "ORT extended"), ("DeiT", "ours, ort")]
NUMBERS = (-(1 << 62), -1, 0, 1, 2, 7, 1 << 20, 1 << 40)
OPERATORS = ("Add", "Mul", "Reshape", "Softmax", "Foo", "Gather", "MatMul", "Transpose", "Concat", "If", "Conv")


def damaged_bytes(data: bytearray, rng: random.Random) -> bytes:
    """Some bytes changed anywhere, or where names are, or the end cut off."""
    kind = rng.randrange(3)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    names = [i for i in range(len(data) - 1) if kind == 1 and data[i : i + 2] in (b"/b", b"bl", b"Ma", b"at")]
    for _ in range(rng.randrange(1, 12)):
        place = rng.choice(names) + rng.randrange(-6, 12) if names else rng.randrange(len(data))
        data[place % len(data)] = rng.randrange(256)
    return bytes(data)


def damaged_graph(data: bytearray, rng: random.Random) -> bytes:
    """A graph with a node, a tensor or the input changed, that is still a message of protobuf."""
    model = onnx.load_model_from_string(bytes(data))
    graph = model.graph
    node, tensor = rng.choice(graph.node), rng.choice(graph.initializer)
    names = [name for each in graph.node for name in each.output]
    constants = [each for each in graph.node if each.op_type == "Constant"]
    kind = rng.randrange(11)
    if kind == 0:
        graph.node.remove(node)
    elif kind == 1:
        node.input[:] = [rng.choice(names) for _ in node.input]
    elif kind == 2:
        node.op_type = rng.choice(OPERATORS)
    elif kind == 3:
        for attribute in node.attribute:
            attribute.i = rng.choice(NUMBERS)
            attribute.ints[:] = [rng.choice(NUMBERS) for _ in attribute.ints]
    elif kind == 4 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif kind == 5:
        graph.initializer.remove(tensor)
    elif kind == 6:
        tensor.data_type = rng.choice((0, 1, 2, 6, 7, 9, 10, 11, 16, 17, 22, 99))
    elif kind == 7:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 8 and constants:
        value = rng.choice(constants).attribute[0].t
        array = onnx.numpy_helper.to_array(value)
        if array.dtype == np.int64:
            value.CopyFrom(onnx.numpy_helper.from_array(np.full_like(array, rng.choice(NUMBERS))))
    elif kind == 9:
        node.output[0] = rng.choice(names)
    else:
        dims = graph.input[0].type.tensor_type.shape.dim
        dims[rng.randrange(len(dims))].dim_value = rng.choice(NUMBERS)
    return model.SerializeToString()


def outcome(path: Path) -> str:
    """What becomes of a file; anything but a line for the user is let through."""
    try:
        found = recognise(path)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            require_same_as_original(found, path, images_for(found.anatomy, found.batch or 2))
    except SnapvitError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 700
        return type(error).__name__
    return "the same model"


@pytest.mark.parametrize("part", range(BATCHES))
def test_a_damaged_file_is_refused_in_one_line_or_is_still_the_model(part, exported, tmp_path):
    each = SEEDS // BATCHES
    found = Counter()
    for seed in range(part * each, (part + 1) * each):
        rng = random.Random(seed)
        data = bytearray(exported(*rng.choice(SOURCES)).read_bytes())
        path = tmp_path / f"{seed}.onnx"
        path.write_bytes((damaged_graph if seed % 2 else damaged_bytes)(data, rng))
        found[outcome(path)] += 1
    assert found.total() == each
    assert found["FileFormatError"]
    assert found["ModelNotUnderstood"]
    assert found["the same model"] < each / 2
