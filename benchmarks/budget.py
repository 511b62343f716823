"""Is a budget kept? The choice across all levers on this machine, looked at again in new processes.

    python benchmarks/budget.py --results DIR [--models bundled] [--shares 80,65,50,40,30] [--hogs 2]
    python benchmarks/budget.py --results DIR --models bundled,deit_tiny_patch16_224 \
        --checkpoint deit_tiny_patch16_224.safetensors --data imagenet-sample --hogs 2 --write docs

A budget of 80 is 0.8 of what the dense model took in a new process a moment before, given in milliseconds. For every
model (ranked once) and every budget `snapvit export --budget` chooses with all levers; then the chosen file is timed in
new processes, in turns with the dense one, since the latency of one file differs from process to process: is it within
the budget on average, is at least the interval of that average, or not? And in how many of the processes alone?

With `--hogs N` one budget of each model (`--hog-share`) is given once more beside N processes that only compute: the
choice must say that it cannot decide, and take at most twice the time. Rows are kept in DIR as they are found, and
those already there are not measured again. `--write` puts the tables into benchmarks.md of that folder. `--images`
calibrates on fewer images, to try this script out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from results import Row, Rows, cpu_words, line, table, write_section

from snapvit_export.family.folder import read_family
from snapvit_export.family.layout import RANKING
from snapvit_export.family.manifest import Manifest
from snapvit_export.profiling.student_t import t_quantile

BUNDLED = "bundled"
SECONDS, PROCESSES = 1.5, 5  # that each of some new processes times each file
COLUMNS = (
    *("model", "budget", "ms", "chosen", "ms by the choice", "decided", f"in {PROCESSES} new processes", "within"),
    *("processes within", "the machine was slower by", "within at equal speed", "files timed", "took, s", "of which"),
)
HOG_COLUMNS = ("model", "budget", "ms", "chosen", "decided", "says", "took, s", "alone, s", "ratio")
INTRODUCTION = """\
`python benchmarks/budget.py --models ... --hogs 2` (the whole command is in its docstring), one thread, batch 1,
ONNX Runtime, {cpu}. A budget of 80 % is 0.8 of what the dense model took in a new process a moment before, in
milliseconds; all levers, the ranking made before. *In {processes} new processes* is the mean latency of the chosen file
in them with its 95 % interval; *interval* under *within*: the interval holds the budget. *Processes within* are those
whose own median met it. In each the dense model is timed too: *the machine was slower by* so much than when the budget
was set, and *at equal speed* takes that out. *Files timed* are those of the choice, without the samples of the latency
model."""


@dataclass(frozen=True)
class Subject:
    """A model, and the options of `snapvit` that name it."""

    name: str
    options: tuple[str, ...]
    folder: Path  # of the family that gives the ranking and the dense latency

    @property
    def ranking(self) -> Path:
        return self.folder / RANKING


def snapvit(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process."""
    call = [sys.executable, "-m", "snapvit_export.cli", *words]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def checked(*words: str) -> str:
    """Run a command that must work, and return what it prints."""
    done = snapvit(*words)
    if done.returncode:
        raise SystemExit(f"snapvit {' '.join(words)}\n{done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Again:
    """The median latency of one file in every new process."""

    ms: list[float]

    @property
    def mean_ms(self) -> float:
        return statistics.geometric_mean(self.ms)

    @property
    def between_ms(self) -> tuple[float, float]:
        """The 95 % interval of the mean, by Student's t: a process is one observation."""
        margin = statistics.stdev(map(math.log, self.ms)) / math.sqrt(len(self.ms))
        factor = math.exp(t_quantile(0.975, len(self.ms) - 1) * margin)
        return self.mean_ms / factor, self.mean_ms * factor


def again(family: Path, seconds: float) -> dict[str, Again]:
    """Time the variants of a family in turns, in some new processes."""
    found: dict[str, list[float]] = {}
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "profile.json")
            told = checked("profile", str(family), "--json", "-q", "--seconds", str(seconds), "--out", out)
        for name, profile in json.loads(told)["profiles"].items():
            found.setdefault(name, []).append(profile["p50_ms"])
    return {name: Again(ms) for name, ms in found.items()}


