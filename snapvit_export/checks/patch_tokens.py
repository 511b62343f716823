"""The patch tokens of an exported file, each in its place, also where the file merges them. Light: onnx, ONNX Runtime.

Segmentation reads a vector for every patch: the tokens after the final norm, or after `fc_norm` where there is no
other. They are outputs of a temporary copy of the graph, beside it, together with the decisions of every merge, by
which each patch takes the token that it went into. The file itself has neither, so its latency is what it was.

With token pooling the last attention is computed for the tokens that are read alone: such files have no patch tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, GateFailed, UsageError
from ..graph.precision import FLOAT
from ..graph.read import read_graph
from ..model.plan import Plan
from ..runtimes.fixed_batch import in_batches
from ..runtimes.ort import OrtSession
from ..storage.atomic import copy_beside, writing
from ..storage.json import from_json
from .embedding_output import TAP, place_beside_its_weights, plain_name
from .merging import matches_in, merging_blocks, names_of, places_of

TOKENS = "patch_tokens"
NORMS = ("LayerNormalization", "RMSNormalization")
Run = Callable[[npt.NDArray[Any]], npt.NDArray[np.float32]]


@contextmanager
def open_patch_tokens(path: Path, threads: int) -> Iterator[Run]:
    """Open a file as a function from a batch of its inputs to patch tokens in their places, (B, h, w, E)."""
    blocks = merging_blocks(path)
    with place_beside_its_weights(path) as folder, copy_beside(path, TAP, folder) as copy:
        size, locate = _write_copy(path, copy, blocks)
        with OrtSession(copy, threads) as session:
            yield lambda images: in_batches(lambda batch: locate(session.run_all(batch), len(batch)), images, size)


Locate = Callable[[dict[str, npt.NDArray[Any]], int], npt.NDArray[np.float32]]


def _write_copy(path: Path, copy: Path, blocks: tuple[int, ...]) -> tuple[int | None, Locate]:
    """Write the copy; return the batch that it takes, if only one, and what puts its tokens into their places."""
    from onnx import helper

    model = read_graph(path)
    graph, metadata = model.graph, {entry.key: entry.value for entry in model.metadata_props}
    if "snapvit.plan" not in metadata:
        raise FileFormatError(f"{path}: not made by snapvit, so where its patch tokens lie is not known")
    plan = from_json(metadata["snapvit.plan"], Plan, str(path))
    try:
        batch, h, w = _grid(graph, metadata.get("snapvit.input", "").startswith("uint8"))
    except (ValueError, IndexError, StopIteration, ZeroDivisionError) as error:
        raise FileFormatError(f"{path}: damaged: its patches are not those of a graph of snapvit") from error
    after = from_json(metadata.get("snapvit.tokens", "[]"), tuple[int, ...], str(path))
    known = after[-1] if after else 0
    _expose_tokens(path, graph)
    del graph.output[:]
    graph.output.extend(map(helper.make_empty_tensor_value_info, [TOKENS, *names_of(blocks)]))
    with writing(copy):
        copy.write_bytes(model.SerializeToString())

    def locate(found: dict[str, npt.NDArray[Any]], images: int) -> npt.NDArray[np.float32]:
        tokens = found[TOKENS].astype(np.float32)
        tokens = tokens.reshape(images, -1, tokens.shape[-1])  # (B, T, E)
        prefix = tokens.shape[1] + sum(plan.merged) - h * w
        if prefix < 0 or tokens.shape[1] != (known or tokens.shape[1]):
            raise UsageError(
                f"{path}: gives no patch tokens, since its output is read from one token alone. Give --by segment the "
                "model that it was made from"
            )
        if not np.isfinite(tokens).all():
            raise GateFailed(f"{path}: gives values that are not finite numbers")
        patches = tokens[:, prefix:]
        if blocks:
            went = places_of({i: matches_in(found, i) for i in blocks}, plan.merged, prefix)[blocks[-1]]
            patches = np.take_along_axis(tokens, went[..., None], axis=1)  # (B, patches, E)
        return patches.reshape(images, h, w, -1)

    return batch or None, locate


def _grid(graph: Any, takes_bytes: bool) -> tuple[int, int, int]:
    """Return the batch that a graph takes, 0 for any, and the rows and columns of its patches."""
    (embed,) = (node for node in graph.node if node.op_type == "Conv")
    kernel = next(attribute.ints for attribute in embed.attribute if attribute.name == "kernel_shape")
    batch, *sides = (dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim)
    height, width = sides[:2] if takes_bytes else sides[1:]
    return batch, height // kernel[0], width // kernel[1]


def _expose_tokens(path: Path, graph: Any) -> None:
    """Add a value with the tokens after their last norm."""
    from onnx import helper

    weights = {plain_name(name): node for node in graph.node for name in node.input[1:]}
    if "final_norm.weight" in weights:
        graph.node.append(helper.make_node("Identity", [weights["final_norm.weight"].output[0]], [TOKENS]))
        return
    norm = weights.get("fc_norm.weight")
    streams = [name for node in graph.node for name in node.output if name.endswith(".stream")]
    if norm is None or norm.op_type not in NORMS or not streams:
        raise UsageError(f"{path}: has no norm that could be taken of each patch token. Segment the model in torch")
    read = [streams[-1], *norm.input[1:]]
    wide = [helper.make_node("Cast", [name], [f"{TOKENS}.{i}"], to=FLOAT) for i, name in enumerate(read)]
    settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in norm.attribute}
    inputs = [node.output[0] for node in wide]
    graph.node.extend([*wide, helper.make_node(norm.op_type, inputs, [TOKENS], **settings)])
