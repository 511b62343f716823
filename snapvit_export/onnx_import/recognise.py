"""Recognise a plain ViT in an ONNX file that somebody else exported: its Anatomy, its Wiring and all of its tensors.

>>> found = recognise(Path("vit.onnx"))
>>> found.anatomy.heads, found.dense["blocks.0.q.weight"].shape

The graph is neither rewritten nor matched against patterns of nodes, which differ with every exporter, version and
optimiser. It is gone through once (`interpret`), every value is told by what it is made of (`values`), and the ViT is
read off that. No library for graphs is needed: onnx reads the file, numpy moves indices. That it was read correctly is
proven afterwards, by comparing our graph with the file itself (`gate`). Light: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..elastic.format import Wiring
from ..errors import ModelNotUnderstood
from ..model.anatomy import Anatomy
from .assemble import assemble
from .door import Entrance, enter, looks_like
from .ending import read_ending
from .interpret import Interpreter
from .nodes import Graph, Misfit, read


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
    notes: tuple[str, ...] = ()  # what the user should know


def recognise(path: Path | str, output: str | None = None, image: tuple[int, int] | None = None) -> Recognised:
    """Return the ViT in a file, or refuse the file by naming the first node that does not fit.

    `output`: which one is the model's, if there are several; `image`: height and width, where the file takes any.
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
    ending = read_ending(node, interpreter.form(node, value), door.shape[0])
    found = assemble(ending, door.shape[0], (door.shape[2], door.shape[3]), interpreter.position_rows)
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
        notes=(*door.notes, *_notes(found.anatomy)),
    )


def _notes(anatomy: Anatomy) -> list[str]:
    """Return what a user may not expect of the model."""
    found = []
    if anatomy.classes == 0:
        found.append(f"the output is an embedding of {anatomy.embed_dim} numbers: no classifier is in the file")
    return found
