"""Graphs that ONNX Runtime does not finish: a call into native code that takes longer than anybody waits."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper

from snapvit_export.graph.read import read_graph

FOR_EVER = 2**62  # rounds of a loop
ROUNDS = helper.make_tensor("endless.rounds", TensorProto.INT64, [], [FOR_EVER])
TRUE = helper.make_tensor("endless.true", TensorProto.BOOL, [], [True])


def endless_graph(path: Path) -> Path:
    """Write a graph that counts to `FOR_EVER` before it gives its input back."""
    given, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("images", "out"))
    graph = helper.make_graph(_nodes("images", "out"), "endless", [given], [out], [ROUNDS, TRUE])
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def make_endless(path: Path) -> None:
    """Let a graph count to `FOR_EVER` before it looks at its images."""
    model = read_graph(path)
    (given,) = model.graph.input
    for node in model.graph.node:
        node.input[:] = ["endless.images" if name == given.name else name for name in node.input]
    nodes = [*_nodes(given.name, "endless.images"), *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend([ROUNDS, TRUE])
    onnx.save_model(model, str(path))


def _nodes(given: str, out: str) -> list[NodeProto]:
    """Return nodes that add nothing, after a loop."""

    def scalar(name: str, kind: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(f"endless.{name}", kind, [])

    body = helper.make_graph(
        [
            helper.make_node("Identity", ["endless.go_on"], ["endless.still"]),
            helper.make_node("Identity", ["endless.value"], ["endless.next"]),
        ],
        "endless.body",
        [scalar("round", TensorProto.INT64), scalar("go_on", TensorProto.BOOL), scalar("value", TensorProto.FLOAT)],
        [scalar("still", TensorProto.BOOL), scalar("next", TensorProto.FLOAT)],
    )
    return [
        helper.make_node("ReduceSum", [given], ["endless.start"], keepdims=0),
        helper.make_node("Loop", ["endless.rounds", "endless.true", "endless.start"], ["endless.end"], body=body),
        helper.make_node("Sub", ["endless.end", "endless.start"], ["endless.nothing"]),
        helper.make_node("Add", [given, "endless.nothing"], [out]),
    ]
