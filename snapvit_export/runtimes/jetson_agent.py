"""Time a family on a Jetson, or on any machine with trtexec: one file that is copied there and run by its Python.

    python3 jetson_agent.py FAMILY --out orin.json

trtexec builds an engine of every variant and runs the family's reference images: an engine that does not answer as its
graph did on the workstation is neither timed nor chosen. The others are timed in turns, in several rounds, so that a
hot minute falls on all of them. What comes out is what `snapvit fleet` and `snapvit choose --profile` read. An
interrupted run goes on.

Latency is the way of one batch: copied to the GPU, computed, copied back (`latencyMs` of runs with copying). What the
GPU alone computes (`computeMs` of runs without) stands beside it. Throughput is not reported: trtexec enqueues ahead.

May import: the standard library, nothing of snapvit; grammar of Python 3.8. tests/runtimes/test_jetson_agent.py holds
us to it, with a fake trtexec: it tests the plumbing, and says nothing about TensorRT.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
import platform
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, NoReturn, Sequence, TextIO, Tuple  # noqa: UP035 (Python 3.8)

ROOT = Path("/")
TRTEXEC_PLACES = ("/usr/src/tensorrt/bin/trtexec",)  # where JetPack puts it, which is not in PATH
UNKNOWN = "unknown"
NO_GRAPH = "TensorRT could not record a CUDA graph"
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
LEAST_RUNS = 40  # fewer do not tell a median
LEAST_ROUNDS = 3
MOST_KEPT = 1000  # samples of one visit: more would tell no more, and the file is sent around
DRAWS, COVERS = 400, 0.95  # as in profiling/sampling.py
SLOWED = 0.05  # by so much while timing: heat, or a clock that was lowered
RESOLUTION_MS = 1e-4  # that samples are rounded to
# What is read comes from elsewhere: bounds far beyond any family, so that a hostile one is refused and not followed.
MOST_JSON_BYTES = 1 << 28
MOST_NUMBER = 10**7
DEEPEST_GRAPH = 16  # graphs within each other: bodies of If and Loop
PRECISIONS = ("fp32", "fp16", "fp8", "int8-dynamic", "int8-static")
OUT_OF_MEMORY = "the kernel ended trtexec, probably for lack of memory. Close other programs, or add swap"
FP8_SINCE = (8, 9)  # compute capability: Ada; an Orin has 8.7
# Characters that control a terminal or the writing direction, as in visible.py
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class AgentError(Exception):
    """The work could not be done. The text is one line that a person can act on."""

    exit_code = 1


class UsageError(AgentError):
    """The request itself makes no sense."""

    exit_code = 2


# --- Versions of TensorRT: what their parser and their trtexec take ---------------------------------------------------


class Version(NamedTuple):
    """A version of TensorRT."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


LEAST_VERSION = Version(10, 3, 0)  # JetPack 6; strongly typed networks as we use them

# The highest opset that is documented, from that version on. Nothing found says more for the versions between.
OPSETS = {
    # docs/operators.md of github.com/onnx/onnx-tensorrt, for 10.0; in February 2025 its maintainer still points there
    # when asked about 10.7 (github.com/NVIDIA/TensorRT/issues/4336). For 10.9 to 10.13 docs/Changelog.md names single
    # newer operators (GroupNormalization of opset 21) and the ONNX 1.18 package, but no higher opset.
    (10, 0): 20,
    # The parser takes Attention, an operator of opset 23: github.com/onnx/onnx-tensorrt/pull/1043.
    (10, 14): 23,
    # The same operators.md at commit fa5aa9f61e7781d2ca8f5351d42c1f19525a6124, for 10.15. Nothing newer was found for
    # 10.16.
    (10, 15): 24,
    # docs.nvidia.com/deeplearning/tensorrt/latest/reference/onnx-opset-guide.html, for 11.x.
    (11, 0): 25,
}
SINCE = {"Gelu": 20, "Attention": 23, "RMSNormalization": 23, "RotaryEmbedding": 23, "Swish": 24}  # operators' opsets
NOT_TAKEN = ("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")  # marked N in operators.md, to the newest


def highest_opset(version: Version) -> int:
    """The highest opset that this version's parser is documented to read."""
    return max(opset for since, opset in OPSETS.items() if since <= version[:2])


