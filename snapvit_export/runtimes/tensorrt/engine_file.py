"""Engine files: a TensorRT engine beside a record of its origin; a stale or foreign one is never run. Light.

    s30.engine        the serialised engine
    s30.engine.json   of which graph, by which version, for which GPU, with which settings

An engine is valid for one graph, one version of TensorRT and one kind of GPU. The timing cache of a device, version and
precision is shared by all engines: building the next variant then takes a part of the time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from ...errors import FileFormatError, SnapvitError
from ...storage.atomic import cache_folder, sha256, write_atomically
from ...storage.json import Count, Size, Value, read_json, write_json
from ...target import Precision
from .kernel_plan import KernelPlan

SUFFIX = ".engine"
ANY = "any"  # device of an engine that was built without a GPU
# Fields of a record that decide if an engine may be used.
COMPARED = (
    *("onnx_sha256", "package", "version", "device", "capability", "precision", "batch", "most_batch"),
    *("workspace_bytes", "level", "board", "sm_count", "least_batch"),
)


class EngineRecord(Value, frozen=True, kw_only=True):
    """The graph, TensorRT version, GPU and settings that an engine was built for."""

    format_version: Literal[1] = 1
    onnx_sha256: str
    engine_sha256: str = ""  # once it is written
    package: str  # tensorrt or tensorrt_rtx
    version: str  # of that package
    device: str  # the GPU; "any" where none was there to build for
    capability: str  # of the GPU, such as 8.7
    board: str | None = None  # that carries it; None: a card, or an older record
    sm_count: Count | None = None  # multiprocessors: Orins of one name and capability differ in it
    driver: str
    precision: Precision
    batch: Size
    most_batch: Size
    least_batch: Size = 1
    workspace_bytes: Count
    level: Count
    products: dict[str, Count]  # matrix products by precision, counted in the parsed network
    agreed: bool = False  # True: it ran on a GPU and its answers to real images agreed with ONNX Runtime's
    kernels: KernelPlan | None = None  # that the compiler made, if it tells; older records do not have them

    def differs_from(self, other: EngineRecord) -> str | None:
        """Return the first field in which two records of one engine differ; None if they agree."""
        names = list(COMPARED)
        if self.package == "tensorrt_rtx" and self.device == ANY:  # made to be loaded by any card
            names = [name for name in names if name not in ("device", "capability", "board", "sm_count")]
        for name in names:
            if getattr(self, name) != getattr(other, name):
                return name
        return None


class AgentRecipe(msgspec.Struct, frozen=True):
    """What the Jetson agent writes of a build, as far as it is shown; the agent reads all of it itself."""

    precision: Precision
    batch: Size
    tensorrt: str
    device: str


class AgentRecord(msgspec.Struct, frozen=True):
    """The agent's record of an engine, s30.json beside s30.engine."""

    recipe: AgentRecipe
    sha256: str


def engine_path(graph: Path) -> Path:
    """Return the path of a graph's engine."""
    return graph.with_suffix(SUFFIX)


def record_path(graph: Path) -> Path:
    """Return the path of that engine's record."""
    return graph.with_suffix(f"{SUFFIX}.json")


def engine_files(graph: Path) -> tuple[Path, Path]:
    """Return the paths of a graph's engine and of its record, whether they exist or not."""
    return engine_path(graph), record_path(graph)


def write_engine(graph: Path, engine: bytes, record: EngineRecord) -> None:
    """Write an engine, then its record, which gets the engine's hash: without the record it does not count."""
    record_path(graph).unlink(missing_ok=True)
    write_atomically(engine_path(graph), engine)
    digest = hashlib.sha256(engine).hexdigest()
    write_json(record_path(graph), msgspec.structs.replace(record, engine_sha256=digest))


def read_engine(graph: Path, wanted: EngineRecord) -> bytes:
    """Return the engine of a graph if its record agrees with `wanted`, whose `engine_sha256` is not compared."""
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


def read_record(path: Path) -> EngineRecord:
    """Return the record of an engine file after comparing its hash; nothing is loaded or run."""
    if not path.is_file():
        raise FileFormatError(f"{path}: there is no such engine. Give a file that ends in {SUFFIX}")
    record = path.with_name(f"{path.name}.json")
    if not record.is_file():
        raise FileFormatError(_of_agent(path) or f"{path}: has no record {record.name} beside it. Build it again")
    found = read_json(record, EngineRecord)
    if sha256(path) != found.engine_sha256:
        raise FileFormatError(f"{path}: it is not the engine that {record.name} describes. Build it again")
    return found


def _of_agent(path: Path) -> str | None:
    """Say what the Jetson agent's own record, s30.json, tells of an engine; None if it has none of this very file."""
    record = path.with_suffix(".json")
    try:
        found = read_json(record, AgentRecord)
    except SnapvitError:
        return None
    if sha256(path) != found.sha256:
        return None
    built = found.recipe
    return (
        f"{path}: built by the Jetson agent in {built.precision}, batch {built.batch}, by TensorRT {built.tensorrt} "
        f"for {built.device}, as {record.name} says, which has no kernel plan. The agent with --layers shows its layers"
    )


def mark_agreed(graph: Path) -> None:
    """Record that the outputs of a graph's engine, if it has one, agreed with ONNX Runtime's."""
    if record_path(graph).is_file():
        record = read_json(record_path(graph), EngineRecord)
        write_json(record_path(graph), msgspec.structs.replace(record, agreed=True))


def timing_cache_path(device: str, version: str, precision: Precision) -> Path:
    """Return the path of the cache for all engines of a device, version and precision, in the user's cache folder."""
    key = hashlib.sha256(f"{device}\n{version}\n{precision}".encode()).hexdigest()[:16]
    return cache_folder("timing") / f"{key}.cache"
