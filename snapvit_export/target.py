"""A target: where and how a model must run. Light: no torch."""

from __future__ import annotations

from typing import Literal

from .values import Size, Value


class Target(Value, frozen=True, kw_only=True):
    """Runtime, precision, batch and threads that a latency belongs to."""

    runtime: Literal["onnxruntime"]
    precision: Literal["fp32"]
    batch: Size
    threads: Size