def parse_version(text: str) -> Version:
    """The version in what trtexec prints first: [TensorRT v100300], before 10 [TensorRT v8601]."""
    found = re.search(r"\[TensorRT v(\d+)\]", text)
    if found is None:
        raise AgentError(f"trtexec does not say its version, only '{_last_line(text)[:80]}'. Give --trtexec PATH")
    number = int(found.group(1))
    unit = 10000 if number >= 10000 else 1000
    return Version(number // unit, number % unit // 100, number % 100)


def build_arguments(
    version: Version,
    onnx: Path,
    engine: Path,
    cache: Path,
    shape: str | None = None,
    workspace_mb: int | None = None,
    layers: bool = False,
) -> list[str]:
    """Return trtexec's arguments to build an engine; `shape` (images:1x3x224x224) if the graph leaves it open."""
    words = [f"--onnx={onnx}", f"--saveEngine={engine}", "--skipInference", f"--timingCacheFile={cache}", "--noTF32"]
    if version.major == 10:  # from 11 on every network is strongly typed
        words.append("--stronglyTyped")
    if shape is not None:
        words += [f"--{which}Shapes={shape}" for which in ("min", "opt", "max")]
    if workspace_mb is not None:
        words.append(f"--memPoolSize=workspace:{workspace_mb}")
    if layers:
        words.append("--profilingVerbosity=detailed")
    return words


def run_arguments(
    version: Version,
    engine: Path,
    times: Path,
    seconds: float,
    warm_up: float,
    shape: str | None = None,
    copying: bool = True,
) -> list[str]:
    """Return trtexec's arguments to time an engine, with copying to and from the GPU or without."""
    words = [f"--loadEngine={engine}"]
    if version.major == 10:
        words += ["--useCudaGraph", "--useSpinWait"] + ([] if copying else ["--noDataTransfers"])
    elif copying:  # 11 uses graphs and spins by itself, and copies nothing unless told to: sampleOptions.cpp of 11.1
        words.append("--includeDataTransfers")
    if shape is not None:
        words.append(f"--shapes={shape}")
    return [*words, f"--warmUp={1000 * warm_up:g}", f"--duration={seconds:g}", f"--exportTimes={times}"]


def compare_arguments(engine: Path, images: Path, answers: Path, name: str, shape: str | None = None) -> list[str]:
    """Return trtexec's arguments to run given images once and write the answers; `name`: of the input."""
    words = [f"--loadEngine={engine}", f"--loadInputs={name}:{images}", f"--exportOutput={answers}"]
    if shape is not None:
        words.append(f"--shapes={shape}")
    # 11 copies nothing unless told to, but for this one run: inferenceLoop in sampleInference.cpp of 11.1
    return [*words, "--iterations=1", "--warmUp=0", "--duration=0"]


def layer_arguments(
    version: Version, engine: Path, profile: Path, info: Path, seconds: float, shape: str | None = None
) -> list[str]:
    """Return trtexec's arguments to time the layers of an engine, in a run of its own."""
    words = [f"--loadEngine={engine}", "--dumpProfile", f"--exportProfile={profile}", f"--exportLayerInfo={info}"]
    if version.major == 10:  # 11 always does
        words.append("--separateProfileRun")
    if shape is not None:
        words.append(f"--shapes={shape}")
    return [*words, f"--duration={seconds:g}"]


# --- What trtexec writes ----------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """One visit to an engine: every run, in order."""

    latency_ms: list[float]  # copied there, computed, copied back
    compute_ms: list[float]
    copied: bool  # whether anything was copied at all


class LayerTime(NamedTuple):
    """The time of one layer of an engine."""

    name: str
    median_ms: float
    percentage: float  # of all layers' time


def parse_times(text: str, where: str) -> Times:
    """Read what --exportTimes writes: a list with an object for every run."""
    rows = _json(text, where, "--exportTimes")
    try:
        latency = [_milliseconds(row["latencyMs"]) for row in rows]
        compute = [_milliseconds(row["computeMs"]) for row in rows]
        copied = any(_milliseconds(row.get(way, 0.0)) > 0 for row in rows for way in ("h2dMs", "d2hMs"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AgentError(f"{where}: not what trtexec --exportTimes writes: {_short(error)}. Run again") from error
    if not latency:
        raise AgentError(f"{where}: trtexec timed no run. Give more --seconds")
    return Times(latency, compute, copied)


def parse_profile(text: str, where: str) -> list[LayerTime]:
    """Read what --exportProfile writes: first how often, then an object for every layer."""
    rows = _json(text, where, "--exportProfile")
    try:
        return [
            LayerTime(
                str(row["name"]),
                _milliseconds(row.get("medianMs", row["averageMs"])),  # before 8.5 there was no median
                _milliseconds(row["percentage"]),
            )
            for row in rows
            if "name" in row
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AgentError(f"{where}: not what trtexec --exportProfile writes: {_short(error)}") from error


def parse_layer_info(text: str, where: str) -> dict[str, str]:
    """Read what --exportLayerInfo writes: the number type of each layer's first output, by the layer's name.

    Layers are names alone unless the engine was built with details; from TensorRT 11 on the type has a key of its own.
    """
    found = _json(text, where, "--exportLayerInfo")
    try:
        types = {}
        for layer in found["Layers"]:
            if isinstance(layer, str):
                types[layer] = UNKNOWN
                continue
            outputs = layer.get("Outputs") or [{}]
            kind = outputs[0].get("DataType") or outputs[0].get("Format/Datatype") or UNKNOWN
            types[str(layer["Name"])] = number_type(str(kind))
        return types
    except (KeyError, TypeError, AttributeError) as error:
        raise AgentError(f"{where}: not what trtexec --exportLayerInfo writes: {_short(error)}") from error


def number_type(text: str) -> str:
    """fp16 for "Half" and for "Row major linear FP16 format", and so on."""
    kinds = {"half": "fp16", "fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16", "int8": "int8", "fp8": "fp8"}
    kinds.update({"float": "fp32", "fp32": "fp32", "int32": "int32", "int64": "int64", "bool": "bool"})
    return next((kinds[word] for word in re.findall(r"[a-z]+\d*", text.lower()) if word in kinds), text)


def last_error(log: str) -> str:
    """The last line of a log that tells what went wrong; the lines after it only tell that something did."""
    only_that = (
        r"(Engine|Building engine|Parsing model|Failed to (create engine|parse onnx)|Inference set|Error occurred)"
    )
    errors = [re.sub(r"^(\[[^\]]*\]\s*)*", "", line) for line in log.splitlines() if "[E]" in line]
    telling = [line for line in errors if line and not re.match(only_that, line)]
    return ((telling or errors or [_last_line(log)])[-1] or "it gave no reason")[:300]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("&&&&")]
    return lines[-1] if lines else ""


def _json(text: str, where: str, option: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise AgentError(f"{where}: not what trtexec {option} writes: {_short(error)}") from error


def parse_json(text: str) -> Any:
    """Read JSON as strictly as snapvit does: each key once, no NaN, not nested without end."""
    try:
        return json.loads(text, object_pairs_hook=_each_key_once, parse_constant=_no_number, parse_int=_whole)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def read_json(path: Path) -> Any:
    """Read a JSON file; what is no plain file is not waited for."""
    if path.exists() and not path.is_file():
        raise OSError(0, "not a plain file", str(path))
    if path.stat().st_size > MOST_JSON_BYTES:
        raise ValueError(f"more than {MOST_JSON_BYTES >> 20} MB")
    return parse_json(path.read_text(encoding="utf-8"))


def _milliseconds(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0 or isinstance(value, (bool, str)):
        raise ValueError(f"{value!r} is no duration")
    return number


def _short(error: BaseException) -> str:
    return f"no {error} in it" if isinstance(error, KeyError) else str(error)[:120]


# --- Statistics of samples: as profiling/sampling.py computes them, in plain Python -----------------------------------


def percentile(ordered: Sequence[float], at: float) -> float:
    """That percentile of numbers in order, between two of them if need be."""
    rank = at / 100 * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def intervals(bursts: Sequence[Sequence[float]], percents: Iterable[float]) -> dict[float, tuple[float, float]]:
    """Between which values each percentile lies: whole bursts are drawn again and again, since neighbours are alike."""
    chance, count = random.Random(0), len(bursts)
    ordered = sorted((ms, n) for n, burst in enumerate(bursts) for ms in burst)
    found: dict[float, list[float]] = {at: [] for at in percents}
    known: dict[tuple[int, ...], list[float]] = {}  # a few bursts give the same draw often
    for _ in range(DRAWS):
        drawn = [0] * count
        for _ in range(count):
            drawn[chance.randrange(count)] += 1
        key = tuple(drawn)
        if key not in known:
            values = [ms for ms, n in ordered for _ in range(drawn[n])]
            known[key] = [percentile(values, at) for at in found]
        for values, value in zip(found.values(), known[key]):
            values.append(value)
    ends = (50 * (1 - COVERS), 50 * (1 + COVERS))
    return {at: (percentile(sorted(v), ends[0]), percentile(sorted(v), ends[1])) for at, v in found.items()}


def noise(bursts: Sequence[Sequence[float]]) -> float:
    """Return the relative difference of an engine from itself: rounds with even and with odd numbers."""
    if len(bursts) < 2:
        return 0.0
    even, odd = (statistics.median([ms for burst in bursts[n::2] for ms in burst]) for n in (0, 1))
    return abs(even - odd) / max(min(even, odd), 1e-9)


def drift(samples: Sequence[float]) -> float:
    """Return the relative slowdown of the last third against the first."""
    third = max(1, len(samples) // 3)
    return statistics.median(samples[-third:]) / max(statistics.median(samples[:third]), 1e-9) - 1


def evenly(values: Sequence[float], count: int) -> list[float]:
    """So many of the values, from all over them."""
    return [values[n * len(values) // count] for n in range(count)] if count < len(values) else list(values)


# --- The family -------------------------------------------------------------------------------------------------------


class Graph(NamedTuple):
    """The properties of an ONNX file that are checked before TensorRT reads it."""

    opset: int
    operators: dict[str, str]  # to the name of the first node
    input: str
    shape: tuple[int, ...]  # 0: open


class Variant(NamedTuple):
    """One file of a family."""

    name: str
    path: Path
    sha256: str
    graph: Graph
    precision: str


@dataclass(frozen=True)
class Family:
    """The part of the manifest that timing needs."""

    folder: Path
    model: str
    dense: str
    precision: str  # of the dense variant; others may have their own
    batch: int
    threads: int
    fixed_batch: int | None
    variants: tuple[Variant, ...]
    reference: Reference | None = None  # that engines are compared with; None in older families


def read_family(folder: Path) -> Family:
    """Read a family and check every file of it against its hash."""
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
    except OSError as error:
        raise AgentError(f"{path}: cannot be read: {error.strerror}. Give the folder of a family") from error
    except ValueError as error:
        raise AgentError(f"{path}: damaged: {_short(error)}. Copy the family again") from error
    try:
        if manifest["format_version"] != 1:
            raise AgentError(
                f"{path}: of format {str(manifest['format_version'])[:20]}, and this agent reads 1. Copy a newer agent"
            )
        return _family(folder, manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AgentError(f"{path}: not the manifest of a family: {_short(error)}. Copy the family again") from error


def _family(folder: Path, manifest: Mapping[str, Any]) -> Family:
    target, fixed = manifest["target"], manifest["input"]["batch"]
    sizes = {}
    for entry in [*manifest["weights"], *manifest["variants"]]:
        path = _inside(folder, _text_in(entry, "file"))
        _check_hash(path, _text_in(entry, "sha256"))
        sizes[entry["file"]] = path.stat().st_size
    variants = tuple(_variant(folder, entry, _precision(target), sizes) for entry in manifest["variants"])
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError("two variants have the same name")
    if manifest["dense"] not in names:
        raise ValueError(f"no variant is called '{manifest['dense']}', which should be the dense one")
    return Family(
        folder=folder,
        model=_text_in(manifest, "model"),
        dense=manifest["dense"],
        precision=_precision(target),
        batch=_number_in(target, "batch"),
        threads=_number_in(target, "threads"),
        fixed_batch=None if fixed is None else _number_in(manifest["input"], "batch"),
        variants=variants,
        reference=_reference(folder, manifest),
    )


def _text_in(entry: Mapping[str, Any], key: str) -> str:
    if not isinstance(entry[key], str) or "\0" in entry[key]:
        raise ValueError(f"{key} is no text")
    return str(entry[key])


def _number_in(entry: Mapping[str, Any], key: str) -> int:
    value = entry[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_NUMBER:
        raise ValueError(f"{key} is not a whole number from 1 to {MOST_NUMBER}")
    return value


def _precision(entry: Mapping[str, Any]) -> str:
    if entry["precision"] not in PRECISIONS:
        raise ValueError(f"precision is none of {', '.join(PRECISIONS)}")
    return str(entry["precision"])


def _variant(folder: Path, entry: Mapping[str, Any], precision: str, sizes: Mapping[str, int]) -> Variant:
    """One entry of the manifest; `precision`: the family's, which an entry that names none has.

    `sizes`: of all files that the manifest lists.
    """
    name = _text_in(entry, "name")
    if not re.fullmatch(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,99}", name):
        raise AgentError(f"{folder / 'manifest.json'}: '{name[:100]}' cannot name a file. Copy the family again")
    path = _inside(folder, entry["file"])
    if path.suffix != ".onnx":
        raise AgentError(f"{path}: not an ONNX graph, which TensorRT needs. Export it with --flavour tensorrt")
    listed = {file: sizes[file] for file in entry.get("weights", []) if file in sizes}
    graph = read_graph(path, PurePosixPath(entry["file"]).parent, listed)
    return Variant(name, path, entry["sha256"], graph, _precision(entry) if "precision" in entry else precision)


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder; names and links that leave it are refused."""
    path = PurePosixPath(name)
    inner = not (path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts)
    if inner:  # realpath follows links, and gives up on those that go round in circles
        inner = Path(os.path.realpath(str(folder))) in Path(os.path.realpath(str(folder / path))).parents
    if not inner:
        raise AgentError(f"{folder / 'manifest.json'}: '{name}' leaves the folder. Copy the family again")
    return folder / path


def _check_hash(path: Path, wanted: str) -> None:
    if path.exists() and not path.is_file():
        raise AgentError(f"{path}: not a plain file. Copy the family again")
    if not path.is_file():
        raise AgentError(f"{path}: missing, though manifest.json lists it. Copy the family again")
    if sha256(path) != wanted:
        raise AgentError(f"{path}: damaged: it is not the file that manifest.json describes. Copy the family again")


def sha256(path: Path) -> str:
    """Hash a file without holding it in memory."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


class Field(NamedTuple):
    """A field of a protobuf message: a number, or the place of bytes in the file."""

    number: int
    value: int
    start: int
    end: int


def read_graph(path: Path, folder: PurePosixPath = PurePosixPath(), listed: Mapping[str, int] | None = None) -> Graph:
    """Read opset, operators and input from an ONNX file, which may hold gigabytes of weights, without the onnx package.

    TensorRT maps whatever file a tensor names, so all of them must be among the `listed` ones, by the sizes that these
    have; `folder`: of the file, which its names are relative to. None: nothing is known of other files, nor checked.

    Field numbers are those of onnx.proto: ModelProto 7 graph, 8 opset_import; GraphProto 1 node, 11 input.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if listed is not None:
                for tensor in tensors_of(data):
                    _check_place(data, tensor, folder, listed)
            return _graph(data)
    except (ValueError, IndexError) as error:
        raise AgentError(f"{path}: not an ONNX file: {_short(error)}. Copy the family again") from error


# The fields of each kind of message that lead to tensors, by their numbers in onnx.proto, and the kind behind them.
PARTS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
REPEATED = {
    ("graph", 1),
    ("graph", 5),
    ("graph", 15),
    ("function", 7),
    ("function", 11),
    ("node", 5),
    ("attribute", 10),
}
REPEATED |= {("attribute", 11), ("attribute", 23), ("model", 20), ("model", 25)}
Spans = Sequence[Tuple[int, int]]  # noqa: UP006 (Python 3.8): the places of a message, which may be in pieces


def tensors_of(data: mmap.mmap | bytes) -> Iterator[Spans]:
    """The places of all tensors of a model: initialisers, attributes, those of graphs in graphs and of functions.

    A message that is there once may be written in several pieces, which a reader puts together: so does this.
    """
    waiting: list[tuple[str, Spans, int]] = [("model", [(0, len(data))], 0)]
    while waiting:
        kind, spans, depth = waiting.pop()
        if kind == "tensor":
            yield spans
            continue
        if depth > DEEPEST_GRAPH:
            raise ValueError("its graphs are nested too deep")
        pieces: dict[int, list[tuple[int, int]]] = {}
        for field in (field for start, end in spans for field in fields(data, start, end)):
            inner = PARTS[kind].get(field.number)
            if inner is not None and (kind, field.number) in REPEATED:
                waiting.append((inner, [(field.start, field.end)], depth + (inner == "graph")))
            elif inner is not None:
                pieces.setdefault(field.number, []).append((field.start, field.end))
        waiting += [(PARTS[kind][n], found, depth + (PARTS[kind][n] == "graph")) for n, found in pieces.items()]


BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16}
BITS.update(
    {17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8}
)  # of TensorProto.DataType: 8-bit and smaller floats


def _check_place(data: mmap.mmap | bytes, tensor: Spans, folder: PurePosixPath, listed: Mapping[str, int]) -> None:
    """Refuse a tensor whose weights are in a file that is not listed, or not within it.

    TensorProto 1 dims, 2 data_type, 13 external_data (1 key, 2 value), 14 data_location.
    """
    places: list[tuple[str, str]] = []
    dims, kind, outside = 1, 0, False
    for field in (field for start, end in tensor for field in fields(data, start, end)):
        if field.number == 13:
            entry = {inner.number: _text(data, inner) for inner in fields(data, field.start, field.end)}
            places.append((entry.get(1, ""), entry.get(2, "")))
        elif field.number == 14:
            outside = field.value == 1
        elif field.number == 2:
            kind = field.value
        elif field.number == 1:
            for side in [field.value] if field.start == field.end else _packed(data, field):
                dims *= side
                if dims >= 1 << 63:
                    raise ValueError("a tensor has a negative size, or more than any memory")
    if not places and not outside:
        return
    found = dict(places)
    if len(found) < len(places):
        raise ValueError("a tensor names the place of its weights twice")
    name = found.get("location", "")
    whole = listed.get(str(folder / name))
    if whole is None:
        raise ValueError(f"it reads what manifest.json does not list for it: '{name}'")
    needed = str(-(-dims * BITS.get(kind, 0) // 8))
    words = [found.get("offset", "0"), found.get("length", needed)]
    if not all(re.fullmatch(r"[0-9]{1,18}", word) for word in words):
        raise ValueError(f"a tensor names no place in '{name}'")
    if sum(map(int, words)) > whole or (kind in BITS and int(words[1]) != int(needed)):
        raise ValueError(f"a tensor is not within '{name}'")


def _packed(data: mmap.mmap | bytes, field: Field) -> Iterator[int]:
    at = field.start
    while at < field.end:
        value, at = varint(data, at)
        yield value


def _graph(data: mmap.mmap) -> Graph:
    opset, inputs = 0, []
    operators: dict[str, str] = {}
    for field in fields(data, 0, len(data)):
        if field.number == 8:
            entry = {inner.number: inner for inner in fields(data, field.start, field.end)}
            domain = _text(data, entry[1]) if 1 in entry else ""
            if domain in ("", "ai.onnx") and 2 in entry:
                opset = max(opset, entry[2].value)
        elif field.number == 7:
            for part in fields(data, field.start, field.end):
                if part.number == 1:
                    node = {inner.number: inner for inner in fields(data, part.start, part.end)}
                    name = _text(data, node[3]) if 3 in node else ""
                    operators.setdefault(_text(data, node[4]) if 4 in node else "", name)
                elif part.number == 11:
                    inputs.append(_port(data, part))
    if not opset or not inputs:
        raise ValueError("it has no opset or no input")
    name, shape = inputs[0]
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,200}", name):  # trtexec is given it with a shape, separated by colons
        raise ValueError(f"its input is called '{name}'")
    if any(size > MOST_NUMBER for size in shape):
        raise ValueError(f"its input has the shape {shape}")
    return Graph(opset, operators, name, shape)


def _port(data: mmap.mmap, port: Field) -> tuple[str, tuple[int, ...]]:
    """Name and shape of an input: ValueInfoProto 1 name, 2 type; then tensor_type 1, shape 2, dim 1, dim_value 1."""
    parts = {inner.number: inner for inner in fields(data, port.start, port.end)}
    name = _text(data, parts[1]) if 1 in parts else ""
    shape: list[int] = []
    inner = parts.get(2)
    for number in (1, 2):
        if inner is not None:
            inner = {found.number: found for found in fields(data, inner.start, inner.end)}.get(number)
    if inner is not None:
        for dim in fields(data, inner.start, inner.end):
            sizes = {size.number: size.value for size in fields(data, dim.start, dim.end)}
            shape.append(sizes.get(1, 0))
    return name, tuple(shape)


def _text(data: mmap.mmap | bytes, field: Field) -> str:
    return data[field.start : field.end].decode("utf-8", "replace")


def fields(data: mmap.mmap | bytes, start: int, end: int) -> Iterator[Field]:
    """The fields of a protobuf message, without looking into them."""
    at = start
    while at < end:
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        value, size = 0, {1: 8, 5: 4}.get(kind, 0)
        if kind in (0, 2):
            value, at = varint(data, at)
            size = value if kind == 2 else 0
        elif not size:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + size > end:
            raise ValueError(f"it ends before byte {at + size}")
        yield Field(number, value, at, at + size)
        at += size


def varint(data: mmap.mmap | bytes, at: int) -> tuple[int, int]:
    """A number in seven bits a byte, low ones first, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number without end at byte {at}")


def refuse_untaken(family: Family, version: Version) -> None:
    """Refuse, before anything is built, what this TensorRT does not take."""
    if version < LEAST_VERSION:
        raise AgentError(f"TensorRT {version} is too old: {LEAST_VERSION} or newer is needed, which JetPack 6 brings")
    highest = highest_opset(version)
    for variant in family.variants:
        graph = variant.graph
        if variant.precision == "int8-dynamic":
            raise AgentError(
                f"{variant.path}: in int8-dynamic, which scales its inputs while it runs, and TensorRT does not. "
                "Export it with --precision int8-static or fp16"
            )
        if graph.opset > highest:
            newer = next((kind for kind in graph.operators if SINCE.get(kind, 0) > highest), None)
            node = f", node {graph.operators[newer] or newer} is {newer}" if newer else ""
            raise AgentError(
                f"{variant.path}: opset {graph.opset}{node}, and TensorRT {version} reads up to {highest}. "
                "Export it with --flavour tensorrt"
            )
        if "Attention" in graph.operators and variant.precision == "fp32":  # parses, and then fails to build
            raise AgentError(
                f"{variant.path}: node {graph.operators['Attention'] or 'Attention'} is Attention, which TensorRT does "
                "not build in fp32. Export it with --flavour tensorrt"
            )
        for kind in NOT_TAKEN:
            if kind in graph.operators:
                raise AgentError(
                    f"{variant.path}: node {graph.operators[kind] or kind} is {kind}, which TensorRT does not take. "
                    "Export it with --precision int8-static or fp16"
                )


def without_fp8(variants: Sequence[Variant], dense: str, capability: tuple[int, int] | None) -> dict[str, str]:
    """Tell why the variants in fp8 are left out on a GPU that has none; a dense one in fp8 is refused."""
    if capability is None or capability >= FP8_SINCE:
        return {}
    least, own = (".".join(map(str, version)) for version in (FP8_SINCE, capability))
    reason = f"in fp8, which needs compute capability {least}, and this GPU has {own}"
    found = {variant.name: reason for variant in variants if variant.precision == "fp8"}
    if dense in found:
        raise AgentError(f"{dense}: {reason}. Export it with --precision int8-static or fp16")
    return found


def shape_of(graph: Graph, batch: int) -> str | None:
    """The shape of the images for trtexec, such as images:1x3x224x224; None if the graph has fixed it."""
    if 0 not in graph.shape:
        return None
    return f"{graph.input}:" + "x".join(str(size or batch) for size in graph.shape)


def batch_of(family: Family, wanted: int | None) -> int:
    """Images in a run: what was asked for, or what the family was made for."""
    batch = wanted or family.batch
    if family.fixed_batch not in (None, batch):
        raise UsageError(f"the family takes exactly {family.fixed_batch} images. Give --batch {family.fixed_batch}")
    return batch


def chosen(family: Family, only: str | None) -> list[Variant]:
    """The variants to time, in the order of the manifest; dense always, since the others are compared with it."""
    if only is None:
        return list(family.variants)
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    known = [variant.name for variant in family.variants]
    for name in sorted(wanted - set(known)):
        raise UsageError(f"--only {name}: no variant is called that. There are: {', '.join(known)}")
    return [variant for variant in family.variants if variant.name in wanted | {family.dense}]


# --- Comparing: the answers of an engine with those of its own graph --------------------------------------------------

# The least cosine of an engine's centred answers to those of its graph in ONNX Runtime on the workstation, by
# precision. In fp32 only the order of sums differs: a difference of a thousandth of the largest value, which the gates
# of the export allow between runtimes, is about 1e-5. What is quantised flips single steps where rounding decides; the
# gates ask 0.9 of its distance to fp32, and ten times closer of two forms of the same quantised graph.
LEAST_COSINES = {"fp32": 0.99999, "fp16": 0.9995}
LEAST_QUANTISED = 0.99
# Scores that may differ by rounding alone. A cosine c leaves an error of sqrt(2 (1 - c)) standard deviations in every
# score, the difference of two scores has sqrt(2) times that, and three times as much is still no surprise.
NEAR_TIE = 6.0
# Of an image whose merges rounding decides: with equally similar tokens merged instead, a DeiT-Tiny with 0.15 to
# 0.3 of its tokens keeps 0.993 at least (half of its images less than 0.9995). Answers that are wrong are near 0.
LEAST_UNDECIDED = 0.9
COMPARED = {"cosine", "least_cosine", "asked", "top1", "images", "left_out", "passed"}  # keys of a comparison


def least_cosine(precision: str) -> float:
    """Return the least cosine that is asked of the answers of an engine in a precision."""
    return LEAST_COSINES.get(precision, LEAST_QUANTISED)


class Reference(NamedTuple):
    """The images and answers that a family carries: what an engine is compared with."""

    images: int
    outputs: int
    scores: bool  # of classes, or else an embedding
    takes_bytes: bool
    mean: list[float]
    std: list[float]
    pixels: dict[tuple[int, int], Path]  # RGB bytes of all images one after another, by height and width
    answers: dict[str, Path]  # float32, by variant
    undecided: dict[str, set[int]]  # images whose merges rounding decides, by variant
    dense: Path  # answers of the dense model in fp32
    digests: dict[str, str]  # hashes of the files, by name


def _reference(folder: Path, manifest: Mapping[str, Any]) -> Reference | None:
    """Return the reference of a family, its files checked; None: an older family has none."""
    told = manifest.get("reference")
    if told is None:
        return None
    images, outputs = _number_in(told, "images"), _number_in(told, "outputs")
    files = [told["dense"], *told["pixels"], *told["answers"].values()]
    places = {_text_in(entry, "file"): _inside(folder, _text_in(entry, "file")) for entry in files}
    for entry in files:
        _check_hash(places[entry["file"]], _text_in(entry, "sha256"))
    pixels = {}
    for entry in told["pixels"]:
        height, width = map(int, entry["image_size"])
        pixels[height, width] = places[entry["file"]]
    answers = {name: places[entry["file"]] for name, entry in told["answers"].items()}
    sizes = {path: images * height * width * 3 for (height, width), path in pixels.items()}
    sizes.update(dict.fromkeys([*answers.values(), places[told["dense"]["file"]]], 4 * images * outputs))
    for path, size in sizes.items():
        if path.stat().st_size != size:
            raise ValueError(f"{path.name} has not the {size} bytes of its images")
    steps = manifest["preprocessing"]
    mean, std = ([float(value) for value in steps[part]] for part in ("mean", "std"))
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise ValueError("mean and std are not those of three channels")
    return Reference(
        images=images,
        outputs=outputs,
        scores=told["kind"] == "scores",
        takes_bytes=manifest["input"]["type"] == "uint8",
        mean=mean,
        std=std,
        pixels=pixels,
        answers=answers,
        undecided={name: {int(n) for n in entry.get("undecided", ())} for name, entry in told["answers"].items()},
        dense=places[told["dense"]["file"]],
        digests={entry["file"]: entry["sha256"] for entry in files},
    )


def read_answers(path: Path, outputs: int) -> list[list[float]]:
    """Read the answers of all images: float32, one image after another."""
    values = array("f", path.read_bytes())
    if sys.byteorder == "big":
        values.byteswap()
    return [list(values[start : start + outputs]) for start in range(0, len(values), outputs)]


def as_input(pixels: bytes, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """Normalise the RGB bytes of one image, channels first, to the very float32 that the workstation computed with."""

    def single(value: float) -> float:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])

    planes = []
    for channel in range(3):
        middle, scale = single(mean[channel]), single(std[channel])
        of_byte = [struct.pack("<f", single(single(byte / 255) - middle) / scale) for byte in range(256)]
        planes.append(b"".join(map(of_byte.__getitem__, pixels[channel::3])))
    return b"".join(planes)


def in_runs(images: int, batch: int) -> list[list[int]]:
    """Return which images go into each run of a batch; the last run is filled up from the first images on."""
    return [[n % images for n in range(start, start + batch)] for start in range(0, images, batch)]


def parse_output(text: str, where: str, count: int) -> list[float]:
    """Read what --exportOutput writes: an object for every output, values in six digits; nan for what is no number."""
    numbers = re.sub(r"(?<=[\[,\s])[-+]?(nan|inf)(\([^)]*\))?(?=[\],\s])", "null", text, flags=re.IGNORECASE)
    rows = _json(numbers, where, "--exportOutput")
    try:
        (row,) = rows
        values = [math.nan if value is None else float(value) for value in row["values"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise AgentError(f"{where}: not what trtexec --exportOutput writes: {_short(error)}. Run again") from error
    if len(values) != count:
        raise AgentError(f"{where}: {len(values)} values, and {count} were expected. Run again")
    return values


def compare(
    wanted: Sequence[Sequence[float]],
    found: Sequence[Sequence[float]],
    scores: bool,
    asked: float,
    undecided: Sequence[bool] = (),
) -> dict[str, Any]:
    """Compare answers with those that are wanted, image by image.

    Both are centred first, or what all answers have in common would hide a difference: scores of classes by the mean of
    each image's own, since that changes no probability; embeddings by the mean that is wanted over all images. Every
    image must have a cosine of `asked`, and the same best class unless two are nearly tied. Of images of which rounding
    decides what tokens a variant merges (`undecided`) less is asked: `LEAST_UNDECIDED`.
    """
    none = {"cosine": None, "least_cosine": None, "asked": asked, "top1": None, "images": len(wanted), "left_out": 0}
    if not all(math.isfinite(value) for row in found for value in row):
        return dict(none, passed=False)
    if scores:
        pairs = [(_centred(a), _centred(b)) for a, b in zip(wanted, found)]
    else:
        middle = [sum(column) / len(wanted) if len(wanted) > 1 else 0.0 for column in zip(*wanted)]
        pairs = [
            ([x - m for x, m in zip(a, middle)], [x - m for x, m in zip(b, middle)]) for a, b in zip(wanted, found)
        ]
    cosines = [_cosine(a, b) for a, b in pairs]
    least = [min(asked, LEAST_UNDECIDED) if may_differ else asked for may_differ in undecided or [False] * len(pairs)]
    same = [_same_best(a, b, limit) if scores else None for (a, b), limit in zip(pairs, least)]
    agrees = [cosine >= limit and best is not False for cosine, limit, best in zip(cosines, least, same)]
    told = [best for best in same if best is not None]
    return dict(
        none,
        cosine=sum(cosines) / len(cosines),
        least_cosine=min(cosines),
        top1=sum(told) / len(told) if told else None,
        left_out=sum(limit <= cosine < asked for cosine, limit in zip(cosines, least)),
        passed=all(agrees),
    )


def _centred(values: Sequence[float]) -> list[float]:
    middle = sum(values) / len(values)
    return [value - middle for value in values]


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    if list(a) == list(b):  # also where both are zero
        return 1.0
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return max(-1.0, min(1.0, sum(x * y for x, y in zip(a, b)) / max(lengths, 1e-300)))


def _same_best(wanted: Sequence[float], found: Sequence[float], asked: float) -> bool | None:
    """Return True if both have the same best class; None if the wanted ones are nearly tied."""
    ordered = sorted(wanted)
    spread = math.sqrt(sum(value * value for value in wanted) / len(wanted))
    if len(wanted) > 1 and ordered[-1] - ordered[-2] <= NEAR_TIE * math.sqrt(1 - asked) * spread:
        return None
    return wanted.index(ordered[-1]) == found.index(max(found))


def told_of(compared: Mapping[str, Any]) -> str:
    """Say what a comparison found, with its figures."""
    if compared["least_cosine"] is None:
        return f"its answers to {compared['images']} images are not finite numbers"
    best = "" if compared["top1"] is None else f", the same best class in {100 * compared['top1']:.0f} %"
    out = compared["left_out"]
    merges = f"; in {out} of them rounding decides which tokens merge, and {LEAST_UNDECIDED} is asked" if out else ""
    return f"least cosine {compared['least_cosine']:.6f} of {compared['images']} images{best}{merges}"


# --- The device -------------------------------------------------------------------------------------------------------


def output_of(*command: str) -> str:
    """Return what a program of the system prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def text_of(path: Path) -> str:
    """Return the text of a file of the system; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
    except OSError:
        return ""


def line_of(path: Path) -> str:
    """The first line of a file of the system."""
    return text_of(path).strip().split("\n")[0].strip()


def number_of(path: Path) -> float | None:
    """The number in a file of the system."""
    try:
        return float(line_of(path))
    except ValueError:
        return None


def look(root: Path = ROOT) -> dict[str, Any]:
    """Return clocks, temperatures and free memory of this moment."""
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "clocks_mhz": clocks(root),
        "temperatures_c": temperatures(root),
        "memory_available_bytes": _meminfo(root, "MemAvailable"),
    }


def clocks(root: Path = ROOT) -> dict[str, float]:
    """Clocks in MHz: "gpu" just now, "gpu min" and "gpu max" between which it may move; cores likewise."""
    found: dict[str, float] = {}
    places = [*_gpu_places(root), *sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"), key=_by_number)]
    for place in places:
        name, folder, file, unit = place.name, place / "cpufreq", "scaling_{}_freq", 1e3
        if not place.name.startswith("cpu"):
            name, folder, file, unit = "gpu" if "gpu" not in found else place.name, place, "{}_freq", 1e6
        for which, end in (("cur", ""), ("min", " min"), ("max", " max")):
            value = number_of(folder / file.format(which))
            if value is not None:
                found[name + end] = round(value / unit, 1)
    if "gpu" not in found:
        now, most = (_smi(field) for field in ("clocks.sm", "clocks.max.sm"))
        found.update({name: float(mhz) for name, mhz in (("gpu", now), ("gpu max", most)) if _is_number(mhz)})
    return found


def _gpu_places(root: Path) -> list[Path]:
    """Return the kernel's folders of a Jetson's GPU clock: 17000000.gpu, .ga10b or .gv11b, by board and release."""
    patterns = ("sys/class/devfreq/*", "sys/devices/gpu.0/devfreq/*", "sys/devices/platform/gpu.0/devfreq/*")
    places = (place for pattern in patterns for place in sorted(root.glob(pattern)))
    found = {place.name: place for place in places if re.search(r"gpu|g[abpv]\d+b", place.name)}
    return list(found.values())


def _by_number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name) or 0)


def temperatures(root: Path = ROOT) -> dict[str, float]:
    """Degrees of every thermal zone that tells; a zone whose part is switched off does not."""
    found: dict[str, float] = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*"), key=_by_number):
        value = number_of(zone / "temp")
        if value is not None:
            name = line_of(zone / "type") or zone.name
            found[name if name not in found else zone.name] = round(value / 1000, 1)
    if not found and _is_number(_smi("temperature.gpu")):
        found["gpu"] = float(_smi("temperature.gpu"))
    return found


def _meminfo(root: Path, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _smi(field: str) -> str:
    """One thing about the first GPU that nvidia-smi knows: for cards in a PC, and newer Jetsons in part."""
    if shutil.which("nvidia-smi") is None:
        return ""
    text = output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits").strip()
    first = text.split("\n")[0].strip()
    return "" if first.startswith("[") else first  # [N/A], [Not Supported]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def power_modes(root: Path = ROOT) -> dict[int, str]:
    """The names of the power modes that this board has, by their numbers."""
    text = text_of(root / "etc/nvpmodel.conf")
    found = re.findall(r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>", text, re.MULTILINE)
    return {int(number): name for number, name in found}


def power_mode(root: Path = ROOT) -> str:
    """The name of the power mode that is set: as nvpmodel tells it or, where that needs root, its own file."""
    asked = re.search(r"NV Power Mode:\s*(\S+)", output_of("nvpmodel", "-q"))
    if asked is not None:
        return asked.group(1)
    kept = re.search(r"pmode:(\d+)", text_of(root / "var/lib/nvpmodel/status"))
    return power_modes(root).get(int(kept.group(1)), UNKNOWN) if kept else UNKNOWN


def _watts(name: str) -> float:
    """Return the limit of a power mode, to compare modes: MAXN and, above it, MAXN_SUPER have none, 15W has one."""
    if name.startswith("MAXN"):
        return math.inf if "SUPER" in name else 1e6
    found = re.search(r"(\d+)W", name)
    return float(found.group(1)) if found else 0.0


def software(version: Version, root: Path = ROOT) -> dict[str, str]:
    """Versions of all that a latency may depend on."""
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", line_of(root / "etc/nv_tegra_release"))
    cuda = re.search(r'"cuda"\s*:\s*{[^}]*"version"\s*:\s*"([\d.]+)"', text_of(root / "usr/local/cuda/version.json"))
    driver = re.search(r"Kernel Module\s.*?(\d+\.\d+(\.\d+)?)", line_of(root / "proc/driver/nvidia/version"))
    found = {
        "jetpack": output_of("dpkg-query", "--showformat=${Version}", "--show", "nvidia-jetpack").strip(),
        "l4t": f"{release.group(1)}.{release.group(2)}" if release else "",
        "tensorrt": str(version),
        "cuda": cuda.group(1) if cuda else "",
        "driver": driver.group(1) if driver else _smi("driver_version"),
    }
    return {name: value or UNKNOWN for name, value in found.items()}


def device_card(version: Version, seen: Mapping[str, Any], root: Path = ROOT) -> dict[str, Any]:
    """The machine as a DeviceCard of profiling/device.py."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    total = _meminfo(root, "MemTotal")
    own = _smi("memory.total")  # MiB; a Jetson shares the processor's
    return {
        "cpu": _cpu(root),
        "cores": len(cores),
        "core_numbers": cores,
        "governor": line_of(root / f"sys/devices/system/cpu/cpu{cores[0]}/cpufreq/scaling_governor") or UNKNOWN,
        "memory_bytes": total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "runtime_version": str(version),
        "accelerator": {
            "name": line_of(root / "proc/device-tree/model") or _smi("name") or UNKNOWN,
            "software": software(version, root),
            "power_mode": power_mode(root),
            "clocks_mhz": dict(seen["clocks_mhz"]),
            "temperatures_c": dict(seen["temperatures_c"]),
            "memory_bytes": int(float(own)) << 20 if _is_number(own) else total,
            "board": line_of(root / "proc/device-tree/model") or None,
            "sm_count": sm_count(),
        },
    }


def sm_count() -> int | None:
    """Return the number of streaming multiprocessors: boards with one GPU name differ in it."""
    return attribute_of_gpu(16)  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def compute_capability() -> tuple[int, int] | None:
    """Return what kind of arithmetic the GPU has, such as (8, 7); None if it is not known."""
    major, minor = attribute_of_gpu(75), attribute_of_gpu(76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
    return None if major is None or minor is None else (major, minor)


def attribute_of_gpu(number: int) -> int | None:
    """Return an attribute of the first GPU by its number in cuda.h, from the driver; None without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, found = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(found), number, device)
    return None if failed else found.value


def _cpu(root: Path) -> str:
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or UNKNOWN


def warnings_of(card: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """Return advice on settings to change before timing; only for a Jetson, which is known well enough."""
    if not (root / "etc/nv_tegra_release").exists():
        return []
    found, gpu = [], card["accelerator"]
    mode, modes = gpu["power_mode"], power_modes(root)
    highest = max(modes, key=lambda number: _watts(modes[number]), default=None)
    if mode == UNKNOWN:
        found.append("the power mode is unknown. Look yourself: sudo nvpmodel -q")
    elif highest is not None and _watts(mode) < _watts(modes[highest]):
        found.append(f"the power mode is {mode}, and {modes[highest]} is higher. Set it: sudo nvpmodel -m {highest}")
    at = gpu["clocks_mhz"]
    if "gpu" not in at or "gpu max" not in at:
        found.append("the GPU does not tell its clock, so it may change while timing. Hold it: sudo jetson_clocks")
    elif at["gpu"] != at["gpu max"] and at.get("gpu min") != at["gpu max"]:
        found.append(f"the GPU is at {at['gpu']:g} of {at['gpu max']:g} MHz and moves. Hold it: sudo jetson_clocks")
    return found


# --- Power, energy and heat -------------------------------------------------------------------------------------------

PERIOD = 0.05  # seconds between two readings of the power
SELDOM = 5  # periods between two looks at heat and clocks: looking takes time from what is measured
LEAST_READINGS = 8  # of the power in a run
LEAST_REFRESHES = 4  # of the sensor in a run: it averages over the time between two of them
IDLE_SECONDS = 3.0
MOST_WATTS = 1e4  # a reading beyond is none
LOWERED = 0.97  # of a clock that is held: less was lowered, not rounded
SOAK_STEP = 60.0  # seconds of each row of a soak
SETTLED = 0.02  # difference of the last two rows of a soak
SENSORS = ("ina3221", "ina3221x", "ina238")
# The rails whose sum is the whole module or board, by their labels; the first whose rails are all there is taken.
TOTALS = (
    ("VIN",),  # Thor: what the developer kit draws, by an INA238 on its carrier board (NVIDIA's forum, topic 366461)
    ("VDD_IN",),  # Orin NX and Orin Nano: the module (Jetson Linux guide, forum topic 200883)
    # AGX Orin: the module. A fourth rail, VDDQ_VDD2_1V8AO, reads 5 V too, so it is taken to be a part of VIN_SYS_5V0.
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),  # Thor on a carrier board without an INA238: the module
)


class Rail(NamedTuple):
    """A supply that a sensor of the board measures."""

    name: str
    chip: str
    volts: Path  # in millivolts
    amperes: Path  # in milliamperes
    power: Path | None  # in microwatts, where the chip multiplies itself
    refresh: float  # seconds between two values of the sensor

    def watts(self) -> float | None:
        """Return the power now; None if it cannot be read."""
        if self.power is not None:
            found = number_of(self.power)
            watts = math.nan if found is None else found / 1e6
        else:
            volts, amperes = number_of(self.volts), number_of(self.amperes)
            watts = math.nan if volts is None or amperes is None else volts * amperes / 1e6
        return watts if abs(watts) <= MOST_WATTS else None


class Power(NamedTuple):
    """The rails whose sum is the power of the whole module or board."""

    rails: tuple[Rail, ...]

    @property
    def source(self) -> str:
        """What measures, in words: VDD_IN by INA3221."""
        chips = dict.fromkeys(rail.chip.upper() for rail in self.rails)
        return f"{' + '.join(rail.name for rail in self.rails)} by {' and '.join(chips)}"

    @property
    def refresh(self) -> float:
        """The seconds between two values of the slowest sensor."""
        return max(rail.refresh for rail in self.rails)

    def watts(self) -> dict[str, float] | None:
        """Return the power of each rail now; None if one cannot be read."""
        found = {rail.name: rail.watts() for rail in self.rails}
        known = {name: watts for name, watts in found.items() if watts is not None}
        return known if len(known) == len(found) else None


def rails_of(root: Path = ROOT) -> dict[str, Rail]:
    """Return all rails that sensors of this machine measure, by label; channels without one are not connected."""
    patterns = ["sys/class/hwmon/hwmon*"]
    patterns += [f"sys/bus/i2c/drivers/{chip}/*/hwmon/hwmon*" for chip in SENSORS]
    found: dict[str, Rail] = {}
    for folder in (place for pattern in patterns for place in sorted(root.glob(pattern), key=_by_number)):
        chip = line_of(folder / "name")
        if chip not in SENSORS:
            continue
        interval = number_of(folder / "update_interval")  # milliseconds
        refresh = interval / 1000 if interval is not None and 0 < interval < 1e5 else PERIOD
        for label in sorted(folder.glob("in[0-9]*_label"), key=_by_number):
            number, name = _by_number(label), line_of(label)
            if not name or name.startswith("NC") or name.startswith("sum of"):
                continue
            volts, amperes = folder / f"in{number}_input", folder / f"curr{number}_input"
            power = folder / f"power{number}_input"
            rail = Rail(name, chip.rstrip("x"), volts, amperes, power if power.exists() else None, refresh)
            if name not in found and (power.exists() or (volts.exists() and amperes.exists())):
                found[name] = rail
    return found


def power_of(root: Path = ROOT) -> tuple[Power | None, str]:
    """Return what measures the power of the whole board, or None and the reason why nothing does."""
    rails = rails_of(root)
    for names in TOTALS:
        if all(name in rails for name in names):
            power = Power(tuple(rails[name] for name in names))
            if power.watts() is None:
                return None, f"{power.source} cannot be read"
            return power, ""
    if rails:
        return None, f"the rails {', '.join(rails)} are not known to add up to the board's power"
    return None, "no INA3221 or INA238 tells the power of this board"


Sample = Tuple[float, float]  # noqa: UP006 (Python 3.8): moment in seconds, watts


def joules(samples: Sequence[Sample], start: float, end: float) -> float:
    """Integrate power over time: straight lines between readings, and beyond the first and last as they were."""
    inside = [(at, watts) for at, watts in samples if start < at < end]
    points = [(start, _watts_at(samples, start)), *inside, (end, _watts_at(samples, end))]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points, points[1:]))  # noqa: RUF007 (Python 3.8)


def _watts_at(samples: Sequence[Sample], moment: float) -> float:
    before = [sample for sample in samples if sample[0] <= moment]
    after = [sample for sample in samples if sample[0] > moment]
    if not before or not after:
        return (before[-1:] or after[:1])[0][1]
    (t0, w0), (t1, w1) = before[-1], after[0]
    return w0 + (w1 - w0) * (moment - t0) / (t1 - t0)


class Spent(NamedTuple):
    """The energy of some runs of a model, or the reason why it is not known."""

    energy_mj: float | None = None  # of one run
    watts: float | None = None  # on average
    seconds: float = 0.0  # from run to run
    reason: str = ""

    def above(self, idle_w: float | None) -> float | None:
        """The energy of one run beyond what the board draws anyway."""
        return None if self.energy_mj is None or idle_w is None else self.energy_mj - 1000 * idle_w * self.seconds


def spent_in(samples: Sequence[Sample], start: float, end: float, runs: int, refresh: float) -> Spent:
    """Return the energy of so many runs between two moments, or why readings of the power do not tell it."""
    inside = [at for at, _ in samples if start <= at <= end]
    needed = LEAST_REFRESHES * max(refresh, PERIOD)
    if runs < 1 or end - start < needed:
        return Spent(
            reason=f"it ran for {max(end - start, 0):.1f} s, and the sensor needs {needed:.1f}: give more --seconds"
        )
    if len(inside) < LEAST_READINGS:
        return Spent(
            reason=f"its power was read {len(inside)} times, and {LEAST_READINGS} are needed: give more --seconds"
        )
    gap = max(b - a for a, b in zip([start, *inside], [*inside, end]))
    if gap > max(needed, 10 * PERIOD):
        return Spent(reason=f"its power could not be read for {gap:.1f} s")
    if len({watts for _, watts in samples}) == 1:
        return Spent(reason="the sensor told the same value all the time")
    energy = joules(samples, start, end)
    if energy <= 0:
        return Spent(reason="the sensor told no power")
    return Spent(1000 * energy / runs, energy / (end - start), (end - start) / runs)


def over_currents(root: Path = ROOT) -> dict[str, int]:
    """Return how often each over-current input of the chip has throttled it since it was started: oc1, oc2, oc3."""
    found = {}
    for path in sorted(root.glob("sys/class/hwmon/hwmon*/oc*_event_cnt")):
        value = number_of(path)
        if value is not None and 0 <= value < 1 << 32:
            found[path.name.split("_")[0]] = int(value)
    return found


def alert_files(root: Path = ROOT) -> dict[str, Path]:
    """Return the states of what the kernel throttles when it is hot, by name; a fan that runs throttles nothing."""
    devices = sorted(root.glob("sys/class/thermal/cooling_device*"), key=_by_number)
    kinds = {line_of(device / "type"): device / "cur_state" for device in devices}
    return {kind: state for kind, state in kinds.items() if kind.endswith("-alert")}


class Watch:
    """Watches the board while something runs: its power, its GPU clock, and what throttles it.

    `log`: of a trtexec, whose lines tell when its runs began and ended. An older log there is removed.
    """

    def __init__(self, power: Power | None, root: Path = ROOT, log: Path | None = None) -> None:
        self.power, self.root, self.log = power, root, log
        self.samples: list[tuple[float, dict[str, float]]] = []  # moment, watts by rail
        self.clocks: list[tuple[float, float]] = []  # moment, hertz
        self.alerts: set[str] = set()
        self.timed: tuple[float, float, int] | None = None  # beginning and end of the timed runs, and their number
        self.counts: dict[str, int] = {}  # events of over-current meanwhile
        self._gpu, self._alerts = next(iter(_gpu_places(root)), None), alert_files(root)
        self._stop = threading.Event()
        # Reading a sensor may wait for its next value, and the log must not wait for that.
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read_power, self._read_rest)]

    def __enter__(self) -> Watch:
        if self.log is not None:
            self.log.unlink(missing_ok=True)
        self._before, self._held = over_currents(self.root), _held_clock(self._gpu)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        after = over_currents(self.root)  # the counters are of 32 bits, and begin again
        self.counts = {name: (after[name] - n) % (1 << 32) for name, n in self._before.items() if name in after}

    def _read_power(self) -> None:
        while self.power is not None and not self._stop.is_set():
            before, watts = time.monotonic(), self.power.watts()
            if watts is not None:
                self.samples.append(((before + time.monotonic()) / 2, watts))
            self._stop.wait(PERIOD)

    def _read_rest(self) -> None:
        last, turn = False, 0
        while not last:
            last = self._stop.is_set()  # once more after the end: a log may have come late
            self._read_log()
            if last or turn % SELDOM == 0:
                self._read_heat()
            turn += 1
            self._stop.wait(PERIOD)

    def _read_heat(self) -> None:
        self.alerts.update(kind for kind, state in self._alerts.items() if (number_of(state) or 0) > 0)
        clock = None if self._gpu is None else number_of(self._gpu / "cur_freq")
        self.clocks += [] if clock is None else [(time.monotonic(), clock)]

    def _read_log(self) -> None:
        """Note the moment at which trtexec tells of its timed runs, which is right after the last of them."""
        if self.log is None or self.timed is not None:
            return
        found = re.search(r"Timing trace has (\d+) queries over (\d[\d.e+-]*) s\s", text_of(self.log))
        if found is not None:
            with contextlib.suppress(ValueError):
                seconds, now = float(found.group(2)), time.monotonic()
                self.timed = (now - seconds, now, int(found.group(1)))

    def spent(self, timed: tuple[float, float, int] | None = None) -> Spent:
        """Return the energy of runs: those that trtexec told of, or so many between two moments."""
        if self.power is None:
            return Spent(reason="nothing measures it")
        told = timed or self.timed
        if told is None:
            return Spent(reason="trtexec did not tell when it timed")
        totals = [(at, sum(watts.values())) for at, watts in self.samples]
        return spent_in(totals, *told, self.power.refresh)

    def rails_w(self) -> dict[str, float]:
        """Return the mean power of each rail during the timed runs."""
        start, end = self.timed[:2] if self.timed is not None else (-math.inf, math.inf)
        inside = [watts for at, watts in self.samples if start <= at <= end]
        return {name: round(statistics.mean(w[name] for w in inside), 3) for name in (inside[0] if inside else ())}

    def throttled(self) -> list[str]:
        """Return what has throttled the chip meanwhile, in words; nothing if nothing did."""
        found = [f"over-current {name}, {count} times" for name, count in self.counts.items() if count]
        found += sorted(self.alerts)
        start, end = self.timed[:2] if self.timed is not None else (-math.inf, math.inf)
        least = min((clock for at, clock in self.clocks if start <= at <= end), default=math.inf)
        if self._held is not None and least < LOWERED * self._held:
            found.append(f"GPU clock {least / 1e6:.0f} of {self._held / 1e6:.0f} MHz")
        return found


def _held_clock(gpu: Path | None) -> float | None:
    """Return the GPU's clock if it is held (jetson_clocks); None if it may move, or is not known."""
    if gpu is None:
        return None
    least, most = number_of(gpu / "min_freq"), number_of(gpu / "max_freq")
    return most if most and least == most else None


def idle_watts(power: Power) -> float | None:
    """Return the median power of the board while nothing of ours runs."""
    end, found = time.monotonic() + max(IDLE_SECONDS, LEAST_REFRESHES * power.refresh), []
    while time.monotonic() < end:
        watts = power.watts()
        if watts is not None:
            found.append(sum(watts.values()))
        time.sleep(PERIOD)
    return statistics.median(found) if found else None


def seen_in(watches: Sequence[Watch], idle_w: float | None) -> dict[str, Any]:
    """Return energy and heat of a visit: of its run with copying, which comes first, and what throttled any of them."""
    spent = watches[0].spent()
    reasons = [reason for watch in watches for reason in watch.throttled()]
    return {
        "energy_mj": spent.energy_mj,
        "above_idle_mj": spent.above(idle_w),
        "watts": spent.watts,
        "rails_w": watches[0].rails_w(),
        "no_energy": spent.reason,
        "throttled": list(dict.fromkeys(reasons)),
    }


def energy_in_profile(visits: Sequence[Mapping[str, Any]], power: Power | None) -> dict[str, Any]:
    """Return the keys of a Profile that tell its energy; fewer rounds with one than an interval needs tell none."""
    known = [visit for visit in visits if visit.get("energy_mj") is not None]
    if power is None or len(known) < LEAST_ROUNDS:
        return {"energy_mj": None}
    rounds = [visit["energy_mj"] for visit in known]
    above = [visit["above_idle_mj"] for visit in known if visit.get("above_idle_mj") is not None]
    watts = [visit["watts"] for visit in known if visit.get("watts") is not None]
    return {
        "energy_mj": statistics.mean(rounds),
        "energy_rounds_mj": rounds,
        "energy_source": power.source,
        "energy_above_idle_mj": statistics.mean(above) if above else None,
        "power_w": statistics.mean(watts) if watts else None,
    }


def steady_ms(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the latency after heat: the median of the medians in the last third of a soak."""
    last = rows[-max(1, len(rows) // 3) :]
    return statistics.median(row["p50_ms"] for row in last)


def _energy_in(visit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked energy and heat of a visit in the file of an interrupted run."""
    found: dict[str, Any] = {"throttled": [str(reason) for reason in visit.get("throttled", [])]}
    for key in ("energy_mj", "above_idle_mj", "watts"):
        value = visit.get(key)
        if value is not None and not (isinstance(value, (int, float)) and abs(value) < 1e9):
            raise ValueError(f"{key} is no number")
        found[key] = value
    rails = {str(name): float(watts) for name, watts in dict(visit.get("rails_w", {})).items()}
    return dict(found, rails_w=rails, no_energy=str(visit.get("no_energy", "")))


# --- Power modes ------------------------------------------------------------------------------------------------------


class NeedsRestart(AgentError):
    """A power mode that only a restart of the board can set."""


def current_mode(root: Path = ROOT) -> int | None:
    """Return the number of the power mode that is set."""
    asked = re.search(r"NV Power Mode:\s*\S+\s+(\d+)", output_of("nvpmodel", "-q"))
    found = asked or re.search(r"pmode:(\d+)", text_of(root / "var/lib/nvpmodel/status"))
    return int(found.group(1)) if found else None


def set_mode(number: int, root: Path = ROOT) -> None:
    """Set a power mode; one that asks for a restart is refused: nothing is answered, so nothing is restarted."""
    try:
        done = subprocess.run(
            ["nvpmodel", "-m", str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
            start_new_session=True,  # Ctrl-C is for us: it must be able to set the mode back
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(f"nvpmodel -m {number} cannot be run: {error}. Set the mode yourself") from error
    text = done.stdout.decode("utf-8", "replace")
    if re.search(r"reboot", text, re.IGNORECASE):
        raise NeedsRestart(f"power mode {number} needs a restart of the board")
    if current_mode(root) != number:
        raise AgentError(f"nvpmodel -m {number} did not set the mode: {_last_line(text)[:200] or 'it gave no reason'}")


def modes_of(text: str, known: Mapping[int, str]) -> list[int]:
    """Return the numbers of the power modes that are named: all, 0,2 or 15W,MAXN."""
    if text == "all":
        return list(known)
    found = []
    for word in (word.strip() for word in text.split(",")):
        number = next((n for n, name in known.items() if word in (str(n), name)), None)
        if number is None:
            there = ", ".join(f"{n} ({name})" for n, name in known.items())
            raise UsageError(f"--power-modes {word}: no power mode is called that. There are: {there}")
        found += [number] if number not in found else []
    return found


# --- The work ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    family: Path
    out: Path
    trtexec: str | None = None
    seconds: float = 10.0
    warm_up: float = 1.0
    rounds: int = 5
    workspace: int | None = None
    keep_engines: Path | None = None
    only: str | None = None
    batch: int | None = None
    layers: bool = False
    soak: float | None = None  # minutes
    power_modes: str | None = None
    root: Path = ROOT  # of the files of the system; another one only in tests

    def beside(self, ending: str) -> Path:
        """A file or folder beside the one to write: orin.partial.json for orin.json."""
        return self.out.with_name(self.out.stem + ending)

    @property
    def partial(self) -> Path:
        """The file with the measurements so far."""
        return self.beside(".partial.json")

    @property
    def record(self) -> Path:
        """All that was seen and that a Profile has no place for."""
        return self.beside(".record.json")

    @property
    def engines(self) -> Path:
        """The folder that engines are built in."""
        return self.keep_engines or self.beside(".engines")


def find_trtexec(given: str | None) -> str:
    """The trtexec to use."""
    if given is not None:
        if not os.access(given, os.X_OK) or not os.path.isfile(given):
            raise AgentError(f"{given}: not a program that can be run. Give --trtexec PATH")
        return given
    found = shutil.which("trtexec") or next((p for p in TRTEXEC_PLACES if os.access(p, os.X_OK)), None)
    if found is None:
        raise AgentError(
            f"no trtexec in PATH nor at {TRTEXEC_PLACES[0]}. Install it (sudo apt install libnvinfer-bin) "
            "or give --trtexec PATH"
        )
    return found


def version_of(trtexec: str) -> Version:
    """Ask trtexec for the version of its TensorRT."""
    try:
        done = subprocess.run(
            [trtexec, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AgentError(f"{trtexec}: cannot be run: {error}. Give --trtexec PATH") from error
    return parse_version(done.stdout.decode("utf-8", "replace"))


class Agent:
    """One family on one device."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.family = read_family(asked.family)
        self.trtexec = find_trtexec(asked.trtexec)
        self.version = version_of(self.trtexec)
        refuse_untaken(self.family, self.version)
        self.batch = batch_of(self.family, asked.batch)
        wanted = chosen(self.family, asked.only)
        self.left_out = without_fp8(wanted, self.family.dense, compute_capability())
        self.variants = [variant for variant in wanted if variant.name not in self.left_out]
        self.looks = [look(asked.root)]
        self.card = device_card(self.version, self.looks[0], asked.root)
        self.warnings = warnings_of(self.card, asked.root)
        if self.left_out:
            names, reason = ", ".join(self.left_out), next(iter(self.left_out.values()))
            self.warnings.append(f"{names}: left out, {reason}")
        self.power, self.no_power = power_of(asked.root)
        if self.power is None and (asked.root / "etc/nv_tegra_release").exists():
            self.warnings.append(f"no energy is measured: {self.no_power}")
        self.idle_w: float | None = None
        self.state: dict[str, Any] = {}
        self.builds: dict[str, Any] = {}
        self.answered: dict[str, dict[str, Any]] = {}  # comparisons of this run
        self.failed: dict[str, dict[str, Any]] = {}  # those that a variant did not pass
        _refuse_foreign(asked.out, {"profiles", "target"})
        _refuse_foreign(asked.record, {"looks", "builds"})
        _check_writable(asked.out, "--out")
        _check_writable(asked.engines / "engine", "--keep-engines")

    def work(self) -> dict[str, Any]:
        """Build, time, write; what was written comes back."""
        gpu = self.card["accelerator"]
        precisions = " and ".join(dict.fromkeys(variant.precision for variant in self.variants))
        say(f"{self.family.model} in {precisions} on {gpu['name']}, TensorRT {self.version}")
        for warning in self.warnings:
            say(f"warning: {warning}")
        engines = {variant.name: self.build(variant) for variant in self.variants}
        engines = self.compared(engines)
        visits = self.take_turns(engines)
        self.soak(engines)
        layers = {name: self.layers(name, engine) for name, engine in engines.items()} if self.asked.layers else {}
        return self.write(visits, layers)

    def key(self) -> dict[str, Any]:
        """Return the identity of a run: one goes on where another stopped only if both have the same."""
        asked = self.asked
        return {
            "engines": {name: built["sha256"] for name, built in self.builds.items()},  # a new build may be faster
            "device": self.card["accelerator"]["name"],
            "sm_count": self.card["accelerator"]["sm_count"],
            "power_mode": self.card["accelerator"]["power_mode"],
            "seconds": asked.seconds,
            "warm_up": asked.warm_up,
            "rounds": asked.rounds,
        }

    def build(self, variant: Variant) -> Path:
        """The engine of a variant: one that was built here before from the same file in the same way, or a new one."""
        folder = self.asked.engines
        folder.mkdir(parents=True, exist_ok=True)
        engine, unfinished = folder / f"{variant.name}.engine", folder / f".{variant.name}.engine"
        described = folder / f"{variant.name}.json"
        recipe, known = self.recipe(variant), _described(described)
        if known is not None and known["recipe"] == recipe and _is_file(engine, known["sha256"]):
            say(f"{variant.name}: engine built before")
        else:
            say(f"{variant.name}: building")
            started, trouble = time.monotonic(), f"{variant.path}: TensorRT {self.version} cannot build it"
            arguments = self.build_arguments(variant, variant.path, unfinished, folder)
            self.run(trouble, arguments, folder / f"{variant.name}.log", unfinished)
            unfinished.replace(engine)
            seconds, size = round(time.monotonic() - started, 1), engine.stat().st_size
            known = {"recipe": recipe, "sha256": sha256(engine), "size_bytes": size, "seconds": seconds}
            write_json(described, known)
        self.builds[variant.name] = known
        return engine

    def build_arguments(self, variant: Variant, onnx: Path, engine: Path, folder: Path) -> list[str]:
        """Return trtexec's arguments; the timing cache is of one device, version and precision."""
        gpu = self.card["accelerator"]
        kind = f"{_plain(gpu['name'])}-{gpu['sm_count'] or 0}-{self.version}-{variant.precision}"
        cache, shape = folder / f"timing-{kind}.cache", self.shape(variant.name)
        return build_arguments(self.version, onnx, engine, cache, shape, self.asked.workspace, self.asked.layers)

    def recipe(self, variant: Variant) -> dict[str, Any]:
        """All that an engine depends on: one of another recipe is stale or foreign, and is built anew."""
        names = Path(variant.path.name), Path(f"{variant.name}.engine"), Path()  # the folder does not matter
        return {
            "onnx_sha256": variant.sha256,
            "tensorrt": str(self.version),
            "device": self.card["accelerator"]["name"],
            "sm_count": self.card["accelerator"]["sm_count"],
            "precision": variant.precision,
            "batch": self.batch,
            "arguments": self.build_arguments(variant, *names),
        }

    def run(self, trouble: str, arguments: Sequence[str], log: Path, gives: Path) -> str:
        """Run trtexec; its log if it gave the file that it should, an error with the telling line of the log if not."""
        with open(log, "wb") as file:
            code = subprocess.call(
                [self.trtexec, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        text = log.read_text(encoding="utf-8", errors="replace")
        if code != 0 or not gives.is_file():
            reason = OUT_OF_MEMORY if code == -signal.SIGKILL else last_error(text)
            raise AgentError(f"{trouble}: {reason}. All of it: {log}")
        return text

    @property
    def timed(self) -> list[Variant]:
        """The variants whose answers are what they should be, as far as that was compared."""
        return [variant for variant in self.variants if variant.name not in self.failed]

    def compared(self, engines: Mapping[str, Path]) -> dict[str, Path]:
        """Compare the answers of all engines with the family's reference; return those that are worth timing."""
        if self.family.reference is None:
            self.warn("the family has no reference images, so no answer is compared. Export it with --reference")
            return dict(engines)
        for variant in self.variants:
            if variant.name not in self.family.reference.answers:
                self.warn(f"{variant.name}: not compared, since the family has no reference answers of it")
                continue
            found = self.answered[variant.name] = self.compare(variant, engines[variant.name], self.family.reference)
            if found["passed"]:
                say(f"{variant.name}: compared, {told_of(found)}")
                continue
            self.failed[variant.name] = found
            asked = f"at least {found['asked']:g} and the same classes are asked"
            wrong = f"{variant.name}: its engine does not answer as its graph does: {told_of(found)}; {asked}"
            if variant.name == self.family.dense:
                raise AgentError(f"{wrong}. Nothing is timed without it: try another --precision or TensorRT")
            self.warn(f"{wrong}. It is neither timed nor chosen")
        return {name: engine for name, engine in engines.items() if name not in self.failed}

    def compare(self, variant: Variant, engine: Path, reference: Reference) -> dict[str, Any]:
        """Compare the answers of one engine; what was found is kept beside it, and not looked for again."""
        known, described = self.builds[variant.name], self.asked.engines / f"{variant.name}.json"
        rules = (least_cosine(variant.precision), LEAST_UNDECIDED, reference.scores, reference.mean, reference.std)
        against = [sorted(reference.digests.items()), rules, sorted(reference.undecided[variant.name])]
        key = hashlib.sha256(json.dumps(against).encode()).hexdigest()
        if known.get("compared_with") == key:
            return dict(known["compared"])
        say(f"{variant.name}: comparing")
        numbers = [n for run in in_runs(reference.images, self.batch) for n in run]
        answers = self.answers(variant, engine, reference)
        own, dense = (
            read_answers(path, reference.outputs) for path in (reference.answers[variant.name], reference.dense)
        )
        wanted, asked = [own[n] for n in numbers], least_cosine(variant.precision)
        undecided = [n in reference.undecided[variant.name] for n in numbers]
        found = compare(wanted, answers, reference.scores, asked, undecided)
        to_dense = compare([dense[n] for n in numbers], answers, reference.scores, asked)
        found["dense_cosine"] = to_dense["cosine"]
        known.update(compared=found, compared_with=key)
        write_json(described, known)
        return found

    def answers(self, variant: Variant, engine: Path, reference: Reference) -> list[list[float]]:
        """Run the reference images through an engine, as many at once as it was built for."""
        graph, log = variant.graph, self.asked.engines / f"{variant.name}.compare.log"
        height, width = graph.shape[1:3] if reference.takes_bytes else graph.shape[2:4]
        if (height, width) not in reference.pixels:
            raise AgentError(f"{variant.path}: no reference images of {height} x {width}. Copy the family again")
        pixels, size = reference.pixels[height, width].read_bytes(), height * width * 3
        images = [pixels[n * size : (n + 1) * size] for n in range(reference.images)]
        if not reference.takes_bytes:
            images = [as_input(image, reference.mean, reference.std) for image in images]
        found: list[list[float]] = []
        # Not beside the engines: commas and colons in that path would mean something in --loadInputs.
        with tempfile.TemporaryDirectory(prefix="snapvit-") as folder:
            given, written = Path(folder) / "images.bin", Path(folder) / "answers.json"
            for run in in_runs(reference.images, self.batch):
                given.write_bytes(b"".join(images[n] for n in run))
                shape = self.shape(variant.name)
                arguments = compare_arguments(engine, given, written, graph.input, shape)
                self.run(f"{engine}: cannot be run", arguments, log, written)
                text = written.read_text(encoding="utf-8", errors="replace")
                values = parse_output(text, f"{variant.name}: {written.name}", len(run) * reference.outputs)
                found += [values[i : i + reference.outputs] for i in range(0, len(values), reference.outputs)]
                written.unlink()
        return found

    def not_passed(self) -> dict[str, Any]:
        """Return the variants that were not timed, for the file that is written."""
        digests = {variant.name: variant.sha256 for variant in self.variants}
        return {name: {"sha256": digests[name], "compared": found} for name, found in self.failed.items()}

    def taken(self, name: str) -> dict[str, Any]:
        """Tell how latencies were taken: `Taken` of runtimes/taken.py. trtexec has two batches under way by itself."""
        no_graph = any(warning.startswith(f"{name}: {NO_GRAPH}") for warning in self.warnings)
        return {
            "transfers": True,
            "queue_depth": 2,
            "ahead": 1,
            "cuda_graph": not no_graph,
            "spin_wait": True,
            "tf32": False,
            "pinned_memory": True,
        }

    def take_turns(self, engines: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
        """Visit the engines in turns; what was measured is kept at once, and not measured again."""
        state = self.state = self.resumed()
        self.looks = state["looks"]
        self.idle_w = state["idle_w"] = self.idle()
        names = list(engines)
        with tempfile.TemporaryDirectory(prefix=".times-", dir=str(self.asked.engines)) as scratch:
            for number in range(self.asked.rounds):
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:  # none is always the first, when the GPU is coolest
                    if any((visit["round"], visit["variant"]) == (number, name) for visit in state["visits"]):
                        continue
                    visit = self.visit(name, engines[name], Path(scratch))
                    state["visits"].append(dict(visit, round=number, variant=name))
                    state["looks"].append(look(self.asked.root))
                    write_json(self.asked.partial, dict(state, warnings=self.warnings))
                    median = statistics.median(visit["latency_ms"])
                    say(f"round {number + 1} of {self.asked.rounds}: {name} {median:.3f} ms")
        in_order = sorted(state["visits"], key=lambda visit: int(visit["round"]))
        return {name: [visit for visit in in_order if visit["variant"] == name] for name in names}

    def visit(self, name: str, engine: Path, scratch: Path) -> dict[str, Any]:
        """One turn of an engine: some seconds with copying, some without."""
        seconds, shape = self.asked.seconds / self.asked.rounds, self.shape(name)
        found, watches = [], []
        for copying in (True, False):
            times, log = scratch / "times.json", self.asked.engines / f"{name}.run.log"
            arguments = run_arguments(self.version, engine, times, seconds, self.asked.warm_up, shape, copying)
            with Watch(self.power, self.asked.root, log) as watch:
                text = self.run(f"{engine}: cannot be run", arguments, log, times)
            watches.append(watch)
            found.append(parse_times(times.read_text(encoding="utf-8", errors="replace"), f"{name}: {times.name}"))
            times.unlink()
            if copying and not found[-1].copied:  # then its options mean something else than they did
                raise AgentError(f"{self.trtexec}: copied nothing, though asked to. Get an agent for {self.version}")
            if re.search(r"--useCudaGraph flag has been ignored|not permitted under CUDA graph", text):
                self.warn(f"{name}: {NO_GRAPH}, so starting its kernels counts too")
        return {
            "latency_ms": [max(round(ms, 4), RESOLUTION_MS) for ms in evenly(found[0].latency_ms, MOST_KEPT)],
            "gpu_ms": [round(ms, 4) for ms in evenly(found[1].compute_ms, MOST_KEPT)],
            **seen_in(watches, self.idle_w),
        }

    def shape(self, name: str) -> str | None:
        """Return the shape that trtexec needs for a variant."""
        return next(shape_of(variant.graph, self.batch) for variant in self.variants if variant.name == name)

    def resumed(self) -> dict[str, Any]:
        """Return the state that an interrupted run of the same kind has left, or an empty one."""
        begun = {"format_version": 1, "key": self.key(), "looks": self.looks, "visits": []}
        path = self.asked.partial
        if not path.exists():
            return begun
        try:
            state = read_json(path)
            same, warnings = state["key"] == begun["key"], [str(warning) for warning in state["warnings"]]
            known = [_visit(visit) for visit in state["visits"]]
            looks = [dict(seen, clocks_mhz=dict(seen["clocks_mhz"])) for seen in state["looks"]]
            soaked = _soaked_in(state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AgentError(f"{path}: damaged: {_short(error)}. Remove it to begin anew") from error
        if not same:
            say(f"{path} is of another run and is begun anew")
            return begun
        say(f"going on after {len(known)} of {len(self.timed) * self.asked.rounds} visits")
        self.warnings += [warning for warning in warnings if warning not in self.warnings]
        return dict(begun, visits=known, looks=[*looks, *self.looks], **soaked)

    def layers(self, name: str, engine: Path) -> list[dict[str, Any]]:
        """Time of each layer, longest first; what cannot be read is a warning, since nothing else depends on it."""
        folder = self.asked.engines
        profile, info = folder / f"{name}.profile.json", folder / f"{name}.layers.json"
        seconds, shape = max(1.0, self.asked.seconds / self.asked.rounds), self.shape(name)
        try:
            arguments = layer_arguments(self.version, engine, profile, info, seconds, shape)
            self.run(f"{engine}: its layers cannot be timed", arguments, folder / f"{name}.layers.log", profile)
            found = parse_profile(profile.read_text(encoding="utf-8", errors="replace"), profile.name)
            types = {}
            if info.is_file():
                types = parse_layer_info(info.read_text(encoding="utf-8", errors="replace"), info.name)
        except AgentError as error:
            self.warn(str(error))
            return []
        ordered = sorted(found, key=lambda layer: -layer.median_ms)
        return [dict(layer._asdict(), type=types.get(layer.name, UNKNOWN)) for layer in ordered]

    def write(self, visits: Mapping[str, list[dict[str, Any]]], layers: Mapping[str, Any]) -> dict[str, Any]:
        """Write the Profiles and the record, and remove what is of no more use."""
        asked, family = self.asked, self.family
        for part in ("clocks_mhz", "temperatures_c"):  # as they were in the end: warm
            self.card["accelerator"][part] = self.looks[-1][part]
        target = {
            "runtime": "tensorrt",
            "precision": family.precision,
            "batch": self.batch,
            "threads": family.threads,
            "device": self.card,
        }
        profiles = {v.name: self.profile(v, [visit["latency_ms"] for visit in visits[v.name]]) for v in self.timed}
        alone = {name: sorted(ms for visit in found for ms in visit["gpu_ms"]) for name, found in visits.items()}
        for name, profile in profiles.items():
            profile["gpu_ms"] = round(percentile(alone[name], 50), 4)
            self.heat(name, profile, visits[name])
            self.beware(name, profile)
        gpu = {n: {at: round(percentile(ms, q), 4) for at, q in PERCENTILES.items()} for n, ms in alone.items()}
        written = {"format_version": 1, "model": family.model, "target": target, "profiles": profiles}
        written["failed"] = self.not_passed()
        if self.left_out:
            digests = {variant.name: variant.sha256 for variant in family.variants}
            written["left_out"] = {n: {"sha256": digests[n], "reason": text} for n, text in self.left_out.items()}
        write_json(asked.out, written)
        seen = {"looks": self.looks, "builds": self.builds, "gpu_ms": gpu, "layers": dict(layers)}
        seen.update(self.energy_record(visits))
        write_json(asked.record, dict(seen, format_version=1, key=self.key(), device=self.card, warnings=self.warnings))
        asked.partial.unlink(missing_ok=True)
        if asked.keep_engines is None:
            self.clear()
        self.show(profiles, gpu)
        self.show_energy(profiles, visits)
        return written

    def idle(self) -> float | None:
        """Measure the power of the board before anything of ours runs; None where nothing tells it."""
        if self.power is None:
            return None
        say(f"measuring the power of the idle board, {self.power.source}")
        return idle_watts(self.power)

    def soak(self, engines: Mapping[str, Path]) -> None:
        """Run engines for minutes without a pause, one after another, and keep what each minute was like.

        Those that --only names, or all. One that was interrupted is begun anew: the board has cooled down since.
        """
        minutes, only = self.asked.soak, self.asked.only
        if minutes is None:
            return
        named = None if only is None else {name.strip() for name in only.split(",")}
        soaked = self.state.setdefault("soak", {})
        with tempfile.TemporaryDirectory(prefix=".times-", dir=str(self.asked.engines)) as scratch:
            for name, engine in engines.items():
                known = soaked.get(name, {}).get("minutes") == minutes
                if known or (named is not None and name not in named):
                    continue
                rows: list[dict[str, Any]] = []
                while (left := 60 * minutes - sum(row["seconds"] for row in rows)) > 0.001:
                    rows.append(self.soak_step(name, engine, min(SOAK_STEP, left), Path(scratch), len(rows)))
                soaked[name] = {"minutes": minutes, "rows": rows}
                write_json(self.asked.partial, dict(self.state, warnings=self.warnings))

    def soak_step(self, name: str, engine: Path, seconds: float, scratch: Path, number: int) -> dict[str, Any]:
        """Return one row of a soak: latencies, heat and power of up to a minute."""
        times, log = scratch / "times.json", self.asked.engines / f"{name}.soak.log"
        warm_up = self.asked.warm_up if number == 0 else 0.0
        arguments = run_arguments(self.version, engine, times, seconds, warm_up, self.shape(name))
        with Watch(self.power, self.asked.root, log) as watch:
            self.run(f"{engine}: cannot be run", arguments, log, times)
        found = parse_times(times.read_text(encoding="utf-8", errors="replace"), f"{name}: {times.name}")
        times.unlink()
        seen, ordered = look(self.asked.root), sorted(found.latency_ms)
        row = {
            "seconds": seconds,
            "runs": len(ordered),
            **{f"{at}_ms": round(percentile(ordered, q), 4) for at, q in PERCENTILES.items()},
            "temperatures_c": seen["temperatures_c"],
            "gpu_mhz": _mean_mhz(watch) or seen["clocks_mhz"].get("gpu"),
            **seen_in([watch], self.idle_w),
        }
        steps = math.ceil(60 * (self.asked.soak or 0) / SOAK_STEP)
        say(f"soaking {name}: minute {number + 1} of {steps}, {row['p50_ms']:.3f} ms")
        return row

    def heat(self, name: str, profile: dict[str, Any], visits: Sequence[Mapping[str, Any]]) -> None:
        """Add energy, throttling and the latency after heat to a Profile, and warn of what should not be relied on."""
        profile.update(energy_in_profile(visits, self.power))
        hit = [visit for visit in visits if visit["throttled"]]
        profile["conditions"]["throttled"] = len(hit) / len(visits)
        if hit:
            why = "; ".join(dict.fromkeys(reason for visit in hit for reason in visit["throttled"]))
            self.warn(
                f"{name} was throttled in {len(hit)} of {len(visits)} rounds: {why[:300]}. "
                "Cool the board, give it a stronger supply, or take a lower power mode"
            )
        reasons = [visit["no_energy"] for visit in visits if visit["no_energy"]]
        if self.power is not None and profile["energy_mj"] is None and reasons:
            self.warn(f"the energy of {name} is not known: {reasons[0]}")
        soaked = self.state.get("soak", {}).get(name)
        if soaked is not None:
            rows = soaked["rows"]
            profile["steady_ms"] = steady_ms(rows)
            last = [row["p50_ms"] for row in rows[-2:]]
            if abs(last[-1] / last[0] - 1) > SETTLED:
                self.warn(f"{name} still changed in the last minute of its soak. Give more minutes to --soak")

    def energy_record(self, visits: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return what the record keeps of power and heat: by visit, and of every soak."""
        parts = ("round", "energy_mj", "above_idle_mj", "watts", "rails_w", "no_energy", "throttled")
        told = {"source": None if self.power is None else self.power.source, "idle_w": self.idle_w}
        return {
            "power": dict(told, reason=self.no_power),
            "visits": {
                name: [{part: visit[part] for part in parts} for visit in all_] for name, all_ in visits.items()
            },
            "soak": self.state.get("soak", {}),
        }

    def show_energy(self, profiles: Mapping[str, Mapping[str, Any]], visits: Mapping[str, Any]) -> None:
        """The energy of every variant and the rows of a soak, for people; nothing where nothing was measured."""
        if any(profile["energy_mj"] is not None for profile in profiles.values()):
            idle = "unknown" if self.idle_w is None else f"{self.idle_w:.2f} W"
            say(
                f"Energy of the board while it runs without a pause, {profiles_source(profiles)}; idle {idle}",
                sys.stdout,
            )
            rows = [(name, *energy_cells(profile, visits[name], self.batch)) for name, profile in profiles.items()]
            say_table(("variant", "W", "mJ per image", "of these above idle", "rounds throttled"), rows)
        rows = [
            (name, str(number + 1), *soak_cells(row, self.batch))
            for name, soaked in self.state.get("soak", {}).items()
            for number, row in enumerate(soaked["rows"])
        ]
        if rows:
            say_table(
                ("soak", "minute", "p50 ms", "p99 ms", "hottest", "GPU MHz", "W", "mJ per image", "throttled"), rows
            )

    def clear(self) -> None:
        """Remove what was made on the way, and the folder if nothing else is in it."""
        folder = self.asked.engines
        patterns = [f"{start}{variant.name}.*" for variant in self.variants for start in ("", ".")]
        for pattern in [*patterns, "timing-*.cache*"]:
            for path in folder.glob(pattern):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()

    def profile(self, variant: Variant, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
        """A Profile of profiling/profile.py: as many samples of every round, so that rounds can be drawn."""
        burst = min(len(samples) for samples in rounds)
        bursts = [evenly(samples, burst) for samples in rounds]
        samples = [ms for taken in bursts for ms in taken]
        ordered = sorted(samples)
        bounds = intervals(bursts, PERCENTILES.values())
        found: dict[str, Any] = {f"{name}_ms": percentile(ordered, at) for name, at in PERCENTILES.items()}
        return dict(
            found,
            spread_ms=percentile(ordered, 75) - percentile(ordered, 25),
            intervals_ms={name: list(bounds[at]) for name, at in PERCENTILES.items()},
            cpu_ms=None,
            energy_mj=None,
            method="trtexec",
            taken=self.taken(variant.name),
            compared=self.answered.get(variant.name),
            samples_ms=samples,
            runs=len(samples),
            burst=burst,
            pause_ms=0.0,
            conditions={"noise": noise(bursts), "drift": drift(samples), "waited": 0.0, "others": None},
            precision=variant.precision,
            batch=self.batch,
            threads=self.family.threads,
            sha256=variant.sha256,
            device=self.card,
        )

    def beware(self, name: str, profile: Mapping[str, Any]) -> None:
        """Warn of timings that should not be relied on."""
        slowed = profile["conditions"]["drift"]
        if slowed > SLOWED:
            self.warn(f"{name} slowed down by {100 * slowed:.0f} % while it was timed. Cool the device and time again")
        if profile["runs"] < LEAST_RUNS:
            self.warn(f"{name} ran only {profile['runs']} times, and {LEAST_RUNS} are needed. Give more --seconds")

    def warn(self, text: str) -> None:
        """Say something once, and keep it for the record."""
        if text not in self.warnings:
            self.warnings.append(text)
            say(f"warning: {text}")

    def show(self, profiles: Mapping[str, Any], gpu: Mapping[str, Mapping[str, float]]) -> None:
        """The answer, for people."""
        wide = max(len("variant"), *map(len, profiles))
        say(f"{'variant':{wide}}  p50 ms  between           p90 ms  p99 ms  GPU p50  GPU p99", sys.stdout)
        for name, found in profiles.items():
            low, high = found["intervals_ms"]["p50"]
            columns = (
                f"{found['p50_ms']:6.2f}  {low:6.2f} - {high:6.2f}   {found['p90_ms']:6.2f}  {found['p99_ms']:6.2f}"
            )
            say(f"{name:{wide}}  {columns}   {gpu[name]['p50']:6.2f}   {gpu[name]['p99']:6.2f}", sys.stdout)
        kept = "" if self.asked.keep_engines is None else f", engines in {self.asked.keep_engines}"
        say(f"Written to {self.asked.out}{kept}; what else was seen is in {self.asked.record}", sys.stdout)


def profiles_source(profiles: Mapping[str, Mapping[str, Any]]) -> str:
    """What measured the energy of some Profiles."""
    return next((str(p["energy_source"]) for p in profiles.values() if p.get("energy_source")), UNKNOWN)


def energy_cells(profile: Mapping[str, Any], visits: Sequence[Mapping[str, Any]], batch: int) -> tuple[str, ...]:
    """Power, energy of an image, the part of it above idle, and throttled rounds, as text."""
    above = profile.get("energy_above_idle_mj")
    return (
        _cell(profile.get("power_w"), 2),
        _cell(None if profile["energy_mj"] is None else profile["energy_mj"] / batch, 2),
        _cell(None if above is None else above / batch, 2),
        f"{sum(bool(visit['throttled']) for visit in visits)} of {len(visits)}",
    )


def soak_cells(row: Mapping[str, Any], batch: int) -> tuple[str, ...]:
    """One row of a soak, as text."""
    heat = row["temperatures_c"]
    hottest = max(heat, key=heat.__getitem__, default=None)
    return (
        f"{row['p50_ms']:.2f}",
        f"{row['p99_ms']:.2f}",
        "-" if hottest is None else f"{heat[hottest]:.0f} C {hottest}",
        _cell(row["gpu_mhz"], 0),
        _cell(row["watts"], 2),
        _cell(None if row["energy_mj"] is None else row["energy_mj"] / batch, 2),
        "; ".join(row["throttled"]) or "no",
    )


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def say_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, the others to the right."""
    widths = [max(len(row[n]) for row in [titles, *rows]) for n in range(len(titles))]
    for row in [titles, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        say("  ".join(cells), sys.stdout)


def _mean_mhz(watch: Watch) -> float | None:
    return statistics.mean(clock for _, clock in watch.clocks) / 1e6 if watch.clocks else None


def _soaked_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked soaks that an interrupted run has finished."""
    found = {}
    for name, soaked in dict(state.get("soak", {})).items():
        rows = []
        for row in soaked["rows"]:
            times = {f"{at}_ms": _milliseconds(row[f"{at}_ms"]) for at in PERCENTILES}
            heat = {str(zone): float(degrees) for zone, degrees in dict(row["temperatures_c"]).items()}
            clock = None if row["gpu_mhz"] is None else float(row["gpu_mhz"])
            told = {"seconds": float(row["seconds"]), "runs": int(row["runs"]), "gpu_mhz": clock}
            rows.append(dict(times, **told, temperatures_c=heat, **_energy_in(row)))
        if not rows:
            raise ValueError("a soak has no rows")
        found[str(name)] = {"minutes": float(soaked["minutes"]), "rows": rows}
    return {"soak": found}


class Sweep:
    """A family in several power modes of one board, one after the other; the mode of before is set again at the end.

    Every mode has Profiles of its own, orin.15W.json beside --out orin.json: a Profile is of one mode. Engines are
    built once, in the first mode. Modes that only a restart could set are left out.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked, self.root = asked, asked.root
        self.known = power_modes(self.root)
        if not self.known:
            raise UsageError("--power-modes: no /etc/nvpmodel.conf tells the power modes of this machine. Leave it out")
        wanted = modes_of(str(asked.power_modes), self.known)
        if not is_root():
            raise UsageError("--power-modes: only root can set them. Run it with sudo, or time the mode that is set")
        now = current_mode(self.root)
        if now is None:
            raise AgentError("the power mode is unknown, so it could not be set again. Look yourself: nvpmodel -q")
        _refuse_foreign(asked.beside(".modes.json"), {"modes"})
        _check_writable(self.kept, "--out")
        self.state = self.resumed(now)
        self.modes = sorted(wanted, key=lambda number: number != now)  # that which is set first, for it needs no change
        self.held = _held_clock(next(iter(_gpu_places(self.root)), None)) is not None

    @property
    def kept(self) -> Path:
        """The file that says how far an interrupted sweep has come."""
        return self.asked.beside(".modes.partial.json")

    def resumed(self, now: int) -> dict[str, Any]:
        """Return what an interrupted sweep has left, or a new beginning; also the mode to set again in the end."""
        asked = self.asked
        of_run = [asked.seconds, asked.warm_up, asked.rounds, asked.only, asked.batch, asked.soak]
        key = [*of_run, sha256(asked.family / "manifest.json") if (asked.family / "manifest.json").is_file() else ""]
        if not self.kept.exists():
            return {"key": key, "mode_before": now, "done": {}}
        try:
            state = read_json(self.kept)
            done = {str(number): dict(row) for number, row in state["done"].items()} if state["key"] == key else {}
            before = state["mode_before"]  # None: it was set again
            return {"key": key, "mode_before": now if before is None else int(before), "done": done}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AgentError(f"{self.kept}: damaged: {_short(error)}. Remove it to begin anew") from error

    def work(self) -> None:
        """Time every mode, and set the mode of before again, whatever happens."""
        write_json(self.kept, self.state)
        try:
            for number in self.modes:
                if str(number) not in self.state["done"]:
                    self.state["done"][str(number)] = self.one(number)
                    write_json(self.kept, self.state)
        finally:
            self.set_again()
        self.write()

    def set_again(self) -> None:
        """Set the power mode of before; a second Ctrl-C does not stop it."""
        before, kinds = self.state["mode_before"], (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {kind: signal.signal(kind, signal.SIG_IGN) for kind in kinds}
        try:
            differs = current_mode(self.root) != before
            if differs:
                set_mode(before, self.root)
                self.hold()
            write_json(self.kept, dict(self.state, mode_before=None))
            if differs:  # last, since the terminal may be gone
                say(f"the power mode is {self.known.get(before, before)} again")
        except AgentError as error:
            say(f"warning: {error}. Set it yourself: sudo nvpmodel -m {before}")
        finally:
            for kind, handler in handlers.items():
                signal.signal(kind, handler)

    def hold(self) -> None:
        """Hold the clocks at the maximum of the mode that is set, if they were held before: a new mode frees them."""
        if self.held:
            output_of("jetson_clocks")

    def one(self, number: int) -> dict[str, Any]:
        """Time the family in one mode; what the table shows of it, or why it was left out."""
        name = self.known[number]
        try:
            if current_mode(self.root) != number:
                say(f"power mode {name}")
                set_mode(number, self.root)
                self.hold()
                time.sleep(self.asked.warm_up)
        except AgentError as error:
            say(f"warning: {error}, so {name} is left out. Time it alone: sudo nvpmodel -m {number}")
            return {"mode": name, "left_out": str(error), "rows": []}
        out = self.asked.beside(f".{mode_in_name(name, number, self.known)}.json")
        agent = Agent(replace(self.asked, out=out, keep_engines=self.asked.engines, power_modes=None))
        agent.warnings = [text for text in agent.warnings if not text.startswith("the power mode is ")]
        profiles = agent.work()["profiles"]
        rows = {name: mode_row(profile, agent.batch) for name, profile in profiles.items()}
        return {"mode": name, "left_out": None, "file": out.name, "rows": rows}

    def write(self) -> None:
        """Write and show the table, and remove what is of no more use."""
        done = [dict(self.state["done"][str(number)], id=number) for number in sorted(self.modes)]
        timed = [mode for mode in done if mode["left_out"] is None]
        self.kept.unlink(missing_ok=True)
        if self.asked.keep_engines is None and self.asked.engines.is_dir():
            Agent(replace(self.asked, power_modes=None)).clear()
        if not timed:
            raise AgentError(
                f"no power mode could be timed: {done[0]['left_out']}. Set one, and leave --power-modes out"
            )
        write_json(self.asked.beside(".modes.json"), {"format_version": 1, "modes": done})
        cells = [
            (mode["mode"], name, *(_cell(row[part], 2) for part in MODE_PARTS))
            for mode in timed
            for name, row in mode["rows"].items()
        ]
        say_table(("mode", "variant", "p50 ms", "p99 ms", "W", "mJ per image", "of these above idle"), cells)
        files = ", ".join(mode["file"] for mode in timed)
        say(f"Written to {files}; the table is in {self.asked.beside('.modes.json')}", sys.stdout)


MODE_PARTS = ("p50_ms", "p99_ms", "watts", "image_mj", "above_idle_mj")


def mode_row(profile: Mapping[str, Any], batch: int) -> dict[str, float | None]:
    """Return what the table of a sweep shows of a variant in one mode."""
    energy, above = profile["energy_mj"], profile.get("energy_above_idle_mj")
    return {
        "p50_ms": profile["p50_ms"],
        "p99_ms": profile["p99_ms"],
        "watts": profile.get("power_w"),
        "image_mj": None if energy is None else energy / batch,
        "above_idle_mj": None if above is None else above / batch,
    }


def mode_in_name(name: str, number: int, known: Mapping[int, str]) -> str:
    """Return a power mode as a part of a file's name; its number where another mode has the same."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or str(number)
    return plain if list(known.values()).count(name) == 1 else f"{plain}-{number}"


def is_root() -> bool:
    """True for the user who may change power modes."""
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _described(path: Path) -> dict[str, Any] | None:
    """Return the record beside an engine; None if there is none that can be read."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not {"recipe", "sha256"} <= set(found):
        return None
    if not isinstance(found.get("compared"), dict) or not set(found["compared"]) >= COMPARED:
        found.pop("compared_with", None)  # then it is compared again
    return found


def _visit(visit: Mapping[str, Any]) -> dict[str, Any]:
    """Return one checked entry of an interrupted run."""
    times = {part: [_milliseconds(ms) for ms in visit[part]] for part in ("latency_ms", "gpu_ms")}
    if not all(times.values()) or not all(times["latency_ms"]):
        raise ValueError("a visit has no times")
    return dict(times, round=int(visit["round"]), variant=_text_in(visit, "variant"), **_energy_in(visit))


def _is_file(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _refuse_foreign(path: Path, keys: set[str]) -> None:
    """Refuse to replace a file that no agent wrote, such as the family's own manifest."""
    if not path.exists() or path.is_dir():
        return
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not keys <= set(found):
        raise UsageError(f"{path}: exists, and no agent wrote it. Choose another --out")


def _check_writable(out: Path, option: str) -> None:
    """Refuse, before long work, a place that cannot be written."""
    if out.is_dir():
        raise UsageError(f"{out}: a folder. Choose another {option}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=str(out.parent), prefix=f".{out.name}.")
    except OSError as error:
        raise AgentError(f"{out}: cannot be written: {error.strerror}. Choose another {option}") from error
    os.close(handle)
    os.unlink(name)


def write_json(path: Path, value: Any) -> None:
    """Write a file that appears whole or not at all."""
    handle, name = tempfile.mkstemp(dir=str(path.parent), prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
        os.replace(name, str(path))
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            raise AgentError(f"{path}: cannot be written: {error.strerror}. Free some space, and run again") from error
        raise


def say(text: str, file: TextIO | None = None) -> None:
    """Print one line, progress by default on standard error; names of others cannot control the terminal."""
    stream = file or sys.stderr
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(visible(text).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def visible(text: str) -> str:
    """Return the text with control characters as escapes: `snapvit_export.visible`, which is not here."""
    return _CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See --help")


def _number(least: float, whole: bool = False) -> Any:
    def parse(text: str) -> float:
        value = int(text) if whole else float(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number from {least:g} on")
        return value

    return parse


def parse_arguments(words: Sequence[str] | None) -> Asked:
    """Read the command line."""
    parser = _Parser(prog="jetson_agent.py", description="Time a family of snapvit with trtexec on this machine.")
    parser.add_argument("family", type=Path, help="the folder of the family")
    parser.add_argument("--out", type=Path, default=Path("jetson.json"), help="file to write (jetson.json)")
    parser.add_argument("--trtexec", help="the program, if it is not in PATH or where JetPack puts it")
    parser.add_argument(
        "--seconds", type=_number(0.1), default=10.0, help="of each engine, with and without copying (10)"
    )
    parser.add_argument("--warm-up", type=_number(0), default=1.0, help="seconds before every timing run (1)")
    parser.add_argument("--rounds", type=_number(LEAST_ROUNDS, True), default=5, help="turns of each engine (5)")
    parser.add_argument("--workspace", type=_number(1, True), metavar="MB", help="most memory that a layer may use")
    parser.add_argument(
        "--keep-engines", type=Path, metavar="FOLDER", help="keep the engines there, and use them again"
    )
    parser.add_argument("--only", metavar="s30,dense", help="only these variants, and dense")
    parser.add_argument("--batch", type=_number(1, True), help="images in a run; as the family was made for")
    parser.add_argument("--layers", action="store_true", help="also time every layer, into the record")
    parser.add_argument(
        "--soak", type=_number(0.01), metavar="MINUTES", help="then run each of --only, or all, so long"
    )
    parser.add_argument(
        "--power-modes", nargs="?", const="all", metavar="0,2", help="in these power modes, or all; needs root"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return Asked(**vars(parser.parse_args(words)))


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit code."""
    try:
        asked = parse_arguments(words)
        (Agent(asked) if asked.power_modes is None else Sweep(asked)).work()
    except AgentError as error:
        say(f"error: {str(error)[:1000]}")
        return error.exit_code
    except OSError as error:  # a full disk, a folder that went away
        say(f"error: {error.filename}: {error.strerror}. The same command goes on where it stopped")
        return 1
    except MemoryError:
        say("error: not enough memory. Close other programs, and run again")
        return 1
    except KeyboardInterrupt:
        say("error: interrupted. The same command goes on where it stopped")
        return 130
    return 0


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def end_in_order() -> None:
    """Let SIGTERM, and SIGHUP of a terminal or a connection that is gone, end the work as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _stop)


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
