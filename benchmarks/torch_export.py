"""The standard export of a torch module, for comparison: what `graph` writes must equal it, and be faster.

The tracing exporter at opset 17 gives a smaller and faster graph for ViTs than the newer one at the same opset.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import onnx
import torch
from torch import nn

from snapvit_export.model.anatomy import Anatomy
from snapvit_export.prune.rank.search.engine import OPSET, quiet

INPUT = "images"


def output_name(anatomy: Anatomy) -> str:
    """What the file calls its result: class scores, or the embedding of a model without a classifier."""
    return "logits" if anatomy.classes else "features"


def to_onnx(module: nn.Module, anatomy: Anatomy, metadata: dict[str, str]) -> bytes:
    """Serialise a module; `metadata` goes into the file for whoever opens it later."""
    module = _unfused(module)
    example = torch.zeros(1, anatomy.channels, *anatomy.image)
    name, buffer = output_name(anatomy), io.BytesIO()
    with quiet(), torch.no_grad():
        torch.onnx.export(
            module,
            (example,),
            buffer,  # type: ignore[arg-type]  # the tracing exporter takes a stream
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[name],
            dynamic_axes={INPUT: {0: "batch"}, name: {0: "batch"}},
            dynamo=False,
        )
    graph = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(graph, metadata)
    onnx.checker.check_model(graph, full_check=True)
    return graph.SerializeToString()


def _unfused(module: nn.Module) -> nn.Module:
    """The same weights with attention spelled out: the fused form traces to a fifth more nodes."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twin = copy.deepcopy(module, memo=shared)  # new modules around the same tensors
    part: Any
    for part in twin.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = False
    return twin.eval()
