"""Engines that run the blocks of candidates in a search: torch anywhere, or ONNX Runtime, faster on a CPU.

Both take the same tensors and must give the same embedding. The ONNX graph is traced once, with the weights as inputs
of dynamic width, so a candidate needs no new session, no copy of the model and no compilation.

A GPU may compute in reduced precision (autocast): `choose_autocast` takes the fastest that stays faithful to fp32.
"""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ....errors import SnapvitError, UsageError
from ....runtimes.device import usable_cores
from ...blocks.functional import Body, Weights, run_blocks

OPSET = 17  # at which the tracing exporter gives the smaller and faster graph for ViTs
EngineName = Literal["torch", "onnxruntime"]
Autocast = Literal["none", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype | None] = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FAITHFUL = 0.9999  # least cosine to fp32 of a lower precision that may be chosen


def check_engine(engine: str | None) -> EngineName | None:
    """Refuse an engine that does not exist."""
    if engine not in (None, "torch", "onnxruntime"):
        raise UsageError(f"no engine is called '{engine}'. Known: torch, onnxruntime")
    return engine  # type: ignore[return-value]


def check_autocast(autocast: str | None) -> Autocast | None:
    """Refuse a precision that does not exist; None: measured on a GPU."""
    if autocast not in (None, "none", "bf16", "fp16"):
        raise UsageError(f"no autocast is called '{autocast}'. Known: none, bf16, fp16")
    return autocast  # type: ignore[return-value]


class SearchEngine(Protocol):
    """Takes the weights of a candidate once, then runs chunks of cached tokens, `workers` of them at a time."""

    workers: int

    def prepare(self, weights: Sequence[Weights]) -> Any: ...

    def run(self, tokens: Tensor, first: Tensor, prepared: Any) -> Tensor: ...  # (B, T, E) -> (B, T or needed, E)


class TorchEngine:
    """Plain torch, on any device; `autocast` names a lower precision for the matrix products, or None."""

    def __init__(self, body: Body, device: torch.device, autocast: torch.dtype | None = None) -> None:
        self.body = replace(body, rope=None if body.rope is None else body.rope.to(device))
        self.device, self.autocast, self.workers = device, autocast, 1

    def prepare(self, weights: Sequence[Weights]) -> Sequence[Weights]:
        return [{name: tensor.to(self.device) for name, tensor in block.items()} for block in weights]

    def run(self, tokens: Tensor, first: Tensor, prepared: Sequence[Weights]) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return run_blocks(tokens.to(self.device), first.to(self.device), prepared, self.body).float()


class OrtEngine:
    """ONNX Runtime on the CPU, one session for the whole search.

    Each run has one thread; cores are used by running several chunks at once. That needs no barrier after every
    operator, and the result does not depend on the number of cores.
    """

    def __init__(self, body: Body, example: Sequence[Weights], tokens: Tensor, first: Tensor, workers: int = 1) -> None:
        import onnxruntime as ort

        self.names = [[f"{i}.{name}" for name in block] for i, block in enumerate(example)]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.workers = workers
        options.log_severity_level = 3
        graph = _trace(body, example, self.names, tokens, first)
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def prepare(self, weights: Sequence[Weights]) -> dict[str, np.ndarray]:
        tensors = zip(
            [name for names in self.names for name in names], [t for block in weights for t in block.values()]
        )
        return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors}

    def run(self, tokens: Tensor, first: Tensor, prepared: dict[str, np.ndarray]) -> Tensor:
        inputs = {"tokens": tokens.numpy(), "first": first.numpy(), **prepared}
        return torch.from_numpy(self.session.run(None, inputs)[0])


class _TracedBlocks(nn.Module):
    """`run_blocks` as a module whose inputs are all tensors, which is what can be traced."""

    def __init__(self, body: Body, keys: list[list[str]]) -> None:
        super().__init__()
        self.body, self.keys = body, keys

    def forward(self, tokens: Tensor, first: Tensor, *flat: Tensor) -> Tensor:
        values = iter(flat)
        return run_blocks(tokens, first, [{key: next(values) for key in block} for block in self.keys], self.body)


