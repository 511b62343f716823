"""Operators on constants compute what ONNX says they do: compared with onnx's own reference."""

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from snapvit_export.onnx_import.arrays import MOST, constant
from snapvit_export.onnx_import.nodes import Misfit, Node

OPSET = 17
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
IMAGE = RNG.standard_normal((1, 2, 4, 6)).astype(np.float32)
INTS = np.array([-7, -2, 0, 5, 9])


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES = [
    ("Reshape", [X, ints(0, -1)], {}),
    ("Transpose", [X], {}),
    ("Transpose", [X], {"perm": [1, 2, 0]}),
    ("Flatten", [X], {"axis": 2}),
    ("Flatten", [X], {"axis": -1}),
    ("Squeeze", [X[:1, :, :1], ints(0, 2)], {}),
    ("Squeeze", [X[:1]], {}),
    ("Unsqueeze", [X, ints(0, -1)], {}),
    ("Slice", [X, ints(1), ints(1 << 62), ints(2)], {}),
    ("Slice", [X, ints(-1, 2), ints(-(1 << 62), 0), ints(1, 2), ints(-1, -1)], {}),
    ("Slice", [X, ints(0), ints(4), ints(-1), ints(2)], {}),
    ("Split", [X, ints(1, 3)], {"axis": 2}),
    ("Split", [X], {"axis": -1}),
    ("Gather", [X, ints(-1, 0)], {"axis": 1}),
    ("Gather", [X, np.array(2)], {"axis": 2}),
    ("Gather", [X, ints(0, 1, 1, 2).reshape(2, 2)], {"axis": 1}),
    ("GatherElements", [X, np.zeros((2, 3, 2), np.int64)], {"axis": 2}),
    ("Expand", [X[:, :1], ints(2, 3, 1)], {}),
    ("Tile", [X, ints(1, 2, 1)], {}),
    ("SpaceToDepth", [IMAGE], {"blocksize": 2}),
    ("Concat", [X, X[:, :1]], {"axis": 1}),
    ("Div", [INTS, ints(2, 2, 3, -2, 4)], {}),
    ("Div", [X, X[0] + 3], {}),
    ("Pow", [X, np.array(2.0, np.float32)], {}),
    ("Mod", [INTS, ints(3, 3, 3, -3, 4)], {}),
    ("Mod", [X, X[0] + 3], {"fmod": 1}),
    ("Equal", [INTS, ints(-7, 0, 0, 1, 9)], {}),
    ("Where", [INTS > 0, INTS, ints(0)], {}),
    ("Clip", [X, np.array(-0.5, np.float32), np.array(0.5, np.float32)], {}),
    ("Max", [X, X[0]], {}),
    ("Range", [np.array(2), np.array(11), np.array(3)], {}),
    ("Range", [np.array(5.0, np.float32), np.array(0.0, np.float32), np.array(-2.0, np.float32)], {}),
    ("ReduceMean", [X], {"axes": [1], "keepdims": 0}),
    ("ReduceSum", [X, ints(-1)], {}),
    ("ReduceProd", [INTS.reshape(1, 5)], {"keepdims": 0}),
    ("Shape", [X], {"start": 1}),
    ("Shape", [X], {"end": -1}),
    ("Size", [X], {}),
    ("Cast", [X], {"to": TensorProto.INT64}),
    ("Gemm", [X[0], X[1], X[0, :, :3]], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("MatMul", [X, X[0].T], {}),
    ("Erf", [X], {}),
    ("Sigmoid", [X], {}),
    ("Softplus", [X], {}),
    ("HardSigmoid", [X], {"alpha": 0.3}),
    ("Elu", [X], {"alpha": 0.7}),
    ("LeakyRelu", [X], {}),
    ("Mish", [X], {}),
    ("CumSum", [X, np.array(1)], {}),
    ("Trilu", [X], {"upper": 0}),
    ("Softmax", [X], {}),
    ("ScatterND", [X[0], ints(0, 2).reshape(2, 1), X[1, :2]], {}),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_an_operator_gives_what_the_reference_gives(op, inputs, attributes):
    count = 2 if op == "Split" else 1
    names, outputs = [f"x{i}" for i in range(len(inputs))], [f"y{i}" for i in range(count)]
    opset = 18 if op == "Mish" else OPSET
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, inputs)
    ]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([helper.make_node(op, names, outputs, **attributes)], "one", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    wanted = ReferenceEvaluator(model).run(None, dict(zip(names, inputs)))
    found = constant(Node(op, "", "n", tuple(names), tuple(outputs), attributes), inputs, opset)
    for a, b in zip(found if isinstance(found, list) else [found], wanted):
        assert np.shape(a) == np.shape(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_positions_are_resized_by_onnx_runtime():
    attributes = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
    node = Node("Resize", "", "n", ("x", "", "", "sizes"), ("y",), attributes)
    found = constant(node, [IMAGE, None, None, ints(1, 2, 2, 3)], OPSET)
    np.testing.assert_allclose(found, IMAGE.reshape(1, 2, 2, 2, 3, 2).mean((3, 5)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Expand", [X, ints(1 << 40, 1, 1, 1)]),
        ("Tile", [X, ints(1 << 30, 1, 1)]),
        ("ConstantOfShape", [ints(MOST, 2)]),
        ("Range", [np.array(0), np.array(1 << 60), np.array(1)]),
        ("Add", [np.zeros((1 << 20, 1), np.float32), np.zeros((1, 1 << 20), np.float32)]),
        ("Resize", [IMAGE, None, None, ints(1, 2, 1 << 20, 1 << 20)]),
    ],
)
def test_a_damaged_shape_does_not_fill_the_memory(op, inputs):
    node = Node(op, "", "n", ("x", "y"), ("z",), {})
    with pytest.raises(Misfit, match="is not one of a ViT"):
        constant(node, inputs, OPSET)
