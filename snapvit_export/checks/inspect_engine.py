"""Inspect a TensorRT engine by its record: what it was built from, by what and for what, and its kernels. Light.

Nothing is loaded or run, so this needs neither TensorRT nor a GPU.
"""

from __future__ import annotations

from pathlib import Path

from ..runtimes.tensorrt.engine_file import SUFFIX, EngineRecord, read_record
from ..runtimes.tensorrt.kernel_plan import BlockKernels
from ..storage.json import Count, Value


class EngineInspection(Value, frozen=True, kw_only=True):
    """An engine file and its record; `blocks` is empty where the record tells no kernels."""

    file: str
    size_bytes: Count
    record: EngineRecord
    blocks: tuple[BlockKernels, ...]


def is_engine(path: Path) -> bool:
    """Return True if a file is called like an engine."""
    return path.suffix == SUFFIX


def inspect_engine(path: Path | str) -> EngineInspection:
    """Read the record of an engine, after comparing the engine with it."""
    path = Path(path)
    record = read_record(path)
    blocks = record.kernels.by_block() if record.kernels is not None else ()
    return EngineInspection(file=path.name, size_bytes=path.stat().st_size, record=record, blocks=blocks)
