"""An engine on disk, beside a record of what it is: a stale or foreign engine is refused, never run. Light.

    s30.engine        what TensorRT serialised
    s30.engine.json   of which graph, by which version, for which GPU, with which settings

An engine holds for one graph, one version of TensorRT and one kind of GPU. The timing cache of a device, version and
precision is shared by all engines: building the next variant then takes a part of the time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from ...errors import FileFormatError
from ...storage.atomic import cache_folder, sha256, write_atomically
from ...storage.json import Count, Size, Value, read_json, write_json
from ...target import Precision

SUFFIX = ".engine"
ANY = "any"  # device of an engine that was built without a GPU
COMPARED = (
    *("onnx_sha256", "package", "version", "device", "capability", "precision", "batch", "most_batch"),
    *("workspace_bytes", "level"),
)


class EngineRecord(Value, frozen=True, kw_only=True):
    """What an engine was made of, by what, for what."""

    format_version: Literal[1] = 1
    onnx_sha256: str
    engine_sha256: str = ""  # once it is written
    package: str  # tensorrt or tensorrt_rtx
    version: str  # of that package
    device: str  # the GPU; "any" where none was there to build for
    capability: str  # of the GPU, such as 8.7
    driver: str
    precision: Precision
    batch: Size
    most_batch: Size
    workspace_bytes: Count
    level: Count
    products: dict[str, Count]  # matrix products by precision, counted in the parsed network
    agreed: bool = False  # True: it ran on a GPU and gave what ONNX Runtime gives

    def differs_from(self, other: EngineRecord) -> str | None:
        """The first thing in which two records of one engine differ; None if they are of the same."""
        names = list(COMPARED)
        if self.package == "tensorrt_rtx" and self.device == ANY:  # made to be loaded by any card
            names = [name for name in names if name not in ("device", "capability")]
        for name in names:
            if getattr(self, name) != getattr(other, name):
                return name
        return None


def engine_path(graph: Path) -> Path:
    """Where the engine of a graph lies."""
    return graph.with_suffix(SUFFIX)


def record_path(graph: Path) -> Path:
    """Where its record lies."""
    return graph.with_suffix(f"{SUFFIX}.json")


def engine_files(graph: Path) -> tuple[Path, Path]:
    """Where the engine of a graph and its record lie, if there is one."""
    return engine_path(graph), record_path(graph)


def write_engine(graph: Path, engine: bytes, record: EngineRecord) -> None:
    """Write an engine, then its record, which gets the engine's hash: without the record it does not count."""
    record_path(graph).unlink(missing_ok=True)
    write_atomically(engine_path(graph), engine)
    digest = hashlib.sha256(engine).hexdigest()
    write_json(record_path(graph), msgspec.structs.replace(record, engine_sha256=digest))


def read_engine(graph: Path, wanted: EngineRecord) -> bytes:
    """The engine of a graph, if it is the one that is wanted here; `wanted.engine_sha256` is not looked at."""
    path = engine_path(graph)
    if not path.is_file() or not record_path(graph).is_file():
        raise FileFormatError(f"{path}: there is no engine of {graph.name} with its record. Build it on this device")
    found = read_json(record_path(graph), EngineRecord)
    if (what := found.differs_from(wanted)) is not None:
        has, needs = getattr(found, what), getattr(wanted, what)
        raise FileFormatError(f"{path}: built for another {what} ({has}, here {needs}). Build it on this device")
    if sha256(path) != found.engine_sha256:
        raise FileFormatError(f"{path}: damaged: it is not the engine that its record describes. Build it again")
    return path.read_bytes()


def mark_agreed(graph: Path) -> None:
    """Write down that the engine of a graph, if it has one, gave what ONNX Runtime gives."""
    if record_path(graph).is_file():
        record = read_json(record_path(graph), EngineRecord)
        write_json(record_path(graph), msgspec.structs.replace(record, agreed=True))


def timing_cache_path(device: str, version: str, precision: Precision) -> Path:
    """One cache for all engines of a device, version and precision, in the user's cache folder."""
    key = hashlib.sha256(f"{device}\n{version}\n{precision}".encode()).hexdigest()[:16]
    return cache_folder("timing") / f"{key}.cache"