def _trace(body: Body, example: Sequence[Weights], names: list[list[str]], tokens: Tensor, first: Tensor) -> bytes:
    flat = [tensor for block in example for tensor in block.values()]
    inputs = ["tokens", "first", *(name for block in names for name in block)]
    axes = {name: _open_axes(name, tensor) for name, tensor in zip(inputs[2:], flat)}
    buffer = io.BytesIO()
    with quiet(), torch.no_grad():
        torch.onnx.export(
            _TracedBlocks(body, [list(block) for block in example]),
            (tokens, first, *flat),
            buffer,  # type: ignore[arg-type]  # the tracing exporter takes a stream
            opset_version=OPSET,
            input_names=inputs,
            output_names=["embedding"],
            dynamic_axes={"tokens": {0: "batch"}, "first": {0: "batch", 2: "first"}, "embedding": {0: "batch"}, **axes},
            dynamo=False,
        )
    return buffer.getvalue()


def _open_axes(name: str, tensor: Tensor) -> dict[int, str]:
    """Return the dynamic axes of a weight: those along which heads or neurons are cut, none of norms and scales."""
    block, kind = name.split(".")[:2]
    if kind in ("norm1", "norm2", "scale1", "scale2", "q_norm", "k_norm"):
        return {}
    cut = "heads" if kind in ("qkv", "q", "kv", "proj", "attn_norm") else "neurons"
    if kind in ("proj", "fc2"):
        return {1: f"{block}.{kind}.{cut}"} if tensor.ndim == 2 else {}
    return {0: f"{block}.{kind}.{cut}"}


def choose_autocast(
    body: Body, device: torch.device, example: Sequence[Weights], tokens: Tensor, first: Tensor
) -> Autocast:
    """Return the precision that runs these tokens fastest among those that stay faithful to fp32, as measured."""
    kinds: list[Autocast] = ["none", "bf16", "fp16"] if device.type == "cuda" else ["none", "bf16"]
    outputs, seconds = {}, {}
    for kind in kinds:
        engine = TorchEngine(body, device, DTYPES[kind])
        prepared = engine.prepare(example)
        outputs[kind] = engine.run(tokens, first, prepared).flatten(1)
        seconds[kind] = min(_seconds(engine, tokens, first, prepared) for _ in range(3))
    wanted = outputs["none"]
    faithful = [k for k in kinds if torch.nn.functional.cosine_similarity(outputs[k], wanted).min() >= FAITHFUL]
    return min(faithful, key=lambda kind: seconds[kind])


def _seconds(engine: TorchEngine, tokens: Tensor, first: Tensor, prepared: Sequence[Weights]) -> float:
    start = time.perf_counter()
    engine.run(tokens, first, prepared).sum().item()  # .item() waits for the device
    return time.perf_counter() - start


def make_engine(
    name: EngineName | None,
    body: Body,
    device: torch.device,
    example: Sequence[Weights],
    tokens: Tensor,
    first: Tensor,
    autocast: Autocast = "none",
    workers: int = 1,
) -> SearchEngine:
    """Return the engine of that name, by default the faster one: ONNX Runtime on a CPU if installed, else torch."""
    if engine_name(name, device, autocast) == "onnxruntime":
        if device.type != "cpu":
            raise SnapvitError(
                "the onnxruntime engine of the search runs on the CPU. Give --device cpu or leave it out"
            )
        if autocast != "none":
            raise SnapvitError(f"the onnxruntime engine of the search computes in fp32, not in {autocast}. Use torch")
        return OrtEngine(body, example, tokens, first, min(workers, usable_cores()))
    return TorchEngine(body, device, DTYPES[autocast])


def engine_name(name: EngineName | None, device: torch.device, autocast: Autocast | None) -> EngineName:
    """Return the name of the engine that will be used."""
    if name is not None:
        return name
    suits = device.type == "cpu" and autocast in (None, "none")
    return "onnxruntime" if suits and _has_onnxruntime() else "torch"


def _has_onnxruntime() -> bool:
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter, which warns of its age and of each shape that it takes as constant: both are intended."""
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
