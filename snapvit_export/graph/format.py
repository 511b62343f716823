"""The format of a graph: flavour, opset, batch, input and output, and if it holds its own weights. Light.

Three flavours:

    portable   standard operators of opset 17: OpenVINO, anything
    ort        opset 23 with its Attention and Gelu operators, which ONNX Runtime runs faster
    tensorrt   standard operators of opset 19, in forms that TensorRT makes few kernels of (`tensorrt_forward`)

The first two read the same weights; the third has its own, with q, k and v of a block in one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..target import Runtime

Flavour = Literal["portable", "ort", "tensorrt"]
OPSETS: dict[Flavour, int] = {"portable": 17, "ort": 23, "tensorrt": 19}
PREFERRED: dict[Runtime, Flavour] = {
    "onnxruntime": "ort",
    "onnxruntime-tensorrt": "tensorrt",
    "tensorrt": "tensorrt",
}  # the other runtimes take portable graphs
OTHER: dict[Flavour, Flavour] = {
    "portable": "ort",
    "ort": "portable",
    "tensorrt": "portable",
}  # that gates compare with
INPUT = "images"  # the name of a graph's input


@dataclass(frozen=True)
class GraphFormat:
    """The operators, input and output of a graph, and if it holds its own weights.

    >>> GraphFormat("ort", batch=8).opset
    23
    """

    flavour: Flavour = "portable"
    batch: int | None = None  # None: any
    takes_bytes: bool = False  # (B, H, W, C) uint8 instead of (B, C, H, W) float32, already normalised
    features: bool = False  # the embedding instead of class scores
    single_file: bool = False  # the graph holds its own weights

    @property
    def opset(self) -> int:
        """The version of the operator set that the graph is written for."""
        return OPSETS[self.flavour]


def cropped(images: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """Return the upper left of images as graphs take them, (B, H, W, C) bytes or (B, C, H, W): enough to time them."""
    height, width = size
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images[:, :height, :width])
    return np.ascontiguousarray(images[:, :, :height, :width])


def check_flavour(name: str) -> Flavour:
    """Return the flavour of that name."""
    if name not in OPSETS:
        raise UsageError(f"no flavour is called '{name}'. Known: {', '.join(OPSETS)}")
    return name


def flavour_for(runtime: Runtime, asked: str | None = None) -> Flavour:
    """Return the flavour that was asked for, or the one that a runtime runs fastest."""
    return PREFERRED.get(runtime, "portable") if asked is None else check_flavour(asked)