def prepare(subject: Subject) -> None:
    """Rank a model once; the family has the dense model too."""
    if not subject.ranking.exists():
        print(f"<!-- ranking {subject.name} -->", flush=True)
        checked("export", *subject.options, "--sparsity", "0.5", "--out", str(subject.folder), "-q")


def choose(subject: Subject, budget_ms: float, out: Path) -> tuple[Manifest | None, float, str]:
    """Export to a budget: the manifest, or None if nothing fits; the seconds that it took; what it said."""
    words = ("--budget", f"{budget_ms:.4f}ms", "--ranking", str(subject.ranking), "--out", str(out), "-q")
    start = time.perf_counter()
    done = snapvit("export", *subject.options, *words)
    seconds = time.perf_counter() - start
    if done.returncode == 0:
        return read_family(out), seconds, ""
    if "no variant" not in done.stderr:
        raise SystemExit(f"{subject.name}, {budget_ms:.4f} ms:\n{done.stderr.strip()}")
    return None, seconds, done.stderr.strip().splitlines()[-1]


def described(manifest: Manifest | None, seconds: float, said: str) -> Row:
    """Return what is recorded of a choice, quiet or not."""
    row: Row = {"seconds": seconds, "stages": {}, "variant": None, "decided": None, "doubt": said}
    if manifest is None or manifest.choice is None:
        return row
    choice = manifest.choice
    mine = next(m for m in choice.measurements if m.variant == choice.variant)
    row |= {"stages": manifest.seconds, "variant": choice.variant, "decided": choice.decided, "doubt": choice.doubt}
    row |= {"latency_ms": mine.latency_ms, "between_ms": mine.between_ms, "timed": len(choice.measurements)}
    return row | {"levers": mine.levers, "next_better": choice.next_denser, "budget_ms": choice.budget_ms}


def measure(subject: Subject, share: float, seconds: float) -> Row:
    """One budget of a model: choose, then look again."""
    budget_ms = share / 100 * again(subject.folder, seconds)["dense"].mean_ms
    row: Row = {"model": subject.name, "share": share, "hogs": 0, "cpu": cpu_words()}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "family"
        manifest, took, said = choose(subject, budget_ms, out)
        row |= {"budget_ms": budget_ms, **described(manifest, took, said)}
        if manifest is not None:
            found = again(out, seconds)
            mine, dense = found[row["variant"]], found["dense"]
            row |= {"processes_ms": mine.ms, "again_ms": mine.mean_ms, "again_between_ms": mine.between_ms}
            row |= {"dense_again_ms": dense.mean_ms, "within": _within(mine.mean_ms, mine.between_ms[0], budget_ms)}
    return row


def _within(ms: float, low: float, budget_ms: float) -> str:
    return "yes" if ms <= budget_ms else "interval" if low <= budget_ms else "no"


def slower(row: Row) -> float:
    """Return how much slower the machine was in the new process than when the budget was set, by the dense model."""
    return float(row["dense_again_ms"] / (100 * row["budget_ms"] / row["share"]))


def within_at_equal_speed(row: Row) -> str:
    return _within(row["again_ms"] / slower(row), row["again_between_ms"][0] / slower(row), row["budget_ms"])


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep cores busy meanwhile."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def measure_beside(subject: Subject, quiet: Row, hogs: int) -> Row:
    """The choice of the same milliseconds while others compute."""
    row: Row = {"model": subject.name, "share": quiet["share"], "hogs": hogs, "cpu": cpu_words()}
    with tempfile.TemporaryDirectory() as folder, busy(hogs):
        found = described(*choose(subject, quiet["budget_ms"], Path(folder) / "family"))
    row |= {"budget_ms": quiet["budget_ms"], **found, "quiet_seconds": quiet["seconds"]}
    return row | {"time_ratio": row["seconds"] / quiet["seconds"]}


