"""The same work again and again in one process, and what stays behind of it: memory, open files, temporary files.

    python tests/helpers/load.py exports MADE --count 1000       # MADE: family, elastic and images of one model

Prints JSON. After some rounds of warming up, memory is what the process holds when all garbage is collected and given
back to the system. `--leak` keeps a little of every round, to show that the bound notices it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

WARM_UP = 10  # rounds: by then caches, arenas and imports are there
FEWER = 3  # of those that take long
IMAGES = 24  # of each validation

Round = Callable[[int], Any]  # does its work once, and returns what a leak would keep


class Left(msgspec.Struct, frozen=True):
    """What a load left behind since the process was warm."""

    rounds: int
    seconds: float
    grown_bytes: int  # of memory
    most_bytes: int  # of memory at any time, above that at the beginning
    unit_bytes: int  # of what one round would leave if it kept the smallest of its results
    files: int  # open ones more than before
    mapped: int  # parts of files in memory more than before
    threads: int
    temporary: int  # files and folders that are left in the folder for temporary ones


def memory() -> int:
    """Bytes of memory that this process holds, without files that are mapped, after all that can be given back was."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_files() -> int:
    """Parts of files that are mapped, but for libraries."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(".bin" in line or ".onnx" in line or ".safetensors" in line for line in lines)


def repeat(once: Round, count: int, unit_bytes: int, leak: bool, warm_up: int = WARM_UP, collects: bool = True) -> Left:
    """Do the rounds, and measure what stays. `collects`: False leaves circles of references where they are."""
    kept = []
    with tempfile.TemporaryDirectory(prefix="load-") as scratch, patch.object(tempfile, "tempdir", scratch):
        for number in range(warm_up):
            once(number)
        began, before, most_before = time.monotonic(), memory(), _most()
        files, mapped, threads = open_files(), mapped_files(), threading.active_count()
        if not collects:
            gc.disable()
        for number in range(count):
            result = once(warm_up + number)
            if leak:
                kept.append(result)
            del result
        files, mapped = open_files() - files, mapped_files() - mapped
        gc.enable()
        after = memory()
        return Left(
            rounds=count,
            seconds=round(time.monotonic() - began, 2),
            grown_bytes=after - before,
            most_bytes=_most() - most_before,
            unit_bytes=unit_bytes,
            files=files,
            mapped=mapped,
            threads=threading.active_count() - threads,
            temporary=len(os.listdir(scratch)),
        )


def _most() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def exports(made: Path, count: int, leak: bool) -> Left:
    """Variants that are cut from one Elastic folder: planned, corrected, written and compared in both flavours."""
    from snapvit_export.elastic.folder import Elastic
    from snapvit_export.graph.writer import is_shared
    from snapvit_export.selection.point import Point

    with _scratch() as scratch:
        packed = Elastic.load(made / "elastic")
        builder = _builder(packed, made, scratch)
        planner = packed.planner
        sparsities = np.random.default_rng(0).permutation(np.linspace(0.05, 0.6, WARM_UP + count))

        def once(number: int) -> bytes:
            plan = planner.sparsity(float(sparsities[number]))
            built = builder.build("variant", Point(plan, "fp32" if number % 2 else "int8-dynamic"), keep=False)
            own = [built.path, *(path for path in built.weights if not is_shared(path))]
            data = b"".join(path.read_bytes() for path in own)
            for path in own:
                path.unlink()
            return data

        each = sum(len(once(number)) for number in range(2)) // 2  # one in either precision
        return repeat(once, count, each, leak)


def folders(made: Path, count: int, leak: bool) -> Left:
    """Elastic folders that are opened, read and forgotten, while no garbage is collected."""
    from snapvit_export.elastic.folder import Elastic
    from snapvit_export.selection.point import Point

    with _scratch() as scratch:

        def once(_: int) -> Any:
            packed = Elastic.load(made / "elastic")
            builder = _builder(packed, made, scratch)
            builder.write_probe("probe", Point(packed.planner.sparsity(0.3), "fp32"))
            return builder

        size = (made / "elastic" / "correction.bin").stat().st_size
        return repeat(once, count, size, leak, collects=False)


def families(made: Path, count: int, leak: bool) -> Left:
    """Families that are validated on images, one after the other, each in a folder of its own."""
    from snapvit_export.evaluate import evaluator
    from snapvit_export.evaluate.evaluator import EvalOptions
    from snapvit_export.family.folder import read_family
    from snapvit_export.progress import Silent
    from snapvit_export.workflows.validate import ValidateRequest, validate

    read: list[Any] = []
    plain = evaluator._read

    def reading(*given: Any) -> Any:
        read[:] = [plain(*given)]
        return read[0]

    with _scratch() as scratch, patch.object(evaluator, "_read", reading):

        def once(number: int) -> Any:
            family = shutil.copytree(made / "family", scratch / f"family{number}")
            validate(ValidateRequest(family, str(made / "images"), EvalOptions(images=IMAGES)), Silent())
            assert read_family(family).variants[0].evaluation is not None
            shutil.rmtree(family)
            return read.pop()

        decoded = sum(images.pixels.nbytes for images in once(-1).values())
        return repeat(once, count, decoded, leak, FEWER)


THREADS, EACH = 8, 25  # that ask at the same time, and requests of each in a round


def requests(made: Path, count: int, leak: bool) -> Left:
    """Requests of eight threads to one ElasticSession, each answered, in the order of its thread, by its own images."""
    from concurrent.futures import ThreadPoolExecutor

    from snapvit_export.family.loaded import load_family
    from snapvit_export.serving.session import ElasticSession

    family = load_family(made / "family")
    size = family.manifest.anatomy.image
    pictures = [np.random.default_rng(n).standard_normal((1, 3, *size)).astype(np.float32) for n in range(16)]
    expected = {each.name: [each.session.run(picture) for picture in pictures] for each in family}
    with ElasticSession(made / "family", "1000ms", seconds=0) as session, ThreadPoolExecutor(THREADS) as pool:

        def caller(number: int, thread: int) -> list[Any]:
            answers = []
            for n in range(EACH):
                which = (7 * number + 3 * thread + n) % len(pictures)
                answer = session.run(pictures[which], deadline=1e-3 if n % 5 == 0 else None)  # some are late
                np.testing.assert_allclose(answer.output, expected[answer.variant][which], rtol=1e-3, atol=1e-3)
                answers.append(answer)
            return answers

        def once(number: int) -> list[Any]:
            return list(pool.map(caller, [number] * THREADS, range(THREADS)))

        left = repeat(once, count, THREADS * EACH * 512, leak)  # an answer: an array, its header, six numbers
        assert session.stats.calls == (count + WARM_UP) * THREADS * EACH
        assert session.stats.retired == {}
        assert session.stats.failed == 0
        return left


def days(made: Path, count: int, leak: bool, variants: float = 24, hours: float = 24.0, ms: float = 10.0) -> Left:
    """Days of `profile` by a clock of their own: files that take so long, in turns, for as many hours together."""
    from helpers.clock import fake_clock
    from snapvit_export.family.folder import read_family
    from snapvit_export.family.manifest import MeasuredOn
    from snapvit_export.profiling import in_process, sampling
    from snapvit_export.profiling.sampling import MOST_RUNS
    from snapvit_export.profiling.timer import File, Timer
    from snapvit_export.progress import Silent
    from snapvit_export.runtimes.session import device_for
    from snapvit_export.selection.candidates import live_report
    from snapvit_export.selection.known_profiles import FamilyProfile

    manifest = read_family(made / "family")
    target, device = manifest.target.target, device_for(manifest.target.runtime)
    files = {f"v{number}": File(Path(f"v{number}.onnx"), "ab") for number in range(int(variants))}
    most = 10**12 if leak else MOST_RUNS
    random = np.random.default_rng(0)
    noise = (ms * np.abs(random.normal(1, 0.02, 4096))).tolist()

    @contextmanager
    def session(*_: Any) -> Iterator[Any]:
        class Session:
            runs = 0

            def run(self, images: Any) -> None:
                self.runs += 1
                clock.advance(noise[self.runs % len(noise)])

        yield Session()

    with (
        _scratch() as scratch,
        fake_clock() as clock,
        patch.object(in_process, "open_session", session),
        patch.object(sampling, "MOST_RUNS", most),
    ):

        def once(number: int) -> None:
            began = clock.monotonic()
            timer = Timer(target, device, np.zeros((1, 3, 8, 8), np.float32))
            seconds = 3600 * hours / variants if number else 0.01  # the first warms up
            profiles = timer.time(files, seconds, live_report(Silent(), None), "p90", energy=True)
            found = FamilyProfile(model=manifest.model, target=MeasuredOn.of(target, device), profiles=profiles)
            found.save(scratch / "profile.json")
            assert FamilyProfile.load(scratch / "profile.json") == found
            assert clock.monotonic() - began >= seconds * variants

        kept = len(files) * MOST_RUNS * 2 * (sys.getsizeof(1.0) + 8)  # two numbers of every run, in lists
        return repeat(once, count, kept, leak=False, warm_up=1)


def _builder(packed: Any, made: Path, scratch: Path) -> Any:
    from snapvit_export.family.folder import read_family
    from snapvit_export.graph.format import GraphFormat
    from snapvit_export.progress import Silent
    from snapvit_export.selection.elastic_builder import ElasticBuilder
    from snapvit_export.selection.on_device import noise

    manifest = read_family(made / "family")
    target = manifest.target.target
    images = lambda size: noise(manifest, 2, size)  # noqa: E731
    return ElasticBuilder(packed, manifest, target, GraphFormat("ort"), images, scratch, Silent())


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="snapvit-load-") as folder:
        yield Path(folder)


LOADS = {"exports": exports, "requests": requests, "folders": folders, "families": families, "days": days}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("made", type=Path)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--leak", action="store_true")
    given, more = parser.parse_known_args()
    settings = {name: float(value) for name, value in (word.split("=") for word in more)}  # of a day: hours=1
    left = LOADS[given.load](given.made, given.count, given.leak, **settings)
    assert "torch" not in sys.modules
    print(json.dumps(msgspec.to_builtins(left)))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # where `helpers` is, as pytest has it
    main()
