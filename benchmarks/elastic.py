"""Is a deadline kept while the machine changes, and at what quality? Elastic beside every static variant and an oracle.

    python benchmarks/elastic.py --family FAMILY --data IMAGES --results DIR [--seconds 60] [--write docs]
    python benchmarks/elastic.py --make --checkpoint deit_tiny_patch16_224.safetensors --data imagenet-sample \
        --classes imagenet-sample/classes.txt --results DIR [--seconds 60] [--write docs]

`--make` exports the family first, as `snapvit export --for cpu` does: DeiT-Tiny, mixes of levers from 1 to 0.3 of the
FLOPs, in float32 and both kinds of int8. Variants that others beat in latency and fidelity do not run alone. IMAGES is
a source with labels of the model's classes. With `--classes` it is a folder of files that are called wnid_label.jpg, a
class being the line of its wnid: half of the images are for the export, the others for the requests. Labels tell
accuracy alone.

Scenarios, each for so many seconds, by the same seed for all contenders:

    quiet     nothing else runs
    hogs1     a process that only computes, on one core, comes and goes, every 3 to 8 s; hogs2 and hogs4 as many at once
    clock     the clock steps down and up again: simulated, since no cloud machine lets us set it. After every run the
              process computes on until the run has taken 1.3, 1.8 or 2.5 times as long
    bursts    requests come in bursts of one to four, at random times

Requests arrive at fixed times, whether or not the one before was answered: the deadline counts from there. The deadline
is 1.25 times what the dense model takes here, at rest (`--deadline` in ms otherwise), and a frame comes with every two
deadlines. A static variant answers all of them; `elastic` is an ElasticSession of all. The oracle knows the future: for
every request it takes the best variant that was in time for that request when it ran alone, of the same file and
under the same load; where none was, the fastest, late. Fidelity is the share of answers that are the dense model's in
fp32, accuracy the share that is right, both of what each request really got (on the image that it was about); a request
without an answer counts as wrong.

Rows and traces are kept in DIR as they are found; those already there are not measured again. `--write` puts the table
and the plots into the docs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from results import Row, Rows, cpu_words, table, write_section
from threadpoolctl import threadpool_limits

from snapvit_export.calibration.images import prepare
from snapvit_export.calibration.open_source import open_source
from snapvit_export.family.folder import read_family
from snapvit_export.family.trace import Load, Trace, Traced
from snapvit_export.report.charts.deadlines import deadlines
from snapvit_export.report.draw import svg
from snapvit_export.serving.session import ElasticSession, Refused
from snapvit_export.serving.variants import OpenVariant
from snapvit_export.storage.json import read_json, write_json

ELASTIC, ORACLE = "elastic", "oracle"
SLACK = 1.25  # deadline beside the latency of the dense model
FRAMES_APART = 2.0  # deadlines
MOST_WAITING = 256  # requests: what a static variant is behind by at most, or it would be refused what the others get
CLOCKS = (1.0, 1.3, 1.8, 2.5)  # times as long as at rest
GOALS = "hit rate at least 0.99 where the fastest variant reaches it, fidelity at least 0.95 of the oracle's"
PLOTTED = ("hogs2", "clock", "bursts")  # the others look like these


@dataclass(frozen=True)
class Scenario:
    """Other work over time, and when requests come."""

    loads: tuple[tuple[float, float, float], ...]  # from, to (seconds), and how much
    is_clock: bool
    arrivals: tuple[float, ...]  # seconds

    def load_at(self, seconds: float) -> float:
        return next((much for begin, end, much in self.loads if begin <= seconds < end), 1.0 if self.is_clock else 0.0)


def scenarios(seconds: float, deadline_ms: float) -> dict[str, Scenario]:
    """All scenarios, the same for every contender."""
    every = FRAMES_APART * deadline_ms / 1000
    steady = tuple(every * n for n in range(int(seconds / every)))
    found = {"quiet": Scenario((), False, steady)}
    for count in (1, 2, 4):
        spells = _spells(random.Random(count), seconds)
        found[f"hogs{count}"] = Scenario(tuple((a, b, float(count)) for a, b in spells), False, steady)
    rng = random.Random(9)
    found["clock"] = Scenario(tuple((a, b, rng.choice(CLOCKS[1:])) for a, b in _spells(rng, seconds)), True, steady)
    bursts, at = [], 0.0
    while at < seconds:
        bursts += [at + 0.0005 * k for k in range(rng.randint(1, 4))]
        at += rng.uniform(1.0, 4.0) * every
    found["bursts"] = Scenario((), False, tuple(bursts))
    return found


def _spells(rng: random.Random, seconds: float) -> list[tuple[float, float]]:
    found, at = [], rng.uniform(2, 5)
    while at < seconds - 1:
        end = min(at + rng.uniform(3, 8), seconds)
        found.append((at, end))
        at = end + rng.uniform(3, 8)
    return found


def _burn(go: Any, stop: Any) -> None:
    """Compute on one core whenever told to."""
    a = np.random.default_rng(0).standard_normal((128, 128))
    with threadpool_limits(1):  # otherwise one process keeps all cores busy
        while not stop.is_set():
            if go.wait(0.2):
                a = np.tanh(a @ a.T * 0.01)


@contextmanager
def hogs(count: int) -> Iterator[Callable[[bool], None]]:
    """Processes that compute while they are told to."""
    context = multiprocessing.get_context("spawn")
    go, stop = context.Event(), context.Event()
    processes = [context.Process(target=_burn, args=(go, stop), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield lambda on: go.set() if on else go.clear()
    finally:
        stop.set()
        go.set()
        for process in processes:
            process.join()


@contextmanager
def slowed(clock: Callable[[], float]) -> Iterator[None]:
    """Let every run take so many times as long."""
    plain = OpenVariant.run

    def run(self: OpenVariant, images: Any) -> Any:
        began = time.perf_counter()
        found = plain(self, images)
        until = began + clock() * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return found

    OpenVariant.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpenVariant.run = plain  # type: ignore[method-assign]


def run_through(
    session: ElasticSession, scenario: Scenario, pictures: Sequence[Any], deadline_ms: float
) -> list[Traced]:
    """Answer all requests of a scenario, each from a thread at its arrival; request n is about image n."""
    most = int(max((much for _, _, much in scenario.loads), default=0)) if not scenario.is_clock else 0

    def answered(number: int, at: float, began: float) -> Traced:
        try:
            answer = session.run(pictures[number % len(pictures)], deadline_ms, began + at)
        except Refused:
            return Traced(at_s=at, variant=None, latency_ms=None, met=False)
        return Traced(
            at_s=at,
            variant=answer.variant,
            latency_ms=answer.latency_ms,
            met=answer.met,
            slowness=session.slowness,
        )

    with hogs(most) as work, ThreadPoolExecutor(MOST_WAITING) as callers:
        time.sleep(1.5 if most else 0.2)  # until they have started
        began = time.perf_counter()
        clock = lambda: scenario.load_at(time.perf_counter() - began)  # noqa: E731
        found: list[Future[Traced]] = []
        with slowed(clock if scenario.is_clock else lambda: 1.0):
            for number, at in enumerate(scenario.arrivals):
                while (left := began + at - time.perf_counter()) > 0:
                    time.sleep(min(left, 0.02))
                    work(bool(most) and clock() > 0)
                work(bool(most) and clock() > 0)
                found.append(callers.submit(answered, number, at, began))
            return [each.result() for each in found]


def answers(family: Path, pictures: Sequence[Any], labels: Sequence[int]) -> dict[str, tuple[Any, Any]]:
    """For each variant which images it answers as the dense model, and which rightly: (N,) each."""
    with ElasticSession(family, seconds=0) as session:
        best = {
            name: np.array([session._variants.opened[name].run(_sized(session, name, p)).argmax() for p in pictures])
            for name in session.variants
        }
        dense = best[session.manifest.dense]
    return {name: (found == dense, found == np.asarray(labels)) for name, found in best.items()}


def _sized(session: ElasticSession, name: str, picture: Any) -> Any:
    return picture[session._variants.image_size(name)]


def oracle(static: dict[str, list[Traced]], best_first: Sequence[str]) -> list[Traced]:
    """Of each request the best that was in time."""
    found = []
    for each in zip(*(static[name] for name in best_first)):
        found.append(next((request for request in each if request.met), each[-1]))
    return found


def summary(requests: Sequence[Traced], known: dict[str, tuple[Any, Any]], images: int) -> Row:
    """Hit rate, fidelity, accuracy, and how often another variant answers than before."""
    faithful = [each.variant is not None and known[each.variant][0][n % images] for n, each in enumerate(requests)]
    right = [each.variant is not None and known[each.variant][1][n % images] for n, each in enumerate(requests)]
    names = [each.variant for each in requests]
    return {
        "requests": len(requests),
        "hit": float(np.mean([each.met for each in requests])),
        "fidelity": float(np.mean(faithful)),
        "accuracy": float(np.mean(right)),
        "in_time_and_right": float(np.mean([a and each.met for a, each in zip(right, requests)])),
        "p99_ms": float(np.percentile([each.latency_ms or math.inf for each in requests], 99)),
        "switches": sum(a != b for a, b in zip(names, names[1:])),  # noqa: RUF007
    }


def split(folder: Path, classes: Path, results: Path) -> tuple[Path, Path]:
    """Write two lists with labels: images to export with, and images of the requests."""
    wnids = [line.split()[0] for line in classes.read_text().splitlines()]
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    random.Random(0).shuffle(paths)
    lists = results / "export.txt", results / "requests.txt"
    for goal, part in zip(lists, (paths[::2], paths[1::2])):
        goal.write_text("".join(f"{p.resolve()}\t{wnids.index(p.name.split('_')[0])}\n" for p in part))
    return lists


def make(folder: Path, checkpoint: str, data: str) -> Path:
    """Export the family: a spread of mixes in every precision, for a device that times them itself, which is here."""
    if not (folder / "manifest.json").exists():
        command = [sys.executable, "-m", "snapvit_export.cli", "export", "--model", "deit_tiny_patch16_224"]
        command += ["--for", "cpu", "--data", data, "--checkpoint", checkpoint, "--out", str(folder)]
        subprocess.run(command, check=True)
    return folder


def measure(given: argparse.Namespace, family: Path) -> tuple[list[Row], dict[str, Trace]]:
    """Run all contenders through all scenarios."""
    manifest, source = read_family(family), open_source(given.data)
    if source.labels is None:
        raise SystemExit(f"{given.data}: has no labels. Give a folder with one sub-folder for each class")
    rows = random.Random(0).sample(range(source.count), min(given.images, source.count))
    chosen = source.subset(rows)
    sizes = {variant.image_of(manifest.anatomy): manifest.preprocessing_of(variant) for variant in manifest.variants}
    by_size = {size: prepare(chosen, steps) for size, steps in sizes.items()}
    batches = {size: list(images.batches(1)) for size, images in by_size.items()}
    taken = [dict(zip(batches, each)) for each in zip(*batches.values())]
    labels = next(iter(by_size.values())).labels
    known = answers(family, taken, labels)
    with ElasticSession(family, seconds=2.0) as session:
        best_first, ms = session.best_first, session.stats.variants
    best_first = tuple(n for n in best_first if not any(ms[o] <= ms[n] for o in best_first[: best_first.index(n)]))
    kept = Rows(given.results, "elastic.jsonl", ("scenario", "contender"))
    begun = next((row["deadline_ms"] for row in kept.all()), None)  # what goes on keeps the deadline
    if begun and given.deadline and begun != given.deadline:
        raise SystemExit(
            f"--deadline {given.deadline:g}: {given.results} was begun with {begun:g}. Give another --results"
        )
    deadline_ms = begun or given.deadline or SLACK * ms[manifest.dense]
    for name, scenario in scenarios(given.seconds, deadline_ms).items():
        if given.only and name not in given.only.split(","):
            continue
        for contender in (*best_first, ELASTIC):
            path = given.results / f"{name}-{contender}.json"
            if kept.has(scenario=name, contender=contender):
                continue
            only = None if contender == ELASTIC else [contender]
            with ElasticSession(family, deadline_ms, hit=given.hit, only=only, most_waiting=MOST_WAITING) as session:
                requests = run_through(session, scenario, taken, deadline_ms)
            loads = [Load(from_s=a, to_s=b, what=_words(name, much)) for a, b, much in scenario.loads]
            trace = Trace(
                title=name, deadline_ms=deadline_ms, variants=best_first, requests=tuple(requests), loads=tuple(loads)
            )
            write_json(path, trace)
            row = {"scenario": name, "contender": contender, "deadline_ms": deadline_ms, "cpu": cpu_words()}
            print(kept.add({**row, **summary(requests, known, len(taken))}), flush=True)
        if not kept.has(scenario=name, contender=ORACLE):
            static = {
                each: list(read_json(given.results / f"{name}-{each}.json", Trace).requests) for each in best_first
            }
            row = {"scenario": name, "contender": ORACLE, "deadline_ms": deadline_ms, "cpu": cpu_words()}
            print(kept.add({**row, **summary(oracle(static, best_first), known, len(taken))}), flush=True)
    names = dict.fromkeys(row["scenario"] for row in kept.all())
    traces = {name: read_json(given.results / f"{name}-{ELASTIC}.json", Trace) for name in names}
    return kept.all(), traces


def _words(scenario: str, much: float) -> str:
    if scenario == "clock":
        return f"clock / {much:g}"
    return f"{much:.0f} hog{'s' if much > 1 else ''}"


def goals(rows: Sequence[Row]) -> list[str]:
    """Whether each scenario reaches the goals, in a line each."""
    lines = []
    for name in dict.fromkeys(row["scenario"] for row in rows):
        found = {row["contender"]: row for row in rows if row["scenario"] == name}
        static = [row for contender, row in found.items() if contender not in (ELASTIC, ORACLE)]
        ours, best = found[ELASTIC], found[ORACLE]
        reachable = static[-1]["hit"] >= 0.99
        same = [row for row in static if row["hit"] >= ours["hit"]]
        better = all(ours["fidelity"] >= row["fidelity"] for row in same)
        lines.append(
            f"- {name}: hit rate {ours['hit']:.4f}"
            + ("" if reachable else f" (the fastest variant alone reaches {static[-1]['hit']:.4f})")
            + f", fidelity {ours['fidelity'] / max(best['fidelity'], 1e-9):.3f} of the oracle's, "
            + ("better than" if better else "not better than")
            + f" each of the {len(same)} static variants with such a hit rate"
        )
    return lines


def write(rows: Sequence[Row], traces: dict[str, Trace], docs: Path) -> None:
    """Put the table and the plots into the docs."""
    cells = [
        [
            row["scenario"],
            f"**{row['contender']}**" if row["contender"] == ELASTIC else row["contender"],
            *(f"{row[key]:.4f}" for key in ("hit", "fidelity", "accuracy", "in_time_and_right")),
            f"{row['p99_ms']:.1f}",
            str(row["switches"]),
        ]
        for row in rows
    ]
    columns = ["scenario", "who answers", "in time", "fidelity", "accuracy", "in time and right", "p99, ms", "switches"]
    plots = []
    for name, trace in traces.items():
        chart = deadlines(trace) if name in PLOTTED else None
        if chart is not None:
            (docs / f"elastic-{name}.svg").write_bytes(svg(chart))
            plots.append(f"![{chart.alt}](elastic-{name}.svg)")
    text = (
        f"`python benchmarks/elastic.py` (the whole command is in its docstring), {rows[0]['cpu']}, deadline "
        f"{rows[0]['deadline_ms']:.1f} ms. The goal: {GOALS}, and better than every static variant with the same hit "
        "rate."
    )
    parts = [text, "\n".join(goals(rows)), table(columns, cells), *plots]
    write_section(docs, "elastic", "Deadlines while the machine changes", "\n\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", type=Path)
    parser.add_argument("--make", action="store_true", help="export the family into RESULTS/family first")
    parser.add_argument("--checkpoint", default="deit_tiny_patch16_224.safetensors")
    parser.add_argument("--data", required=True)
    parser.add_argument("--classes", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each scenario and contender")
    parser.add_argument("--deadline", type=float, help="ms")
    parser.add_argument("--hit", type=float, default=0.99)
    parser.add_argument("--only", help="these scenarios: quiet,hogs2")
    parser.add_argument("--write", type=Path, help="folder of the docs")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    calibration = given.data
    if given.classes:
        calibration, given.data = map(str, split(Path(given.data), given.classes, given.results))
    family = make(given.results / "family", given.checkpoint, calibration) if given.make else given.family
    if family is None:
        raise SystemExit("give --family FOLDER, or --make")
    rows, traces = measure(given, family)
    print("\n".join(goals(rows)))
    if given.write:
        write(rows, traces, given.write)


if __name__ == "__main__":
    main()