def cells(row: Row) -> list[str]:
    """Return the cells of a budget that was given alone."""
    if row["variant"] is None:
        chosen = ["nothing fits", *[""] * 8]
    else:
        (low, high), (least, most) = row["between_ms"], row["again_between_ms"]
        chosen = [row["variant"], f"{row['latency_ms']:.2f} ({low:.2f} to {high:.2f})"]
        chosen += ["yes" if row["decided"] else "no", f"{row['again_ms']:.2f} ({least:.2f} to {most:.2f})"]
        met = sum(ms <= row["budget_ms"] for ms in row["processes_ms"])
        chosen += [row["within"], f"{met} of {len(row['processes_ms'])}"]
        chosen += [f"{100 * (slower(row) - 1):+.1f} %", within_at_equal_speed(row), str(row["timed"])]
    longest = sorted(row["stages"].items(), key=lambda stage: -stage[1])[:3]
    of_which = ", ".join(f"{name} {seconds:.0f}" for name, seconds in longest)
    return [row["model"], f"{row['share']:g} %", f"{row['budget_ms']:.2f}", *chosen, f"{row['seconds']:.0f}", of_which]


def hog_cells(row: Row) -> list[str]:
    """Return the cells of a budget that was given beside other work."""
    decided = "" if row["decided"] is None else "yes" if row["decided"] else "no"
    start = [row["model"], f"{row['share']:g} %", f"{row['budget_ms']:.2f}", row["variant"] or "nothing fits", decided]
    took = [f"{row['seconds']:.0f}", f"{row['quiet_seconds']:.0f}", f"**{row['time_ratio']:.2f}**"]
    return [*start, row["doubt"] or "", *took]


def report(rows: Sequence[Row]) -> str:
    """Return the section of the docs."""
    alone = [row for row in rows if not row["hogs"]]
    beside = [row for row in rows if row["hogs"]]
    kept = [row for row in alone if row["variant"] is not None]
    counts = {word: sum(row["within"] == word for row in kept) for word in ("yes", "interval", "no")}
    decided = sum(bool(row["decided"]) for row in kept)
    cpus = "; ".join(sorted({row["cpu"] for row in rows}))
    summary = f"Within the budget in new processes: {counts['yes']} of {len(kept)}"
    summary += f", with the interval alone {counts['interval']}, above it {counts['no']}"
    same = sum(within_at_equal_speed(row) != "no" for row in kept)
    alone_ms = [(ms, row["budget_ms"]) for row in kept for ms in row["processes_ms"]]
    summary += f"; of all processes alone {sum(ms <= budget for ms, budget in alone_ms)} of {len(alone_ms)}"
    summary += f"; at equal speed of the machine {same} of {len(kept)}. Decided: {decided} of {len(kept)}."
    parts = [INTRODUCTION.format(cpu=cpus, processes=PROCESSES), summary, table(COLUMNS, [cells(row) for row in alone])]
    if beside:
        parts.append(f"Beside {beside[0]['hogs']} processes that only compute:")
        parts.append(table(HOG_COLUMNS, [hog_cells(row) for row in beside]))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--models", default=BUNDLED)
    parser.add_argument("--checkpoint", help="of models other than the bundled one")
    parser.add_argument("--data", help="images for models other than the bundled one")
    parser.add_argument("--images", type=int)
    parser.add_argument("--shares", default="80,65,50,40,30")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--hogs", type=int, default=0)
    parser.add_argument("--hog-share", type=float, default=50)
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    given = parser.parse_args()
    rows = Rows(given.results, "budget.jsonl", ("model", "share", "hogs"))
    fewer = () if given.images is None else ("--images", str(given.images))
    print(cpu_words() + "\n\n" + table(COLUMNS, []), flush=True)
    for name in given.models.split(","):
        named = () if name == BUNDLED else ("--model", name, "--checkpoint", given.checkpoint, "--data", given.data)
        if None in named:
            parser.error(f"{name} needs --checkpoint and --data")
        subject = Subject(name, (*named, *fewer), given.results / name)
        prepare(subject)
        for share in map(float, given.shares.split(",")):
            if not rows.has(model=name, share=share, hogs=0):
                print(line(cells(rows.add(measure(subject, share, given.seconds)))), flush=True)
        quiet = [r for r in rows.all() if (r["model"], r["share"], r["hogs"]) == (name, given.hog_share, 0)]
        if given.hogs and not rows.has(model=name, share=given.hog_share, hogs=given.hogs):
            if not quiet:
                parser.error(f"--hogs compares with the share of {given.hog_share:g} %: measure that one too")
            print(line(hog_cells(rows.add(measure_beside(subject, quiet[-1], given.hogs)))), flush=True)
    if given.write:
        write_section(given.write, "budget", "Budgets", report(rows.all()))


if __name__ == "__main__":
    main()
