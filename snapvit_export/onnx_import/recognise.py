"""Recognise a plain ViT in an ONNX file that somebody else exported: its Anatomy, its Wiring and all of its tensors.

>>> found = recognise("vit.onnx")
>>> found.anatomy.heads, found.dense["blocks.0.q.weight"].shape
((4, 4, 4, 4), (48, 48))

The graph is neither rewritten nor matched against patterns of nodes, which differ with every exporter, version and
optimiser. It is gone through once (`interpret`), every value is told by what it is made of (`values`), and the ViT is
read off that. No library for graphs is needed: onnx reads the file, numpy moves indices. That it was read correctly is
proven afterwards, by comparing our graph with the file itself (`gate`). Light: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from ..elastic.format import Wiring
from ..errors import ModelNotUnderstood
from ..model.anatomy import Anatomy
from .assemble import Assembled, assemble
from .door import Entrance, TokensRead, enter, looks_like
from .ending import read_ending
from .interpret import Interpreter
from .nodes import Graph, Misfit, Node, read
from .rules.functions import as_form
from .rules.pooling import reduced
from .values import Form, Pointwise, Value


@dataclass(frozen=True, eq=False)
class Recognised:
    """A foreign file as our graphs are made from: with a preprocessing it becomes a `graph.writer.Blueprint`."""

    anatomy: Anatomy
    wiring: Wiring
    dense: dict[str, npt.NDArray[np.float32]] = field(repr=False)  # by canonical name, heads and neurons as in the file
    input_name: str
    output_name: str
    batch: int | None  # None: any
    dtype: np.dtype  # of the input
    is_half: bool  # it computes in fp16: equal to ours only as far as that goes
    streams: tuple[str, ...]  # values of the file: the residual stream after each block; "" where it has no name
    tokens_read: TokensRead | None  # what is read of the output, if that is all tokens
    metadata: dict[str, str]  # of the file; one of ours has its preprocessing and labels there
    notes: tuple[str, ...] = ()  # what the user should know

    def vectors(self, output: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
        """Return what is read of the file's own output: (N, classes) or (N, E)."""
        values = output.astype(np.float32)
        if self.tokens_read is None:
            return values
        first = self.anatomy.prefix if self.tokens_read == "patches" else 0
        return values[:, 0] if self.tokens_read == "token" else np.asarray(values[:, first:].mean(1), np.float32)


def recognise(path: Path | str, output: str | None = None, image: tuple[int, int] | None = None) -> Recognised:
    """Return the ViT in a file, or refuse the file by naming the first node that does not fit.

    `output`: which value is the model's, if there are several outputs, or not the last one; `NAME:token`, `NAME:mean`
    and `NAME:patches` read one vector of an output of all tokens. `image`: height and width, where the file takes any.
    """
    graph = read(Path(path))
    door = enter(graph, output, image)
    try:
        return _recognised(graph, door)
    except Misfit as misfit:
        kind = looks_like(graph)
        raise ModelNotUnderstood(f"{graph.path}: {kind}not understood at {misfit}") from misfit


def _recognised(graph: Graph, door: Entrance) -> Recognised:
    interpreter = Interpreter(graph, door.input_name, door.shape)
    value = interpreter.run(door.output_name)
    node = next((n for n in graph.nodes if door.output_name in n.outputs), None)
    if node is None:
        raise ModelNotUnderstood(f"{graph.path}: no node gives the output '{door.output_name}'")
    ending = read_ending(node, _read(interpreter, node, value, door), door.shape[0])
    image, position_rows = (door.shape[2], door.shape[3]), interpreter.scope.position_rows
    found = assemble(ending, door.shape[0], image, position_rows, door.is_half)
    return Recognised(
        anatomy=found.anatomy,
        wiring=found.wiring,
        dense=found.tensors,
        input_name=door.input_name,
        output_name=door.output_name,
        batch=door.batch,
        dtype=door.dtype,
        is_half=door.is_half,
        streams=found.streams,
        tokens_read=door.tokens_read,
        metadata={entry.key: entry.value for entry in graph.model.metadata_props},
        notes=(*door.notes, *_notes(found)),
    )


def _read(interpreter: Interpreter, node: Node, value: Value, door: Entrance) -> Form:
    """Return what is read of the output: of all tokens one, or a mean."""
    if isinstance(value, Pointwise):
        text = "class scores or an embedding were expected, not a function of them"
        raise Misfit(node, f"{text}. Name the value before: --output {node.inputs[0]}")
    form, scope = as_form(node, value), interpreter.scope
    if door.tokens_read is None:
        return form
    if len(form.shape) != 3 or form.shape[0] != scope.batch or form.shape[1] < scope.patches:
        raise Misfit(node, f"all tokens of each image were expected, of which ':{door.tokens_read}' is read")
    if door.tokens_read == "token":
        return form.moved(lambda a: a[:, 0])
    first = form.shape[1] - scope.patches if door.tokens_read == "patches" else 0
    mean = replace(node, op="ReduceMean", attributes={"keepdims": 0})
    pooled = reduced(scope, mean, form.moved(lambda a: a[:, first:]), np.array([1]))
    return as_form(node, pooled)


def _notes(found: Assembled) -> list[str]:
    """Return what a user may not expect of the model."""
    notes = []
    if found.anatomy.classes == 0:
        notes.append(f"the output is an embedding of {found.anatomy.embed_dim} numbers: no classifier is in the file")
    if found.anatomy.rope != "none" and found.wiring.rotary is UNSET:
        notes.append("its rotary tables follow no known formula: it stays at its own resolution")
    return notes
