"""A target: where and how a model must run. Light: no torch."""

from __future__ import annotations

from typing import Literal, get_args

from .errors import UsageError
from .storage.json import Size, Value

Runtime = Literal["onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "openvino", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8-dynamic", "int8-static"]
SumBits = Literal[16, 32]  # that a CPU must have for the sum of two int8 products, or it computes something else

# What each runtime computes in for real; `int8` means the first of its kind.
TAKES: dict[Runtime, tuple[Precision, ...]] = {
    "onnxruntime": ("fp32", "fp16", "int8-dynamic", "int8-static"),  # dynamic keeps more and needs no images
    "onnxruntime-cuda": ("fp32", "fp16"),  # its int8 operators are the CPU's
    "onnxruntime-tensorrt": ("fp32", "fp16", "int8-static"),
    "openvino": ("fp32", "int8-static"),  # fp16 would be computed in fp32
    "tensorrt": ("fp32", "fp16", "int8-static"),  # it has no dynamic quantisation
}
ON_CPU: tuple[Runtime, ...] = ("onnxruntime", "openvino")  # where CPU time tells how much work there was


class Target(Value, frozen=True, kw_only=True):
    """Runtime, precision, batch and threads that a latency belongs to."""

    runtime: Runtime
    precision: Precision
    batch: Size
    threads: Size


def parse_precision(name: str, runtime: Runtime = "onnxruntime") -> Precision:
    """The precision that a person means for a runtime: `int8` is the kind of int8 that suits it."""
    kinds = [precision for precision in TAKES[runtime] if precision.startswith("int8")]
    found = check_precision(kinds[0] if name == "int8" and kinds else name)
    if found not in TAKES[runtime]:
        raise UsageError(f"{runtime} does not compute in {found}. Give one of {', '.join(TAKES[runtime])}")
    return found


def check_runtime(name: str) -> Runtime:
    """The runtime of that name."""
    if name not in TAKES:
        raise UsageError(f"no runtime is called '{name}'. Known: {', '.join(TAKES)}")
    return name


def check_precision(name: str) -> Precision:
    """The precision of that name."""
    if name not in get_args(Precision):
        raise UsageError(f"no precision is called '{name}'. Known: {', '.join(get_args(Precision))}")
    return name  # type: ignore[return-value]
