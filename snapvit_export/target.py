"""A target: where and how a model must run. Light: no torch."""

from __future__ import annotations

from typing import Literal, get_args

from .errors import UsageError
from .values import Size, Value

Runtime = Literal["onnxruntime", "tensorrt"]
Precision = Literal["fp32", "fp16", "int8-dynamic", "int8-static"]


class Target(Value, frozen=True, kw_only=True):
    """Runtime, precision, batch and threads that a latency belongs to."""

    runtime: Runtime
    precision: Precision
    batch: Size
    threads: Size


def parse_precision(name: str) -> Precision:
    """The precision that a person means: `int8` is the dynamic one, which keeps more and needs no images."""
    return check_precision("int8-dynamic" if name == "int8" else name)


def check_precision(name: str) -> Precision:
    """The precision of that name."""
    if name not in get_args(Precision):
        raise UsageError(f"no precision is called '{name}'. Known: {', '.join(get_args(Precision))}")
    return name  # type: ignore[return-value]
