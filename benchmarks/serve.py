"""The HTTP service under load: answers in time, refusals and fidelity at half, once and twice what it can answer.

    python benchmarks/serve.py --family FAMILY --images FOLDER --deadline 60ms [--seconds 8] [--write docs]

`snapvit serve FAMILY --late refuse` runs in a process of its own, on the loopback address alone, beside the program
that asks. Its capacity is the rate at which one caller after the other is answered by the fastest variant, found
first. Then requests come at random times (Poisson, one seed), with so many times the capacity, each from a thread of
its own and whether or not those before are answered; at most `MOST` in a row. Latency is the caller's, with connection
and decoding; "in time" is a share of all requests, so what is refused counts as missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from results import Row, cpu_words, table, write_section

LOADS = (0.5, 1.0, 2.0)  # times the capacity
CALLERS = 128
MOST = 4000  # requests of one load
ASKED = 60  # requests that tell the capacity
SUFFIXES = (".jpg", ".jpeg", ".png")


@contextmanager
def served(family: Path, deadline: str, late: str) -> Iterator[tuple[str, int]]:
    """Run the service; give its address, and end it by SIGTERM."""
    words = ["serve", str(family), "--deadline", deadline, "--late", late, "--port", "0"]
    process = subprocess.Popen([sys.executable, "-m", "snapvit_export.cli", *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next((line for line in process.stderr if " at http://" in line), None)
        if line is None:
            raise SystemExit(f"snapvit {' '.join(words)} did not start")
        address = urlsplit(line.split()[-1])
        assert address.hostname is not None
        assert address.port is not None
        yield address.hostname, address.port
    finally:
        process.terminate()
        process.wait(60)


def ask(address: tuple[str, int], image: bytes, query: str = "") -> Row:
    """Send one image; return status, the caller's milliseconds and the answer."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request("POST", f"/predict?top=1{query}", image)
        response = connection.getresponse()
        answer = json.loads(response.read())
        return {"status": response.status, "ms": 1000 * (time.perf_counter() - began), **answer}
    finally:
        connection.close()


def under_load(address: tuple[str, int], images: Sequence[bytes], rate: float, seconds: float) -> list[Row]:
    """Send requests at random times with this rate."""
    rng, arrivals = random.Random(0), [0.0]
    while arrivals[-1] < seconds and len(arrivals) < MOST:
        arrivals.append(arrivals[-1] + rng.expovariate(rate))
    with ThreadPoolExecutor(CALLERS) as callers:
        began, found = time.perf_counter(), []
        for number, at in enumerate(arrivals):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            found.append(callers.submit(ask, address, images[number % len(images)]))
        return [each.result() for each in found]


def summary(load: float, rate: float, found: Sequence[Row]) -> list[str]:
    """Return one line of the table."""
    answered = [row for row in found if row["status"] == 200]
    statuses = Counter(row["status"] for row in found)
    if others := set(statuses) - {200, 503}:
        raise SystemExit(f"unexpected answers: {sorted(others)}")
    ms = [row["ms"] for row in answered]
    agreement = [row["fidelity"] for row in answered if row["fidelity"] is not None]
    return [
        *(f"{load:g}", f"{rate:.0f}", f"{len(found)}", f"{sum(row['met'] for row in answered) / len(found):.3f}"),
        *(f"{statuses[503] / len(found):.3f}", f"{np.percentile(ms, 50):.1f}", f"{np.percentile(ms, 99):.1f}"),
        f"{np.mean(agreement):.3f}" if agreement else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--deadline", required=True)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--write", type=Path, help="folder of benchmarks.md")
    given = parser.parse_args()
    paths = sorted(path for path in given.images.rglob("*") if path.suffix.lower() in SUFFIXES)[:200]
    images = [path.read_bytes() for path in paths]
    with served(given.family, given.deadline, "run") as address:  # nothing is in time, so the fastest answers, late
        took = [ask(address, images[n % len(images)], "&deadline=0.1ms")["ms"] for n in range(ASKED)]
    capacity, lines = 1000 / float(np.median(took)), []
    with served(given.family, given.deadline, "refuse") as address:
        for load in LOADS:
            found = under_load(address, images, load * capacity, given.seconds)
            lines.append(summary(load, load * capacity, found))
            print(lines[-1], flush=True)
            time.sleep(1.0)
    columns = ("load / capacity", "requests a second", "requests", "in time", "refused", "p50, ms", "p99, ms")
    words = f"`python benchmarks/serve.py --deadline {given.deadline}`, {cpu_words()}, both sides on this machine."
    text = f"{words}\n\n{table((*columns, 'mean fidelity'), lines)}"
    print(text)
    if given.write is not None:
        write_section(given.write, "serve", "The HTTP service under load", text)


if __name__ == "__main__":
    main()
