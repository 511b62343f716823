"""One int8 layer as we write it, in ONNX Runtime, with the inputs that give its largest sums; and CPUs by hand.

    qemu-x86_64 -cpu Haswell python tests/helpers/one_int8_layer.py

prints what the CPU made of each layer. No torch, so that an emulated CPU runs it in seconds.
"""

import json
from itertools import product

import numpy as np

from snapvit_export.graph.layers import dynamic_int8, static_int8
from snapvit_export.graph.nodes import Nodes
from snapvit_export.graph.precision import Range, stored

LEAST, MOST = -(2**15), 2**15 - 1  # of a number of 16 bits
KINDS = ("dynamic", "static", "static about zero")


def saturating(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """uint8 (n, in) x int8 (in, out) as CPUs without VNNI multiply: vpmaddubsw on neighbours, then sums in 32 bits."""
    odd = weight.shape[0] % 2
    x = np.pad(inputs.astype(np.int64), ((0, 0), (0, odd)))
    w = np.pad(weight.astype(np.int64), ((0, odd), (0, 0)))
    pairs = (x[:, 0::2, None] * w[0::2] + x[:, 1::2, None] * w[1::2]).clip(LEAST, MOST)  # (n, in/2, out)
    return pairs.sum(1)


def extremes(weight: np.ndarray) -> np.ndarray:
    """Inputs of 0 and 255 for int8 (in, out): all of them, every second, and the worst for each output feature."""
    size = len(weight)
    plain = [np.ones(size), np.arange(size) % 2, (np.arange(size) + 1) % 2, np.arange(size) % 4 < 2]
    worst = [side.T for side in (weight > 0, weight < 0)]
    return (255 * np.concatenate([plain, *worst])).astype(np.uint8)


def weights(size: int, out: int = 9) -> np.ndarray:
    """Weights (in, out) of many kinds: normal, all alike, of changing signs, one far larger than the rest."""
    found = np.random.default_rng(size).standard_normal((size, out)).astype(np.float32)
    found[:, 0], found[:, 1], found[:, 2] = 1, -1, 1 - 2 * (np.arange(size) % 2)
    found[size // 2, 3] = 50
    return found


def make_layer(kind: str, weight: np.ndarray, in_first: bool, sum_bits: int) -> tuple[bytes, np.ndarray]:
    """A graph of one layer whose inputs and outputs are whole numbers, and its int8 weights (in, out)."""
    from onnx import TensorProto, helper, numpy_helper

    layer = "blocks.0.fc2" if in_first else "blocks.0.fc1"
    tensors = stored({f"{layer}.weight": weight if in_first else weight.T}, "int8-static", sum_bits)
    tensors[f"{layer}.scale"] = np.ones(weight.shape[1], np.float32)
    n = Nodes(17)
    if kind == "dynamic":
        y = dynamic_int8(n, "x", layer, False, in_first)
    else:
        about_zero = kind == "static about zero"
        span = Range(-127, 127) if about_zero else Range(0, 255)  # a step is 1
        y = static_int8(n, "x", layer, False, in_first, weight.shape[1], span, about_zero, False)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", len(weight)])
    result = helper.make_tensor_value_info(y, TensorProto.FLOAT, ["n", weight.shape[1]])
    kept = [numpy_helper.from_array(np.ascontiguousarray(tensors[name]), name) for name in n.weights]
    graph = helper.make_graph(n.nodes, "layer", [given], [result], initializer=[*n.constants.values(), *kept])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    whole = tensors[f"{layer}.weight"]
    return model.SerializeToString(), whole if in_first else whole.T


def run(graph: bytes, inputs: np.ndarray, prepacked: bool) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.add_session_config_entry("session.disable_prepacking", str(int(not prepacked)))
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": inputs.astype(np.float32)})[0].astype(np.int64)


def found_here(sum_bits: int) -> dict[str, bool]:
    """Whether this CPU computes the layers exactly, and whether as `saturating` says; every layer must."""
    exact, as_told = True, True
    for kind, size, in_first, prepacked, rows in product(KINDS, (1, 7, 48, 191, 768), (0, 1), (0, 1), (1, None)):
        graph, whole = make_layer(kind, weights(size), bool(in_first), sum_bits)
        shift = 128 if kind == "static about zero" else 0  # ONNX Runtime makes unsigned bytes of signed ones by it
        inputs = np.maximum(extremes(whole), shift and 1)[:rows].astype(np.int64)  # -127 is the least signed one
        found = run(graph, inputs - shift, bool(prepacked))
        exact &= np.array_equal(found, (inputs - shift) @ whole.astype(np.int64))
        as_told &= np.array_equal(found, saturating(inputs, whole) - shift * whole.astype(np.int64).sum(0))
    return {"exact": exact, "saturating": as_told}


if __name__ == "__main__":
    print(json.dumps({str(bits): found_here(bits) for bits in (16, 32)}))
