"""A target: the runtime, precision, batch and threads that a model must run with. Light: no torch."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from .errors import UsageError
from .storage.json import Size, Value

Runtime = Literal["onnxruntime", "onnxruntime-cuda", "onnxruntime-tensorrt", "openvino", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8-dynamic", "int8-static", "fp8"]
SumBits = Literal[16, 32]  # width in which a CPU must add two int8 products, or it computes something else

# The precisions that each runtime really computes in; `int8` means the first int8 kind of the runtime.
TAKES: dict[Runtime, tuple[Precision, ...]] = {
    "onnxruntime": ("fp32", "fp16", "int8-dynamic", "int8-static"),  # dynamic is more accurate and needs no images
    "onnxruntime-cuda": ("fp32", "fp16"),  # its int8 operators are the CPU's
    "onnxruntime-tensorrt": ("fp32", "fp16", "int8-static"),
    "openvino": ("fp32", "int8-static"),  # fp16 would be computed in fp32
    "tensorrt": ("fp32", "fp16", "int8-static", "fp8"),  # it has no dynamic quantisation
}
# What a choice may try beside fp32: the precisions that the kind of device computes in, not only stores. The card of a
# device may say more (`profiles`): not every GPU has fp8.
FASTER: dict[Runtime, tuple[Precision, ...]] = {
    "onnxruntime": ("int8-dynamic", "int8-static"),  # its CPU kernels compute fp16 in fp32
    "onnxruntime-cuda": ("fp16",),
    "onnxruntime-tensorrt": ("fp16", "int8-static"),
    "openvino": ("int8-static",),
    "tensorrt": ("fp16", "int8-static"),
}
ON_CPU: tuple[Runtime, ...] = ("onnxruntime", "openvino")  # CPU time measures their work


class Target(Value, frozen=True, kw_only=True):
    """Runtime, precision, batch and threads that a latency belongs to."""

    runtime: Runtime
    precision: Precision
    batch: Size
    threads: Size


def in_precision(target: Target, precision: Precision) -> Target:
    """Return a target in another precision: families may mix them."""
    return msgspec.structs.replace(target, precision=precision)


def parse_precision(name: str, runtime: Runtime = "onnxruntime") -> Precision:
    """Return the precision that a person means for a runtime: `int8` is the kind of int8 that suits it."""
    kinds = [precision for precision in TAKES[runtime] if precision.startswith("int8")]
    found = check_precision(kinds[0] if name == "int8" and kinds else name)
    if found not in TAKES[runtime]:
        raise UsageError(f"{runtime} does not compute in {found}. Give one of {', '.join(TAKES[runtime])}")
    return found


def check_runtime(name: str) -> Runtime:
    """Return the runtime of that name."""
    if name not in TAKES:
        raise UsageError(f"no runtime is called '{name}'. Known: {', '.join(TAKES)}")
    return name


def check_precision(name: str) -> Precision:
    """Return the precision of that name."""
    if name not in get_args(Precision):
        raise UsageError(f"no precision is called '{name}'. Known: {', '.join(get_args(Precision))}")
    return name  # type: ignore[return-value]


def faster_than(own: Precision, runtime: Runtime, of_card: tuple[Precision, ...] = ()) -> tuple[Precision, ...]:
    """Return the precisions that a choice may try beside a family's own: those with fewer bits.

    `of_card`: what the device computes in; without it, what every device of that runtime does.

    >>> faster_than("fp16", "tensorrt", of_card=("fp16", "int8-static", "fp8"))
    ('int8-static', 'fp8')
    """
    bits = {"fp32": 32, "fp16": 16}
    known = tuple(other for other in of_card if other in TAKES[runtime]) or FASTER[runtime]
    return tuple(other for other in known if bits.get(other, 8) < bits.get(own, 8))
